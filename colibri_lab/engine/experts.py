"""Feed-forward layers: routed experts out of the cache, and the always-resident kind (dense layers, shared experts)."""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..checkpoint.container import Tensor
from .linear import FIELDS, Linear, descriptor
from .sizes import ffn_scratch, matmul_scratch


class DenseFeedForward:
    """down(silu(gate x) * up x) with weights that stay where they are mapped: one expert that every token visits."""

    def __init__(self, payload: np.ndarray, gate: Tensor, up: Tensor, down: Tensor, options: dict, load=kernels.load):
        self.memory = payload.reshape(1, -1)
        self.descriptors = np.array([[descriptor(t) for t in (gate, up, down)]], np.int64)
        self.factors = np.array([[t.factor for t in (gate, up, down)]], np.float32)
        self.width = gate.shape[0]
        self.nbytes = gate.nbytes + up.nbytes + down.nbytes
        self.options = options
        self._zero = np.zeros(1, np.int32)
        self._experts = load("ffn").experts

    def __call__(self, x: np.ndarray, arena) -> np.ndarray:
        """x (tokens, hidden) → (tokens, hidden) in the arena."""
        tokens = len(x)
        offsets = arena.take((2,), np.int32)
        offsets[:] = 0, tokens
        token_of = arena.take((tokens,), np.int32)
        token_of[:] = np.arange(tokens)
        out = arena.take(x.shape, np.float32)
        hidden = arena.take((tokens, self.width), np.float32)
        room = arena.take((ffn_scratch(tokens, tokens, 1, x.shape[1], self.width),), np.uint8)
        self._experts(
            x, self.memory, self._zero, self._zero, self.descriptors, self.factors, offsets, token_of, hidden, out,
            **self.options, scratch=room,
        )  # fmt: skip
        return out


class SharedExpert:
    """An expert that every token visits besides the routed ones; gated families scale it by sigmoid of a learned score."""

    def __init__(self, ffn: DenseFeedForward, score: Linear | None):
        self.ffn, self.score = ffn, score

    def __call__(self, x: np.ndarray, arena) -> np.ndarray:
        y = self.ffn(x, arena)
        if self.score is not None:
            room = arena.take((matmul_scratch(len(x), x.shape[1]),), np.uint8)
            y *= 1.0 / (1.0 + np.exp(-self.score(x, arena.take((len(x), 1), np.float32), room)))
        return y


class RoutedExperts:
    """The experts of one MoE layer, computed from cache buffers in whatever order they become resident.

    `bucket` groups the step's tokens by expert, `run` computes a stretch of the active experts, `combine` adds each
    token's experts in router order: the order of `run` calls cannot change the result. `at_once` experts are computed at
    the same time, all of a stretch when None.
    """

    def __init__(
        self,
        tables: list[tuple[dict, ...]],
        num_experts: int,
        options: dict,
        at_once: int | None = None,
        load=kernels.load,
    ):
        self.descriptors, self.factors = _expert_tables(tables, num_experts)
        self.width = int(self.descriptors[0, 0, 0])
        self.options, self.at_once = options, at_once
        # expert → its place among the step's active experts; one more for PAD, which clips to it and is left out
        self._place = np.full(num_experts + 1, -1, np.int32)
        kernel = load("ffn")
        self._experts, self._combine, self._fill = kernel.experts, kernel.combine, kernel.fill_buckets

    def bucket(self, x: np.ndarray, ids: np.ndarray, active: np.ndarray, arena) -> None:
        """Start a step. x (tokens, hidden); ids (tokens, k) uint16, PAD where there is none; active (n,) int32: the
        distinct experts in computing order. Everything until `combine` lives in the arena."""
        take, tokens, k = arena.take, len(x), ids.shape[1]
        self.arena = arena
        self._place[active] = np.arange(len(active), dtype=np.int32)
        local = np.take(self._place, ids, out=take(ids.shape, np.int32), mode="clip")
        self.x, self.active = x, active
        self.offsets = take((len(active) + 1,), np.int32)
        self.token_of = take((tokens * k,), np.int32)
        self.row_of = take(ids.shape, np.int32)
        self._fill(local, self.offsets, self.token_of, self.row_of, take((len(active),), np.int32), len(active))
        self.rows = take((tokens * k, x.shape[1]), np.float32)

    def run(self, memory: np.ndarray, buffers: np.ndarray, first: int, last: int) -> None:
        """Compute active experts first … last - 1, found in rows `buffers` (int32) of `memory` (buffers, bytes)."""
        step = self.at_once or max(last - first, 1)
        for at in range(first, last, step):
            self._run(memory, buffers[at - first : at - first + step], at, min(at + step, last))

    def _run(self, memory: np.ndarray, buffers: np.ndarray, first: int, last: int) -> None:
        r0, r1 = int(self.offsets[first]), int(self.offsets[last])
        start = self.arena.mark()
        hidden = self.arena.take((r1 - r0, self.width), np.float32)
        room = self.arena.take(
            (ffn_scratch(len(self.x), r1 - r0, last - first, self.x.shape[1], self.width),), np.uint8
        )
        self._experts(
            self.x, memory, buffers, self.active[first:last], self.descriptors, self.factors,
            self.offsets[first : last + 1] - r0, self.token_of[r0:r1], hidden, self.rows[r0:r1], **self.options,
            scratch=room,
        )  # fmt: skip
        self.arena.rewind(start)

    def combine(self, weights: np.ndarray) -> np.ndarray:
        """weights (tokens, k) → the layer's output (tokens, hidden)."""
        y = self.arena.take(self.x.shape, np.float32)
        self._combine(self.rows, self.row_of, weights, y, self.options["threads"])
        return y


def _expert_tables(tables: list[tuple[dict, ...]], num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Tensor tables of a layer's blocks → descriptors (experts, 3, 7) int64 and factors (experts, 3) float32."""
    descriptors = np.zeros((num_experts, 3, FIELDS), np.int64)
    factors = np.ones((num_experts, 3), np.float32)
    for entry in (entry for table in tables for entry in table):
        expert, part = entry["name"].split(".")
        at = int(expert), ("gate", "up", "down").index(part)
        descriptors[at] = descriptor(entry)
        factors[at] = entry["factor"]
    return descriptors, factors
