"""The memory pool and the arenas, seen from Python. The engine computes in memory from here and from nowhere else.

One pool per open model: expert slots come from its coarse view, KV pages, rotary tables and arenas from its fine view.
A request has four arenas: `prefill` and `decode` hold a step's activations, `router` and `expert_compute` what one
layer's routing and experts need. A layer's temporaries go when the layer is done, so the peak does not depend on how
many layers there are; everything goes at the end of the step.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from .. import kernels, machine
from ..errors import KernelError, MemoryPlanError, PoolExhausted, SettingError
from ..units import format_size

TAGS = {"slots": 1, "kv": 2, "arena": 3, "rotary": 4, "other": 5}  # 0 is free
ARENAS = ("prefill", "decode", "router", "expert_compute")
ALIGN = 64  # kArenaAlign in cpp/arena_core.hpp
BLOCK = 4096  # kBlockBytes in cpp/memory_pool_core.hpp
NEARLY_FULL = 0.9


class MemoryPool:
    """One region of memory, handed out in runs of 4 KiB blocks; offsets and sizes in bytes.

    `unit` is what the coarse view counts in. There is no realloc: a run that was handed out neither moves nor grows, so
    release it and allocate another. With `power_of_two` other sizes are refused. Above `warn_above` (a share of the
    pool; None: never) the pool warns once. Nothing is touched before use unless `prefault`.

    Raises `SettingError` for a size that breaks the power-of-two rule, `MemoryPlanError` for one that the machine does
    not have; both before anything is allocated. Not thread-safe, but `counts`, `snapshot` and `touched` may be called
    from any thread.
    """

    def __init__(
        self,
        size: int,
        unit: int = BLOCK,
        *,
        huge_pages: bool = False,
        prefault: bool = False,
        power_of_two: bool = False,
        warn_above: float | None = NEARLY_FULL,
    ):
        if power_of_two and (size < BLOCK or size & (size - 1)):
            below = 1 << max(size.bit_length() - 1, 12)
            raise SettingError(
                f"pool_size must be a power of two of at least {BLOCK} bytes, got {size}; the nearest are {below} "
                f"({format_size(below, binary=True)}) and {2 * below} ({format_size(2 * below, binary=True)})"
            )
        available = machine.memory()[1]
        if size > available:
            raise MemoryPlanError(
                f"a memory pool of {size} bytes ({format_size(size)}) does not fit: {available} bytes "
                f"({format_size(available)}) are available; nothing was allocated"
            )
        try:
            self._core = kernels.load("memory_pool").MemoryPool(size, unit, huge_pages, prefault)
        except RuntimeError as error:
            raise MemoryPlanError(f"memory pool: {error}; choose fewer slots or a shorter max_seq_len") from None
        self.memory: np.ndarray = self._core.memory()  # uint8 (bytes,)
        self.warn_above = warn_above

    def allocate(self, size: int, tag: str, coarse: bool = False) -> int:
        """Offset of a run of at least `size` bytes. `coarse`: whole units, counted from the region's end.

        Raises `PoolExhausted` with what is needed, what is free and the largest free run.
        """
        offset = self._core.allocate(size, coarse, TAGS[tag])
        if offset < 0:
            c = self._core.counts()
            raise PoolExhausted(
                f"memory pool: {size} bytes in one run are needed for {tag}, {c['free_bytes']} of {c['bytes']} are free and "
                f"the largest run has {c['largest_run_bytes']}; open the model with fewer slots, a shorter max_seq_len or a "
                "larger pool_size",
                size,
                c["free_bytes"],
                c["largest_run_bytes"],
            )
        if self.warn_above is not None and self.used_share > self.warn_above:
            self.warn_above = None  # once
            warnings.warn(f"memory pool: {self}; a larger pool_size would leave room", stacklevel=2)
        return offset

    def release(self, offset: int) -> None:
        """Give a run back. Raises ValueError unless a live run begins there."""
        self._core.release(offset)

    def array(self, offset: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """A view of the region; it keeps the region alive."""
        return np.ndarray(shape, dtype, self.memory, offset)

    @property
    def size(self) -> int:
        return self._core.bytes

    @property
    def unit(self) -> int:
        return self._core.unit

    @property
    def huge_pages(self) -> bool:
        """Whether the system accepted the request for huge pages."""
        return self._core.huge_pages

    @property
    def used_share(self) -> float:
        c = self._core.counts()
        return c["used_bytes"] / c["bytes"]

    def counts(self) -> dict:
        """bytes, used_bytes, peak_bytes, free_bytes, wasted_bytes, free_runs, largest_run_bytes, allocations, releases,
        refusals; `used_by_tag` and `peak_by_tag`: bytes by what they are for."""
        c = self._core.counts()
        for name in ("used_by_tag", "peak_by_tag"):
            c[name] = {tag: int(c[name][code]) for tag, code in TAGS.items()}
        return c

    def fragmentation(self) -> dict[str, float]:
        """external: share of the free bytes outside the largest free run; internal: share of the used bytes that
        rounding up to blocks and units took. 0 is none."""
        c = self._core.counts()
        return {
            "external": 1 - c["largest_run_bytes"] / c["free_bytes"] if c["free_bytes"] else 0.0,
            "internal": c["wasted_bytes"] / c["used_bytes"] if c["used_bytes"] else 0.0,
        }

    def snapshot(self) -> np.ndarray:
        """uint8 (blocks,): what each block is for, as `TAGS`; 0 is free."""
        return self._core.snapshot()

    def touched(self) -> np.ndarray | None:
        """uint8 (blocks,): 1 where the system has given memory; None where it does not tell."""
        return self._core.touched()

    def __str__(self) -> str:
        c = self._core.counts()
        return f"{format_size(c['used_bytes'])} of {format_size(c['bytes'])} used ({c['used_bytes'] / c['bytes']:.0%})"


@dataclass(frozen=True)
class ArenaCounts:
    """One arena in bytes. `requested` is what was asked for at the high-water mark, without alignment."""

    used: int
    high_water: int
    requested: int
    capacity: int
    growths: int

    @property
    def ratio(self) -> float | None:
        """Capacity over the bytes that were needed at once; None before anything was."""
        return self.capacity / self.requested if self.requested else None


class Extra:
    """Chunks from outside the pool, for steps that need more than was planned."""

    def __init__(self):
        self.allowed, self.now, self.peak = False, 0, 0

    def chunk(self, size: int) -> np.ndarray:
        """uint8 on a multiple of 64, freed when the arena lets go of it."""
        raw = np.empty(size + ALIGN, np.uint8)
        start = -raw.ctypes.data % ALIGN
        self.now += size
        self.peak = max(self.peak, self.now)
        return raw[start : start + size]


class Arenas:
    """The four arenas of one request, out of the pool. Each is a kernel `Arena` (cpp/arena.cpp): take, mark, rewind,
    reset.

    `sizes` are bytes by name. With `growing` they are first sizes: a full arena takes another chunk from the pool, as
    large as all it has, and merges its chunks at the end of the step, when nothing points into them. Otherwise a full
    arena raises `MemoryPlanError`, unless `beyond_plan` allows memory from outside the pool until the end of the step.
    `checks` poisons what is not handed out (cpp/arena_core.hpp).
    """

    def __init__(self, pool: MemoryPool, sizes: dict[str, int], growing: bool = False, checks: bool = False):
        self._pool, self._growing = pool, growing
        self._runs: dict[str, list[tuple[int, int]]] = {name: [] for name in ARENAS}  # (offset, bytes) of chunks
        self._extra = Extra()
        make = kernels.load("arena").Arena
        for name in ARENAS:
            setattr(self, name, make(self._grower(name), checks))
            self._add_chunk(name, sizes[name])

    def beyond_plan(self, allowed: bool) -> None:
        """Whether a step may need more than was planned: a router in the place of the model's may choose more
        experts."""
        self._extra.allowed = allowed

    def of(self, phase: str):
        """The arena that holds the activations of a step of this phase."""
        return self.prefill if phase == "prefill" else self.decode

    def reset(self) -> None:
        """The step is over. Raises `KernelError` when `checks` found a write where none was allowed."""
        for name in ARENAS:
            arena = getattr(self, name)
            try:
                arena.reset()
            except RuntimeError as error:
                raise KernelError(f"{name} {error}; a kernel writes outside the arrays it was given") from None
            if self._extra.now or len(self._runs[name]) > 1:
                size = arena.counts()["high_water_bytes"] if self._growing else self._runs[name][0][1]
                arena.drop_chunks()
                self._release(name)
                self._add_chunk(name, size)
        self._extra.now = 0

    def close(self) -> None:
        """Give all memory back to the pool."""
        for name in ARENAS:
            getattr(self, name).reset()
            getattr(self, name).drop_chunks()
            self._release(name)

    def counts(self) -> dict[str, ArenaCounts]:
        found = {name: getattr(self, name).counts() for name in ARENAS}
        return {
            name: ArenaCounts(
                *(c[f"{part}_bytes"] for part in ("used", "high_water", "requested", "capacity")), c["growths"]
            )
            for name, c in found.items()
        }

    def record(self, samples: int) -> None:
        """Keep the bytes in use after each of so many takes and rewinds of every arena from now on; 0 stops."""
        for name in ARENAS:
            getattr(self, name).record(samples)

    def samples(self) -> dict[str, np.ndarray]:
        """int64 (n, 2) by arena: nanoseconds of the steady clock, bytes in use."""
        return {name: getattr(self, name).samples() for name in ARENAS}

    def _add_chunk(self, name: str, size: int) -> None:
        getattr(self, name).add_chunk(_chunk(self._pool, self._runs[name], size))

    def _release(self, name: str) -> None:
        while self._runs[name]:
            self._pool.release(self._runs[name].pop()[0])

    @property
    def extra_bytes(self) -> tuple[int, int]:
        """Bytes from outside the pool: now, and the most there ever were at once."""
        return self._extra.now, self._extra.peak

    def _grower(self, name: str):
        # Not self: an arena must not hold what holds it.
        pool, runs, growing, extra = self._pool, self._runs[name], self._growing, self._extra

        def grow(needed: int) -> np.ndarray:
            has = sum(size for _, size in runs)
            if growing:
                try:
                    return _chunk(pool, runs, max(needed, has))
                except PoolExhausted:
                    if not extra.allowed:
                        raise
            elif not extra.allowed:
                raise MemoryPlanError(f"arena {name}: {needed} bytes more are needed than the {has} that were planned")
            return extra.chunk(max(needed, has))

        return grow


def _chunk(pool: MemoryPool, runs: list[tuple[int, int]], size: int) -> np.ndarray:
    """uint8 (bytes,) in whole blocks out of the pool, noted in `runs`."""
    size = -(-max(size, 1) // BLOCK) * BLOCK
    offset = pool.allocate(size, "arena")
    runs.append((offset, size))
    return pool.memory[offset : offset + size]
