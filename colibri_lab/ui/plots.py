"""Static pictures of a run: the frames of frames.py drawn by matplotlib, and the pipeline as a drawing.

Every function takes a run (`Lab.generate`, a monitor's run) or its step table and returns a `Picture`: a matplotlib
figure on the Agg canvas that shows itself in a notebook. pyplot is not used, so any thread may call these.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from . import frames
from .frames import Frame
from .theme import FONT_PT, LIGHT

MISS_MARK = 5  # points, the cross on a missed cell


class Picture(Figure):
    """A figure that is its own PNG; `savefig` and the axes are matplotlib's."""

    def __init__(self, size: tuple[float, float], **kwargs):
        super().__init__(figsize=size, dpi=100, layout="constrained", facecolor="white", **kwargs)
        FigureCanvasAgg(self)

    def png(self) -> bytes:
        """The picture as PNG bytes."""
        out = io.BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def hit_rate(run, baseline=None) -> Picture:
    """Hit rate of the expert cache per decoded token, % of accesses; `baseline` is drawn in grey and dashed."""
    return picture(frames.hit_rate(run, baseline))


def stage_latency(run, baseline=None) -> Picture:
    """Wall time per decoded token in ms, stacked by stage; `baseline` only widens the axis, so two pictures compare."""
    return picture(frames.stage_latency(run, baseline))


def stage_share(run, baseline=None) -> Picture:
    """Share of decode wall time by stage in %; `baseline` is a tick on each bar."""
    return picture(frames.stage_share(run, baseline))


def residency(array, layers=()) -> Picture:
    """Layers × experts: in memory, used, missed. `array` as `Lab.residency()`, or a sequence of them over steps.

    `layers` names the rows. Raises ValueError for another number of dimensions.
    """
    return picture(frames.residency(array, layers=layers))


def run_summary(run, baseline=None) -> Picture:
    """The four panels of the run monitor in one picture. Without a residency history the fourth stays empty."""
    history = getattr(run, "residency", None) or []
    if len(history):
        last = frames.residency(history, layers=getattr(run, "layers", ()))
    else:
        last = None
    fig = Picture((9.6, 6.4))
    grid = fig.add_gridspec(2, 2, width_ratios=(1.2, 1))
    draw(fig.add_subplot(grid[0, 0]), frames.hit_rate(run, baseline))
    draw(fig.add_subplot(grid[1, 0]), frames.stage_latency(run, baseline))
    draw(fig.add_subplot(grid[1, 1]), frames.stage_share(run, baseline))
    corner = fig.add_subplot(grid[0, 1])
    if last is None:
        corner.set_axis_off()
        corner.text(0.5, 0.5, "residency was not recorded", ha="center", va="center", fontsize=FONT_PT)
    else:
        draw(corner, last)
    return fig


def picture(frame: Frame, size: tuple[float, float] = (6.4, 3.2)) -> Picture:
    """One frame as a picture of `size` inches."""
    fig = Picture(size)
    draw(fig.add_subplot(), frame)
    return fig


def page(
    shown: Sequence[Frame],
    said: Iterable[str],
    path: str | Path | None = None,
    title: str = "",
    left_column: float = 1.2,
) -> Picture:
    """Four frames in two columns, the sentences below them, written to `path` if given."""
    figure = Picture((10.4, 7.0))
    for axes, frame in zip(figure.subplots(2, 2, width_ratios=(left_column, 1)).flat, shown, strict=True):
        draw(axes, frame)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.supxlabel("\n".join(part for s in said if s for part in wrap(s, 150)), x=0.01, ha="left", fontsize=9)
    if path is not None:
        figure.savefig(path)
    return figure


