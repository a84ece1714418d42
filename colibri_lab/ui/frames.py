"""From a run to what a panel shows: plain arrays and labels, with no drawing in them.

A `Frame` is drawn by the browser (live.py) and by matplotlib (plots.py) alike, so the moving picture and the printed
one cannot disagree. Everything counts decode only, unless a title says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ..telemetry import STAGES
from .theme import STAGE_GROUPS, both, policy_style

POINTS = 150  # most columns of the stacked picture; more tokens than that are averaged in groups
ABSENT, RESIDENT, USED, MISSED = range(4)  # cells of the residency grid


@dataclass(frozen=True)
class Series:
    """One line, area or bar: its name, colour name of `theme`, dash in pixels, width in points, opacity 0-1."""

    label: str
    color: str
    dash: tuple[int, ...] = ()
    width: float = 2.0
    alpha: float = 1.0


@dataclass(frozen=True)
class Mark:
    """On a panel of lines: a point ("dot", "star" or "ring") at (x, y), or a dotted upright at x when y is None. The text stands below the point, or `above` it."""

    x: float
    y: float | None = None
    text: str = ""
    color: str = "ink"
    shape: str = "dot"
    above: bool = False


@dataclass(frozen=True, eq=False)
class Frame:
    """One panel. `values` is float32 of shape

    lines  (series, tokens), NaN leaves a gap        bars  (bars, 2): percent now, percent of the kept run or NaN
    stack  (series, tokens), bottom to top           grid  (3, layers, experts): state, resident since, times used
    columns  (3, columns): height, number of its series, where a tick stands or NaN
    """

    kind: str
    title: str
    xlabel: str
    ylabel: str
    values: np.ndarray
    series: tuple[Series, ...] = ()
    xlim: tuple[float, float] = (0, 1)
    ylim: tuple[float, float] = (0, 1)
    texts: tuple[str, ...] = ()  # beside each bar
    rows: tuple[str, ...] = ()  # names of the grid's rows
    words: tuple[str, ...] = ()  # what each state of the grid means, for its readout; () speaks of residency
    level: float | None = None  # a line across the columns
    note: str = ""
    stride: int = 1  # tokens from one value to the next
    x: tuple[float, ...] = ()  # of lines: where each value stands, if not at multiples of `stride`
    marks: tuple[Mark, ...] = ()  # of lines
    log: bool = False  # of lines: all numbers are powers of ten, and named so on the axes
    cursor: float | None = None  # the token that the grid shows
    empty: str = ""  # why there is nothing to see, and what to do

    def spec(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON for the browser."""
        fields = ("kind", "title", "xlabel", "ylabel", "xlim", "ylim", "texts", "rows", "note", "words", "level")
        fields += ("stride", "x", "cursor", "empty", "log")
        spec = {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in fields}
        series = [
            {"label": s.label, "color": both(s.color), "dash": list(s.dash), "width": s.width, "alpha": s.alpha}
            for s in self.series
        ]
        marks = [{**vars(m), "color": both(m.color)} for m in self.marks]
        return spec | {"shape": list(self.values.shape), "series": series, "marks": marks}


@dataclass(frozen=True, eq=False)
class Decode:
    """The decode steps of one run as arrays of length tokens; `stage_ms` is (len(STAGE_GROUPS), tokens)."""

    hits: np.ndarray
    misses: np.ndarray
    bytes_loaded: np.ndarray
    wall_ms: np.ndarray
    stage_ms: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.wall_ms)

    @property
    def hit_rate(self) -> float | None:
        """Hits of all accesses, 0-1; None when no expert was asked for."""
        asked = self.hits.sum() + self.misses.sum()
        return float(self.hits.sum() / asked) if asked else None

    @property
    def hit_percent(self) -> np.ndarray:
        """Per token, NaN where no expert was asked for."""
        asked = self.hits + self.misses
        return np.divide(100.0 * self.hits, asked, out=np.full(len(asked), np.nan), where=asked > 0)

    @property
    def wait_ms(self) -> np.ndarray:
        """Wall time per token spent waiting for experts."""
        return self.stage_ms[[name for name, *_ in STAGE_GROUPS].index("expert load wait")]

    def trailing_hit_percent(self, count: int) -> np.ndarray:
        """Of the last `count` tokens together, fewer at the start."""
        hits, asked = np.cumsum(self.hits), np.cumsum(self.hits + self.misses)
        hits[count:], asked[count:] = hits[count:] - hits[:-count], asked[count:] - asked[:-count]
        return np.divide(100.0 * hits, asked, out=np.full(len(asked), np.nan), where=asked > 0)

    def grouped_ms(self, size: int) -> np.ndarray:
        """`stage_ms` as means over groups of `size` tokens, (groups of stages, ceil(tokens / size))."""
        starts = np.arange(0, len(self), size)
        if not len(starts):
            return self.stage_ms
        return np.add.reduceat(self.stage_ms, starts, axis=1) / np.minimum(size, len(self) - starts)

    @property
    def share_percent(self) -> np.ndarray:
        """(groups,) of decode wall time."""
        total = self.stage_ms.sum()
        return 100.0 * self.stage_ms.sum(axis=1) / total if total else np.full(len(STAGE_GROUPS), np.nan)


