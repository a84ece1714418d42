"""Small floating-point formats: bfloat16, FP8 E4M3 with block scales, and the MX pair E2M1 with E8M0 scales."""

from __future__ import annotations

import numpy as np

MX_BLOCK = 32  # elements that share an E8M0 scale
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by 4-bit code
E8M0_NAN = 255


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


def _e4m3_table() -> np.ndarray:
    """All 256 values of E4M3 (arXiv:2209.05433): sign, 4 exponent bits with bias 7, 3 bits of fraction; no infinity, and
    NaN where all bits but the sign are set."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


E4M3 = _e4m3_table()


def fp8_to_f32(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int] = (128, 128), first_row: int = 0
) -> np.ndarray:
    """Rows of an FP8 matrix with a float32 scale per block of `block` rows × columns → float32.

    codes uint8 (rows, cols), rows first_row … of the matrix; scales (ceil(all rows / block[0]), ceil(cols / block[1])):
    blocks are cut at the end of the matrix, never spread evenly.
    """
    rows, cols = codes.shape
    by_row = scales[np.arange(first_row, first_row + rows) // block[0]]
    return E4M3[codes] * np.repeat(by_row, block[1], axis=1)[:, :cols]


def e8m0_to_f32(exponents: np.ndarray) -> np.ndarray:
    """uint8 → float32 2^(e - 127); 255 is NaN. (OCP Microscaling Formats 1.0, 5.4.1)"""
    wide = exponents.astype(np.int32)
    return np.where(wide == E8M0_NAN, np.float32(np.nan), np.ldexp(np.float32(1), wide - 127)).astype(np.float32)


def f32_to_e8m0(scales: np.ndarray) -> np.ndarray:
    """Inverse of `e8m0_to_f32` for powers of two; 0 (padding) becomes 0."""
    exponent = np.frexp(scales.astype(np.float64))[1] - 1 + 127
    return np.where(scales == 0, 0, exponent).astype(np.uint8)


def mxfp4_codes(blocks: np.ndarray) -> np.ndarray:
    """Packed MXFP4 as checkpoints hold it → 4-bit codes. blocks uint8 (rows, n, 16), the even element of a pair in the low
    four bits → uint8 (rows, 32 n)."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
    return codes.reshape(len(blocks), -1)


def mxfp4_to_f32(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 of a checkpoint, blocks uint8 (rows, n, 16) and E8M0 scales uint8 (rows, n) → float32 (rows, 32 n)."""
    return E2M1[mxfp4_codes(blocks)] * np.repeat(e8m0_to_f32(scales), MX_BLOCK, axis=1)


def mx_scale(largest: np.ndarray) -> np.ndarray:
    """The E8M0 scale of blocks whose largest |w| is given: 2^(floor(log2 largest) - 2), 2 being E2M1's largest exponent
    (OCP Microscaling Formats 1.0, 6.3). Values that came from MXFP4 are found again exactly."""
    exponent = np.frexp(largest.astype(np.float64))[1] - 1 - 2
    return np.ldexp(np.float32(1), np.clip(np.where(largest == 0, 0, exponent), -127, 127)).astype(np.float32)


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes (uint8) of the nearest E2M1 numbers, ties to the even code; beyond 6 saturates."""
    size = np.abs(x)
    middles = (E2M1[:7].astype(np.float64) + E2M1[1:8]) / 2
    code = np.searchsorted(middles, size, side="left")  # at a tie: the lower code
    tie = (code < 7) & (size == middles[np.minimum(code, 6)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return np.where((x < 0) & (code > 0), code + 8, code).astype(np.uint8)