def draw(ax, frame: Frame) -> None:
    """Draw `frame` into matplotlib axes."""
    ax.set_title(frame.title, loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    if frame.note:
        ax.set_title(frame.note, loc="right", fontsize=FONT_PT)
    ax.set_xlabel(frame.xlabel, fontsize=FONT_PT)
    ax.set_ylabel(frame.ylabel, fontsize=FONT_PT)
    ax.tick_params(labelsize=FONT_PT)
    ax.spines[["top", "right"]].set_visible(False)
    {"lines": _lines, "stack": _stack, "bars": _bars, "columns": _columns, "grid": _grid}[frame.kind](ax, frame)
    if frame.cursor is not None:
        ax.axvline(frame.cursor, color=LIGHT["ink"], lw=1, ls=":")
    if frame.empty:
        ax.text(0.5, 0.5, frame.empty, transform=ax.transAxes, ha="center", va="center", fontsize=FONT_PT)


def _lines(ax, frame: Frame) -> None:
    ax.set(xlim=frame.xlim, ylim=frame.ylim)
    ax.grid(axis="y", color=LIGHT["rule"], lw=0.7)
    ax.set_axisbelow(True)
    for row, s in zip(frame.values, frame.series, strict=True):
        style = (0, tuple(0.7 * d for d in s.dash)) if s.dash else "-"
        ax.plot(
            frame.x or frame.stride * np.arange(len(row)),
            row,
            color=LIGHT[s.color],
            lw=s.width,
            ls=style,
            alpha=s.alpha,
            label=s.label or "_",
        )
    for mark in frame.marks:
        _mark(ax, mark)
    if frame.log:
        _name_powers(ax.xaxis, frame.xlim)
        _name_powers(ax.yaxis, frame.ylim)
    if any(s.label for s in frame.series):
        ax.legend(fontsize=FONT_PT, loc="best", framealpha=0.85, handlelength=2.6)


def _name_powers(axis, limits: tuple[float, float]) -> None:
    """1, 2 and 5 times each power of ten between two exponents."""
    exponents = np.arange(np.floor(limits[0]), np.ceil(limits[1]) + 1)
    at = [k + e for k in exponents for e in np.log10((1, 2, 5)) if limits[0] <= k + e <= limits[1]]
    axis.set_ticks(at, [f"{round(10**v, 9):g}" for v in at])


def _mark(ax, mark: frames.Mark) -> None:
    (start, end), color = ax.get_xlim(), LIGHT[mark.color]
    left = mark.x > start + 0.72 * (end - start)
    if mark.y is None:
        ax.axvline(mark.x, color=color, lw=1, ls=":")
    else:
        look, size = {"dot": ("o", 6 if mark.text else 3), "star": ("*", 11), "ring": ("o", 14)}[mark.shape]
        ax.plot(mark.x, mark.y, look, color=color, ms=size, zorder=4, mew=2 if mark.shape == "ring" else None,
                mfc="none" if mark.shape == "ring" else color)  # fmt: skip
    if mark.text:
        at = (mark.x, 1) if mark.y is None else (mark.x, mark.y)
        ax.annotate(mark.text, at, (-6 if left else 6, 5 if mark.above else -12), xycoords=("data", "axes fraction" if mark.y is None else "data"),
                    textcoords="offset points", ha="right" if left else "left", fontsize=FONT_PT,
                    color=LIGHT["ink"] if mark.y is None else color,
                    bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5})  # fmt: skip


def _stack(ax, frame: Frame) -> None:
    ax.set(xlim=frame.xlim, ylim=frame.ylim)
    count = frame.values.shape[1]
    if not count:
        return
    colors = [LIGHT[s.color] for s in frame.series]
    x = frame.stride * np.arange(max(count, 2))
    ax.stackplot(x, np.repeat(frame.values, 2, axis=1) if count == 1 else frame.values, colors=colors, lw=0)
    tops = np.cumsum(frame.values, axis=0)
    reach = max(1, int(0.3 * (frame.xlim[1] - frame.xlim[0]) / frame.stride))
    for s, low, high in zip(frame.series, np.vstack([np.zeros_like(tops[:1]), tops[:-1]]), tops, strict=True):
        bottom, top = low[:reach].max(), high[:reach].min()
        if top - bottom > 0.08 * frame.ylim[1] and count >= reach:
            box = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1}
            ax.text(frame.xlim[1] * 0.015, (bottom + top) / 2, s.label, fontsize=FONT_PT, va="center", bbox=box)


