"""Latency of the memory pool, drawn for its benchmark. The pool itself is shown by `memory_map` and `memory_lessons`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..errors import SettingError
from ..units import format_size
from .plots import Picture
from .theme import FONT_PT, LIGHT


def latency_picture(table: pd.DataFrame, size: tuple[float, float] = (8.4, 3.2)) -> Picture:
    """Time of one allocation and release against how full the pool is, beside malloc.

    table: columns `allocator`, `bytes`, `occupancy` (0-1), `median_ns`, `p99_ns`, as benchmarks/memory.py writes it.
    Raises `SettingError` when it is empty.
    """
    if not len(table):
        raise SettingError("no latencies to draw: run benchmarks/memory.py first")
    sizes = sorted(table["bytes"].unique())
    fig = Picture(size)
    axes = np.atleast_1d(fig.subplots(1, len(sizes), sharey=True))
    styles = {"pool": ("hit", "-", "o"), "malloc": ("kept", "--", "s"), "first fit by block": ("miss", ":", "^")}
    for ax, wanted in zip(axes, sizes, strict=True):
        for allocator, rows in table[table["bytes"] == wanted].groupby("allocator"):
            color, dash, mark = styles.get(allocator, ("other", "-", "x"))
            rows = rows.sort_values("occupancy")
            ax.plot(
                100 * rows.occupancy, rows.median_ns, color=LIGHT[color], ls=dash, marker=mark, ms=4, label=allocator
            )
        ax.set_title(format_size(wanted, binary=True), fontsize=FONT_PT)
        ax.set_yscale("log")
        ax.set_xlabel("% of the pool in use", fontsize=FONT_PT)
        ax.tick_params(labelsize=FONT_PT)
        ax.grid(axis="y", color=LIGHT["rule"], lw=0.7)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ns per allocation and release", fontsize=FONT_PT)
    axes[0].legend(fontsize=FONT_PT, frameon=False)
    return fig
