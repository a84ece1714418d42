"""Number formats of stored matrices: how weights become codes and scales, and codes weights.

fp32, fp16, bf16 hold the values themselves (bf16 as its bits in uint16, numpy having no such type). The integer formats
are w ≈ (q - zero) * scale * factor, with a scale and a zero point for each

    int8, int4-row           output channel (a row)
    int8-tensor, …           matrix
    int8-g64, int4-g64, …    group of 32, 64 or 128 neighbouring columns of a row

min-max affine, so that the range always contains 0, 0 is exact, and |error| <= scale * factor / 2. "-sym" fixes the zero
point in the middle (int8: 0, int4: 8) and does not store it. int8 codes are -128 … 127, int4 codes 0 … 15. Scales are
float32, those of groups float16, rounded up so that nothing is clipped. `factor` is one number per expert, a power of two
so that multiplying by it rounds nothing. Zero rows are exact, and constant rows as far as their scale can be (groups: when
the number fits float16).

mxfp4 is a 4-bit floating-point number (E2M1) with a power of two as the scale of 32 columns (OCP Microscaling Formats
1.0). What was MXFP4 in a checkpoint stays exactly that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ContainerError, ModelError, SettingError, did_you_mean
from .minifloat import E2M1, MX_BLOCK, bf16_to_f32, f32_to_bf16, mx_scale, nearest_e2m1, to_f32

GROUP_SIZES = (32, 64, 128)
ALIASES = {"int4": "int4-g64", "int8-row": "int8"}  # what a bare name stands for


@dataclass(frozen=True)
class Format:
    """A number format.

    `kind` how one element is written. `dtype` of a stored unit: an element, or a byte that holds two. `k_group` units of a
    row that lie side by side in layout "rows16". `group` columns that share a scale, 0 the whole row. `shared` one scale
    for the whole matrix, written for every row. `symmetric` no stored zero points.
    """

    name: str
    kind: str
    dtype: np.dtype
    k_group: int = 1
    scale_dtype: np.dtype | None = None
    group: int = 0
    shared: bool = False
    symmetric: bool = True

    @property
    def scaled(self) -> bool:
        return self.scale_dtype is not None

    @property
    def four_bit(self) -> bool:
        return self.kind in ("int4", "mxfp4")

    @property
    def lowest(self) -> int:
        """The smallest integer code."""
        return 0 if self.four_bit else -128

    @property
    def levels(self) -> int:
        """Steps between the smallest and the largest integer code."""
        return 15 if self.four_bit else 255

    @property
    def middle(self) -> int:
        """The zero point of a symmetric integer format."""
        return 8 if self.four_bit else 0

    def units(self, cols: int) -> int:
        """Stored units of a row; two 4-bit codes share one, and a row is padded to whole lines of eight."""
        return -(-cols // 8) * 4 if self.four_bit else cols

    def groups(self, cols: int) -> int:
        """Scales of a row; the last group may be short."""
        return 0 if not self.scaled else -(-cols // self.group) if self.group else 1


def _integer_formats() -> list[Format]:
    found = []
    for kind, dtype in (("int8", np.dtype("i1")), ("int4", np.dtype("u1"))):
        for symmetric in (False, True):
            end = "-sym" if symmetric else ""
            row = kind if kind == "int8" else "int4-row"
            found += [
                Format(row + end, kind, dtype, 4, np.dtype("<f4"), 0, False, symmetric),
                Format(f"{kind}-tensor{end}", kind, dtype, 4, np.dtype("<f4"), 0, True, symmetric),
            ]
            found += [
                Format(f"{kind}-g{size}{end}", kind, dtype, 4, np.dtype("<f2"), size, False, symmetric)
                for size in GROUP_SIZES
            ]
    return found


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", "fp32", np.dtype("<f4")),
        Format("fp16", "fp16", np.dtype("<f2")),
        Format("bf16", "bf16", np.dtype("<u2")),
        *_integer_formats(),
        Format("mxfp4", "mxfp4", np.dtype("u1"), 4, np.dtype("u1"), MX_BLOCK),
    )
}


@dataclass(frozen=True, eq=False)
class Encoded:
    """Rows in a number format: `data` (rows, cols), values or codes (one per element, also of 4-bit formats); `scale`
    float32 and `zero` integer, (rows, groups), None where the format has none."""

    data: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None


def find_format(name: str, where: str = "number format") -> Format:
    if name not in FORMATS:
        raise ContainerError(f"{where}: unknown number format {name!r}; {did_you_mean(str(name), FORMATS)}")
    return FORMATS[name]


def format_name(quant_type: str, group_size: int | None = None) -> str:
    """The name of "int8" or "int4" with groups of `group_size` columns, 0 for one scale per output channel; by default what
    each needs: channels for int8, groups of 64 for int4. Other names pass, without a group size. Raises `SettingError`."""
    known = ("auto", *FORMATS, *ALIASES)
    if quant_type not in known:
        raise SettingError(f"quantize cannot be {quant_type!r}; {did_you_mean(str(quant_type), known)}")
    if group_size is None:
        return ALIASES.get(quant_type, quant_type)
    if quant_type not in ("int8", "int4"):
        raise SettingError(f"group_size goes with int8 or int4, not with {quant_type}")
    if group_size not in (0, *GROUP_SIZES):
        raise SettingError(
            f"group_size must be one of {', '.join(map(str, GROUP_SIZES))} columns, or 0 for one scale per output channel, "
            f"got {group_size!r}"
        )
    return f"{quant_type}-g{group_size}" if group_size else {"int8": "int8", "int4": "int4-row"}[quant_type]


def encode(
    values: np.ndarray,
    format: str,
    factor: float = 1.0,
    name: str = "tensor",
    bounds: tuple[float, float] | None = None,
) -> Encoded:
    """Rows (rows, cols) of float32, float16 or bf16 bits (uint16) in a number format.

    `bounds`: smallest and largest value of the whole matrix, for formats that share one scale when `values` are only some
    of its rows. Raises `ModelError` naming the tensor for NaN or infinity, and for values that the format cannot hold.
    """
    kind = find_format(format)
    if values.dtype == kind.dtype and not kind.scaled:
        check_finite(to_f32(values), name)
        return Encoded(values)
    wide = to_f32(values)
    check_finite(wide, name)
    if kind.scaled:
        w = wide.astype(np.float64) / factor
        scale, zero = scale_range(*group_bounds(w, kind, factor, bounds), kind, name)
        return encoded(round_to_codes(w, scale, zero, kind), scale, zero, kind)
    with np.errstate(over="ignore"):
        data = f32_to_bf16(wide) if format == "bf16" else wide.astype(kind.dtype)
    if not np.isfinite(to_f32(data)).all():
        top = np.abs(wide).max()
        raise ModelError(f"{name}: the value {top:g} is beyond the range of {format}; convert to bf16 or int8 instead")
    return Encoded(data)


def decode(rows: Encoded, format: str, factor: float = 1.0) -> np.ndarray:
    """Inverse of `encode`: float32 (rows, cols)."""
    kind = find_format(format)
    if not kind.scaled:
        return to_f32(rows.data)
    cols = rows.data.shape[1]
    scale = spread(rows.scale * np.float32(factor), kind, cols)
    zero = kind.middle if rows.zero is None else spread(rows.zero.astype(np.float32), kind, cols)
    return steps(rows.data, zero, kind) * scale


def encoded(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, kind: Format) -> Encoded:
    """What the format stores of codes (rows, cols), scale and zero (rows, groups)."""
    return Encoded(codes, scale, None if kind.symmetric else zero.astype(kind.dtype))


def steps(codes: np.ndarray, zero, kind: Format) -> np.ndarray:
    """float32: what codes stand for in units of the scale; `zero` one number or an array that fits."""
    return E2M1[codes] if kind.kind == "mxfp4" else codes.astype(np.float32) - np.asarray(zero, np.float32)


def spread(per_group: np.ndarray, kind: Format, cols: int) -> np.ndarray:
    """(rows, groups) → one number per column, (rows, cols), or (rows, 1) where rows have one."""
    return np.repeat(per_group, kind.group, axis=1)[:, :cols] if kind.group else per_group


def expert_factor(largest: float) -> float:
    """Per-expert scale: the least power of two that is not below the expert's largest |w|; 1.0 for an all-zero expert."""
    if largest == 0:
        return 1.0
    mantissa, exponent = np.frexp(largest)
    return float(np.ldexp(1.0, int(np.clip(exponent - (mantissa == 0.5), -126, 127))))