def _bars(ax, frame: Frame) -> None:
    values = np.nan_to_num(frame.values[:, 0])
    ax.barh(np.arange(len(values)), values, color=[LIGHT[s.color] for s in frame.series], height=0.75)
    ax.set(xlim=(0, frame.xlim[1] * 1.35), ylim=(-0.6, len(values) - 0.4))
    ax.set_xticks([t for t in ax.get_xticks() if t <= frame.xlim[1]])
    ax.set_yticks(np.arange(len(values)), [s.label for s in frame.series])
    ends = np.fmax(values, frame.values[:, 1])
    for y, (x, kept, text) in enumerate(zip(ends, frame.values[:, 1], frame.texts or [""] * len(values), strict=True)):
        if np.isfinite(kept):
            ax.plot([kept, kept], [y - 0.45, y + 0.45], color=LIGHT["ink"], lw=1.6)
        ax.text(x + 0.012 * ax.get_xlim()[1], y, text, va="center", fontsize=FONT_PT)


def _columns(ax, frame: Frame) -> None:
    heights, which, ticks = frame.values
    ax.set(xlim=frame.xlim, ylim=frame.ylim)
    ax.grid(axis="y", color=LIGHT["rule"], lw=0.7)
    ax.set_axisbelow(True)
    at = np.arange(len(heights))
    ax.bar(at, heights, 0.8, color=[LIGHT[frame.series[int(i)].color] for i in which])
    ax.hlines(ticks, at - 0.5, at + 0.5, color=LIGHT["ink"], lw=1.6)
    ax.axhline(0, color=LIGHT["ink"], lw=0.6)
    if frame.level is not None:
        ax.axhline(frame.level, color=LIGHT["ink"], lw=1, ls=":")
    for x, text, top in zip(at, frame.texts, np.fmax(np.fmax(heights, ticks), 0), strict=False):
        if text:
            ax.annotate(text, (x, top), (0, 2), textcoords="offset points", fontsize=FONT_PT, ha="center")
    named = [s for s in frame.series if s.label]
    handles = [
        Line2D([], [], color=LIGHT[s.color], lw=1.6) if s.dash else Rectangle((0, 0), 1, 1, color=LIGHT[s.color])
        for s in named
    ]
    if handles:
        labels = [s.label for s in named]
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0, "borderpad": 0.1}
        ax.legend(handles, labels, fontsize=FONT_PT, ncols=len(named), frameon=False, handlelength=1, **place)


