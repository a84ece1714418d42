"""What the expert cache serves, event by event: the trace driven through the live cache's own C++ class.

`trace.replay` gives totals; a predictor needs each layer of each step, since waiting depends on how misses fall together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..cache import policies
from ..cache.prefetch import Prefetcher
from ..errors import SettingError
from ..trace.replay import Contract, Size, Source, top_blocks
from ..trace.table import Trace

PREFILL, DECODE = 0, 1


@dataclass(frozen=True, eq=False)
class Served:
    """One entry per event, an event being one layer of one step; `misses = early + late`.

    step, layer, phase  as in the trace, `layer` as a position in `trace.layers`
    tokens, assignments rows of the event, and experts they asked for before dedup
    blocks, hits        distinct blocks, and how many were found
    early, late         misses that have a free slot at once, and those that must wait for one, or stream through
    ahead               blocks fetched ahead for this event's layer since the event before
    loaded              keys layer x blocks + block that were read, in order: those fetched ahead, then the misses
    ends                loaded[ends[e] : ends[e + 1]] belong to event e
    """

    step: np.ndarray
    layer: np.ndarray
    phase: np.ndarray
    tokens: np.ndarray
    assignments: np.ndarray
    blocks: np.ndarray
    hits: np.ndarray
    early: np.ndarray
    late: np.ndarray
    ahead: np.ndarray
    loaded: np.ndarray
    ends: np.ndarray
    layers: int
    blocks_per_layer: int
    slots: int

    @property
    def misses(self) -> np.ndarray:
        return self.early + self.late

    def hit_rate(self, phase: int = DECODE) -> float | None:
        """Hits / distinct blocks asked for, pooled over layers; None when the phase has no event."""
        mine = self.phase == phase
        asked = int(self.blocks[mine].sum())
        return int(self.hits[mine].sum()) / asked if asked else None

    def steps(self, phase: int = DECODE) -> np.ndarray:
        """Step numbers of a phase, ascending."""
        return np.unique(self.step[self.phase == phase])

    def per_step(self, values: np.ndarray, phase: int = DECODE) -> np.ndarray:
        """Sums of `values` (events,) by step of a phase."""
        mine = self.phase == phase
        _, at = np.unique(self.step[mine], return_inverse=True)
        return np.bincount(at, weights=values[mine]) if len(at) else np.zeros(0)


def serve(
    trace: Trace,
    slots: int | str,
    *,
    policy: str = "lru",
    scope: str = "layer",
    lookup: str = "atomic",
    order: str = "rank",
    admission: str = "forced",
    seed: int = 0,
    reset: str = "never",
    block_size: int = 1,
    prefetch: str = "none",
    prefetch_budget: int | None = None,
    fit: Trace | None = None,
    recency: str = "engine",
) -> Served:
    """Drive `trace` through the cache at `slots` (per layer or in all by `scope`; or bytes, as "4000 MiB").

    fit      where pinning policies take their set from; default the trace itself
    recency  "engine" leaves a step's experts used in the order of this engine; "listed" in the order they are listed in, a
             prompt's by their last token, as engines do that go through tokens and experts one by one
    Raises as `trace.replay`.
    """
    trace.require("rows", what="following a cache event by event")
    if recency not in ("engine", "listed"):
        raise SettingError(f"recency must be engine or listed, got {recency!r}")
    info = policies.policy(policy)
    contract = Contract(scope, lookup, order, seed, admission, reset, block_size=block_size)
    size = Size.of(trace, slots, contract)
    events = trace.events(dedupe=False)
    blocks = -(-trace.num_experts // block_size)
    experts = events.experts // np.uint16(block_size)
    future = (events.layer_index, events.offsets, experts) if info.oracle else None
    core = kernels.load("expert_cache").ExpertCache(
        len(trace.layers), blocks, size.slots, scope, policy, lookup=lookup, order=order, admission=admission, seed=seed,
        capacity_bytes=size.bytes, block_bytes=size.block_bytes, future=future,
    )  # fmt: skip
    if "pins" in info.needs:
        share = 1.0 if policy == "static-pin" else policies.PINNED_SHARE
        core.pin(top_blocks(fit or trace, Source.of(trace, contract), size, share))
    ahead_of = None
    if prefetch != "none":
        ahead_of = Prefetcher(prefetch, len(trace.layers), blocks, prefetch_budget or trace.k)
    weights = None if "gates" not in info.needs else events.weights

    count = events.count
    found = {name: np.zeros(count, np.int64) for name in ("blocks", "hits", "early", "late", "ahead")}
    loaded: list[int] = []
    ends = np.zeros(count + 1, np.int64)
    waiting: list[int] = []  # keys fetched ahead and not yet used to charge an event
    bounds, layer_of, phase_of = events.offsets.tolist(), events.layer_index.tolist(), events.phase.tolist()
    sequence_of = events.sequence.tolist()
    for e in range(count):
        if reset == "per-sequence" and e and sequence_of[e] != sequence_of[e - 1]:
            core.reset()
        layer, span = layer_of[e], slice(bounds[e], bounds[e + 1])
        ids = experts[span]
        if recency == "listed":
            ids = np.array(list(dict.fromkeys(ids[::-1].tolist()))[::-1], np.uint16)
        result = core.step(layer, ids, phase_of[e], None if weights is None else weights[span])
        hit, late = result.hit, result.late
        slots_of = result.loads[:, 1]
        found["blocks"][e] = len(hit)
        found["hits"][e] = np.count_nonzero(hit)
        found["late"][e] = np.count_nonzero((late != 0) | (slots_of < 0))
        found["early"][e] = len(late) - found["late"][e]
        found["ahead"][e] = len(waiting)
        first = layer * blocks
        loaded += waiting
        loaded += [first + int(block) for block in result.blocks[hit == 0]]
        ends[e + 1] = len(loaded)
        if recency == "listed":  # again, now that all are resident: only the order of their last use changes
            for block in ids.tolist():
                core.step(layer, np.array([block], np.uint16), phase_of[e])
        waiting = []
        if ahead_of is not None:
            target, predicted = ahead_of.after(layer, result.blocks.tolist())
            if predicted:
                fetched = core.prefetch(target, np.array(predicted, np.uint16))
                waiting = [target * blocks + int(block) for block in fetched.blocks]
                for slot in fetched.slots.tolist():
                    core.loaded(slot)
    rows = np.bincount(trace.event, minlength=count)
    return Served(
        events.step, events.layer_index, events.phase, rows, events.logical.astype(np.int64), **found,
        loaded=np.array(loaded, np.int64), ends=ends, layers=len(trace.layers), blocks_per_layer=blocks, slots=size.slots,
    )  # fmt: skip
