"""A replay step by step: what each access found, and what was in memory after every step.

`trace.replay` counts; this keeps the course of events, for pictures that move through time. The trace is driven through
the live engine's own C++ class, one call per event, and the sums are those of replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .. import kernels
from ..cache import policies
from ..errors import SettingError
from .source import Size, Source, contract_of, top_blocks

if TYPE_CHECKING:
    from .table import Trace

ABSENT, RESIDENT, USED, MISSED = range(4)


class Overtaken(Exception):
    """`history` was told to stop, since nobody wants its answer any more."""


@dataclass(frozen=True, eq=False)
class History:
    """One entry per access, an access being one distinct expert of one event, in the order they happened.

    step      int32 (accesses,) position among the trace's distinct steps
    key       int32 (accesses,) layer position x experts + expert
    hit       bool (accesses,)
    phase     uint8 (steps,) 0 prefill, 1 decode
    resident  bool, packed to bits (steps, layers, ceil(experts / 8)): in memory when the step was over
    """

    layers: list[int]
    experts: int
    step: np.ndarray
    key: np.ndarray
    hit: np.ndarray
    phase: np.ndarray
    resident: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.phase)

    def steps(self, phase: str = "all") -> np.ndarray:
        """Positions of the steps of a phase, ascending."""
        keep = {"all": self.phase >= 0, "prefill": self.phase == 0, "decode": self.phase == 1}[phase]
        return np.flatnonzero(keep)

    def table(self, phase: str = "all") -> pd.DataFrame:
        """step, phase, accesses, hits, misses, hit_rate: a row per step of the phase."""
        asked = np.bincount(self.step, minlength=len(self))
        hits = np.bincount(self.step[self.hit], minlength=len(self))
        at = self.steps(phase)
        rates = np.divide(hits, asked, out=np.full(len(self), np.nan), where=asked > 0)
        names = np.array(["prefill", "decode"])[self.phase]
        return pd.DataFrame(
            {"step": at, "phase": names[at], "accesses": asked[at], "hits": hits[at], "misses": (asked - hits)[at],
             "hit_rate": rates[at]}
        )  # fmt: skip

    def events(self) -> pd.DataFrame:
        """step, layer, expert, hit: a row per access."""
        layer, expert = np.divmod(self.key, self.experts)
        return pd.DataFrame(
            {"step": self.step, "layer": np.asarray(self.layers)[layer], "expert": expert, "hit": self.hit}
        )

    def grid(self, step: int) -> np.ndarray:
        """float32 (3, layers, experts) after a step: state, step since which it is resident (NaN: it is not; -1: from
        the start), steps that used it so far. States: 0 absent, 1 resident, 2 used by this step and found, 3 missed."""
        shape = (len(self.layers), self.experts)
        first, end = np.searchsorted(self.step, [step, step + 1])
        state = np.unpackbits(self.resident[step], axis=-1, count=self.experts).astype(np.float32)
        since = np.full(shape, -1, np.float32).reshape(-1)
        loads = np.flatnonzero(~self.hit[:end])
        since[self.key[loads]] = self.step[loads]  # of repeated keys the last, newest load counts
        since[state.reshape(-1) == ABSENT] = np.nan
        now = slice(first, end)
        state.reshape(-1)[self.key[now]] = np.where(self.hit[now], USED, MISSED)
        uses = np.bincount(self.key[:end], minlength=state.size)
        return np.stack([state, since.reshape(shape), uses.reshape(shape).astype(np.float32)])


def history(
    trace: Trace,
    policy: str | Callable = "lru",
    slots: int | str = 8,
    *,
    fit: Trace | None = None,
    stale: Callable[[], bool] = lambda: False,
    **settings,
) -> History:
    """Replay and keep the course. Arguments as `replay`; what is counted (phase, count, warm-up) is for the reader.

    `stale` is asked at every step; True raises `Overtaken`. Raises as `replay`, and `SettingError` for a block size
    other than 1 and for prefetching, which this does not follow.
    """
    contract = contract_of(settings)
    if contract.block_size != 1 or contract.prefetch != "none":
        raise SettingError("history follows single experts read on demand: block_size must be 1 and prefetch none")
    info = policies.policy(policy)
    if info.oracle and contract.reset != "never":
        raise SettingError(f"history cannot follow {info.name} through resets: reset must be never")
    if "gates" in info.needs:
        trace.require("gates", what=f"policy {info.name}")
    size, events = Size.of(trace, slots, contract), trace.events()
    whole = events if contract.lookup == "atomic" else trace.events(dedupe=False)
    core = kernels.load("expert_cache").ExpertCache(
        len(trace.layers), trace.num_experts, size.slots, contract.scope, policy, lookup=contract.lookup,
        order=contract.order, admission=contract.admission, seed=contract.seed, capacity_bytes=size.bytes,
        block_bytes=size.block_bytes,
        future=(whole.layer_index, whole.offsets, whole.experts) if info.oracle else None,
    )  # fmt: skip
    if "pins" in info.needs:
        share = 1.0 if policy == "static-pin" else policies.PINNED_SHARE
        core.pin(top_blocks(fit or trace, Source.of(trace, contract), size, share))

    bounds, layer_of, phase_of = events.offsets.tolist(), events.layer_index.tolist(), events.phase.tolist()
    texts = events.sequence.tolist()
    numbers, step_of = np.unique(events.step, return_inverse=True)
    last_of_step = np.append(np.diff(step_of) != 0, True)
    hit = np.empty(len(events.experts), np.uint8)
    packed = np.empty((len(numbers), len(trace.layers), -(-trace.num_experts // 8)), np.uint8)
    weights = events.weights if "gates" in info.needs else None
    for e, last in enumerate(last_of_step.tolist()):
        if contract.reset == "per-sequence" and e and texts[e] != texts[e - 1]:
            core.reset()
        span = slice(bounds[e], bounds[e + 1])
        gates = None if weights is None else weights[span]
        hit[span] = core.step(layer_of[e], events.experts[span], phase_of[e], gates).hit
        if last:
            packed[step_of[e]] = np.packbits(core.residency() != 0, axis=-1)
            if stale():
                raise Overtaken
    phase = np.zeros(len(numbers), np.uint8)
    phase[step_of] = events.phase
    key = events.layer_index[events.event_of] * trace.num_experts + events.experts
    return History(
        trace.layers, trace.num_experts, step_of[events.event_of].astype(np.int32), key.astype(np.int32), hit != 0, phase,
        packed,
    )  # fmt: skip
