"""Pictures of number formats: weights and their errors, errors by layer and expert, scales, bytes against quality.

Matrices come from `Container` or as arrays, reports from `quality.quality_report`; nothing is measured here. Each picture has
one sentence underneath, made from its numbers.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap

from ..checkpoint.binfile import Tensor
from ..errors import SettingError
from .plots import Picture
from .theme import FONT_PT, LIGHT, bytes_text

_REDS = LinearSegmentedColormap.from_list("errors", ["#FFFFFF", LIGHT["miss"]])
BINS = 101


def _axes(title: str, xlabel: str, ylabel: str, verdict: str, size=(6.8, 3.7)):
    figure = Picture(size)
    ax = figure.add_subplot()
    ax.set_title(title, loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    ax.set_xlabel(xlabel, fontsize=FONT_PT)
    ax.set_ylabel(ylabel, fontsize=FONT_PT)
    ax.tick_params(labelsize=FONT_PT)
    ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(verdict, fontsize=FONT_PT, x=0.01, ha="left")
    return figure, ax


def weight_histogram(wanted: np.ndarray, found: np.ndarray, name: str = "weights") -> Picture:
    """How often each weight occurs, before (wanted) and after (found) rounding; arrays of one shape."""
    edges = np.linspace(min(wanted.min(), found.min()), max(wanted.max(), found.max()), BINS)
    zero, was = float((found == 0).mean()), float((wanted == 0).mean())
    said = f"{100 * zero:.1f} % of the weights are exactly 0 after rounding, {100 * was:.1f} % before."
    figure, ax = _axes(f"Weights of {name}", "weight", "weights per bin", said)
    ax.hist(wanted.ravel(), edges, color=LIGHT["resident"], label="before")
    ax.hist(found.ravel(), edges, histtype="step", color=LIGHT["miss"], lw=1.4, label="after")
    ax.set_yscale("log")
    ax.legend(fontsize=FONT_PT)
    return figure


def error_histogram(wanted: np.ndarray, found: np.ndarray, name: str = "weights") -> Picture:
    """Rounding errors, in units of the weights' own spread (their standard deviation)."""
    spread = float(wanted.std()) or 1.0
    error = (found.astype(np.float64) - wanted).ravel() / spread
    said = f"Root mean square {np.sqrt((error**2).mean()):.3f}, largest {np.abs(error).max():.3f} standard deviations."
    figure, ax = _axes(
        f"Rounding errors of {name}", "error / standard deviation of the weights", "weights per bin", said
    )
    ax.hist(error, BINS, color=LIGHT["miss"])
    return figure


def error_heat_map(report, matrix: str = "down", column: str = "output_error") -> Picture:
    """Layers × experts: the relative error of one matrix ("gate", "up" or "down") of every routed expert.

    column: "output_error", on the inputs that the expert met, or "weight_error". Raises `SettingError` for another.
    """
    if column not in ("output_error", "weight_error"):
        raise SettingError(f"column must be output_error or weight_error, got {column!r}")
    rows = report.matrices[(report.matrices.matrix == matrix) & report.matrices.expert.notna()]
    if rows.empty or rows[column].isna().all():
        raise SettingError(f"the report holds no {column} of expert matrices {matrix!r}; measure with weights=True")
    grid = rows.pivot(index="layer", columns="expert", values=column).astype(float)
    worst = rows.loc[rows[column].astype(float).idxmax()]
    said = (
        f"Median {rows[column].median():.4f}; worst {worst[column]:.4f}, expert {worst.expert} of layer {worst.layer}."
    )
    figure, ax = _axes(f"Relative {column.replace('_', ' ')} of {matrix}", "expert", "layer", said)
    image = ax.imshow(grid, cmap=_REDS, vmin=0, aspect="auto", interpolation="nearest")
    ax.set_yticks(range(len(grid)), grid.index)
    figure.colorbar(image, ax=ax).ax.tick_params(labelsize=FONT_PT)
    return figure


def channel_scales(tensor: Tensor) -> Picture:
    """The scale of every output channel of a quantised tensor, and for groups their spread within it.

    Raises `SettingError` for a tensor without scales.
    """
    if tensor.scale is None:
        raise SettingError(f"{tensor.name} is {tensor.format}, which has no scales")
    scale = tensor.encoded().scale * np.float32(tensor.factor)
    middle = np.median(scale, axis=1)
    ratio = scale.max() / scale[scale > 0].min()
    said = f"{scale.size} scales in {scale.shape[0]} channels; the largest is {ratio:.1f} times the smallest."
    figure, ax = _axes(f"Scales of {tensor.name} ({tensor.format})", "output channel", "scale", said)
    ax.plot(middle, ".", ms=3, color=LIGHT["hit"], label="median" if scale.shape[1] > 1 else "scale")
    if scale.shape[1] > 1:
        channel = np.arange(len(scale))
        ax.vlines(channel, scale.min(1), scale.max(1), color=LIGHT["sky"], lw=0.6, label="its groups")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=FONT_PT)
    return figure


NAMED = 12  # formats that have room for their names


def pareto(table: pd.DataFrame) -> Picture:
    """Bytes against bits per byte; the line joins what nothing smaller beats. `table`: format, bytes, bits_per_byte, one row
    each, and reference_bits_per_byte; `low` and `high`, where there are, bound bits_per_byte. Of many only those on the line
    are named."""
    best = front(table)
    reference = float(table.reference_bits_per_byte.iloc[0])
    at = best.iloc[-1]
    said = (
        f"{len(best)} of {len(table)} formats are on the line; the best of them, {at.format}, is "
        f"{100 * (at.bits_per_byte / reference - 1):+.2f} % from 16 bits in {bytes_text(at.bytes)}."
    )
    figure, ax = _axes("Bytes against quality", "MB of weights", "bits per byte", said, (7.2, 4.2))
    if "low" in table:
        bars = np.maximum([table.bits_per_byte - table.low, table.high - table.bits_per_byte], 0)
        ax.errorbar(table.bytes / 1e6, table.bits_per_byte, bars, fmt="none", ecolor=LIGHT["rule"], lw=1.2)
    ax.plot(best.bytes / 1e6, best.bits_per_byte, "-", color=LIGHT["hit"], lw=1.2)
    ax.plot(table.bytes / 1e6, table.bits_per_byte, "o", ms=4, color=LIGHT["hit"])
    many = len(table) > NAMED  # then only those on the line have room for a name
    for row in (_apart(best) if many else table).itertuples():
        ax.annotate(
            row.format, (row.bytes / 1e6, row.bits_per_byte), (4, 5), textcoords="offset points", fontsize=FONT_PT - 1,
            rotation=40 if many else 0, rotation_mode="anchor",
        )  # fmt: skip
    ax.axhline(reference, color=LIGHT["kept"], ls="--", lw=1)
    ax.annotate(
        "16 bits", (1, reference), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=FONT_PT
    )
    return figure


def _apart(best: pd.DataFrame) -> pd.DataFrame:
    """Of rows on the line that lie close to each other the best one."""
    room = 0.025 * np.ptp(best.bytes)
    return best[~(best.bytes.shift(-1) - best.bytes < room)]


def front(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `table` (bytes, bits_per_byte) that no row of as few bytes beats, smallest first."""
    ordered = table.sort_values(["bytes", "bits_per_byte"], ignore_index=True)
    best = ordered.bits_per_byte.cummin()
    return ordered[(ordered.bits_per_byte == best) & ~best.duplicated()].reset_index(drop=True)