def decode_of(source: Any) -> Decode:
    """`Decode` of a run (anything with `.steps`), a list of `Step`, or a table as `telemetry.step_table` makes it."""
    ready = source if isinstance(source, Decode) else getattr(source, "decode", None)
    if isinstance(ready, Decode):
        return ready
    if isinstance(source, pd.DataFrame):
        table = source[source["phase"] == "decode"]
        columns = ("hits", "misses", "bytes_loaded", "wall_ms")
        flat = [table[name].to_numpy(float) for name in columns]
        stages = {name: table[f"{name}_ms"].to_numpy(float) for name in STAGES}
    else:
        steps = source if isinstance(source, Sequence) else source.steps
        steps = [s for s in steps if s.phase == "decode"]
        rows = [(s.hits, s.misses, s.bytes_loaded, s.wall_s * 1e3) for s in steps]
        flat = list(np.array(rows, float).reshape(-1, 4).T)
        stages = {name: np.array([s.stages.get(name, 0.0) * 1e3 for s in steps]) for name in STAGES}
    return Decode(*flat, np.array([sum(stages[name] for name in names) for _, names, _ in STAGE_GROUPS]))


def label_of(run: Any, fallback: str) -> str:
    """`8 slots, lru` from a run's settings; `fallback` for a bare table."""
    settings = getattr(run, "settings", None) or {}
    slots = settings.get("expert_cache_slots")
    if slots is None:
        return fallback
    return f"{slots} slot{'s' * (slots != 1)}, {settings.get('policy', 'lru')}"


def _policy_of(run: Any) -> str:
    return (getattr(run, "settings", None) or {}).get("policy", "lru")


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"


def hit_rate(run, baseline=None, tokens: int = 0, cursor: float | None = None, empty: str = "") -> Frame:
    """Hit rate per decoded token on an axis of at least `tokens`: each token faint, the last few together strong."""
    now, kept = decode_of(run), None if baseline is None else decode_of(baseline)
    length = max(len(now), len(kept) if kept else 0)
    last = max(8, max(tokens, length) // 40)
    color, dash = policy_style(_policy_of(run))
    rows, series = [], []
    if kept is not None:
        rows.append(kept.trailing_hit_percent(last))
        label = f"kept: {label_of(baseline, 'other run')}: {_percent(kept.hit_rate)}"
        series.append(Series(label, "kept", (3, 3)))
    rows += [now.hit_percent, now.trailing_hit_percent(last)]
    series.append(Series("", color, (), 1.0, 0.3))
    label = label_of(run, "" if not len(now) else "this run") + (f": {_percent(now.hit_rate)}" if len(now) else "")
    series.append(Series(label, color, dash, 2.2))
    values = np.full((len(rows), length), np.nan, np.float32)
    for row, line in zip(values, rows, strict=True):
        row[: len(line)] = line
    return Frame(
        "lines",
        "Expert cache hit rate",
        "decoded token",
        "% of accesses",
        values,
        tuple(series),
        xlim=(0, max(tokens, length, 2) - 1),
        ylim=(0, 100),
        note=f"line: last {last} tokens",
        cursor=cursor,
        empty=empty,
    )


def latency_top(*sources, size: int = 1) -> float:
    """A round number of ms above 90 % of each run's groups of `size` tokens; what sticks out is told in the note."""
    sums = [decode_of(s).grouped_ms(size).sum(axis=0) for s in sources if s is not None]
    tops = [np.percentile(ms, 90, method="higher") for ms in sums if len(ms)]
    need = 1.15 * max(tops, default=0.0)
    if need <= 0:
        return 1.0
    unit = 10.0 ** np.floor(np.log10(need))
    return float(next(m * unit for m in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15) if m * unit >= need))


