"""What replay needs besides a policy: the contract, the trace as C++ wants it, the size in slots or bytes, and threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
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


@dataclass(eq=False)
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


@dataclass(eq=False)
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


def usable(trace: Trace, names) -> tuple[list, list[str]]:
    """The policies asked for, and notes. Of "all" those that lack something are left out; asked by name they raise."""
    chosen, notes = policies.parse(names), []
    lacks = trace.lacks()
    for name in list(chosen):
        needs = () if callable(name) else policies.policy(name).needs
        if "gates" in needs and "gates" in lacks:
            if names != "all":
                trace.require("gates", what=f"policy {name}")
            chosen.remove(name)
            notes.append(f"{name} left out: {lacks['gates']}")
    return chosen, notes


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
