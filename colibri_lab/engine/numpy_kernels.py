"""The engine's kernels in plain numpy, with the signatures of the compiled ones: `backend="numpy"`.

`load(name)` stands in for `kernels.load(name)`. Each function says in a few lines what its kernel computes, in float64
where the kernel sums in float32, so a run with either can be held against the other. Nothing here is fast, and arguments
are not checked as the bindings check theirs.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from .. import reference
from ..checkpoint import formats, packing
from ..config import RouterConfig
from ..errors import SettingError, did_you_mean
from .linear import ABSENT, KIND_CODES
from .router import KINDS
from .router_reference import route_numpy

BLOCK = 4096  # bytes that a KV page number counts in
ACTIVATION_GROUP = 64  # columns that share a scale when activations are rounded to int8
_KINDS = {code: name for name, code in KIND_CODES.items()}


def matrix(memory: np.ndarray, place: np.ndarray, factor: float) -> np.ndarray:
    """The float32 (rows, cols) matrix that a descriptor finds in memory (bytes,) uint8."""
    rows, cols, code, data_at, scale_at, zero_at, group = (int(n) for n in place)
    kind = next(
        f for f in formats.FORMATS.values()
        if (f.kind, f.group) == (_KINDS[code], group) and not f.shared and f.symmetric == (zero_at == ABSENT)
    )  # fmt: skip
    sizes = packing.part_sizes((rows, cols), kind.name, "rows16")
    at = (data_at, scale_at, zero_at)
    parts = [memory[start : start + size] if size else None for start, size in zip(at, sizes, strict=True)]
    data, scale, zero = (
        None if part is None else part.view(dtype)
        for part, dtype in zip(parts, (kind.dtype, kind.scale_dtype, kind.dtype), strict=True)
    )
    return formats.decode(packing.unpack(data, scale, zero, (rows, cols), kind, "rows16"), kind.name, factor)


def rounded(x: np.ndarray) -> np.ndarray:
    """x (tokens, cols) as the integer path sees it: int8 codes times the scale of their group of columns, float64."""
    tokens, cols = x.shape
    full = np.zeros((tokens, -(-cols // ACTIVATION_GROUP), ACTIVATION_GROUP), np.float32)
    full.reshape(tokens, -1)[:, :cols] = x
    largest = np.abs(full).max(2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(full * inverse).astype(np.float64)
    return (codes * (largest / np.float32(127))).reshape(tokens, -1)[:, :cols]


def _product(x: np.ndarray, w: np.ndarray, integer: bool) -> np.ndarray:
    return (rounded(x) if integer else x.astype(np.float64)) @ w.T.astype(np.float64)


def _scaled(place: np.ndarray) -> bool:
    return _KINDS[int(place[2])] in ("int8", "int4", "mxfp4")


def matmul(
    x, base, descriptor, factor, bias, out, threads=1, block_size=64, int8_activations=False, scratch=None
) -> None:
    y = _product(x, matrix(base, descriptor, factor), int8_activations and _scaled(descriptor))
    out[:] = y if bias is None else y + bias


def experts(
    x, memory, buffers, experts, descriptors, factors, offsets, token_of, hidden, out, threads=1, block_size=64, exact=True,
    int8_activations=False, scratch=None,
) -> None:  # fmt: skip
    for a, (buffer, expert) in enumerate(zip(buffers, experts, strict=True)):
        rows = slice(offsets[a], offsets[a + 1])
        places = descriptors[expert]
        gate, up, down = (matrix(memory[buffer], place, f) for place, f in zip(places, factors[expert], strict=True))
        integer = int8_activations and all(map(_scaled, places))
        mine = x[token_of[rows]]
        g = _product(mine, gate, integer)
        middle = (g * reference.sigmoid(g) * _product(mine, up, integer)).astype(np.float32)
        out[rows] = _product(middle, down, integer)


def combine(rows, row_of, weights, y, threads=1) -> None:
    y[:] = 0
    for rank in range(row_of.shape[1]):
        used = row_of[:, rank] >= 0
        y[used] += weights[used, rank, None] * rows[row_of[used, rank]]


def fill_buckets(local, offsets, token_of, row_of, cursor, active) -> int:
    flat = local.reshape(-1)
    chosen = np.flatnonzero(flat >= 0)
    order = chosen[np.argsort(flat[chosen], kind="stable")]
    offsets[0], offsets[1 : active + 1] = 0, np.cumsum(np.bincount(flat[chosen], minlength=active))
    token_of[: len(order)] = order // local.shape[1]
    row_of[:] = -1
    row_of.reshape(-1)[order] = np.arange(len(order))
    return len(order)


def silu(x, out, exact=True) -> None:
    out[:] = x * reference.sigmoid(x)


def rms_norm(x, weight, eps, out, threads=1) -> None:
    out[:] = reference.rms_norm(x, weight, eps)


def rotate(x, cos, sin, interleaved=False) -> None:
    x[:] = reference.rotate(x, cos, sin, interleaved)


def attend(q, k, v, pages, past, window, scale, out, threads=1) -> None:
    keys, values = (part[pages].reshape(-1, *part.shape[2:]) for part in (k, v))
    out[:] = reference.attend(q, keys, values, past, window, scale)


def _page(memory, page, at, page_size, kv_heads, head_dim, half) -> np.ndarray:
    """Keys or values (page_size, kv_heads, head_dim) of one page, where they lie."""
    kind = np.dtype(np.float16 if half else np.float32)
    start = int(page) * BLOCK + at
    size = page_size * kv_heads * head_dim * kind.itemsize
    return memory[start : start + size].view(kind).reshape(page_size, kv_heads, head_dim)


def attend_pool(
    q, memory, pages, k_at, v_at, page_size, kv_heads, half, past, window, scale, out, threads=1
) -> None:  # fmt: skip
    count = -(-(past + len(q)) // page_size)
    keys, values = (
        np.concatenate([_page(memory, page, at, page_size, kv_heads, q.shape[2], half) for page in pages[:count]])
        for at in (k_at, v_at)
    )
    out[:] = reference.attend(q, keys, values, past, window, scale)


def write_pool(k, v, memory, pages, k_at, v_at, page_size, half, past) -> float:
    with np.errstate(over="ignore"):
        for at, rows in ((k_at, k), (v_at, v)):
            for position, row in enumerate(rows, past):
                page = _page(memory, pages[position // page_size], at, page_size, *rows.shape[1:], half)
                page[position % page_size] = row
    return float(max(np.abs(k).max(), np.abs(v).max())) if half else 0.0


def route(logits, kind, bias, groups, top_groups, renormalise, scale, ids, weights, threads=1) -> None:
    name = next(name for name, code in KINDS.items() if code == kind)
    rules = RouterConfig(name, renormalise, scale, groups, top_groups, bias is not None)
    ids[:], weights[:] = route_numpy(logits, rules, ids.shape[1], bias)


_KERNELS = {
    "gemm": SimpleNamespace(matmul=matmul),
    "ffn": SimpleNamespace(experts=experts, combine=combine, fill_buckets=fill_buckets, silu=silu),
    "norm": SimpleNamespace(rms_norm=rms_norm),
    "attention": SimpleNamespace(attend=attend, attend_pool=attend_pool, write_pool=write_pool, rotate=rotate),
    "router": SimpleNamespace(route=route),
}


def load(name: str) -> SimpleNamespace:
    """The numpy functions of kernel `name`. Raises `SettingError` for one that does not compute."""
    if name not in _KERNELS:
        raise SettingError(f"kernel {name!r} has no stand-in in numpy; {did_you_mean(name, _KERNELS)}")
    return _KERNELS[name]
