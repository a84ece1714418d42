"""Replay a trace through the expert cache: what any policy would have hit, missed, evicted and read.

The cache is the live engine's own C++ class, so replaying a recorded run with its settings gives the run's own counts.
What the contracts (lookup, order, admission) mean is in cpp/pool_core.hpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .. import kernels
from ..cache import policies as registry
from ..errors import SettingError, did_you_mean
from .source import Contract, Size, Source, contract_of, in_threads, top_blocks, usable

if TYPE_CHECKING:
    from .table import Trace

PREFETCH = ("prefetch_issued", "prefetch_timely", "prefetch_late", "prefetch_wasted")
_COUNT = {
    "union": "an access is one distinct block of an event",
    "logical": "an access is one block asked for by one token",
}
_PHASES = {"all": slice(None), "prefill": slice(0, 1), "decode": slice(1, 2)}


def replay(
    trace: Trace,
    policy: str | Callable = "lru",
    slots: int | str = 8,
    *,
    params: dict[str, float] | None = None,
    start: str = "empty",
    blocks: Sequence[tuple[int, int]] = (),
    fit: Trace | None = None,
    stop=None,
    **settings,
) -> pd.DataFrame:
    """Counts of one policy at one size: a row per layer, and the totals in `.attrs["totals"]`.

    slots     slots per layer (scope layer) or in all (global), or bytes as text: "4000 MiB", shared equally by the layers
              under scope layer. Needs the trace's expert_bytes
    params    the policy's parameters (colibri_lab.cache.policies)
    start     empty | pinned | preloaded: (layer, block) pairs `blocks` are resident at the start, for good or for now
    fit       where static-pin and pin+lru take their set from; without it from this trace, which flatters them
    settings  fields of `Contract`

    Columns: layer, slots, events, full_events, accesses, hits, misses, hit_rate, full_event_hit_rate, evictions, drops,
    loads, bytes_loaded (None without expert_bytes), compulsory, and prefetch_* when something is fetched ahead. With a
    predictor `hits` are those the policy earned; blocks found because they were fetched ahead are counted apart.
    Raises `SettingError`, and `TraceError` when the trace lacks what the policy needs.
    """
    counts = count(trace, policy, slots, contract_of(settings), params, start, blocks, fit, stop)
    table = pd.DataFrame(counts.columns())
    table.attrs["totals"] = counts.totals()
    return table


def grid(
    trace: Trace,
    policies: str | Callable | Iterable,
    slots: Sequence[int | str],
    *,
    threads: int | None = None,
    progress: bool = True,
    **settings,
) -> list[pd.DataFrame]:
    """`replay` for every policy and size, policies outermost, several at a time; interruptible.

    "all" leaves out the policies that this trace cannot feed (`source.usable` says which and why).
    Policies written in Python hold the interpreter, so those gain nothing from threads.
    """
    jobs = [(policy, size) for policy in usable(trace, policies)[0] for size in slots]
    return in_threads(
        lambda job, stop: replay(trace, job[0], job[1], stop=stop, **settings), jobs, threads, progress, "replay"
    )


def count(
    trace: Trace, policy, slots, contract: Contract, params=None, start="empty", blocks=(), fit=None, stop=None
) -> Counts:
    """The replay itself, before it becomes a table; arguments as in `replay`."""
    info = registry.policy(policy)
    params = registry.check_params(policy, params)
    starts = ("empty", "pinned", "preloaded")
    if start not in starts:
        raise SettingError(f"start cannot be {start!r}; {did_you_mean(str(start), starts)}")
    if bool(blocks) != (start != "empty"):
        raise SettingError(
            f"start={start!r} and {len(blocks)} blocks: give blocks=[(layer, block), …] with pinned or preloaded only"
        )
    if "gates" in info.needs:
        trace.require("gates", what=f"policy {info.name}")
    source, size = Source.of(trace, contract), Size.of(trace, slots, contract)
    notes = source.notes + size.notes
    pins = source.indexed(blocks) if start == "pinned" else []
    if "pins" in info.needs:
        if fit is None:
            notes = [*notes, f"{info.name} took its set from the trace it is judged on"]
        share = 1.0 if policy == "static-pin" else registry.PINNED_SHARE
        pins = pins + top_blocks(trace if fit is None else fit, source, size, share)
    native = kernels.load("replay").replay(
        source.stream, policy, size.slots, capacity_bytes=size.bytes, block_bytes=size.block_bytes,
        lookup=contract.lookup, admission=contract.admission, seed=contract.seed, params=params, pins=pins,
        preload=source.indexed(blocks) if start == "preloaded" else [], prefetch=contract.prefetch,
        budget=contract.prefetch_budget, lead=min(contract.prefetch_lead, len(trace.layers)),
        bandwidth=contract.prefetch_bandwidth, first_counted=source.first_counted, stop=stop,
    )  # fmt: skip
    return Counts(source, size, contract, info.name, native, notes)


@dataclass(frozen=True, eq=False)
class Counts:
    """What a replay counted. `native` holds int64 arrays (layers, 2 phases) by name, and whole-run numbers."""

    source: Source
    size: Size
    contract: Contract
    policy: str
    native: dict
    notes: list[str]

    def __getitem__(self, name: str) -> np.ndarray:
        """int64 (layers,): accesses, hits or misses as `contract.count` wants them, loads, or any counter of C++."""
        if name in ("hits", "misses") and self.contract.count == "logical":
            name = f"logical_{name}"
        if name == "accesses":
            ahead = 0 if self.contract.count == "logical" else self["prefetch_timely"] + self["prefetch_late"]
            return self["hits"] + self["misses"] + ahead
        if name == "compulsory":
            return self.source.first_uses[:, _PHASES[self.contract.phase]].sum(1)
        return self.native["misses" if name == "loads" else name][:, _PHASES[self.contract.phase]].sum(1)

    @property
    def bytes_loaded(self) -> np.ndarray | None:
        """int64 (layers,) read for misses, or None where the trace does not say how large experts are."""
        sizes = self.source.trace.expert_bytes
        return None if sizes is None else self["loads"] * sizes * self.contract.block_size

    def columns(self) -> dict:
        """The table of `replay`."""
        columns = {"layer": self.source.trace.layers, "slots": self.size.of_layer}
        columns |= {name: self[name] for name in ("events", "full_events", "accesses", "hits", "misses")}
        columns["hit_rate"] = ratio(columns["hits"], columns["accesses"])
        columns["full_event_hit_rate"] = ratio(columns["full_events"], columns["events"])
        columns |= {name: self[name] for name in ("evictions", "drops", "loads")}
        columns |= {"bytes_loaded": self.bytes_loaded, "compulsory": self["compulsory"]}
        if self.contract.prefetch != "none":
            columns |= {name: self[name] for name in PREFETCH}
        return columns

    @property
    def admission(self) -> str:
        return {"belady-bypass": "bypass", "static-pin": "never"}.get(self.policy, self.contract.admission)

    def totals(self) -> dict:
        """One JSON-able object: sums over layers with every denominator named, and the rows of `per_layer`."""
        contract, size = self.contract, self.size
        columns = {name: None if v is None else np.asarray(v).tolist() for name, v in self.columns().items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(
            *(v if v is not None else [None] * len(columns["layer"]) for v in columns.values()), strict=True)]  # fmt: skip
        for row in rows:
            row |= {name: None for name, value in row.items() if value != value}  # NaN: nothing to divide by
        sums = {name: sum(v) for name, v in columns.items() if v and isinstance(v[0], int)}
        each = size.of_layer.tolist()
        totals = {
            "policy": self.policy,
            "slots": each if size.bytes and contract.scope == "layer" else each[0],
            "capacity_bytes": size.bytes or None,
            "scope": contract.scope,
            "lookup": contract.lookup,
            "order": contract.order if contract.lookup != "atomic" else None,
            "admission": self.admission,
            "seed": contract.seed,
            "accesses": sums["accesses"],
            "hits": sums["hits"],
            "misses": sums["misses"],
            "hit_rate": sums["hits"] / sums["accesses"] if sums["accesses"] else None,
            "full_event_hit_rate": sums["full_events"] / sums["events"] if sums["events"] else None,
            **{name: sums[name] for name in ("events", "evictions", "drops", "loads")},
            "bytes_loaded": sums.get("bytes_loaded"),
            "compulsory": sums["compulsory"],
            "preloaded": self.native["preloaded"],
            "denominators": {
                "hit_rate": f"hits / accesses, pooled over layers; {_COUNT[contract.count]}",
                "full_event_hit_rate": "events without a miss / events; an event is one layer of one step",
                "phase": contract.phase,
                "warmup_steps_not_counted": contract.warmup_steps,
                "reset": contract.reset,
                "prefetched_blocks": "accesses, but not hits" if contract.prefetch != "none" else "none",
            },
            "notes": self.notes,
            "per_layer": rows,
        }
        if contract.prefetch != "none":
            scores = {name: self.native[name] for name in ("predicted", "correct", "wanted")}
            totals["prefetch"] = {
                "predictor": contract.prefetch,
                **{name.removeprefix("prefetch_"): sums[name] for name in PREFETCH},
                **scores,
                "precision": scores["correct"] / scores["predicted"] if scores["predicted"] else None,
                "recall": scores["correct"] / scores["wanted"] if scores["wanted"] else None,
            }
        return totals


def ratio(part, whole):
    """part / whole, NaN where there is nothing to divide by."""
    whole = np.asarray(whole, float)
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
