"""A weight matrix where it lies, and the product with it."""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..checkpoint import formats
from ..checkpoint.container import Tensor

FORMAT_CODES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}  # Format in cpp/include/matrix.hpp


def descriptor(tensor: Tensor, base: int = 0) -> list[int]:
    """(rows, cols, format, data, scale, zero): how the kernels find a packed matrix in a byte region.

    Offsets count from the start of the tensor's payload plus `base`; 0 where the format has no scales.
    """
    rows, cols = tensor.shape
    start = tensor.data.__array_interface__["data"][0] - tensor.offset

    def place(part) -> int:
        return base + part.__array_interface__["data"][0] - start if part is not None else 0

    return [rows, cols, FORMAT_CODES[tensor.format], place(tensor.data), place(tensor.scale), place(tensor.zero)]


class Linear:
    """y = x · Wᵀ (+ bias). W stays in the mapped container file; x (tokens, cols) and y (tokens, rows) are float32."""

    def __init__(self, payload: np.ndarray, tensor: Tensor, options: dict, bias: np.ndarray | None = None):
        if tensor.layout == "rows16":
            self._memory, place = payload, descriptor(tensor)
        else:  # a version-0 or .npy file: packed here, once
            self._memory, place = pack_float32(tensor.array())
        self.rows, self.cols = tensor.shape
        self.nbytes = tensor.nbytes
        self._place = np.array(place, np.int64)
        self._factor, self._bias = tensor.factor, bias
        self._options = (options["threads"], options["block_size"], options["int8_activations"])
        self._matmul = kernels.load("gemm").matmul

    def __call__(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((len(x), self.rows), np.float32)
        self._matmul(x, self._memory, self._place, self._factor, self._bias, out, *self._options)
        return out


def pack_float32(values: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Row-major float32 (rows, cols) → bytes in layout rows16 and their descriptor."""
    rows, cols = values.shape
    packed = np.ascontiguousarray(formats.pack_rows16(np.ascontiguousarray(values, np.float32), 1))
    return packed.reshape(-1).view(np.uint8), [rows, cols, FORMAT_CODES["fp32"], 0, 0, 0]
