"""Pictures of plans, probes, sweeps and comparisons: predicted bands, measured stars, and the sentence they come to."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from ..errors import SettingError
from ..units import format_size
from .plots import Picture
from .theme import FONT_PT, LIGHT, bytes_text

STORAGE_STYLE = {
    "pread": ("hit", "-"),
    "direct": ("miss", "--"),
    "mmap": ("attention", "-."),
    "modelled": ("router", ":"),
}
SHARE_COLORS = {"experts": "hit", "disk": "miss", "page cache": "prefetch", "dense": "attention", "management": "other"}


def _axes(title: str, x: str, y: str, verdict: str, size=(7.2, 3.8)):
    figure = Picture(size)
    ax = figure.add_subplot()
    ax.set_title(title, loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    ax.set_xlabel(x, fontsize=FONT_PT)
    ax.set_ylabel(y, fontsize=FONT_PT)
    ax.tick_params(labelsize=FONT_PT)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=LIGHT["rule"], lw=0.7)
    ax.set_axisbelow(True)
    if x.startswith("slots"):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.supxlabel(verdict, fontsize=FONT_PT, x=0.01, ha="left", wrap=True)
    return figure, ax


def slots(plan, measured: pd.DataFrame | None = None) -> Picture:
    """Predicted decode tokens/s over slots with their band, one line per way of reading, a diamond on the choice.

    `measured`: slots, tokens_per_s, and storage where there are several, drawn as stars. A plan that was measured brings
    its own star.
    """
    chosen = plan.predicted.settings
    table = plan.curves[plan.curves.scope == chosen["scope"]]
    formats = plan.shape.formats[0]
    table = table[table.format == formats] if "format" in table else table
    speed = plan.predicted.tokens_per_s
    figure, ax = _axes(
        f"{plan.shape.name}: predicted speed by slots", f"slots{'' if chosen['scope'] == 'global' else ' per layer'}",
        "decode, tokens/s", slots_verdict(plan),
    )  # fmt: skip
    for storage, rows in table.groupby("storage"):
        color, dash = STORAGE_STYLE[storage]
        rows = rows.sort_values("slots")
        ax.fill_between(rows.slots, rows.low, rows.high, color=LIGHT[color], alpha=0.15, lw=0)
        ax.plot(
            rows.slots, rows.tokens_per_s, dash, color=LIGHT[color], lw=1.8, label=f"{storage}, band holds 9 of 10 runs"
        )
    ax.plot([chosen["expert_cache_slots"]], [speed.value], "D", color=LIGHT["ink"], ms=6, label="recommended")
    stars = [] if measured is None else [(row.slots, row.tokens_per_s) for row in measured.itertuples()]
    if plan.measured:
        stars.append((chosen["expert_cache_slots"], plan.measured["tokens_per_s"]))
    if stars:
        ax.plot(
            *zip(*stars, strict=True),
            "*",
            color=LIGHT["ink"],
            mfc="white",
            ms=12,
            label=f"measured, {len(stars)} setting(s)",
        )
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
    ax.legend(fontsize=FONT_PT, framealpha=0.85)
    return figure


def slots_verdict(plan) -> str:
    """What the curve says: where its maximum is, what it costs, and what would help most."""
    p = plan.predicted
    help_ = {
        "disk": "a faster disk or more memory would help most",
        "page cache": "copies out of the page cache cost most; more slots would save them",
        "experts": "expert products cost most; a narrower number format would help most",
        "dense": "attention and the other resident layers cost most; slots cannot help",
        "management": "managing misses costs most; fewer, larger blocks would help",
    }[p.bottleneck]
    slots_ = p.settings["expert_cache_slots"]
    return (
        f"{slots_} slots take {bytes_text(p.memory['total_bytes'])} and give {p.tokens_per_s.value:.3g} tokens/s "
        f"({p.tokens_per_s.low:.3g} to {p.tokens_per_s.high:.3g}); {help_}."
    )


def shares(prediction) -> Picture:
    """Where a predicted decode step spends its time, as one stacked bar in %."""
    figure, ax = _axes(
        "Where a decoded token spends its time (predicted)", "share of decode time, %", "", "", (7.2, 2.0)
    )
    at = 0.0
    for name, share in prediction.shares.items():
        ax.barh([0], [100 * share], left=[at], color=LIGHT[SHARE_COLORS[name]], label=f"{name} {share:.0%}")
        at += 100 * share
    ax.set_yticks([])
    ax.set_xlim(0, 100)
    figure.legend(fontsize=FONT_PT, ncols=5, loc="outside lower center", frameon=False, columnspacing=1.0)
    return figure


def beside(table: pd.DataFrame) -> Picture:
    """Predicted beside measured: `table` has slots, predicted, low, high, measured, and storage where there are several."""
    if table.empty:
        raise SettingError("nothing to draw: no row has both a prediction and a measurement")
    error = (table.predicted / table.measured - 1).abs()
    verdict = f"{len(table)} settings; predicted within {error.max():.1%} of measured at worst, {error.median():.1%} in the median."
    figure, ax = _axes("Predicted and measured", "slots", "decode, tokens/s", verdict)
    for storage, rows in table.groupby("storage") if "storage" in table else [("pread", table)]:
        color, dash = STORAGE_STYLE[storage]
        rows = rows.sort_values("slots")
        ax.fill_between(rows.slots, rows.low, rows.high, color=LIGHT[color], alpha=0.15, lw=0)
        ax.plot(rows.slots, rows.predicted, dash, color=LIGHT[color], lw=1.8, label=f"{storage} predicted")
        ax.plot(rows.slots, rows.measured, "*", color=LIGHT[color], mfc="white", ms=11, label=f"{storage} measured")
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
    ax.legend(fontsize=FONT_PT, framealpha=0.85)
    return figure


def disk(probe) -> Picture:
    """Cold random reads of a probe: GB/s over block size, a line per number of reads under way."""
    table = probe.table("disk")
    if table.empty:
        raise SettingError("this probe has no disk rates; run `colibri probe --path DIR`")
    best = table.loc[table.bytes_per_s.idxmax()]
    how = ", ".join(sorted(table.how.unique()))
    verdict = (
        f"Best {best.bytes_per_s / 1e9:.2f} GB/s, {int(best.depth)} reads of {bytes_text(best.block_bytes)} under way; "
        f"reads were {how}; n = {int(table.n.min())} or more each."
    )
    figure, ax = _axes("Cold random reads", "size of one read", "GB/s", verdict)
    marks = ["o-", "s--", "^-.", "D:"]
    for mark, (depth, rows) in zip(marks * 4, table.groupby("depth"), strict=False):
        rows = rows.sort_values("block_bytes")
        ax.plot(rows.block_bytes, rows.bytes_per_s / 1e9, mark, color=LIGHT["hit"], alpha=0.35 + 0.65 / len(marks) * marks.index(mark),
                label=f"{depth} under way")  # fmt: skip
        ax.fill_between(rows.block_bytes, rows.low / 1e9, rows.high / 1e9, color=LIGHT["hit"], alpha=0.07, lw=0)
    ax.set_xscale("log", base=2)
    sizes = sorted(table.block_bytes.unique())
    ax.set_xticks(sizes, [format_size(size, binary=True) for size in sizes], fontsize=FONT_PT)
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
    ax.legend(fontsize=FONT_PT, framealpha=0.85)
    return figure


def comparison(found) -> Picture:
    """Every run of a comparison as a dot, side by side, with medians; the verdict underneath."""
    figure, ax = _axes("Runs in turn", "", found.metric, found.reason, (6.4, 3.4))
    rng = np.random.default_rng(0)
    colors = {"a": "hit", "b": "miss", "control": "kept"}
    for at, (side, rows) in enumerate(found.samples.groupby("side")):
        jitter = at + rng.uniform(-0.12, 0.12, len(rows))
        ax.plot(jitter, rows.value, "o", color=LIGHT[colors[side]], alpha=0.6, ms=5)
        ax.plot([at - 0.25, at + 0.25], [rows.value.median()] * 2, color=LIGHT[colors[side]], lw=2.5)
    groups = found.samples.groupby("side").size()
    names = {"a": "A", "b": "B", "control": "A again"}
    ax.set_xticks(
        range(len(groups)), [f"{names[side]}, n = {count}" for side, count in groups.items()], fontsize=FONT_PT
    )
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
    return figure
