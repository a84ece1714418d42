"""Replay a trace through the expert cache: what any policy would have hit, missed, evicted and read.

The cache is the live engine's own C++ class, so replaying a recorded run with its settings gives the run's own counts.
Names of the contracts (lookup, order, admission) are explained in cpp/pool_core.hpp.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from tqdm import tqdm

from .. import kernels
from ..cache import policies
from ..errors import SettingError, TraceError, did_you_mean
from ..units import parse_size

if TYPE_CHECKING:
    from .table import Trace

CHOICES = {
    "scope": ("layer", "global"),
    "lookup": ("atomic", "serial", "serial-hits-first"),
    "order": ("rank", "id", "random"),
    "admission": policies.ADMISSIONS,
    "reset": ("never", "per-sequence"),
    "phase": ("all", "prefill", "decode"),
    "count": ("union", "logical"),
    "prefetch": ("none", "same", "markov", "popular", "oracle"),
}
_PREFETCH = ("prefetch_issued", "prefetch_timely", "prefetch_late", "prefetch_wasted")


@dataclass(frozen=True)
class Contract:
    """Everything about a replay but the policy and the size. Raises `SettingError` on a value outside its choices.

    scope          layer: each MoE layer owns its slots; global: one pool
    lookup, order  how the members of an event meet the cache; order matters to the serial lookups
    admission      forced: every missed block is kept; bypass: a block may be dropped after use
    reset          per-sequence: a cold cache at each new sequence
    phase          what is counted; both phases always run
    count          union: a block counts once per event; logical: once per token that asked for it, so a miss that serves
                   five tokens counts five misses
    warmup_steps   first steps that run without being counted
    block_size     experts per block, as in the container
    """

    scope: str = "layer"
    lookup: str = "atomic"
    order: str = "rank"
    seed: int = 0
    admission: str = "forced"
    reset: str = "never"
    phase: str = "all"
    count: str = "union"
    warmup_steps: int = 0
    block_size: int = 1
    prefetch: str = "none"
    prefetch_budget: int = 0
    prefetch_lead: int = 1
    prefetch_bandwidth: float = 0.0

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise SettingError(
                    f"{name} cannot be {getattr(self, name)!r}; {did_you_mean(str(getattr(self, name)), known)}"
                )
        for name, least in (
            ("seed", 0),
            ("warmup_steps", 0),
            ("block_size", 1),
            ("prefetch_budget", 0),
            ("prefetch_lead", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
                raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.prefetch != "none" and self.prefetch_budget == 0:
            raise SettingError(f"prefetch={self.prefetch!r} needs prefetch_budget, the blocks to predict per event")


def contract_of(settings: dict) -> Contract:
    """A `Contract` from keyword arguments. Raises `SettingError` on an unknown one."""
    known = Contract.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise SettingError(f"unknown replay setting {name!r}; {did_you_mean(name, known)}")
    return Contract(**settings)


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
    contract = contract_of(settings)
    info = policies.policy(policy)
    params = policies.check_params(policy, params)
    source = Source.of(trace, contract)
    if start not in ("empty", "pinned", "preloaded"):
        raise SettingError(f"start cannot be {start!r}; {did_you_mean(str(start), ('empty', 'pinned', 'preloaded'))}")
    if bool(blocks) != (start != "empty"):
        raise SettingError(
            f"start={start!r} and {len(blocks)} blocks: give blocks=[(layer, block), …] with pinned or preloaded only"
        )
    if "gates" in info.needs:
        trace.require("gates", what=f"policy {info.name}")
    size = Size.of(trace, slots, contract)
    notes = source.notes + size.notes
    pinned = source.indexed(blocks) if start == "pinned" else []
    preload = source.indexed(blocks) if start == "preloaded" else []
    if "pins" in info.needs:
        if fit is None:
            notes = [*notes, f"{info.name} took its set from the trace it is judged on"]
        share = 1.0 if policy == "static-pin" else policies.PINNED_SHARE
        pinned = pinned + top_blocks(trace if fit is None else fit, source, size, share)
    counted = kernels.load("replay").replay(
        source.stream, policy, size.slots, capacity_bytes=size.bytes, block_bytes=size.block_bytes,
        lookup=contract.lookup, admission=contract.admission, seed=contract.seed, params=params, pins=pinned,
        preload=preload, prefetch=contract.prefetch, budget=contract.prefetch_budget,
        lead=min(contract.prefetch_lead, len(trace.layers)), bandwidth=contract.prefetch_bandwidth,
        first_counted=source.first_counted, stop=stop,
    )  # fmt: skip
    table = _table(source, size, contract, counted)
    admission = (
        "bypass" if info.name == "belady-bypass" else "never" if info.name == "static-pin" else contract.admission
    )
    totals = _totals(table, contract, info.name, size, admission)
    totals["preloaded"] = int(counted["preloaded"])
    if contract.prefetch != "none":
        totals["prefetch"] |= {name: int(counted[name]) for name in ("predicted", "correct", "wanted")}
    totals["notes"] = notes
    table.attrs["totals"] = totals
    return table


def grid(
    trace: Trace, policies_: str | Sequence, slots: Sequence[int | str], *, threads: int | None = None,
    progress: bool = True, **settings,
) -> list[pd.DataFrame]:  # fmt: skip
    """`replay` for every policy and size, policies outermost, several at a time; interruptible.

    Policies written in Python hold the interpreter, so those gain nothing from threads.
    """
    jobs = [(policy, size) for policy in policies.parse(policies_) for size in slots]
    return in_threads(
        lambda job, stop: replay(trace, job[0], job[1], stop=stop, **settings), jobs, threads, progress, "replay"
    )


def in_threads(work: Callable, jobs: Sequence, threads: int | None, progress: bool, what: str) -> list:
    """[work(job, stop) for job in jobs] on threads, with a progress bar; Ctrl-C stops what runs and raises."""
    stop = kernels.load("replay").Stop()
    pool = ThreadPoolExecutor(max_workers=threads or os.cpu_count() or 1)
    try:
        futures = [pool.submit(work, job, stop) for job in jobs]
        return [f.result() for f in tqdm(futures, what, unit="replay", disable=not progress or len(jobs) < 8)]
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ---- the trace, flattened once per contract


@dataclass
class Source:
    """A trace as C++ wants it, and what counting needs to know of it."""

    trace: Trace
    stream: object
    blocks: int  # per layer
    steps: np.ndarray  # (events,) step numbers
    first_counted: int
    first_uses: np.ndarray  # int64 (layers, 2): counted first uses, by layer and phase
    notes: list[str]

    _lock = threading.Lock()

    @classmethod
    def of(cls, trace: Trace, contract: Contract) -> Source:
        """The source of this trace under this contract; kept, since every policy and size shares it."""
        serial = contract.lookup != "atomic"
        key = ("replay", contract.scope, serial and (contract.order, contract.seed), contract.reset, contract.block_size,
               contract.warmup_steps)  # fmt: skip
        kept = trace.__dict__.setdefault("_sources", {})
        with cls._lock:
            if key not in kept:
                kept[key] = cls._make(trace, contract)
        source = kept[key]
        if serial and contract.order == "rank" and not trace.header["ranked"]:
            note = "the trace does not keep router rank order: order='rank' serves experts as they are listed"
            return replace(source, notes=[*source.notes, note])
        return source

    @classmethod
    def _make(cls, trace: Trace, contract: Contract) -> Source:
        events = trace.events(dedupe=False)
        blocks = -(-trace.num_experts // contract.block_size)
        experts = events.experts if contract.block_size == 1 else events.experts // np.uint16(contract.block_size)
        stream = kernels.load("replay").Stream.make(
            len(trace.layers), blocks, events.offsets, experts, events.layer_index, events.phase, events.sequence,
            events.weights, scope=contract.scope, lookup=contract.lookup, order=contract.order, seed=contract.seed,
            reset=contract.reset == "per-sequence",
        )  # fmt: skip
        steps = np.unique(events.step)
        if contract.warmup_steps >= len(steps):
            raise SettingError(
                f"warmup_steps={contract.warmup_steps} leaves nothing to count: the trace has {len(steps)} steps"
            )
        first = int(np.argmax(events.step >= steps[contract.warmup_steps]))
        key = events.layer_index[events.event_of].astype(np.int64) * blocks + experts
        if contract.reset == "per-sequence":
            key += events.sequence[events.event_of].astype(np.int64) * (blocks * len(trace.layers))
        _, seen_first = np.unique(key, return_index=True)
        at = events.event_of[seen_first]
        at = at[at >= first]
        uses = np.zeros((len(trace.layers), 2), np.int64)
        np.add.at(uses, (events.layer_index[at], events.phase[at]), 1)
        return cls(trace, stream, blocks, steps, first, uses, [])

    def indexed(self, blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(model layer, block) pairs with the layer as its position in `trace.layers`. Raises `TraceError`."""
        places = {layer: i for i, layer in enumerate(self.trace.layers)}
        for layer, block in blocks:
            if layer not in places or not 0 <= block < self.blocks:
                raise TraceError(
                    f"block ({layer}, {block}) is not in the trace: layers {self.trace.layers}, blocks 0 to {self.blocks - 1}"
                )
        return [(places[layer], int(block)) for layer, block in blocks]


