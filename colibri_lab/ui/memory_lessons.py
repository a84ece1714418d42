"""Findings about memory, for notebook 03: each function answers one question with a picture. Use them alone, or with `what_if`.

The counting is in `engine.experiments`; here it becomes panels and a sentence.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pandas as pd

from ..engine import experiments
from ..engine.memory import ARENAS, BLOCK
from ..tune.memory_plan import PARTS
from . import memory_frames as frames
from .frames import Frame, Series
from .theme import bytes_text
from .what_if import Finding

COLUMNS = 32  # blocks in a row of the bitmap
SHARES = tuple(n / 10 for n in range(11))
HOLES = ("free", "taken", "found for the request", "refused")


def bump_pointer(moves: pd.DataFrame, move: int = 60) -> Finding:
    """The arenas' bump pointers around `move`, counted in takes and rewinds from the start of the prefill."""
    move = min(move, len(moves) - 1)
    first = max(0, min(move - 80, len(moves) - 160))
    shown = moves.iloc[first : first + 160]
    now = moves.iloc[move]
    used = {name: int(now[f"{name}_bytes"]) for name in ARENAS}
    before = int(moves[f"{now.arena}_bytes"].iloc[move - 1]) if move else 0
    change = used[now.arena] - before
    did = "takes" if change > 0 else "gives back"
    said = (
        f"Move {move}, step {now.step}: {now.arena} {did} {bytes_text(abs(change))} by moving one offset; nothing is searched and "
        f"nothing is freed singly. In use now {bytes_text(sum(used.values()))}, at the peak "
        f"{bytes_text(sum(moves.attrs['peak'].values()))}, reserved {bytes_text(sum(moves.attrs['reserved'].values()))}: what is "
        "reserved and not in use is not lost, it waits for a longer prompt."
    )
    lines = frames.arena_lines(shown, first, cursor=float(move))
    bars = frames.arena_bars(used, moves.attrs["peak"])
    return Finding((lines, bars), said, arena_table(moves, move))


def arena_table(moves: pd.DataFrame, move: int = -1) -> pd.DataFrame:
    """used, peak and reserved bytes by arena, after `move`."""
    rows = [
        (name, int(moves[f"{name}_bytes"].iloc[move]), moves.attrs["peak"][name], moves.attrs["reserved"][name])
        for name in ARENAS
    ]
    return pd.DataFrame(rows, columns=["arena", "used_bytes", "peak_bytes", "reserved_bytes"]).set_index("arena")


def phases(moves: pd.DataFrame) -> Finding:
    """What each step needs at once: the prefill, and the decode steps."""
    total = moves[[f"{name}_bytes" for name in ARENAS]].sum(axis=1)
    table = pd.DataFrame({"peak_bytes": total.groupby(moves.step).max(), "moves": moves.groupby("step").size()})
    prefill, decode = table.peak_bytes.iloc[0], table.peak_bytes.iloc[1:]
    said = (
        f"The prefill needs {bytes_text(prefill)} at once, a decode step {bytes_text(decode.max())}, {prefill / decode.max():.0f} "
        f"times less, and both leave nothing behind: {len(table)} steps move the pointers {len(moves)} times, and the peak is "
        "that of one layer, however many there are."
    )
    values = np.stack([table.peak_bytes / 1e3, (table.index > 0).astype(int), np.full(len(table), np.nan)])
    frame = Frame(
        "columns", "Most in use at once, by step", "step (0 reads the prompt)", "kB", values.astype(np.float32),
        (Series("prefill", "attention"), Series("decode", "hit")), xlim=(-0.6, len(table) - 0.4),
        ylim=(0, 1.2 * float(table.peak_bytes.max()) / 1e3),
        texts=tuple(f"{v / 1e3:.3g}" if i < 2 else "" for i, v in enumerate(table.peak_bytes)),
    )  # fmt: skip
    return Finding((frame,), said, table)


def fragmentation(every: int = 2, ask: int = 2, blocks: int = 256) -> Finding:
    """A full pool, every `every`-th block given back, and a run of `ask` blocks asked for: does it fit?"""
    found = experiments.holes(blocks, every, ask)
    state = found["before"].astype(int)
    if found["first"] is not None:
        state[found["first"] : found["first"] + ask] = 2
    rows = blocks // COLUMNS
    nothing = np.full((rows, COLUMNS), np.nan)
    bitmap = Frame(
        "grid", "Pool, block by block", "block", "from block", np.stack([state.reshape(rows, COLUMNS), nothing, nothing]).astype(np.float32),
        (Series("taken", "kept"), Series("got by the request", "attention")), xlim=(0, COLUMNS), ylim=(0, rows),
        rows=tuple(str(COLUMNS * row) for row in range(rows)), words=HOLES, note="blank: free",
    )  # fmt: skip
    free, largest = found["free"], found["largest"]
    values = np.array([[ask, np.nan], [largest, np.nan], [free, np.nan]], np.float32)
    bars = Frame(
        "bars", "Enough?", "blocks", "", values, (Series("request", "attention"), Series("largest run", "hit"), Series("free", "other")),
        xlim=(0, max(free, ask)), texts=(f"{ask}", f"{largest}", f"{free}"),
    )  # fmt: skip
    said = _holes_said(found, blocks, ask)
    table = pd.DataFrame({"blocks": [free, largest, ask]}, index=["free", "largest run", "request"])
    return Finding((bitmap, bars), said, table)