def group_size(tokens: int) -> int:
    """Tokens averaged into one column of the stacked picture when it spans `tokens`."""
    return max(1, -(-tokens // POINTS))


def stage_latency(run, baseline=None, tokens: int = 0, top: float = 0.0, cursor=None, empty: str = "") -> Frame:
    """Wall time per decoded token, stacked by stage. `top` in ms keeps the axis of an earlier picture if it suffices."""
    now = decode_of(run)
    size = group_size(max(tokens, len(now)))
    values = now.grouped_ms(size)
    top = max(top, latency_top(now, baseline, size=size))
    above = int((values.sum(axis=0) > top).sum())
    return Frame(
        "stack",
        "Time per token, by stage",
        "decoded token",
        "ms per token" + (f", mean of {size}" if size > 1 else ""),
        values.astype(np.float32),
        tuple(Series(name, color) for name, _, color in STAGE_GROUPS),
        xlim=(0, max(tokens, len(now), 2) - 1),
        ylim=(0, top),
        note=f"{above} above, up to {values.sum(axis=0).max():.3g} ms" if above else "",
        stride=size,
        cursor=cursor,
        empty=empty,
    )


def stage_share(run, baseline=None, empty: str = "") -> Frame:
    """Share of decode wall time by stage, the kept run's share as a tick on each bar."""
    now = decode_of(run)
    kept = np.full(len(STAGE_GROUPS), np.nan) if baseline is None else decode_of(baseline).share_percent
    mean_ms = now.stage_ms.mean(axis=1) if len(now) else np.full(len(STAGE_GROUPS), np.nan)
    share = now.share_percent
    texts = tuple(f"{s:.0f} % · {ms:.2g} ms" if len(now) else "" for s, ms in zip(share, mean_ms, strict=True))
    largest = np.nan_to_num([*share, *kept]).max()
    return Frame(
        "bars",
        "Share of time",
        "% of decode wall time",
        "",
        np.stack([share, kept], axis=1).astype(np.float32),
        tuple(Series(name, color) for name, _, color in STAGE_GROUPS),
        xlim=(0, 60 if largest <= 60 else 100),
        texts=texts,
        note="tick: kept run" if baseline is not None else "",
        empty=empty,
    )


def cell_states(history: Sequence[np.ndarray], index: int) -> np.ndarray:
    """(layers, experts) uint8 of `ABSENT … MISSED` after step `index`: used now but not resident before is a miss."""
    now = np.asarray(history[index], np.uint8)
    before = np.asarray(history[index - 1], np.uint8) if index else np.zeros_like(now)
    return np.where((now == USED) & (before == ABSENT), MISSED, now).astype(np.uint8)


def residency(history, index: int = -1, layers: Sequence[int] = (), when: str = "", empty: str = "") -> Frame:
    """Layers × experts after step `index` of `history`, a sequence of `Lab.residency()` arrays (or a single one).

    Without the step before it a single array cannot tell a hit from a miss: its used cells are shown as used.
    """
    array = np.asarray(history, np.uint8)
    single = array.ndim == 2
    array = array[None] if single else array
    if array.ndim != 3:
        raise ValueError(f"residency: expected (layers, experts) or (steps, layers, experts), found {array.shape}")
    if not len(array):
        array = np.zeros((1, *array.shape[1:]), np.uint8)
    index = range(len(array))[index]
    states = array[0] if single else cell_states(array, index)
    past = array[: index + 1]
    absent_at = np.where(past == ABSENT, np.arange(index + 1)[:, None, None], -1).max(axis=0)
    since = np.where(array[index] == ABSENT, np.nan, absent_at + 1)
    counts = "" if single else f"{(states == MISSED).sum()} missed of {(states >= USED).sum()} used"
    return Frame(
        "grid",
        "Experts in memory" + (f", {when}" if when else ""),
        "expert",
        "layer",
        np.stack([states, since, (past == USED).sum(axis=0)]).astype(np.float32),
        (Series("resident", "resident"), Series("used now", "hit"), Series("missed, read now", "miss")),
        xlim=(0, array.shape[2]),
        ylim=(0, array.shape[1]),
        rows=tuple(str(n) for n in (layers or range(array.shape[1]))),
        note=counts,
        empty=empty,
    )
