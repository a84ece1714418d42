"""Memory at work, as tables: how arenas move during a generation, what a pool does with holes, what a mapped file takes."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import ColibriError, PoolExhausted, SettingError
from ..tune import page_cache
from .memory import ARENAS, BLOCK, MemoryPool

SAMPLES = 1 << 16  # takes and rewinds kept of one arena
STATUS = {"anonymous": "RssAnon", "mapped_files": "RssFile"}


def arena_moves(lab, prompt: str, **generate) -> pd.DataFrame:
    """Every take and rewind of the four arenas while `lab` continues `prompt`, in order: step (0 is the prefill), arena, and
    the bytes in use of each arena after it, `<arena>_bytes`. `attrs`: `peak` and `reserved`, bytes by arena."""
    arenas = lab.engine.request.arenas
    arenas.record(SAMPLES)
    try:
        lab.generate(prompt, **generate)
        samples = arenas.samples()
    finally:
        arenas.record(0)
    return moves_of(samples, {name: c.high_water for name, c in arenas.counts().items()},
                    {name: c.capacity for name, c in arenas.counts().items()})  # fmt: skip


def moves_of(samples: dict[str, np.ndarray], peak: dict[str, int], reserved: dict[str, int]) -> pd.DataFrame:
    """The table of `arena_moves` from `Arenas.samples`."""
    which = np.concatenate([np.full(len(samples[name]), i) for i, name in enumerate(ARENAS)])
    flat = np.concatenate([samples[name] for name in ARENAS])
    order = np.argsort(flat[:, 0], kind="stable")
    which, used = which[order], flat[order, 1]
    table = pd.DataFrame({"arena": np.array(ARENAS, object)[which]})
    for i, name in enumerate(ARENAS):
        held = pd.Series(np.where(which == i, used, np.nan)).ffill().fillna(0)
        table[f"{name}_bytes"] = held.astype(np.int64)
    # A step begins where the arena of its activations takes memory again after it had been given back.
    main = table[["prefill_bytes", "decode_bytes"]].sum(axis=1)
    starts = (main > 0) & (main.shift(fill_value=0) == 0)
    table.insert(0, "step", np.maximum(starts.cumsum() - 1, 0))
    table.attrs.update(peak=peak, reserved=reserved)
    return table


def holes(blocks: int = 256, every: int = 2, ask: int = 2) -> dict:
    """A pool of single blocks, all taken, of which every `every`-th is given back; then a run of `ask` blocks is asked for.

    `before` and `after`: uint8 (blocks,), 1 where taken; `first` block of the run that was found, None when refused;
    `free` blocks and the `largest` free run before the request; `external` fragmentation, 0 to 1.
    """
    if not 1 <= ask <= blocks or not 1 <= every <= blocks:
        raise SettingError(f"holes: every and ask must be 1 to {blocks}, got {every} and {ask}")
    pool = MemoryPool(blocks * BLOCK, warn_above=None)
    runs = [pool.allocate(BLOCK, "other") for _ in range(blocks)]
    for offset in runs[::every]:
        pool.release(offset)
    before, counts, external = pool.snapshot() > 0, pool.counts(), pool.fragmentation()["external"]
    try:
        first = pool.allocate(ask * BLOCK, "other") // BLOCK
    except PoolExhausted:
        first = None
    return {
        "before": before, "after": pool.snapshot() > 0, "first": first, "free": counts["free_bytes"] // BLOCK,
        "largest": counts["largest_run_bytes"] // BLOCK, "external": external,
    }  # fmt: skip


def mapped(path: str | os.PathLike, shares=(0.0, 0.25, 0.5, 0.75, 1.0), seed: int = 0) -> pd.DataFrame:
    """A file is mapped, and more and more of its pages are read, in random order: a row per share of `shares` (ascending).

    touched_MB; anonymous_MB and mapped_files_MB, what the process has more of than before, by the kind the system counts
    it as; page_cache_MB of the file; read_MB from the disk since the start (None where the system does not tell). The page
    cache is asked to forget the file first; what another process holds stays. Raises `ColibriError` where there is no
    /proc/self/status, as on anything but Linux.
    """
    path = Path(path)
    page_cache.evict([path])
    size, rows = path.stat().st_size, []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as region:
        if hasattr(region, "madvise"):
            region.madvise(mmap.MADV_RANDOM)  # only what is touched is read, nothing ahead of it
        pages = np.random.default_rng(seed).permutation(-(-size // mmap.PAGESIZE))
        start, read_before, done = _process(), _read_bytes(), 0
        for share in shares:
            count = round(share * len(pages))
            for page in pages[done:count]:
                region[int(page) * mmap.PAGESIZE]
            done, now, read = count, _process(), _read_bytes()
            cached = page_cache.share([path])
            rows.append({
                "touched_MB": min(count * mmap.PAGESIZE, size) / 1e6,
                **{f"{kind}_MB": (now[kind] - start[kind]) / 1e6 for kind in STATUS},
                "page_cache_MB": None if cached is None else cached * size / 1e6,
                "read_MB": None if read is None or read_before is None else (read - read_before) / 1e6,
            })  # fmt: skip
    table = pd.DataFrame(rows)
    table.attrs["file_MB"] = size / 1e6
    return table


def _process() -> dict[str, int]:
    """Bytes of this process in memory, by kind."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {kind: 1024 * int(lines[name].split()[0]) for kind, name in STATUS.items()}
    except (OSError, KeyError):
        raise ColibriError("mapped: this system has no /proc/self/status with RssAnon and RssFile; Linux has") from None


def _read_bytes() -> int | None:
    """Bytes that the disk has read for this process so far; None where the system does not tell."""
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"])
    except (OSError, KeyError, ValueError):
        return None
