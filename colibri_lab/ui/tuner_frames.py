"""The four panels of the cache tuner, as frames: curve, course over tokens, residency grid, causes of misses.

`kept` is the outcome shown in grey. What is not computed yet is left out, so the panels fill as numbers arrive.
"""

from __future__ import annotations

import numpy as np

from .frames import Frame, Mark, Series
from .theme import policy_style
from .tuner import ORACLES, Outcome, rates

CAUSES = {
    "first uses": "other",
    "too few slots": "sky",
    "forced admission": "prefetch",
    "choice of victim": "miss",
    "lookup order": "router",
}
_ORACLE_STYLE = {"belady-bypass": ("oracle", (6, 3)), "belady": ("kept", (6, 3))}
_ORACLE_NAME = {"belady-bypass": "oracle, may drop", "belady": "oracle, keeps all"}
_KEPT_DASH = (2, 3)


def curve(found: Outcome, kept: Outcome | None = None) -> Frame:
    """Hit rate at every number of slots: the choice's policy, both oracles, the kept choice; a dot where the choice is.

    A kept curve of another trace or scope is laid over by its share of the experts.
    """
    c, subject = found.choice, found.subject
    most = subject.most(c.scope)
    lines, series = [], []
    for name in ORACLES:
        if c.policy != name:
            lines.append(rates(subject, name, c.bound))
            series.append(Series(_ORACLE_NAME[name], *_ORACLE_STYLE[name], 1.6))
    if kept is not None:
        k = kept.choice
        other = rates(kept.subject, k.policy, k.contract)
        same = k.trace == c.trace and k.policy == c.policy and k.contract == c.contract
        if not same and np.isfinite(other).any():
            lines.append(np.interp(np.linspace(0, 1, most + 1), np.linspace(0, 1, len(other)), other))
            series.append(Series(f"kept: {_differences(kept, found)}", "kept", _KEPT_DASH, 1.6))
    color, dash = policy_style(c.policy)
    lines.append(rates(subject, c.policy, c.contract))
    series.append(Series(c.policy + (", serial" * (c.lookup == "serial")), color, dash, 2.4))
    return Frame(
        "lines",
        "Hit rate at every number of slots",
        "slots in all" if c.scope == "global" else "slots per layer",
        "% of accesses",
        np.array(lines, np.float32),
        tuple(series),
        xlim=(0, most),
        ylim=(0, 100),
        note=c.phase,
        cursor=c.slots,
        marks=_marks(found, kept, color),
    )


def _marks(found: Outcome, kept: Outcome | None, color: str) -> tuple[Mark, ...]:
    c, marks = found.choice, []
    if c.scope == "global":
        marks.append(Mark(found.subject.cycle["blocks"], text=f"one token: {found.subject.cycle['blocks']}"))
    if kept is not None and kept.choice != c and kept.choice.trace == c.trace and kept.choice.scope == c.scope:
        marks.append(Mark(kept.choice.slots, 100 * kept.hit_rate, "", "kept"))
    if found.measured is not None:
        marks.append(Mark(c.slots, 100 * found.measured, "", "ink", "star"))
    name = f"{100 * found.hit_rate:.1f} %" + (" = measured (star)" if _same(found) else "")
    return (*marks, Mark(c.slots, 100 * found.hit_rate, name, color))


def _same(found: Outcome) -> bool:
    return found.measured is not None and abs(found.measured - found.hit_rate) < 5e-4


def _differences(kept: Outcome, found: Outcome) -> str:
    """What tells the kept choice from this one, but for the slots."""
    a, b = vars(kept.choice), vars(found.choice)
    differ = [name for name in a if name != "slots" and a[name] != b[name]]
    return ", ".join(a[name] if name in ("trace", "policy") else f"{name} {a[name]}" for name in differ)


