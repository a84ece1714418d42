"""The memory pool and the arenas as panels: a map of the pool, bump pointers, what was planned, and growth over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..engine.memory import ARENAS, BLOCK, TAGS
from .frames import Frame, Series
from .theme import bytes_text

CELLS = 900  # most cells of the map
MAP_COLUMNS = 48
FREE, RESERVED, SLOT, NEW, KV, ARENA, OTHER = range(7)
MAP_WORDS = (
    "free", "reserved, not touched yet", "expert slots, in memory", "touched since the last picture", "KV page, in memory",
    "arena, in memory", "rotary tables, in memory",
)  # fmt: skip
MAP_SERIES = (
    Series("reserved", "resident"), Series("slots", "hit"), Series("new", "miss"), Series("KV", "prefetch"),
    Series("arenas", "attention"), Series("other", "kept"),
)  # fmt: skip
ARENA_COLORS = {"prefill": "attention", "decode": "hit", "router": "router", "expert_compute": "prefetch"}
ARENA_DASHES = {"prefill": (), "decode": (), "router": (3, 3), "expert_compute": (7, 3)}
_STATE_OF_TAG = {TAGS["slots"]: SLOT, TAGS["kv"]: KV, TAGS["arena"]: ARENA, TAGS["rotary"]: OTHER, TAGS["other"]: OTHER}


@dataclass(frozen=True, eq=False)
class PoolState:
    """The pool at one moment. `tags` uint8 (blocks,) as `MemoryPool.snapshot`; `touched` uint8 (blocks,), None where the
    system does not tell; `step` steps done; `used`, `peak` and `reserved` bytes of the arenas; `moves` their last moves."""

    tags: np.ndarray
    touched: np.ndarray | None
    step: int
    used: dict[str, int]
    peak: dict[str, int]
    reserved: dict[str, int]
    moves: pd.DataFrame = field(repr=False)

    def bytes_by_part(self) -> pd.DataFrame:
        """part, taken_bytes (handed out by the pool), touched_bytes (given by the system; NaN where it does not tell)."""
        rows = []
        for name, tag in TAGS.items():
            mine = self.tags == tag
            if mine.any():
                given = np.nan if self.touched is None else int(self.touched[mine].sum()) * BLOCK
                rows.append((name, int(mine.sum()) * BLOCK, given))
        return pd.DataFrame(rows, columns=["part", "taken_bytes", "touched_bytes"])


def blocks_per_cell(blocks: int) -> int:
    """Blocks in a cell of the map."""
    return max(1, -(-blocks // CELLS))


def cells(state: PoolState) -> np.ndarray:
    """uint8 (cells,): what each cell of the map is, FREE … OTHER without NEW. In memory as soon as one of its blocks is."""
    size = blocks_per_cell(len(state.tags))
    count = -(-len(state.tags) // size)
    tags, touched = np.zeros(count * size, np.uint8), np.zeros(count * size, bool)
    tags[: len(state.tags)] = state.tags
    touched[: len(state.tags)] = (state.tags > 0) if state.touched is None else (state.touched > 0) & (state.tags > 0)
    tags, touched = tags.reshape(count, size), touched.reshape(count, size)
    # The part of the first touched block, else of the first taken one.
    first = np.where(touched.any(1), touched.argmax(1), (tags > 0).argmax(1))
    tag = tags[np.arange(count), first]
    found = np.zeros(count, np.uint8)
    for each, name in _STATE_OF_TAG.items():
        found[tag == each] = name
    return np.where((found > 0) & ~touched.any(1), RESERVED, found).astype(np.uint8)


def pool_map(state: PoolState, before: np.ndarray | None, empty: str = "") -> Frame:
    """The pool from its start to its end, row by row. `before`: `cells` of an earlier moment, to mark what is new."""
    now = cells(state)
    shown = now.copy()
    if before is not None and len(before) == len(now):
        shown[(now > RESERVED) & (before <= RESERVED)] = NEW
    rows = -(-len(now) // MAP_COLUMNS)
    grid = np.zeros(rows * MAP_COLUMNS, np.uint8)
    grid[: len(now)] = shown
    nothing = np.full((rows, MAP_COLUMNS), np.nan)
    size = blocks_per_cell(len(state.tags)) * BLOCK
    return Frame(
        "grid", "The pool", f"cell of {size // 1024} KiB", "MB", np.stack([grid.reshape(rows, MAP_COLUMNS), nothing, nothing]).astype(np.float32),
        MAP_SERIES, xlim=(0, MAP_COLUMNS), ylim=(0, rows), rows=tuple(f"{row * MAP_COLUMNS * size / 1e6:.1f}" for row in range(rows)),
        words=MAP_WORDS, note="blank: free", empty=empty,
    )  # fmt: skip


def arena_lines(moves: pd.DataFrame, first: int = 0, cursor: float | None = None, empty: str = "") -> Frame:
    """Bytes in use of each arena after each take and rewind; `first` is the number of the first one."""
    count = max(len(moves), 2)
    values = np.zeros((len(ARENAS), count), np.float32)
    for row, name in zip(values, ARENAS, strict=True):
        row[: len(moves)] = moves[f"{name}_bytes"] / 1e3
    series = tuple(Series(name.replace("_", " "), ARENA_COLORS[name], ARENA_DASHES[name], 1.8) for name in ARENAS)
    return Frame(
        "lines", "Bump pointers", "take or rewind", "kB in use", values, series, xlim=(first, first + count - 1),
        ylim=(0, 1.5 * float(values.max()) or 1.0), x=tuple(float(first + i) for i in range(count)), cursor=cursor, empty=empty,
    )  # fmt: skip


def arena_bars(used: dict[str, int], peak: dict[str, int], empty: str = "") -> Frame:
    """What each arena holds, and its high-water mark as a tick."""
    names = list(ARENAS)[::-1]
    values = np.array([[used[name] / 1e3, peak[name] / 1e3] for name in names], np.float32)
    return Frame(
        "bars", "Arenas: in use and peak", "kB", "", values, tuple(Series(n.replace("_", " "), ARENA_COLORS[n]) for n in names),
        xlim=(0, 1.2 * float(values.max()) or 1.0), texts=tuple(f"{v:.3g} · peak {p:.3g}" for v, p in values), note="tick: peak", empty=empty,
    )  # fmt: skip


def parts(state: PoolState, planned: dict[str, int], empty: str = "") -> Frame:
    """Bytes in memory by part, and what was planned for it as a tick."""
    table = state.bytes_by_part().set_index("part")
    colors = {"slots": "hit", "kv": "prefetch", "arena": "attention", "rotary": "kept"}
    names = [name for name in colors if planned.get(name)][::-1]
    given = [float(table.touched_bytes.get(name, 0.0)) / 1e6 for name in names]
    values = np.array([[v, planned[name] / 1e6] for v, name in zip(given, names, strict=True)], np.float32)
    return Frame(
        "bars", "In memory, and planned", "MB", "", values, tuple(Series(name, colors[name]) for name in names),
        xlim=(0, float(np.nanmax(values)) or 1.0), texts=tuple(f"{v:.3g} of {p:.3g}" for v, p in values), note="tick: planned", empty=empty,
    )  # fmt: skip


def growth(history: Sequence[tuple[int, float, float]], steps: int, empty: str = "") -> Frame:
    """`history`: (step, MB of slots in memory, MB of KV pages) so far."""
    count = max(len(history), 2)
    values = np.full((2, count), np.nan, np.float32)
    x = np.zeros(count)
    for i, (step, slots, kv) in enumerate(history):
        x[i], values[:, i] = step, (slots, kv)
    x[len(history) :] = x[max(len(history) - 1, 0)]
    top = 1.15 * float(np.nanmax(values)) if len(history) else 1.0
    return Frame(
        "lines", "Growing with the text", "step", "MB in memory", values, (Series("slots", "hit"), Series("KV pages", "prefetch", (7, 3))),
        xlim=(0, max(steps, 2)), ylim=(0, top or 1.0), x=tuple(x.tolist()), empty=empty,
    )  # fmt: skip


def verdict(state: PoolState, planned: dict[str, int], slots: int, slot_bytes: int) -> str:
    """What is reserved, what the system gave, how the peak compares with the plan, and which setting moves it most."""
    table = state.bytes_by_part().set_index("part")
    taken, given = int(table.taken_bytes.sum()), float(table.touched_bytes.sum(skipna=False))
    told = "the system does not tell how much is in memory" if np.isnan(given) else f"{bytes_text(given)} are in memory"
    peak, reserved = sum(state.peak.values()), sum(state.reserved.values())
    largest = max(planned, key=planned.get)
    change = {
        "slots": f"one slot less in every layer, of {slots}, frees {bytes_text(slot_bytes)}",
        "kv": "a shorter max_seq_len, or kv_dtype fp16, frees most",
        "arena": "a smaller prefill_chunk frees most",
    }.get(largest, "the largest part is small already")
    return (
        f"The pool has handed out {bytes_text(taken)} and {told}: reserving is not using. Of {bytes_text(reserved)} of arenas at most "
        f"{bytes_text(peak)} were in use at once ({100 * peak / reserved:.0f} %, the plan is for the longest prefill chunk). Largest "
        f"part: {largest}, {bytes_text(planned[largest])}; {change}."
    )
