"""One layer of one text at a time, as a dense matrix: token t used expert e. The locality measures are built on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .table import PAD, Trace


@dataclass(frozen=True, eq=False)
class Stream:
    """The tokens of one sequence through one layer, in order."""

    layer: int
    sequence: int
    used: np.ndarray  # bool (tokens, experts)
    key: np.ndarray  # int64 (tokens,) the same number in every layer for the same token

    def __len__(self) -> int:
        return len(self.used)


def streams(trace: Trace, layers: list[int] | None = None) -> Iterator[Stream]:
    """Every (layer, sequence) of a trace, layers ascending. A union row counts as one token."""
    trace.require("rows", what="locality")
    rows_per_step = int(trace.row.max()) + 1
    key = trace.step.astype(np.int64) * rows_per_step + trace.row
    for layer in trace.layers if layers is None else layers:
        in_layer = np.flatnonzero(trace.layer == layer)
        for sequence in np.unique(trace.sequence[in_layer]):
            rows = in_layer[trace.sequence[in_layer] == sequence]
            yield Stream(layer, int(sequence), dense(trace.experts[rows], trace.num_experts), key[rows])


def dense(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """bool (tokens, experts) from ids (tokens, k)."""
    used = np.zeros((len(ids), num_experts + 1), bool)
    np.put_along_axis(used, np.where(ids == PAD, num_experts, ids).astype(np.int64), True, axis=1)
    return used[:, :num_experts]


def last_use(used: np.ndarray) -> np.ndarray:
    """int32 (tokens + 1, experts): the last token before t that used e, or -1. Row `tokens` is the state at the end."""
    at = np.where(used, np.arange(len(used), dtype=np.int32)[:, None], np.int32(-1))
    before = np.full((len(used) + 1, used.shape[1]), -1, np.int32)
    np.maximum.accumulate(at, axis=0, out=before[1:])
    return before


def window_counts(used: np.ndarray, window: int) -> np.ndarray:
    """int32 (tokens - window + 1, experts): how many tokens of each sliding window use each expert."""
    total = np.zeros((len(used) + 1, used.shape[1]), np.int32)
    np.cumsum(used, axis=0, out=total[1:], dtype=np.int32)
    return total[window:] - total[:-window]
