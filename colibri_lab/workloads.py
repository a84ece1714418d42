"""Work for one kernel, with its inputs: what benchmarks time and what an edited kernel is compared on.

A `Workload` gives the same work to any version of its kernel. `operations` and `bytes` are what the task itself needs: a
multiply-add is two operations, and every weight, input and output crosses the memory bus once. From both follows the
least time a machine can take, `Limits.bound_s`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np

from . import kernels
from .checkpoint import binfile, formats, packing
from .checkpoint.layout import Spec
from .config import RouterConfig
from .engine.linear import descriptor
from .engine.router import KINDS
from .errors import SettingError, did_you_mean

POOL_BYTES = 128_000_000  # weights rotate through this much memory, so that they come from there and not from a cache
HIDDEN, WIDTH, TOP_K = 2048, 1024, 8  # an expert of OLMoE-1B-7B and of several others


@dataclass(frozen=True)
class Workload:
    """`bind(module, threads)` → a function that does the work once with that version; its float32 result is in scratch."""

    kernel: str
    label: str
    operations: float
    bytes: float
    bind: Callable[[ModuleType, int], Callable[[], object]]
    integer: bool = False  # whether the products are of bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def call(self, module: ModuleType | None = None, threads: int = 1) -> Callable[[], object]:
        """The work with `module`, or with the kernel as its files are."""
        return self.bind(kernels.load(self.kernel) if module is None else module, threads)


class _Weights:
    """`copies` sets of matrices of the given shapes in one number format, side by side in memory once that is asked for.

    Values are random with a standard deviation of about 1 / sqrt(columns), so that products stay of order 1. Large sets
    are all alike, which saves time and costs the kernels nothing. `seed(copy, matrix)` seeds a matrix.
    """

    def __init__(self, format: str, shapes: list[tuple[int, int]], copies: int | None = None, seed=lambda *at: at):
        specs = {str(i): Spec(shape, "expert") for i, shape in enumerate(shapes)}
        self._table, self.set_bytes = binfile.plan_table(specs, dict.fromkeys(specs, format))
        self._seed, self.copies = seed, copies or max(2, POOL_BYTES // self.set_bytes)
        self.nbytes = sum(sum(packing.part_sizes(shape, format, "rows16")) for shape in shapes)
        self.places = np.array([descriptor(entry) for entry in self._table], np.int64)

    @cached_property
    def memory(self) -> np.ndarray:
        """uint8 (copies, set_bytes), aligned to 64 bytes."""
        raw = np.zeros(self.copies * self.set_bytes + 64, np.uint8)
        start = -raw.__array_interface__["data"][0] % 64
        memory = raw[start : start + self.copies * self.set_bytes].reshape(self.copies, self.set_bytes)
        different = self.copies if memory.nbytes <= 4_000_000 else 1
        for copy in range(different):
            for i, entry in enumerate(self._table):
                _fill(binfile.tensor_view(memory[copy], entry), np.random.default_rng(self._seed(copy, i)))
        memory[different:] = memory[0]
        return memory


def _fill(tensor: binfile.Tensor, rng: np.random.Generator) -> None:
    """Random stored elements; scales and zero points that give them the size they should have."""
    spread, kind = tensor.shape[1] ** -0.5, tensor.kind
    if not kind.scaled:
        values = rng.normal(0, spread, tensor.elements.size).astype(np.float32)[None]
        tensor.data[:] = formats.encode(values, tensor.format).data.reshape(-1).view(np.uint8)
        return
    tensor.data[:] = np.frombuffer(rng.bytes(tensor.data.size), np.uint8)
    if kind.kind == "mxfp4":
        tensor.scale[:] = 127 + round(np.log2(spread / 3))
    else:
        tensor.scale[:] = spread / kind.levels * 12**0.5  # codes are spread evenly
    if tensor.zero is not None:
        tensor.zero[:] = kind.middle


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _integer(format: str, asked: bool) -> bool:
    if asked and not formats.find_format(format).scaled:
        raise SettingError(f"int8_activations are for weights of integers with scales, not for {format}; leave it out")
    return asked


def gemm(
    format: str = "int8", tokens: int = 1, rows: int = WIDTH, cols: int = HIDDEN, int8_activations: bool = False,
    block_size: int = 64,
) -> Workload:  # fmt: skip
    """x (tokens, cols) times the transpose of a (rows, cols) matrix in a number format; matrices take turns."""
    integer, w, x = _integer(format, int8_activations), _Weights(format, [(rows, cols)]), _noise(tokens, cols)
    out = np.empty((tokens, rows), np.float32)
    options = {"int8_activations": True} if integer else {}

    def bind(module, threads):
        turn = itertools.cycle(w.memory)

        def once():
            module.matmul(x, next(turn), w.places[0], 1.0, None, out, threads, block_size, **options)
            return out

        return once

    label = f"{format}, {_count(tokens)}{', int8 activations' * integer}"
    return Workload("gemm", label, 2 * tokens * rows * cols, w.nbytes + x.nbytes + out.nbytes, bind, integer)


def ffn(
    format: str = "int8", tokens: int = 1, hidden: int = HIDDEN, width: int = WIDTH, k: int = TOP_K, experts: int | None = None,
    int8_activations: bool = False, exact: bool = True, block_size: int = 64, layout: str = "slots",
) -> Workload:  # fmt: skip
    """A step's routed experts: each token goes to k of `experts` at random (default 64, or as many as 400 MB hold).

    layout "slots": every expert is computed where it lies; "gathered": the step's experts are first copied side by side
    into one buffer; "stacked": all gate matrices lie together, then all up, then all down.
    """
    integer, rng = _integer(format, int8_activations), np.random.default_rng(0)
    if layout not in ("slots", "gathered", "stacked"):
        raise SettingError(f"layout cannot be {layout!r}; {did_you_mean(layout, ('slots', 'gathered', 'stacked'))}")
    parts = [(width, hidden), (width, hidden), (hidden, width)]
    each = sum(packing.stored_bytes(shape, format, "rows16") for shape in parts)
    experts = experts or int(np.clip(400_000_000 // each, 2 * k, 64))
    if layout == "stacked":
        shapes = [shape for shape in parts for _ in range(experts)]
        w = _Weights(format, shapes, 1, lambda _, i: (i % experts, i // experts))
        places = np.ascontiguousarray(w.places.reshape(3, experts, -1).swapaxes(0, 1))
        expert_bytes = w.nbytes / experts
    else:
        w = _Weights(format, parts, experts)
        places, expert_bytes = np.repeat(w.places[None], experts, 0), w.nbytes
    factors, x = np.ones((experts, 3), np.float32), _noise(tokens, hidden)
    steps = [_buckets(np.array([rng.permutation(experts)[:k] for _ in range(tokens)], np.int32)) for _ in range(16)]
    middle, out = np.empty((tokens * k, width), np.float32), np.empty((tokens * k, hidden), np.float32)
    room = np.empty((min(experts, tokens * k), w.set_bytes), np.uint8) if layout == "gathered" else None
    options = {"exact": exact, "block_size": block_size} | ({"int8_activations": True} if integer else {})

    def bind(module, threads):
        turn = itertools.cycle(steps)

        def once():
            active, offsets, token_of = next(turn)
            memory, buffers = w.memory, active
            if layout == "gathered":
                memory, buffers = room, np.arange(len(active), dtype=np.int32)
                np.take(w.memory, active, axis=0, out=room[: len(active)], mode="clip")
            elif layout == "stacked":
                buffers = np.zeros(len(active), np.int32)
            module.experts(
                x, memory, buffers, active, places, factors, offsets, token_of, middle, out, threads=threads, **options
            )
            return out

        return once

    used = sum(len(active) for active, _, _ in steps) / len(steps)
    label = f"{format}, {_count(tokens)}, {used:.0f} experts{', int8 activations' * integer}"
    label += "" if layout == "slots" else f", {layout}"
    moved = used * expert_bytes + x.nbytes + out.nbytes
    return Workload("ffn", label, 6 * tokens * k * hidden * width, moved, bind, integer)


def _buckets(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids (tokens, k) → active experts, offsets of their rows, the token of each row."""
    flat = ids.reshape(-1)
    active, counts = np.unique(flat, return_counts=True)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return active, offsets, (np.argsort(flat, kind="stable") // ids.shape[1]).astype(np.int32)


def attention(
    tokens: int = 1, past: int = 1024, heads: int = 16, kv_heads: int = 16, head_dim: int = 128, page_size: int = 256
) -> Workload:
    """Grouped-query attention of `tokens` behind `past` others, keys and values in float32."""
    pages = -(-(past + tokens) // page_size)
    table, q = np.arange(pages, dtype=np.int32), _noise(tokens, heads, head_dim)
    out = np.empty_like(q)

    def bind(module, threads):
        k, v = (_noise(pages, page_size, kv_heads, head_dim) for _ in range(2))

        def once():
            module.attend(q, k, v, table, past, 0, head_dim**-0.5, out, threads)
            return out

        return once

    seen = sum(range(past + 1, past + tokens + 1))
    moved = 8 * (past + tokens) * kv_heads * head_dim + q.nbytes + out.nbytes
    return Workload("attention", f"{_count(tokens)} behind {past}", 4 * seen * heads * head_dim, moved, bind)


def norm(tokens: int = 1, hidden: int = HIDDEN) -> Workload:
    """RMS norm of rows."""
    x, weight = _noise(tokens, hidden), _noise(hidden)
    out = np.empty_like(x)

    def bind(module, threads):
        def once():
            module.rms_norm(x, weight, 1e-5, out, threads)
            return out

        return once

    return Workload("norm", _count(tokens), 4 * x.size, 2 * x.nbytes + weight.nbytes, bind)


def router(tokens: int = 1, experts: int = 64, k: int = TOP_K) -> Workload:
    """From logits to expert ids and weights, softmax before top-k."""
    logits, kind = _noise(tokens, experts), KINDS[RouterConfig().kind]
    ids, weights = np.empty((tokens, k), np.uint16), np.empty((tokens, k), np.float32)

    def bind(module, threads):
        def once():
            module.route(logits, kind, None, 1, 1, False, 1.0, ids, weights, threads)
            return weights

        return once

    return Workload("router", _count(tokens), logits.size * (4 + k), logits.nbytes + ids.nbytes + weights.nbytes, bind)


WORKLOADS = {"gemm": gemm, "ffn": ffn, "attention": attention, "norm": norm, "router": router}


def workload(kernel: str, **options) -> Workload:
    """A kernel's work; `options` are those of the function of that name here. Raises `SettingError` for another name."""
    if kernel not in WORKLOADS:
        raise SettingError(f"no workload for kernel {kernel!r}; {did_you_mean(kernel, WORKLOADS)}")
    return WORKLOADS[kernel](**options)


def _count(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens != 1)}"