def _grid(ax, frame: Frame) -> None:
    states = frame.values[0]
    colors = [LIGHT["absent"]] + [LIGHT[s.color] for s in frame.series]
    layers, experts = states.shape
    ax.pcolormesh(states, cmap=ListedColormap(colors), vmin=-0.5, vmax=len(colors) - 0.5, edgecolors="white",
                  lw=0 if experts > 80 else 0.6)  # fmt: skip
    rows, columns = np.nonzero(states == frames.MISSED)
    size = min(MISS_MARK, 250 / experts)
    ax.plot(columns + 0.5, rows + 0.5, "x", color="white", ms=size, mew=size / 4)
    ax.set(xlim=(0, experts), ylim=(layers, 0))
    step = -(-layers // 16)
    ax.set_yticks(np.arange(0, layers, step) + 0.5, frame.rows[::step])
    step = max(1, experts // 8)
    ax.set_xticks(np.arange(0, experts, step) + 0.5, [str(e) for e in range(0, experts, step)])
    handles = [Rectangle((0, 0), 1, 1, color=LIGHT[s.color]) for s in frame.series]
    names = [s.label + (" (×)" if s.color == "miss" else "") for s in frame.series]
    ax.legend(
        handles,
        names,
        fontsize=FONT_PT,
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        frameon=False,
        handlelength=1,
        columnspacing=1.2,
    )


def pipeline(config, slots: int | None = None) -> Picture:
    """How one token goes through a mixture-of-experts model whose experts live in files; numbers from a `ModelConfig`.

    `slots` draws that many cache slots (4 × top-k if None), as `cl.open(…, expert_cache_slots=slots)` has per layer.
    """
    count = config.num_experts
    slots = min(slots or 4 * config.top_k, count)
    fig = Picture((9.6, 3.9))
    ax = fig.add_subplot()
    ax.set(xlim=(0, 96), ylim=(0, 39))
    ax.set_axis_off()
    moe = len(config.moe_layers)
    dense = config.num_layers - moe
    tail = f" ({dense} more with one dense block instead of experts)" if dense else ""
    frame = FancyBboxPatch((19.5, 1.5), 63, 36, boxstyle="round,pad=0,rounding_size=1.5", fc="#F7F7F7", ec="#BBBBBB")
    ax.add_patch(frame)
    ax.text(21, 35.3, f"one MoE layer, {moe} times{tail}", fontsize=FONT_PT, color="#444444", va="center")

    shared = "+ shared expert" if config.shared != "none" else "by weight"
    boxes = (
        (0.5, 7, "token", "its id", "other"),
        (9.5, 8.5, "embed", f"{config.hidden_size} values", "other"),
        (21, 13, "attention", "+ KV cache", "attention"),
        (37, 13, "router", f"scores all {count}", "router"),
        (53, 12, f"{config.top_k} experts", "run", "hit"),
        (68.5, 12.8, "weighted sum", shared, "shared"),
        (84.7, 10.5, "head", "→ next token", "head"),
    )
    for left, width, *text in boxes:
        _box(ax, left, 28, width, *text)
    for (left, width, *_), (right, *_) in zip(boxes, boxes[1:], strict=False):
        _arrow(ax, (left + width, 28), (right, 28))

    chosen = np.linspace(1, count - 2, config.top_k).round().astype(int).tolist()
    missed, hits = chosen[-1], chosen[:-1][: slots - 1]
    spare = [e for e in range(count) if e not in chosen]
    others = spare[:: max(1, len(spare) // slots)][: slots - 1 - len(hits)]
    held = [*sorted(hits + others), missed]

    file_at, file_width = 24.0, 54 / count
    for e in range(count):
        color = "miss" if e == missed else "resident" if e in held else "absent"
        ax.add_patch(
            Rectangle((file_at + e * file_width, 4.6), 0.86 * file_width, 3.4, fc=LIGHT[color], ec="#999999", lw=0.5)
        )
    ax.text(file_at, 3, f"expert files on disk, {count} a layer", fontsize=FONT_PT, va="center")

    slot_width = min(42 / slots, 4.0)
    slot_at = 36.0
    for i, expert in enumerate(held):
        color = "miss" if expert == missed else "hit" if expert in hits else "resident"
        left = slot_at + i * slot_width
        ax.add_patch(Rectangle((left, 14.5), 0.9 * slot_width, 4, fc=LIGHT[color], ec="#666666", lw=0.7))
        if slot_width > 2.2:
            ink = "black" if color == "resident" else "white"
            ax.text(left + 0.45 * slot_width, 16.5, str(expert), fontsize=FONT_PT, color=ink, ha="center", va="center")
    ax.text(slot_at - 1, 16.5, f"expert cache:\n{slots} slots a layer", fontsize=FONT_PT, ha="right", va="center")

    _arrow(ax, (43.5, 24.2), (43.5, 18.9), "router", "which experts?", (42.8, 21.4), "right")
    _arrow(ax, (59, 18.9), (59, 24.2), "hit", "hit: used at once", (59.7, 21.4))
    miss_at = file_at + (missed + 0.43) * file_width
    slot_end = slot_at + (len(held) - 0.55) * slot_width
    _arrow(
        ax,
        (miss_at, 8.2),
        (slot_end, 14.2),
        "miss",
        "miss: wait for the file",
        ((miss_at + slot_end) / 2 - 2, 11),
        "right",
    )
    return fig


def _box(ax, x, y, width, name, detail, color) -> None:
    ax.add_patch(
        FancyBboxPatch(
            (x, y - 3.6), width, 7.2, boxstyle="round,pad=0,rounding_size=0.9", fc="white", ec=LIGHT[color], lw=2
        )
    )
    ax.text(x + width / 2, y + 1.2, name, fontsize=FONT_PT + 1, fontweight="bold", ha="center", va="center")
    ax.text(x + width / 2, y - 1.6, detail, fontsize=FONT_PT, ha="center", va="center")


def _arrow(ax, start, end, color="ink", text="", at=(0, 0), align="left") -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, lw=1.6, color=LIGHT[color]))
    if text:
        ax.text(*at, text, fontsize=FONT_PT, color=LIGHT["ink"], va="center", ha=align)
