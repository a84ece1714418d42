"""The live expert cache: buffers that hold expert blocks, loader threads that fill them, and the C++ core that decides.

The core (cpp/expert_cache_core.hpp) says which blocks are resident and who leaves; it knows nothing of files. This class
gives every slot a buffer, turns the core's loads into reads, and hands out a `Lease`: the experts of one step in the order
in which they can be computed. A step that wants more blocks than there are slots streams the rest through transient
buffers, which are counted in memory like slots.
"""

from __future__ import annotations

import mmap

import numpy as np

from .. import kernels
from ..checkpoint.container import Container
from ..errors import StorageError

PHASES = {"prefill": 0, "decode": 1}


class Lease:
    """The experts of one step. Compute `resident()`, then `wait()` for the next group while `pending`.

    `experts` (n,) are the distinct experts in computing order; groups are consecutive stretches of it.
    """

    def __init__(self, cache: ExpertCache, layer: int, ids: np.ndarray, result):
        self.cache, self.layer = cache, layer
        self.blocks, self.slots, self.hit = result.blocks.tolist(), result.slots.tolist(), result.hit.tolist()

        # Groups of blocks in computing order: residents; loads into free slots, a few at a time so that computing
        # starts early; then loads that need a buffer this step has used before.
        loads = list(zip(result.loads.tolist(), result.late.tolist(), strict=True))
        early = [index for (index, slot), late in loads if slot >= 0 and not late]
        rest = [index for (index, slot), late in loads if slot < 0 or late]
        lanes, wave = cache.lanes, max(1, cache.transient_buffers)
        self._early = [early[i : i + lanes] for i in range(0, len(early), lanes)]
        self._late = [rest[i : i + wave] for i in range(0, len(rest), wave)]
        tickets = cache.load(layer, [self.blocks[i] for i in early], [self.slots[i] for i in early]) if early else []
        self._tickets = [tickets[i : i + lanes] for i in range(0, len(early), lanes)]

        members = _members(self.blocks, ids, cache.block_size)
        resident = [i for i, hit in enumerate(self.hit) if hit]
        experts, buffers, self._ends = [], [], [0]  # _ends[n]: experts in the first n blocks of computing order
        for index in (*resident, *early, *rest):
            experts += members[index]
            buffers += [self.slots[index]] * len(members[index])
            self._ends.append(len(experts))
        self.experts, self._buffers = np.array(experts, np.int32), np.array(buffers, np.int32)
        self._residents, self._done = len(resident), 0

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
    if block_size == 1:
        return [[block] for block in blocks]
    by_block: dict[int, list[int]] = {block: [] for block in blocks}
    for expert in np.unique(ids).tolist():
        by_block[expert // block_size].append(expert)
    return list(by_block.values())


class ExpertCache:
    """Slots in memory, kept full by the policy. See the module's first paragraph.

    settings: expert_cache_slots, scope, policy, storage, loader_threads, log_level. `memory` (buffers, slot_bytes) uint8
    holds a block in each row; rows are slots, then transient buffers.
    """

    def __init__(self, container: Container, settings: dict):
        config = container.config
        self.container, self.layers, self.blocks = container, config.moe_layers, container.blocks
        self.block_size = container.block_size
        self.lanes, self.scope, self.policy = settings["loader_threads"], settings["scope"], settings["policy"]
        self.slots = settings["expert_cache_slots"]
        pools = 1 if self.scope == "global" else len(self.layers)
        self.first_transient = self.slots * pools
        short = self.slots < self.blocks  # then one step may want more blocks than there are slots
        self.transient_buffers = min(self.blocks, max(4, 2 * self.lanes)) if short else 0

        buffers = self.first_transient + self.transient_buffers
        self.slot_bytes = -(-container.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._region = mmap.mmap(-1, buffers * self.slot_bytes)  # page-aligned; the system fills pages when touched
        self.memory = np.frombuffer(self._region, np.uint8).reshape(buffers, self.slot_bytes)
        headers = [container.block_layout(layer, b) for layer in self.layers for b in range(self.blocks)]
        self._bytes = [h.payload_bytes for h in headers]
        self._loader = kernels.load("storage").BlockLoader(
            [str(h.path) for h in headers], [h.payload_offset for h in headers], self._bytes, settings["storage"],
            self.lanes, self.memory,
        )  # fmt: skip
        self._core = kernels.load("expert_cache").ExpertCache(
            len(self.layers), self.blocks, self.slots, self.scope, self.policy
        )
        self._events: list[tuple] | None = [] if settings["log_level"] == "debug" else None
        self._steps = 0
        self.bytes_loaded = np.zeros((len(self.layers), 2), np.int64)  # (layer, phase)

    def acquire(self, layer: int, ids: np.ndarray, weights: np.ndarray, phase: str) -> Lease:
        """Ask for the experts of one step: layer (number among the MoE layers), ids (tokens, k) uint16, weights float32.

        Decides hits and victims, starts the loads that have a free slot, and returns the `Lease`.
        """
        blocks = ids.reshape(-1) if self.block_size == 1 else ids.reshape(-1) // np.uint16(self.block_size)
        result = self._core.step(layer, blocks, PHASES[phase], weights.reshape(-1))
        lease = Lease(self, layer, ids, result)
        first = layer * self.blocks
        self.bytes_loaded[layer, PHASES[phase]] += sum(
            self._bytes[first + block] for block, hit in zip(lease.blocks, lease.hit, strict=True) if not hit
        )
        if self._events is not None:
            self._log(lease, ids, result.victims.tolist())
        self._steps += 1
        return lease

    def load(self, layer: int, blocks: list[int], buffers: list[int]) -> list[int]:
        """Queue reads of a layer's blocks into buffers; returns their tickets."""
        return self._loader.submit([layer * self.blocks + block for block in blocks], buffers)

    def wait(self, tickets: list[int]) -> None:
        """Block until these reads are done. After a failed read the cache is emptied, since a slot holds rubbish."""
        faults = self._loader.wait(tickets)
        if faults:
            self.reset()
            raise StorageError(f"{faults[0]}; run `colibri validate {self.container.dir}`")

    def abandon(self) -> None:
        """After a step that was broken off: let the reads in flight land, then empty the cache, since a slot whose read
        was never asked for holds rubbish."""
        self._loader.drain()
        self.reset()

    def reset(self) -> None:
        """Forget every resident block and the policy's history; counters stay."""
        self._core.reset()

    def counters(self) -> dict[str, np.ndarray]:
        """hits, misses, evictions, … as the core counts them: int64 (layers, phases)."""
        return self._core.counters()

    def load_service_s(self) -> float:
        """Seconds that loader threads have spent reading, summed over threads."""
        return self._loader.counters()["service_ns"] / 1e9

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
