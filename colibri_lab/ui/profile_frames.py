"""What the profile view shows of runs: waiting against reading, speed against hit rate, and one sentence.

Functions take a `Run` (anything with `steps` and `settings`) and return numbers or a `Frame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .frames import Frame, Mark, Series

SHOWN = 12  # runs in the picture of all runs, the newest ones
_BARS = {"waited for": ("wait", "miss"), "reads, hidden": ("hidden", "prefetch"), "reads, in all": ("service", "other"),
         "wall time": ("wall", "hit")}  # fmt: skip


def axis_top(values) -> float:
    """A round number above all values, for an axis; 1 without any."""
    values = np.array([v for v in np.ravel(values) if v is not None and np.isfinite(v)], float)
    most = float(values.max(initial=0.0))
    if most <= 0:
        return 1.0
    unit = 10.0 ** np.floor(np.log10(most))
    return float(next(m * unit for m in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15) if m * unit >= 1.05 * most))


def times(run: Any) -> dict[str, float | None]:
    """Mean ms per decoded token: wall, wait, work (wall - wait), service (of reads, summed over them), hidden (of the
    service, what no token waited for). None where nothing was measured."""
    steps = [s for s in run.steps if s.phase == "decode"]
    if not steps:
        return dict.fromkeys(("wall", "wait", "work", "service", "hidden"))

    def mean(values) -> float:
        return 1e3 * sum(values) / len(steps)

    wall, wait = mean(s.wall_s for s in steps), mean(s.stages.get("expert_load_wait", 0.0) for s in steps)
    told = all(s.load_service_s is not None for s in steps)
    service = mean(s.load_service_s for s in steps) if told else None
    hidden = None if service is None else max(0.0, service - wait)
    return {"wall": wall, "wait": wait, "work": wall - wait, "service": service, "hidden": hidden}


def row(run: Any) -> dict:
    """One row for a table of runs; None where nothing was measured."""
    steps = [s for s in run.steps if s.phase == "decode"]
    names = ("expert_cache_slots", "threads", "storage", "disk_bandwidth", "disk_page_cache")
    return {
        **{name: run.settings[name] for name in names},
        "hit_rate": run.hit_rate,
        "misses_per_token": sum(s.misses for s in steps) / len(steps) if steps else None,
        **{f"{name}_ms": value for name, value in times(run).items()},
        "tokens_per_s": run.decode_tokens_per_s,
        "stop_reason": run.stop_reason,
    }


def verdict(run: Any) -> str:
    """Where a token's time went, and how much of the reading nobody waited for."""
    t = times(run)
    said = f"Of {t['wall']:.2f} ms per token {t['wait']:.2f} ms are waiting for experts, {t['work']:.2f} ms everything else"
    if t["service"]:
        said += f"; reads took {t['service']:.2f} ms in all, {100 * t['hidden'] / t['service']:.0f} % of it hidden"
    hits = "no expert was asked for" if run.hit_rate is None else f"hit rate {100 * run.hit_rate:.0f} %"
    return f"{said}. {hits[0].upper()}{hits[1:]}, {run.decode_tokens_per_s:.0f} tokens/s (n = 1)."


def reads(run: Any, baseline=None, empty: str = "") -> Frame:
    """Waiting against service, ms per decoded token: only the wait is part of wall time."""
    now, kept = (
        dict.fromkeys(("wall", "wait", "work", "service", "hidden")) if r is None else times(r) for r in (run, baseline)
    )
    values = np.array([[now[key], kept[key]] for key, _ in _BARS.values()], float)  # None becomes NaN
    texts = tuple("" if empty else f"{v:.2f} ms" if np.isfinite(v) else "not measured" for v in values[:, 0])
    return Frame(
        "bars",
        "Waiting and reading",
        "ms per decoded token",
        "",
        values.astype(np.float32),
        tuple(Series(name, color) for name, (_, color) in _BARS.items()),
        xlim=(0, axis_top(values)),
        texts=texts,
        note="tick: kept run" if baseline is not None else "",
        empty=empty,
    )


def all_runs(done: Sequence[Any], shown: Any = None, coming: str = "", empty: str = "") -> Frame:
    """Speed against hit rate, a point per run: a higher hit rate is not a higher speed. Named by slots where there is room."""
    points = [(r, 100 * r.hit_rate, r.decode_tokens_per_s) for r in done[-SHOWN:] if r.hit_rate is not None]
    top = axis_top([speed for *_, speed in points])
    named: list[tuple[float, float]] = []  # where a name stands; the run on show has the first say, then the newest
    marks = []
    for r, hit, speed in sorted(reversed(points), key=lambda point: point[0] is not shown):
        free = all(abs(hit - x) > 16 or abs(speed - y) > 0.09 * top for x, y in named)
        named += [(hit, speed)] * free
        name = f"{r.settings['expert_cache_slots']} slots" if free else ""
        marks.append(Mark(hit, speed, name, *(("hit", "star") if r is shown else ("kept", "dot"))))
    return Frame(
        "lines",
        "Speed against hit rate",
        "hit rate, % of decode accesses",
        "tokens/s",
        np.zeros((0, 0), np.float32),
        xlim=(0, 100),
        ylim=(0, top),
        note=coming or ("star: this run" if marks else ""),
        marks=tuple(reversed(marks)),
        empty=empty,
    )
