"""A trace as flat arrays: one set of experts per event, the form that replay and curves hand to C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .table import Trace

PAD = 65535  # stands in `Trace.experts` where a row has fewer than k ids


@dataclass(frozen=True, eq=False)
class Events:
    """A trace as flat arrays for C++: event e asks for `experts[offsets[e]:offsets[e + 1]]`. See `Trace.events`."""

    offsets: np.ndarray  # int64 (E + 1,)
    experts: np.ndarray  # uint16 (offsets[-1],)
    layer: np.ndarray  # int32 (E,) model layer number
    phase: np.ndarray  # uint8 (E,)
    sequence: np.ndarray  # int32 (E,) of the event's first row
    step: np.ndarray  # int32 (E,)
    weights: np.ndarray | None  # float32 (offsets[-1],)
    layer_index: np.ndarray  # int32 (E,) position of the layer in `Trace.layers`
    logical: np.ndarray  # int32 (E,) assignments before dedup: tokens x k
    resident: np.ndarray | None  # uint8 (offsets[-1],) what the recording engine found

    @property
    def count(self) -> int:
        return len(self.layer)

    @property
    def widths(self) -> np.ndarray:
        """int64 (E,): experts asked for by each event, |E_t|."""
        return np.diff(self.offsets)

    @property
    def event_of(self) -> np.ndarray:
        """int32 (offsets[-1],): the event each entry of `experts` belongs to."""
        return np.repeat(np.arange(self.count, dtype=np.int32), self.widths)


def flatten(trace: Trace, dedupe: bool) -> Events:
    """See `Trace.events`."""
    starts = np.flatnonzero(np.diff(trace.event, prepend=-1))
    total = len(starts)
    used = trace.experts != PAD
    per_row = used.sum(1)
    logical = np.add.reduceat(per_row, starts).astype(np.int32)
    flat = trace.experts[used]
    weights = None if trace.weights is None else trace.weights[used]
    resident = None if trace.resident is None else trace.resident[used]
    widths = logical
    if dedupe and total < len(trace):
        event_of = np.repeat(trace.event, per_row).astype(np.int64)
        _, first, inverse = np.unique(event_of * (PAD + 1) + flat, return_index=True, return_inverse=True)
        keep = np.sort(first)
        if weights is not None:
            best = np.full(len(first), -np.inf, np.float32)
            np.maximum.at(best, inverse, weights)
            weights = best[np.argsort(first)]
        resident = None if resident is None else resident[keep]
        flat = flat[keep]
        widths = np.bincount(event_of[keep], minlength=total)
    offsets = np.zeros(total + 1, np.int64)
    np.cumsum(widths, out=offsets[1:])
    layer = trace.layer[starts]
    return Events(
        offsets=offsets,
        experts=np.ascontiguousarray(flat),
        layer=layer,
        phase=trace.phase[starts],
        sequence=trace.sequence[starts],
        step=trace.step[starts],
        weights=weights,
        layer_index=np.searchsorted(trace.layers, layer).astype(np.int32),
        logical=logical,
        resident=resident,
    )
