"""Number formats of stored matrices, and the packed order in which the kernels read them.

fp32, fp16, bf16 hold the values themselves (bf16 as its bits in uint16, numpy having no such type). int8 is min-max
affine per output row: w ≈ (q - zero) * scale * factor with q and zero in [-128, 127]; the range always contains 0, so
0 is exact, and |error| <= scale * factor / 2. `factor` is one number per expert, a power of two so that multiplying by
it rounds nothing. Constant rows and zero rows are exact.

Packed order "rows16": rows are padded to a multiple of 16 and columns (K) to a multiple of 4, with zeros. Blocks of 16
rows follow each other; inside a block int8 is [K/4][16 rows][4 k], so that one 64-byte line holds 16 rows of 4
consecutive k; the other formats are [K][16 rows]. Scales and zero points are padded with zeros to the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ContainerError, ModelError, did_you_mean

ROW_BLOCK = 16
COLUMN_MULTIPLE = 4


@dataclass(frozen=True)
class Format:
    """A number format: the numpy type of a stored element, how many k lie side by side in "rows16", row scales or not."""

    name: str
    dtype: np.dtype
    k_group: int = 1
    scaled: bool = False


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", np.dtype("<f4")),
        Format("fp16", np.dtype("<f2")),
        Format("bf16", np.dtype("<u2")),
        Format("int8", np.dtype("i1"), k_group=4, scaled=True),
    )
}


@dataclass(frozen=True)
class Encoded:
    """Rows in a number format: `data` (rows, cols) of its dtype; `scale` float32 (rows,), `zero` int8 (rows,) or None."""

    data: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None


def find_format(name: str, where: str = "number format") -> Format:
    if name not in FORMATS:
        raise ContainerError(f"{where}: unknown number format {name!r}; {did_you_mean(str(name), FORMATS)}")
    return FORMATS[name]


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16 → float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 → uint16 bits of the nearest bfloat16, ties to even. Values must be finite; the largest become inf."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_f32(values: np.ndarray) -> np.ndarray:
    """float32 from float32, float16 or bf16 bits (uint16)."""
    return bf16_to_f32(values) if values.dtype == np.uint16 else values.astype(np.float32, copy=False)


def encode(values: np.ndarray, format: str, factor: float = 1.0, name: str = "tensor") -> Encoded:
    """Rows (rows, cols) of float32, float16 or bf16 bits (uint16) in a number format.

    Raises `ModelError` naming the tensor for NaN or infinity, and for values beyond what fp16 or bf16 can hold.
    """
    kind = find_format(format)
    if values.dtype == kind.dtype and not kind.scaled:
        _check_finite(to_f32(values), name)
        return Encoded(values)
    wide = to_f32(values)
    _check_finite(wide, name)
    if format == "int8":
        return _encode_int8(wide, factor)
    with np.errstate(over="ignore"):
        data = f32_to_bf16(wide) if format == "bf16" else wide.astype(kind.dtype)
    if not np.isfinite(to_f32(data)).all():
        top = np.abs(wide).max()
        raise ModelError(f"{name}: the value {top:g} is beyond the range of {format}; convert to bf16 or int8 instead")
    return Encoded(data)


def decode(encoded: Encoded, format: str, factor: float = 1.0) -> np.ndarray:
    """Inverse of `encode`: float32 (rows, cols)."""
    if not find_format(format).scaled:
        return to_f32(encoded.data)
    steps = encoded.data.astype(np.float32) - encoded.zero.astype(np.float32)[:, None]
    return steps * (encoded.scale * np.float32(factor))[:, None]


def expert_factor(largest: float) -> float:
    """Per-expert scale: the least power of two that is not below the expert's largest |w|; 1.0 for an all-zero expert."""
    if largest == 0:
        return 1.0
    mantissa, exponent = np.frexp(largest)
    return float(np.ldexp(1.0, int(np.clip(exponent - (mantissa == 0.5), -126, 127))))


def _encode_int8(wide: np.ndarray, factor: float) -> Encoded:
    w = wide.astype(np.float64) / factor
    low, high = np.minimum(w.min(axis=1), 0), np.maximum(w.max(axis=1), 0)
    exact = (high - low) / 255
    scale = exact.astype(np.float32)
    # Never below the exact step: the ends of the range must not be clipped by more than half a step.
    scale = np.where(scale < exact, np.nextafter(scale, np.float32(np.inf)), scale)
    constant = (w == w[:, :1]).all(axis=1)
    scale = np.where(constant, np.abs(w[:, 0]).astype(np.float32), scale)
    scale = np.where(scale == 0, np.float32(1), scale)
    zero = np.where(constant, 0, np.rint(-128 - low / scale.astype(np.float64))).clip(-128, 127)
    q = np.rint(w / scale.astype(np.float64)[:, None]) + zero[:, None]
    return Encoded(q.clip(-128, 127).astype(np.int8), scale, zero.astype(np.int8))


def _check_finite(wide: np.ndarray, name: str) -> None:
    if not np.isfinite(wide).all():
        row, column = np.argwhere(~np.isfinite(np.atleast_2d(wide)))[0]
        raise ModelError(
            f"{name}: expected finite numbers, found {np.atleast_2d(wide)[row, column]} at [{row}, {column}]"
        )


def padded(rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns as stored in "rows16"."""
    return -(-rows // ROW_BLOCK) * ROW_BLOCK, -(-cols // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def stored_shape(shape: tuple[int, ...], layout: str) -> tuple[int, int]:
    """(rows, cols) as stored; one-dimensional tensors are one row."""
    rows, cols = shape if len(shape) == 2 else (1, shape[0])
    return padded(rows, cols) if layout == "rows16" else (rows, cols)


def stored_bytes(shape: tuple[int, ...], format: str, layout: str) -> int:
    """Bytes of a tensor's elements, scales and zero points aside."""
    rows, cols = stored_shape(shape, layout)
    return rows * cols * find_format(format).dtype.itemsize


def pack_rows16(a: np.ndarray, k_group: int | None = None) -> np.ndarray:
    """(rows, cols) of a stored type → the same elements in "rows16" order, one-dimensional, padded with zeros."""
    group = k_group or (4 if a.dtype.itemsize == 1 else 1)
    rows, cols = padded(*a.shape)
    full = np.zeros((rows, cols), a.dtype) if (rows, cols) != a.shape else a
    if full is not a:
        full[: a.shape[0], : a.shape[1]] = a
    blocks = full.reshape(rows // ROW_BLOCK, ROW_BLOCK, cols // group, group)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(-1)


def unpack_rows16(flat: np.ndarray, rows: int, cols: int, k_group: int | None = None) -> np.ndarray:
    """Inverse of `pack_rows16`: (rows, cols) without the padding."""
    group = k_group or (4 if flat.dtype.itemsize == 1 else 1)
    full_rows, full_cols = padded(rows, cols)
    blocks = flat.reshape(full_rows // ROW_BLOCK, full_cols // group, ROW_BLOCK, group)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(full_rows, full_cols)[:rows, :cols]
