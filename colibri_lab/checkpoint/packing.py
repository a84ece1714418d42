"""The order in which codes and scales lie in a file, which is the order in which the kernels read them.

Layout "rows16": rows are padded to a multiple of 16, stored units to a multiple of 4 per row, with zeros. Blocks of 16 rows
follow each other; inside a block

    fp32, fp16, bf16   [K][16 rows]
    int8               [K/4][16 rows][4 k]     one 64-byte line holds 16 rows of 4 consecutive k
    int4, mxfp4        [K/8][16 rows][4 bytes] byte j of line g holds k = 8g + j in its low four bits and k = 8g + 4 + j in
                                               its high four: masked and shifted, a line gives two lines of the int8 kind
    scales, zeros      [groups][16 rows]

Layout "rows" is row after row: elements, the same 4-byte pieces of eight 4-bit codes, and the scales of each row.
"""

from __future__ import annotations

import numpy as np

from .formats import Encoded, Format, find_format
from .minifloat import e8m0_to_f32, f32_to_e8m0

ROW_BLOCK = 16
UNIT_MULTIPLE = 4


def padded(rows: int, units: int) -> tuple[int, int]:
    """Rows and stored units per row in "rows16"."""
    return -(-rows // ROW_BLOCK) * ROW_BLOCK, -(-units // UNIT_MULTIPLE) * UNIT_MULTIPLE


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, cols); a one-dimensional tensor is one row."""
    return tuple(shape) if len(shape) == 2 else (1, shape[0])


def part_sizes(shape: tuple[int, ...], format: str, layout: str) -> tuple[int, int, int]:
    """Bytes of a stored tensor's elements, scales and zero points, in that order; 0 for what the format has not."""
    kind = find_format(format)
    rows, cols = matrix_shape(shape)
    units = kind.units(cols)
    if layout == "rows16":
        rows, units = padded(rows, units)
    numbers = rows * kind.groups(cols)
    return (
        rows * units * kind.dtype.itemsize,
        numbers * kind.scale_dtype.itemsize if kind.scaled else 0,
        0 if kind.symmetric else numbers,
    )


def stored_bytes(shape: tuple[int, ...], format: str, layout: str) -> int:
    """Bytes of a tensor's elements, scales and zero points aside."""
    return part_sizes(shape, format, layout)[0]


def pack(encoded: Encoded, kind: Format, layout: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Elements, scales and zero points as they are stored, each one-dimensional; None for what the format has not."""
    data = pack_nibbles(encoded.data) if kind.four_bit else encoded.data
    scale = encoded.scale
    if scale is not None:
        scale = f32_to_e8m0(scale) if kind.kind == "mxfp4" else scale.astype(kind.scale_dtype)
    if layout == "rows":
        flat = [np.ascontiguousarray(data).reshape(-1)]
        return *flat, *(
            None if part is None else np.ascontiguousarray(part).reshape(-1) for part in (scale, encoded.zero)
        )
    rest = (None if part is None else pack_columns(part) for part in (scale, encoded.zero))
    return pack_rows16(data, kind.k_group), *rest


def unpack(
    data: np.ndarray,
    scale: np.ndarray | None,
    zero: np.ndarray | None,
    shape: tuple[int, ...],
    kind: Format,
    layout: str,
) -> Encoded:
    """Inverse of `pack`; `data`, `scale`, `zero` in their stored types."""
    return pick_rows(data, scale, zero, matrix_shape(shape), kind, layout, np.arange(matrix_shape(shape)[0]))


def pick_rows(
    data: np.ndarray, scale: np.ndarray | None, zero: np.ndarray | None, shape: tuple[int, int], kind: Format, layout: str,
    ids: np.ndarray,
) -> Encoded:  # fmt: skip
    """As `unpack`, of the rows `ids` (n,) alone."""
    rows, cols = shape
    units, groups = kind.units(cols), kind.groups(cols)
    if layout == "rows":
        codes = data.reshape(rows, units)[ids]
        parts = [None if part is None else part.reshape(rows, groups)[ids] for part in (scale, zero)]
    else:
        block, within = ids // ROW_BLOCK, ids % ROW_BLOCK
        lines = data.reshape(-1, padded(0, units)[1] // kind.k_group, ROW_BLOCK, kind.k_group)
        codes = lines[block, :, within].reshape(len(ids), -1)[:, :units]
        parts = [None if p is None else p.reshape(-1, groups, ROW_BLOCK)[block, :, within] for p in (scale, zero)]
    return Encoded(unpack_nibbles(codes, cols) if kind.four_bit else codes, scale_values(parts[0], kind), parts[1])


def scale_values(stored: np.ndarray | None, kind: Format) -> np.ndarray | None:
    """Stored scales as float32."""
    if stored is None:
        return None
    return e8m0_to_f32(stored) if kind.kind == "mxfp4" else stored.astype(np.float32)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """4-bit codes (rows, cols) uint8 → (rows, bytes), eight codes in four bytes, the row padded with zeros."""
    rows, cols = codes.shape
    full = np.zeros((rows, -(-cols // 8) * 8), np.uint8)
    full[:, :cols] = codes
    eights = full.reshape(rows, -1, 2, 4)
    return (eights[:, :, 0] | eights[:, :, 1] << 4).reshape(rows, -1)


def unpack_nibbles(stored: np.ndarray, cols: int) -> np.ndarray:
    """Inverse of `pack_nibbles`: (rows, cols) uint8."""
    fours = stored.view(np.uint8).reshape(len(stored), -1, 1, 4)
    return np.concatenate([fours & 15, fours >> 4], axis=2).reshape(len(stored), -1)[:, :cols]


def pack_rows16(a: np.ndarray, k_group: int | None = None) -> np.ndarray:
    """(rows, units) of a stored type → the same in "rows16" order, one-dimensional, padded with zeros."""
    group = k_group or (4 if a.dtype.itemsize == 1 else 1)
    rows, cols = padded(*a.shape)
    full = np.zeros((rows, cols), a.dtype) if (rows, cols) != a.shape else a
    if full is not a:
        full[: a.shape[0], : a.shape[1]] = a
    blocks = full.reshape(rows // ROW_BLOCK, ROW_BLOCK, cols // group, group)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(-1)


def pack_columns(a: np.ndarray) -> np.ndarray:
    """Scales or zero points (rows, groups) → [row block][groups][16 rows], rows padded with zeros."""
    rows, groups = a.shape
    full = np.zeros((padded(rows, 0)[0], groups), a.dtype)
    full[:rows] = a
    return np.ascontiguousarray(full.reshape(-1, ROW_BLOCK, groups).transpose(0, 2, 1)).reshape(-1)
