"""A weight matrix where it lies, and the product with it."""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..checkpoint import formats, packing
from ..checkpoint.container import Tensor
from ..config import ModelConfig

KIND_CODES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "int4": 4, "mxfp4": 5}  # Format in cpp/include/matrix.hpp
FIELDS = 7  # numbers in a descriptor
ABSENT = -1  # offset of what a format does not store


def descriptor(part: dict | Tensor) -> list[int]:
    """(rows, cols, kind, data, scale, zero, group) of a tensor table entry or a mapped tensor: how the kernels find a packed
    matrix in a byte region. Offsets count from the start of the payload."""
    if isinstance(part, Tensor):
        start = part.data.__array_interface__["data"][0] - part.offset
        offsets = {name: getattr(part, name) for name in ("scale", "zero")}
        offsets = {n: a if a is None else [a.__array_interface__["data"][0] - start] for n, a in offsets.items()}
        part = dict(format=part.format, shape=part.shape, offset=part.offset, **offsets)
    kind = formats.FORMATS[part["format"]]
    scale, zero = (part[name][0] if part[name] else ABSENT for name in ("scale", "zero"))
    return [*part["shape"], KIND_CODES[kind.kind], part["offset"], scale, zero, kind.group]


class Linear:
    """y = x · Wᵀ (+ bias). W stays in the mapped container file; x (tokens, cols) and y (tokens, rows) are float32.

    `load(name)`, here and in the other layers, gives the functions that compute: compiled kernels, or their numpy twins.
    `room` is uint8 of sizes.matmul_scratch(tokens, cols) bytes or more, on a multiple of 64; without it the kernel keeps some.
    """

    def __init__(
        self, payload: np.ndarray, tensor: Tensor, options: dict, bias: np.ndarray | None = None, load=kernels.load
    ):
        if tensor.layout == "rows16":
            self._memory, place = payload, descriptor(tensor)
        else:  # float32 matrices are stored row by row: packed here, once
            self._memory, place = pack_float32(tensor.array())
        self.rows, self.cols = tensor.shape
        self.nbytes = tensor.nbytes
        self.packed_bytes = self._memory.nbytes if tensor.layout != "rows16" else 0
        self._place = np.array(place, np.int64)
        self._factor, self._bias = tensor.factor, bias
        self._options = (options["threads"], options["block_size"], options["int8_activations"])
        self._matmul = load("gemm").matmul

    def __call__(self, x: np.ndarray, out: np.ndarray | None = None, room: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((len(x), self.rows), np.float32)
        self._matmul(x, self._memory, self._place, self._factor, self._bias, out, *self._options, room)
        return out


def packed_bytes(config: ModelConfig) -> int:
    """Bytes of the matrices that `Linear` packs in memory: routers, and the scores of gated shared experts."""
    rows = config.num_experts, *((1,) if config.shared == "gated" else ())
    return len(config.moe_layers) * sum(packing.stored_bytes((n, config.hidden_size), "fp32", "rows16") for n in rows)


def pack_float32(values: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Row-major float32 (rows, cols) → bytes in layout rows16 and their descriptor."""
    rows, cols = values.shape
    packed = packing.pack_rows16(np.ascontiguousarray(values, np.float32))
    return packed.view(np.uint8), [rows, cols, KIND_CODES["fp32"], 0, ABSENT, ABSENT, 0]
