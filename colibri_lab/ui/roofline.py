"""The roofline: how fast work of a given intensity can be on this machine, and how fast kernels are.

Left of the ridge the bytes take longer than the operations, right of it the operations do (Williams, Waterman and
Patterson 2009). Roofs are measured (`colibri_lab.limits`), never taken from a data sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

import numpy as np
import pandas as pd

from ..limits import Limits
from ..workloads import Workload
from . import plots
from .frames import Frame, Mark, Series
from .theme import FONT_PT

TITLE, XLABEL, YLABEL = "Roofline", "operations per byte that must be moved", "GOP/s"
CROWDED = 5  # of points closer than this factor every second one has its name above it
_VERSIONS = {"old": ("ring", "kept"), "new": ("star", "miss"), "": ("dot", None)}  # a ring that a filled mark fits into
_COLORS = ("hit", "attention", "prefetch", "router", "sky")  # of work that differs in more than its tokens


def nothing(why: str) -> Frame:
    """The panel before anything was measured."""
    return Frame(
        "lines", TITLE, XLABEL, YLABEL, np.zeros((0, 0), np.float32), xlim=(-1, 3), ylim=(0, 3), log=True, empty=why
    )


def roofs(limits: Limits, table: pd.DataFrame, works: Sequence[Workload], chosen: Workload | None = None) -> Frame:
    """Points of `table` (case, version, GOP_per_s; from a `Trial`) under the roofs of `limits`.

    `works` are the workloads whose labels are the cases; they give the intensities. `chosen` is work that may not have been
    measured yet: an upright shows how many operations it has per byte.
    """
    intensity = {work.label: work.intensity for work in works}
    wanted = [*works, chosen] if chosen else list(works)
    integer = any(work.integer for work in wanted)
    span = [*(work.intensity for work in wanted), limits.peak(integer) / limits.bytes_per_s]
    x = np.log10(np.geomspace(min(span) / 4, max(span) * 4, 200))
    slope = limits.bytes_per_s * 10**x
    memory = f"{1e-9 * limits.bytes_per_s:.1f} GB/s, then"
    lines = [(f"{memory} {1e-9 * limits.flop_per_s:.0f} GOP/s of float32", limits.flop_per_s, ())]
    if limits.int8_op_per_s and integer:
        lines.append((f"{1e-9 * limits.int8_op_per_s:.0f} GOP/s of int8", limits.int8_op_per_s, (7, 3)))
    values = np.log10([1e-9 * np.minimum(slope, peak) for _, peak, _ in lines])
    common, groups = _grouped(list(intensity))
    colors = {group: _COLORS[i % len(_COLORS)] for i, group in enumerate(dict.fromkeys(groups.values()))}
    series = [Series(name, "ink", dash, 1.4) for name, _, dash in lines]
    if len(colors) > 1:  # series of no line, for the legend
        series += [Series(group, color, (), 5) for group, color in colors.items()]
        values = np.vstack([values, np.full((len(colors), len(x)), np.nan)])
    low = min(table.GOP_per_s.min() / 3, 1e-9 * slope[0])
    high = max(2.5e-9 * limits.peak(integer), 2 * table.GOP_per_s.max())
    marks = _points(table, intensity, {case: colors[group] for case, group in groups.items()})
    if chosen:
        marks.append(Mark(np.log10(chosen.intensity), None, f"chosen: {chosen.label}", "kept"))
    return Frame(
        "lines", ", ".join([TITLE, *common, f"{limits.threads} thread{'s' * (limits.threads > 1)}"]), XLABEL, YLABEL,
        values.astype(np.float32), tuple(series), xlim=(x[0], x[-1]), ylim=(np.log10(low), np.log10(high)), x=tuple(x),
        log=True, marks=tuple(marks), note="ring: old, star: new" if (table.version != "").any() else "",
    )  # fmt: skip


def roofline(
    limits: Limits, table: pd.DataFrame, works: Sequence[Workload], chosen: Workload | None = None
) -> plots.Picture:
    """`roofs` as a picture, with `sentence` below it; `table` also has share_of_bound."""
    figure = plots.picture(roofs(limits, table, works, chosen), (6.8, 4.2))
    figure.supxlabel("\n".join(wrap(sentence(table), 98)), fontsize=FONT_PT, x=0.01, ha="left")
    return figure


def sentence(table: pd.DataFrame) -> str:
    """Where the newest version of each workload stands."""
    newest = table.groupby("case", sort=False).tail(1)
    parts = [f"{row.case} at {100 * row.share_of_bound:.0f} %" for row in newest.itertuples()]
    return f"Of what the roof allows: {'; '.join(parts)}."


def _points(table: pd.DataFrame, intensity: dict[str, float], colors: dict[str, str]) -> list[Mark]:
    """A mark for each row, from left to right; one of each case carries its tokens."""
    marks, before, above = [], 0.0, False
    for case in sorted(table.case.unique(), key=intensity.get):
        above = not above and intensity[case] < CROWDED * before
        rows = table[table.case == case].sort_values("GOP_per_s", ascending=above)
        for left, row in zip(range(len(rows))[::-1], rows.itertuples(), strict=True):  # the last one is named
            shape, color = _VERSIONS[row.version]
            x, y = np.log10(intensity[case]), np.log10(row.GOP_per_s)
            marks.append(Mark(x, y, "" if left else _split(case)[0], color or colors[case], shape, above))
        before = intensity[case]
    return marks


def _split(case: str) -> tuple[str, list[str]]:
    """ "int8, 8 tokens" → ("8 tokens", ["int8"])."""
    parts = case.split(", ")
    tokens = next(part for part in parts if "token" in part)
    return tokens, [part for part in parts if part != tokens]


def _grouped(cases: list[str]) -> tuple[list[str], dict[str, str]]:
    """What all cases share besides tokens, and of each what it does not share."""
    others = {case: _split(case)[1] for case in cases}
    common = [part for part in others[cases[0]] if all(part in parts for parts in others.values())]
    return common, {case: ", ".join(p for p in parts if p not in common) for case, parts in others.items()}