def _holes_said(found: dict, blocks: int, ask: int) -> str:
    free, largest, first = found["free"], found["largest"], found["first"]
    if first is not None:
        end = f"is served at block {first}"
    else:
        end = "is refused, although the sum would do" if free >= ask else "is refused"
    return (
        f"{free} of {blocks} blocks are free, {bytes_text(free * BLOCK)}, and the largest run has {largest}: a request for {ask} in "
        f"a row {end}. {100 * found['external']:.0f} % of the free memory lies outside the largest run (external fragmentation)."
    )


@lru_cache(maxsize=4)
def _mapped(path: str) -> pd.DataFrame:
    return experiments.mapped(path, SHARES)


def mapped_file(path, touched: int = 50) -> Finding:
    """A mapped file of which `touched` percent of the pages are read (0 to 100, in tens). Measured once for each path."""
    table = _mapped(str(path))
    at = min(range(len(SHARES)), key=lambda i: abs(100 * SHARES[i] - touched))
    row, size = table.iloc[at], table.attrs["file_MB"]
    kinds = (("read_MB", "read from disk", "prefetch"), ("page_cache_MB", "page cache", "sky"),
             ("mapped_files_MB", "mapped files", "hit"), ("anonymous_MB", "own memory", "miss"))  # fmt: skip
    values = np.array([[row[name], size] for name, *_ in kinds], np.float64).astype(np.float32)
    frame = Frame(
        "bars", f"{row.touched_MB:.3g} of {size:.3g} MB touched", "MB", "", values, tuple(Series(label, color) for _, label, color in kinds),
        xlim=(0, size), texts=tuple(_mb(row[name]) for name, *_ in kinds), note="tick: the file",
    )  # fmt: skip
    cold = not np.isnan(float(row.read_MB or np.nan)) and row.read_MB > 0
    disk = (
        f"{_mb(row.read_MB)} had to be read from the disk, and would be again once the system has taken the pages back."
        if cold else "nothing was read from the disk: the pages were in the page cache, or on no disk, already."
    )  # fmt: skip
    said = (
        f"Mapping {size:.3g} MB costs nothing; touching {row.touched_MB:.3g} MB of it brought {_mb(row.mapped_files_MB)} into memory. "
        f"They are counted as mapped files ({_mb(row.page_cache_MB)} of the page cache), not as the process's own memory "
        f"({_mb(row.anonymous_MB)}), so a look at the wrong number says that no memory is used; {disk}"
    )
    return Finding((frame,), said, table)


def _mb(value) -> str:
    return "not measured" if value is None or np.isnan(value) else bytes_text(1e6 * max(value, 0.0))


def plan_against_measured(lab) -> Finding:
    """What was planned before anything was allocated, and the most that was allocated since, part by part."""
    peak = lab.memory(peak=True)
    rows = [(part, lab.plan[part], peak[part]) for part in PARTS if lab.plan[part] or peak[part]]
    table = pd.DataFrame(rows, columns=["part", "planned_bytes", "measured_bytes"])
    table.loc[len(table)] = ["total_bytes", lab.plan["total_bytes"], peak["total_bytes"]]
    table["difference"] = table.measured_bytes - table.planned_bytes
    names = [part.removesuffix("_bytes").replace("_", " ") for part, *_ in rows]
    values = np.array([[measured / 1e6, planned / 1e6] for _, planned, measured in rows][::-1], np.float32)
    frame = Frame(
        "bars", "Measured, and planned", "MB", "", values, tuple(Series(name, "hit") for name in names[::-1]),
        xlim=(0, float(values.max())), texts=tuple(f"{v:.3g}" for v, _ in values), note="tick: planned",
    )  # fmt: skip
    differ = [(row.part, row.difference) for row in table.itertuples() if row.difference and row.part != "total_bytes"]
    exact = len(rows) - len(differ)
    rest = "; ".join(
        f"{part.removesuffix('_bytes')} {bytes_text(abs(off))} {'more' if off > 0 else 'less'}" for part, off in differ
    )
    said = (
        f"Planned {bytes_text(lab.plan['total_bytes'])}, measured {bytes_text(peak['total_bytes'])}: {exact} of {len(rows)} parts are "
        f"equal to the byte{', ' + rest if rest else ''}. The plan counts the most that a run may need, such as a KV cache filled "
        "up to max_seq_len."
    )
    return Finding((frame,), said, table.set_index("part"))