@dataclass
class Size:
    """A capacity in slots or bytes. `of_layer` (layers,) is how many slots each layer's pool has, or the pool in all."""

    slots: int
    bytes: int
    block_bytes: list[int]
    of_layer: np.ndarray
    notes: list[str]

    @classmethod
    def of(cls, trace: Trace, slots: int | str, contract: Contract) -> Size:
        layers, blocks = len(trace.layers), -(-trace.num_experts // contract.block_size)
        most = blocks * (layers if contract.scope == "global" else 1)
        if isinstance(slots, (int, np.integer)) and not isinstance(slots, bool):
            if not 1 <= slots:
                raise SettingError(f"slots must be at least 1, got {slots}")
            fits = min(int(slots), most)
            notes = [] if fits == slots else [f"{slots} slots are more than the {most} blocks there are"]
            return cls(int(fits), 0, [], np.full(layers, fits), notes)
        if isinstance(slots, str) and slots.strip().isdigit():
            return cls.of(trace, int(slots), contract)
        capacity = parse_size(slots, "slots")
        trace.require("expert_bytes", what=f"a capacity in bytes ({slots})")
        sizes = (trace.expert_bytes * contract.block_size).astype(np.int64)
        need = int(sizes.max()) * (1 if contract.scope == "global" else layers)
        if capacity < need:
            raise SettingError(
                f"slots={slots!r} is {capacity} bytes; one block{'' if contract.scope == 'global' else ' per layer'} takes {need}"
            )
        if contract.scope == "global":
            of_layer = np.full(layers, max(1, min(most, capacity // int(sizes.sum() // layers))))
        else:
            of_layer = np.minimum(capacity // layers // sizes, blocks)
        return cls(int(of_layer[0]), capacity, sizes.tolist(), of_layer.astype(np.int64), [])


def top_blocks(history: Trace, source: Source, size: Size, share: float) -> list[tuple[int, int]]:
    """The most used blocks of `history` that fill `share` of the slots, per layer or of one pool; ties by lowest id."""
    counts = history.popularity()
    if history.layers != source.trace.layers or history.num_experts != source.trace.num_experts:
        raise TraceError(f"fit: {len(history.layers)} layers x {history.num_experts} experts do not match the trace, "
                         f"{len(source.trace.layers)} x {source.trace.num_experts}")  # fmt: skip
    per_block = -(-source.trace.num_experts // source.blocks)
    if per_block > 1:
        counts = np.pad(counts, ((0, 0), (0, source.blocks * per_block - counts.shape[1])))
        counts = counts.reshape(len(counts), source.blocks, per_block).sum(2)
    pooled = source.stream.pools == 1 and len(counts) > 1
    if size.bytes and pooled:
        chosen, left = [], int(size.bytes * share)
        for key in np.argsort(-counts, axis=None, kind="stable"):
            layer, block = divmod(int(key), source.blocks)
            if size.block_bytes[layer] <= left:
                chosen.append((layer, block))
                left -= size.block_bytes[layer]
        return chosen
    if pooled:
        keys = np.argsort(-counts, axis=None, kind="stable")[: int(size.of_layer[0] * share)]
        return [divmod(int(key), source.blocks) for key in keys]
    chosen = []
    for layer, (row, slots) in enumerate(zip(counts, size.of_layer, strict=True)):
        chosen += [(layer, int(b)) for b in np.argsort(-row, kind="stable")[: int(slots * share)]]
    return chosen


# ---- counts into tables


def _table(source: Source, size: Size, contract: Contract, counted: dict) -> pd.DataFrame:
    phases = {"all": slice(None), "prefill": slice(0, 1), "decode": slice(1, 2)}[contract.phase]
    sums = {name: values[:, phases].sum(1) for name, values in counted.items() if isinstance(values, np.ndarray)}
    ahead = sums["prefetch_timely"] + sums["prefetch_late"]
    loads = sums["misses"]
    if contract.count == "logical":
        hits, misses = sums["logical_hits"], sums["logical_misses"]
    else:
        hits, misses = sums["hits"], sums["misses"]
    accesses = hits + misses + (0 if contract.count == "logical" else ahead)
    sizes = source.trace.expert_bytes
    columns = {
        "layer": source.trace.layers,
        "slots": size.of_layer,
        "events": sums["events"],
        "full_events": sums["full_events"],
        "accesses": accesses,
        "hits": hits,
        "misses": misses,
        "hit_rate": ratio(hits, accesses),
        "full_event_hit_rate": ratio(sums["full_events"], sums["events"]),
        "evictions": sums["evictions"],
        "drops": sums["drops"],
        "loads": loads,
        "bytes_loaded": None if sizes is None else loads * sizes * contract.block_size,
        "compulsory": source.first_uses[:, phases].sum(1),
    }
    if contract.prefetch != "none":
        columns |= {name: sums[name] for name in _PREFETCH}
    return pd.DataFrame(columns)


def ratio(part, whole):
    """part / whole, NaN where there is nothing to divide by."""
    whole = np.asarray(whole, float)
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)


def _totals(table: pd.DataFrame, contract: Contract, policy: str, size: Size, admission: str) -> dict:
    """One JSON-able object: the sums over layers, with every denominator named."""
    sums = {name: int(table[name].sum()) for name in table.columns[2:] if table[name].dtype.kind == "i"}
    known = table["bytes_loaded"].notna().all()
    none = {"hit_rate": None, "full_event_hit_rate": None}
    per_layer = [
        {key: None if value is None or value != value else value for key, value in row.items()}
        for row in table.astype(object).to_dict("records")
    ]
    totals = {
        "policy": policy,
        "slots": size.slots if not size.bytes or contract.scope == "global" else size.of_layer.tolist(),
        "capacity_bytes": size.bytes or None,
        "scope": contract.scope,
        "lookup": contract.lookup,
        "order": contract.order if contract.lookup != "atomic" else None,
        "admission": admission,
        "seed": contract.seed,
        "accesses": sums["accesses"],
        "hits": sums["hits"],
        "misses": sums["misses"],
        **none,
        "events": sums["events"],
        "evictions": sums["evictions"],
        "drops": sums["drops"],
        "loads": sums["loads"],
        "bytes_loaded": sums["bytes_loaded"] if known else None,
        "compulsory": sums["compulsory"],
        "denominators": {
            "hit_rate": f"hits / accesses, pooled over layers; {_COUNT[contract.count]}",
            "full_event_hit_rate": "events without a miss / events; an event is one layer of one step",
            "phase": contract.phase,
            "warmup_steps_not_counted": contract.warmup_steps,
            "reset": contract.reset,
            "prefetched_blocks": "accesses, but not hits" if contract.prefetch != "none" else "none",
        },
        "per_layer": per_layer,
    }
    if sums["accesses"]:
        totals["hit_rate"] = sums["hits"] / sums["accesses"]
    if sums["events"]:
        totals["full_event_hit_rate"] = sums["full_events"] / sums["events"]
    if contract.prefetch != "none":
        totals["prefetch"] = {"predictor": contract.prefetch, **{name: sums[name] for name in _PREFETCH}}
    return totals


_COUNT = {
    "union": "an access is one distinct block of an event",
    "logical": "an access is one block asked for by one token",
}