def group_bounds(
    w: np.ndarray, kind: Format, factor: float = 1.0, bounds: tuple[float, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest of w (rows, cols) in every group, (rows, groups); `bounds` (of w * factor) wins when the format
    shares one scale."""
    if kind.shared:
        low, high = (w.min(), w.max()) if bounds is None else (bounds[0] / factor, bounds[1] / factor)
        return np.full((len(w), 1), low, np.float64), np.full((len(w), 1), high, np.float64)
    starts = np.arange(0, w.shape[1], kind.group or w.shape[1])
    return np.minimum.reduceat(w, starts, axis=1), np.maximum.reduceat(w, starts, axis=1)


def scale_range(low: np.ndarray, high: np.ndarray, kind: Format, name: str = "tensor") -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest of each group (rows, groups) → scale float32, as the format stores it, and zero float64."""
    if kind.kind == "mxfp4":
        return mx_scale(np.maximum(np.abs(low), np.abs(high))), np.zeros(low.shape)
    constant = low == high
    size = np.maximum(np.abs(low), np.abs(high))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if kind.symmetric:
        below = kind.middle - kind.lowest
        exact = np.maximum(high / (kind.levels - below), -low / below)
    else:
        exact = (high - low) / kind.levels
    scale = _round_up(np.where(constant, size, exact), kind.scale_dtype)
    if not np.isfinite(scale).all():
        raise ModelError(
            f"{name}: a scale of {exact.max():g} is beyond float16; give the expert's factor (formats.expert_factor)"
        )
    scale = np.where(scale == 0, np.float32(1), scale)
    free = np.clip(np.rint(kind.lowest - low / scale.astype(np.float64)), kind.lowest, kind.lowest + kind.levels)
    return scale, np.where(constant | kind.symmetric, kind.middle, free)


def round_to_codes(w: np.ndarray, scale: np.ndarray, zero: np.ndarray, kind: Format) -> np.ndarray:
    """The nearest codes of w (rows, cols), which is already divided by the factor."""
    cols = w.shape[1]
    q = w / spread(scale.astype(np.float64), kind, cols)
    if kind.kind == "mxfp4":
        return nearest_e2m1(q)
    q = np.rint(q) + spread(zero, kind, cols)
    return np.clip(q, kind.lowest, kind.lowest + kind.levels).astype(kind.dtype)


def _round_up(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The next number of `dtype` that is not below: rounding a scale down would clip the ends of its range."""
    with np.errstate(over="ignore"):
        near = exact.astype(dtype)
        near = np.where(near < exact, np.nextafter(near, dtype.type(np.inf)), near)
    return near.astype(np.float32)


def check_finite(wide: np.ndarray, name: str) -> None:
    """Raises `ModelError` naming the tensor and the first place of NaN or infinity."""
    if not np.isfinite(wide).all():
        row, column = np.argwhere(~np.isfinite(np.atleast_2d(wide)))[0]
        raise ModelError(
            f"{name}: expected finite numbers, found {np.atleast_2d(wide)[row, column]} at [{row}, {column}]"
        )


__all__ = [
    "ALIASES", "Encoded", "FORMATS", "Format", "GROUP_SIZES", "bf16_to_f32", "check_finite", "decode", "encode", "encoded",
    "expert_factor", "f32_to_bf16", "find_format", "format_name", "group_bounds", "round_to_codes", "scale_range", "spread",
    "steps", "to_f32",
]  # fmt: skip
