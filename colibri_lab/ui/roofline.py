"""The roofline: how fast work of a given intensity can be on this machine, and how fast kernels are.

Left of the ridge the bytes take longer than the operations, right of it the operations do. Roofs are measured
(`colibri_lab.limits`), never taken from a data sheet.
"""

from __future__ import annotations

from textwrap import wrap

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from ..limits import Limits
from ..workloads import Workload
from .plots import Picture
from .theme import FONT_PT, LIGHT

CROWDED = 5  # points closer than this factor have their labels below and beside them
# A version keeps its colour and mark in every picture: a ring that a filled mark fits into.
_VERSIONS = {
    "old": {"marker": "o", "ms": 13, "mfc": "none", "mec": LIGHT["kept"], "mew": 2},
    "new": {"marker": "D", "ms": 7, "mfc": LIGHT["miss"], "mec": "white", "mew": 0.8},
    "": {"marker": "o", "ms": 8, "mfc": LIGHT["hit"], "mec": "white", "mew": 0.8},
}


def roofline(limits: Limits, table: pd.DataFrame, works: list[Workload], chosen: Workload | None = None) -> Picture:
    """Points of `table` (case, version, GOP_per_s, share_of_bound; from a `Trial`) under the roofs of `limits`.

    `works` are the workloads whose labels are the cases; they give the intensities. `chosen` is work that may not have been
    measured yet: an upright shows where it meets the roof.
    """
    intensity = {work.label: work.intensity for work in works}
    integer = any(work.integer for work in [*works, *([chosen] if chosen else [])])
    common, short = _shortened(list(intensity))
    figure = Picture((6.8, 4.2))
    ax = figure.add_subplot()
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(10, (1, 2, 5), numticks=20))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    title = ", ".join(["Roofline", *common, f"{limits.threads} thread{'s' * (limits.threads > 1)}"])
    ax.set_title(title, loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    ax.set_xlabel("operations per byte that must be moved", fontsize=FONT_PT)
    ax.set_ylabel("GOP/s", fontsize=FONT_PT)
    ax.tick_params(labelsize=FONT_PT)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(which="major", color=LIGHT["rule"], lw=0.7)
    ax.set_axisbelow(True)
    span = [*intensity.values(), *([chosen.intensity] if chosen else []), limits.peak(integer) / limits.bytes_per_s]
    x = np.geomspace(min(span) / 4, max(span) * 4, 200)
    _roofs(ax, limits, x, integer)
    for version, look in _VERSIONS.items():
        rows = table[table.version == version]
        if len(rows):
            at = [intensity[case] for case in rows.case]
            ax.plot(at, rows.GOP_per_s, ls="none", label=version or "measured", zorder=3, **look)
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1}
    before = 0.0
    for case in sorted(table.case.unique(), key=intensity.get):
        crowded = intensity[case] < CROWDED * before
        place = {"xytext": (9, 0), "va": "center"} if crowded else {"xytext": (0, -20), "ha": "center"}
        ax.annotate(short[case], (intensity[case], table[table.case == case].GOP_per_s.min()), textcoords="offset points",
                    fontsize=FONT_PT, bbox=box, zorder=2, **place)  # fmt: skip
        before = 0.0 if crowded else intensity[case]
    low = min(table.GOP_per_s.min() / 3, 1e-9 * limits.bytes_per_s * x[0])
    ax.set_ylim(low, max(2.2e-9 * limits.peak(integer), 1.5 * table.GOP_per_s.max()))
    if chosen:
        _mark_chosen(ax, limits, chosen, low)
    ax.legend(fontsize=FONT_PT, loc="upper left", framealpha=0.85)
    figure.supxlabel("\n".join(wrap(_sentence(table, short), 98)), fontsize=FONT_PT, x=0.01, ha="left")
    return figure


def _mark_chosen(ax, limits: Limits, work: Workload, low: float) -> None:
    most = 1e-9 * min(limits.bytes_per_s * work.intensity, limits.peak(work.integer))
    ax.plot([work.intensity] * 2, [low, most], color=LIGHT["kept"], lw=1.4, ls=(0, (2, 2)), zorder=1)
    left = work.intensity * limits.bytes_per_s > limits.peak(work.integer)  # of the ridge there is no roof to run into
    ax.annotate(f"chosen: {work.label}", (work.intensity, low), (-5 if left else 5, 5), textcoords="offset points",
                fontsize=FONT_PT, color=LIGHT["ink"], ha="right" if left else "left", va="bottom")  # fmt: skip


def _shortened(labels: list[str]) -> tuple[list[str], dict[str, str]]:
    """The parts that all labels share, and what is left of each."""
    parts = {label: label.split(", ") for label in labels}
    common = [part for part in parts[labels[0]] if all(part in other for other in parts.values())]
    return common, {label: ", ".join(p for p in mine if p not in common) for label, mine in parts.items()}


def _roofs(ax, limits: Limits, x: np.ndarray, integer: bool) -> None:
    slope = 1e-9 * limits.bytes_per_s * x
    peaks = [("float32 multiply-adds", limits.flop_per_s, "-")]
    if limits.int8_op_per_s and integer:
        peaks.append(("int8 products", limits.int8_op_per_s, (0, (5, 2))))
    for name, peak, style in peaks:
        ax.plot(x, np.minimum(slope, 1e-9 * peak), color=LIGHT["oracle"], lw=1.4, ls=style)
        ax.text(x[-1], 1.06e-9 * peak, f"{name}, {1e-9 * peak:.0f} GOP/s", fontsize=FONT_PT, ha="right", va="bottom")
    ax.annotate(f"memory, {1e-9 * limits.bytes_per_s:.1f} GB/s", (x[2], slope[2]), (10, 0), textcoords="offset points",
                fontsize=FONT_PT, ha="left", va="center")  # fmt: skip


def _sentence(table: pd.DataFrame, short: dict[str, str]) -> str:
    """Where the newest version of each workload stands."""
    newest = table.groupby("case", sort=False).tail(1)
    parts = [f"{short[row.case] or 'it'} at {100 * row.share_of_bound:.0f} %" for row in newest.itertuples()]
    return f"Of what the roof allows: {', '.join(parts)}."