def over_time(found: Outcome, kept: Outcome | None = None, step: int | None = None) -> Frame:
    """Hit rate over the tokens of the phase, a few together; `step` is where the grid stands."""
    c = found.choice
    lines, series = [], []
    color, dash = policy_style(c.policy)
    longest = max([_length(found)] + ([_length(kept)] if kept is not None else []))
    window = max(8, longest // 25)
    if kept is not None and kept.history is not None and kept.choice != c:
        lines.append(_rolling(kept, window))
        series.append(Series(f"kept: {kept.choice.label}: {100 * kept.hit_rate:.1f} %", "kept", _KEPT_DASH, 1.6))
    if found.history is not None:
        lines.append(_rolling(found, window))
        series.append(Series(f"{c.label}: {100 * found.hit_rate:.1f} %", color, dash, 2.2))
    values = np.full((len(lines), longest), np.nan, np.float32)
    for row, line in zip(values, lines, strict=True):
        row[: len(line)] = line
    cursor = None
    if found.history is not None and step is not None:
        at = np.searchsorted(found.history.steps(c.phase), step)
        cursor = int(at) if at < _length(found) else None
    return Frame(
        "lines",
        "Hit rate over time",
        "decoded token" if c.phase == "decode" else "step",
        "% of accesses",
        values,
        tuple(series),
        xlim=(0, max(longest, 2) - 1),
        ylim=(0, 100),
        note=f"last {window} together",
        cursor=cursor,
    )


def _length(found: Outcome) -> int:
    return 0 if found.history is None else len(found.history.steps(found.choice.phase))


def _rolling(found: Outcome, window: int) -> np.ndarray:
    table = found.history.table(found.choice.phase)
    hits, asked = (np.cumsum(table[name].to_numpy(float)) for name in ("hits", "accesses"))
    hits[window:], asked[window:] = hits[window:] - hits[:-window], asked[window:] - asked[:-window]
    return np.divide(100 * hits, asked, out=np.full(len(asked), np.nan), where=asked > 0)


def grid(found: Outcome, step: int) -> Frame:
    """Layers × experts after a step: in memory, used, missed."""
    subject, course = found.subject, found.history
    if course is None:
        values, title, note = np.zeros((3, subject.layers, subject.experts), np.float32), "Experts in memory", ""
    else:
        values = course.grid(step)
        prefill = course.steps("prefill")
        before = int(np.searchsorted(prefill, step))
        name = "prompt" if course.phase[step] == 0 else f"token {step - before}"
        used, missed = int((values[0] >= 2).sum()), int((values[0] == 3).sum())
        title, note = f"Experts in memory, {name}", f"{missed} missed of {used} used"
    return Frame(
        "grid",
        title,
        "expert",
        "layer",
        values,
        (Series("resident", "resident"), Series("used now", "hit"), Series("missed, read now", "miss")),
        xlim=(0, subject.experts),
        ylim=(0, subject.layers),
        rows=tuple(str(n) for n in subject.trace.layers),
        note=note,
        empty="" if course is not None else "following the trace …",
    )


def causes(found: Outcome, kept: Outcome | None = None) -> Frame:
    """Why accesses miss, in % of accesses, the kept choice's share as a tick. Drawn from the bottom up."""
    now = _shares(found)
    before = np.full(len(CAUSES), np.nan) if kept is None or kept.choice == found.choice else _shares(kept)
    per_token = [found.misses[name] / found.tokens for name in CAUSES]
    largest = np.nan_to_num([*now, *before]).max()
    return Frame(
        "bars",
        "What the misses are made of",
        "% of accesses · misses per token",
        "",
        np.stack([now, before], axis=1).astype(np.float32),
        tuple(Series(name, color) for name, color in CAUSES.items()),
        xlim=(0, next(top for top in (20, 50, 100) if largest <= top)),
        texts=tuple(f"{s:.1f} % · {m:.3g}" for s, m in zip(now, per_token, strict=True)),
        note="tick: kept" if np.isfinite(before).any() else "",
    )


def _shares(found: Outcome) -> np.ndarray:
    return np.array([100 * found.misses[name] / found.totals["accesses"] for name in CAUSES])
