"""The live expert cache: buffers that hold expert blocks, loader threads that fill them, and the C++ core that decides.

The core (cpp/expert_cache_core.hpp) says which blocks are resident and who leaves; it knows nothing of files. This class
gives every slot a buffer, turns the core's loads into reads, and hands out a `Lease`: the experts of one step in the order
in which they can be computed. A step that wants more blocks than there are slots streams the rest through transient
buffers, which are counted in memory like slots.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import NamedTuple

import numpy as np

from .. import kernels
from ..checkpoint.container import Container
from ..config import read_pairs
from ..engine.memory import MemoryPool
from ..engine.sizes import blocks as whole_blocks
from ..engine.sizes import transient_buffers
from ..errors import SettingError, StorageError
from ..units import parse_rate, parse_size
from . import policies
from .prefetch import Prefetcher
from .storage import ModelledDevice, VirtualClock

PHASES = {"prefill": 0, "decode": 1}
FETCHING = 3  # StepResult.hit: fetched ahead and still under way


class Lease:
    """The experts of one step. Compute `resident()`, then `wait()` for the next group while `pending`.

    `experts` (n,) are the distinct experts in computing order; groups are consecutive stretches of it.
    """

    def __init__(self, cache: ExpertCache, layer: int, ids: np.ndarray, result):
        self.cache, self.layer = cache, layer
        self.blocks, self.slots, self.hit = result.blocks.tolist(), result.slots.tolist(), result.hit.tolist()

        # Groups of blocks in computing order: residents; blocks fetched ahead that are still under way; loads into free
        # slots, a few at a time so that computing starts early; then loads that need a buffer this step has used before.
        resident = [i for i, hit in enumerate(self.hit) if hit and hit != FETCHING]
        early, tickets, rest = self._start_loads(result) if len(resident) < len(self.hit) else ([], [], [])
        lanes, wave = cache.lanes, max(1, cache.transient_buffers)
        self._early = [early[i : i + lanes] for i in range(0, len(early), lanes)]
        self._tickets = [tickets[i : i + lanes] for i in range(0, len(early), lanes)]
        self._late = [rest[i : i + wave] for i in range(0, len(rest), wave)]
        self._residents, self._done = len(resident), 0
        self._lay_out([*resident, *early, *rest], ids)

    def _start_loads(self, result) -> tuple[list[int], list[int], list[int]]:
        """Places in `blocks` that are coming, their tickets, and the places that must wait for a buffer."""
        cache, loads = self.cache, list(zip(result.loads.tolist(), result.late.tolist(), strict=True))
        early = [index for (index, slot), late in loads if slot >= 0 and not late]
        rest = [index for (index, slot), late in loads if slot < 0 or late]
        tickets = (
            cache.load(self.layer, [self.blocks[i] for i in early], [self.slots[i] for i in early]) if early else []
        )
        coming = [i for i, hit in enumerate(self.hit) if hit == FETCHING]
        return coming + early, [cache.ahead.pop(self.slots[i]) for i in coming] + tickets, rest

    def _lay_out(self, order: list[int], ids: np.ndarray) -> None:
        """Experts and their buffers in computing order; _ends[n]: experts in the first n blocks of it."""
        if self.cache.block_size == 1:
            experts, buffers = [self.blocks[i] for i in order], [self.slots[i] for i in order]
            self._ends = range(len(order) + 1)
        else:
            members = _members(self.blocks, ids, self.cache.block_size)
            experts, buffers, self._ends = [], [], [0]
            for i in order:
                experts += members[i]
                buffers += [self.slots[i]] * len(members[i])
                self._ends.append(len(experts))
        self.experts, self._buffers = np.array(experts, np.int32), np.array(buffers, np.int32)

    def _take(self, blocks: int) -> tuple[np.ndarray, int, int]:
        first, last = int(self._ends[self._done]), int(self._ends[self._done + blocks])
        self._done += blocks
        return self._buffers[first:last], first, last

    def resident(self) -> tuple[np.ndarray, int, int]:
        """(buffers, first, last) of the experts that were in memory already."""
        return self._take(self._residents)

    @property
    def pending(self) -> bool:
        return bool(self._early or self._late)

    def wait(self) -> tuple[np.ndarray, int, int]:
        """Block until the next group is in memory; (buffers, first, last). Raises `StorageError` naming the file."""
        if self._early:
            group, tickets = self._early.pop(0), self._tickets.pop(0)
        else:
            group, buffers, transient = self._late.pop(0), [], self.cache.first_transient
            for at, index in enumerate(group, self._done):
                buffer = self.slots[index]
                if buffer < 0:
                    buffer, transient = transient, transient + 1
                self._buffers[self._ends[at] : self._ends[at + 1]] = buffer
                buffers.append(buffer)
            tickets = self.cache.load(self.layer, [self.blocks[i] for i in group], buffers)
        self.cache.wait(tickets)
        return self._take(len(group))


def _members(blocks: list[int], ids: np.ndarray, block_size: int) -> list[list[int]]:
    """The experts of `ids` that each block holds, ascending."""
    by_block: dict[int, list[int]] = {block: [] for block in blocks}
    for expert in np.unique(ids).tolist():
        by_block[expert // block_size].append(expert)
    return list(by_block.values())


class Carried(NamedTuple):
    """The state of a cache without its memory: the core with residency and policy, predictor, events and counters."""

    core: object
    prefetcher: Prefetcher | None
    events: list[tuple] | None
    bytes_loaded: np.ndarray
    steps: int


class ExpertCache:
    """Slots in memory, kept full by the policy. See the module's first paragraph.

    `memory` (buffers, slot_bytes) uint8 holds a block in each row; rows are slots, then transient buffers, all from the
    pool's coarse view, whose unit must be the slot. `clock` gives nanoseconds; with modelled storage it runs as if the
    modelled device had been waited for. `stage(name)` is the context in which to do what a stage is charged for.
    """

    stage = contextlib.nullcontext

    def __init__(self, container: Container, settings: dict, pool: MemoryPool):
        config = container.config
        self.container, self.layers, self.blocks = container, config.moe_layers, container.blocks
        self.block_size, self.settings = container.block_size, settings
        self.lanes, self.slots = settings["loader_threads"], settings["expert_cache_slots"]
        pools = 1 if settings["scope"] == "global" else len(self.layers)
        self.first_transient = self.slots * pools
        self.transient_buffers = transient_buffers(self.first_transient, len(self.layers), self.blocks, settings)

        buffers = self.first_transient + self.transient_buffers
        self.slot_bytes = whole_blocks(container.slot_bytes)
        offset = pool.allocate(buffers * self.slot_bytes, "slots", coarse=True)
        self.memory = pool.array(offset, (buffers, self.slot_bytes), np.uint8)
        self._open_storage()
        self._core = kernels.load("expert_cache").ExpertCache(
            len(self.layers), self.blocks, self.slots, settings["scope"], settings["policy"], lookup=settings["lookup"],
            order=settings["order"], admission=settings["admission"], seed=settings["cache_seed"],
            future=_future(settings, self.layers, self.block_size),
        )  # fmt: skip
        budget = settings["prefetch_budget"] or config.top_k
        ahead = settings["prefetch"] != "none"
        if ahead:
            self._core.prefetch(0, np.empty(0, np.uint16))  # from the first step on, keep what prefetching must know
        self.prefetcher = Prefetcher(settings["prefetch"], len(self.layers), self.blocks, budget) if ahead else None
        self.ahead: dict[int, int] = {}  # buffer → ticket of a block fetched ahead that may still be under way
        self._due: dict[int, int] = {}  # ticket → when a modelled device has it, in nanoseconds of `clock`
        self._events: list[tuple] | None = [] if settings["log_level"] == "debug" else None
        self._steps = 0
        self.bytes_loaded = np.zeros((len(self.layers), 2), np.int64)  # (layer, phase)
        self._hold_blocks()

    def _open_storage(self) -> None:
        s, headers = (
            self.settings,
            [self.container.block_layout(layer, b) for layer in self.layers for b in range(self.blocks)],
        )
        self._bytes = [h.payload_bytes for h in headers]
        largest = max(h.payload_offset + h.payload_bytes for h in headers)
        self.window_bytes = self.lanes * largest if s["storage"] == "mmap" else 0  # mapped by loader threads at once
        mode = "pread" if s["storage"] == "modelled" else s["storage"]
        self._loader = kernels.load("storage").BlockLoader(
            [str(h.path) for h in headers],
            [h.payload_offset for h in headers],
            self._bytes,
            mode,
            self.lanes,
            self.memory,
        )
        if self._loader.refusal:
            warnings.warn(
                f"storage direct is not possible here ({self._loader.refusal}): reading with pread", stacklevel=4
            )
        self.storage = s["storage"] if s["storage"] == "modelled" else self._loader.mode
        self.clock = VirtualClock()
        self.device = None
        if s["storage"] == "modelled":
            self.device = ModelledDevice(
                parse_rate(s["disk_bandwidth"]),
                s["disk_latency_us"] / 1e6,
                s["disk_queue_depth"],
                parse_size(s["disk_page_cache"]),
            )

    def acquire(self, layer: int, ids: np.ndarray, weights: np.ndarray, phase: str) -> Lease:
        """Ask for the experts of one step: layer (number among the MoE layers), ids (tokens, k) uint16, weights float32.

        Decides hits and victims, starts the loads that have a free slot, and returns the `Lease`.
        """
        if self.ahead:
            self._note_arrivals()
        blocks = ids.reshape(-1) if self.block_size == 1 else ids.reshape(-1) // np.uint16(self.block_size)
        result = self._core.step(layer, blocks, PHASES[phase], weights.reshape(-1))
        lease = Lease(self, layer, ids, result)
        lease.phase = phase
        self._count(
            layer, PHASES[phase], [block for block, hit in zip(lease.blocks, lease.hit, strict=True) if not hit]
        )
        if self._events is not None:
            self._log(lease, ids, result.victims.tolist())
        self._steps += 1
        if self.prefetcher:
            self.prefetch(*self.prefetcher.after(layer, lease.blocks), phase)
        return lease

    def prefetch(self, layer: int, blocks: list[int], phase: str) -> None:
        """Start reading blocks that `layer` may want, where that displaces nothing warmer."""
        if not blocks:
            return
        result = self._core.prefetch(layer, np.array(blocks, np.uint16))
        accepted, slots = result.blocks.tolist(), result.slots.tolist()
        self.ahead.update(zip(slots, self.load(layer, accepted, slots, urgent=False), strict=True))
        self._count(layer, PHASES[phase], accepted)

    def load(self, layer: int, blocks: list[int], buffers: list[int], urgent: bool = True) -> list[int]:
        """Queue reads of a layer's blocks into buffers; returns their tickets. Urgent reads overtake those fetched ahead."""
        overwritten = [self.ahead.pop(buffer) for buffer in buffers if buffer in self.ahead]
        if overwritten:
            self._loader.wait(overwritten)  # two reads into one buffer must not race
        files = [layer * self.blocks + block for block in blocks]
        # Handing a read over wakes a thread, which may take this one's core at once: that is waiting too.
        with self.stage("expert_load_wait") if urgent else contextlib.nullcontext():
            tickets = self._loader.submit(files, buffers, urgent)
        if self.device:
            now_s = self.clock() / 1e9
            for file, ticket in zip(files, tickets, strict=True):
                self._due[ticket] = int(self.device.read(file, self._bytes[file], now_s) * 1e9)
        return tickets

    def wait(self, tickets: list[int]) -> None:
        """Block until these reads are done. After a failed read the cache is emptied, since a slot holds rubbish."""
        begun = self.clock()
        faults = self._loader.wait(tickets)
        if self.device:
            self.clock.jump_to(max(begun, *(self._due.pop(ticket) for ticket in tickets)))
        if faults:
            self.reset()
            raise StorageError(f"{faults[0]}; run `colibri validate {self.container.dir}`")

    def _note_arrivals(self) -> None:
        now = self.clock()
        for buffer, ticket in list(self.ahead.items()):
            if self._loader.done(ticket) and self._due.get(ticket, now) <= now:
                del self.ahead[buffer]
                self._due.pop(ticket, None)
                self._core.loaded(buffer)

    def _count(self, layer: int, phase: int, blocks: list[int]) -> None:
        first = layer * self.blocks
        self.bytes_loaded[layer, phase] += sum(self._bytes[first + block] for block in blocks)

    def _hold_blocks(self) -> None:
        """Make `cache_blocks` resident before the first step."""
        start, given = self.settings["cache_start"], self.settings["cache_blocks"]
        needs = "pins" in policies.policy(self.settings["policy"]).needs
        if (start != "empty" or needs) != bool(given):
            raise SettingError(
                f"cache_start {start!r} with policy {self.settings['policy']!r} and {len(given or [])} cache_blocks do not go "
                "together: give cache_blocks with pinned, preloaded or a pinning policy, and only then"
            )
        if not given:
            return
        pairs = [(self.layers.index(layer), block) for layer, block in self._known(read_pairs(given, "cache_blocks"))]
        result = self._core.preload(pairs) if start == "preloaded" else self._core.pin(pairs)
        for index, slot in result.loads.tolist():
            layer, block = pairs[index]
            self.device, device = None, self.device  # not part of any run
            self.wait(self.load(layer, [block], [slot]))
            self.device = device

    def _known(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        for layer, block in pairs:
            if layer not in self.layers or not 0 <= block < self.blocks:
                raise SettingError(
                    f"cache_blocks: ({layer}, {block}) does not exist; MoE layers are {self.layers[0]} to {self.layers[-1]}, "
                    f"blocks 0 to {self.blocks - 1}"
                )
        return pairs

    def hand_over(self) -> Carried:
        """What another cache needs to go on where this one stops; no buffers, so that their memory can be freed first."""
        self._loader.drain()
        return Carried(self._core, self.prefetcher, self._events, self.bytes_loaded, self._steps)

    def take_over(self, carried: Carried) -> None:
        """Go on where a cache of another size stopped. The policy chooses who leaves; who stays is read again."""
        carried.core.resize(self.slots)
        self._core, self.prefetcher, self._events = carried.core, carried.prefetcher, carried.events
        self.bytes_loaded, self._steps = carried.bytes_loaded, carried.steps
        for slot in range(self._core.slot_count):
            occupant = self._core.occupant(slot)
            if occupant is not None:
                layer, block = occupant
                self._core.loaded(slot)
                self._loader.wait(self._loader.submit([layer * self.blocks + block], [slot], True))

    def start_sequence(self) -> None:
        """A new text begins: with cache_reset per-sequence the cache starts cold."""
        if self.settings["cache_reset"] == "per-sequence":
            self.reset()

    def abandon(self) -> None:
        """After a step that was broken off: let the reads in flight land, then empty the cache, since a slot whose read
        was never asked for holds rubbish."""
        self._loader.drain()
        self.reset()

    def reset(self) -> None:
        """Forget every resident block but the pinned ones, and the policy's history; counters stay."""
        self._loader.drain()
        self._core.reset()
        self.ahead.clear()
        self._due.clear()

    def block_size_bytes(self, layer: int, block: int) -> int:
        """Bytes that reading this block takes."""
        return self._bytes[layer * self.blocks + block]

    def block_bytes(self) -> dict[int, int]:
        """Model layer → bytes of its largest block."""
        rows = np.array(self._bytes).reshape(len(self.layers), self.blocks)
        return {layer: int(row.max()) for layer, row in zip(self.layers, rows, strict=True)}

    def counters(self) -> dict[str, np.ndarray]:
        """hits, misses, evictions, … as the core counts them: int64 (layers, phases)."""
        return self._core.counters()

    def load_service_s(self) -> float:
        """Seconds that loader threads (or the modelled device) have spent reading, summed over reads."""
        if self.device:
            return self.device.service_s
        return self._loader.counters()["service_ns"] / 1e9

    def device_bytes(self) -> int | None:
        """Bytes that came from the device and not from the page cache; None where the system does not tell."""
        return self.device.device_bytes if self.device else self._loader.counters()["device_bytes"]

    def residency(self) -> np.ndarray:
        """uint8 (moe_layers, experts): 0 absent, 1 resident, 2 resident and used by the layer's last step."""
        blocks = self._core.residency().reshape(len(self.layers), self.blocks)
        return np.repeat(blocks, self.block_size, axis=1)[:, : self.container.config.num_experts]

    @property
    def events(self) -> list[tuple]:
        """(step, layer, expert, block, hit, slot, victim) per access, kept with log_level debug; else empty."""
        return self._events or []

    def _log(self, lease: Lease, ids: np.ndarray, victims: list) -> None:
        left = iter(victims)
        members = _members(lease.blocks, ids, self.block_size)
        for block, hit, slot, experts in zip(lease.blocks, lease.hit, lease.slots, members, strict=True):
            victim = None if hit else next(left, None)
            gone = None if victim is None else (self.layers[victim[0]], victim[1])
            for expert in experts:
                self._events.append((self._steps, self.layers[lease.layer], expert, block, bool(hit), slot, gone))


def _future(settings: dict, layers: tuple[int, ...], block_size: int):
    """The coming run as the core wants it, (layer, offsets, blocks), for the oracles; None for other policies."""
    oracle = policies.policy(settings["policy"]).oracle
    if oracle != (settings["future"] is not None):
        raise SettingError(
            f"policy {settings['policy']!r} {'needs' if oracle else 'takes no'} `future`, the trace of the run to come: record "
            "one with lab.record(), then open the model with policy='belady', future=trace"
        )
    if not oracle:
        return None
    from ..trace import load_trace

    trace = settings["future"]
    events = (load_trace(trace) if isinstance(trace, (str, bytes)) or hasattr(trace, "__fspath__") else trace).events()
    place = {layer: i for i, layer in enumerate(layers)}
    index = np.array([place[layer] for layer in events.layer.tolist()], np.int32)
    return index, events.offsets, (events.experts // np.uint16(block_size)).astype(np.uint16)
