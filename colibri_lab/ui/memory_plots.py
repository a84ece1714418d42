"""Pictures of memory: what every block of the pool is for, the arenas over time, the plan beside what was measured.

`memory_map(lab)` shows the first of them live while the model generates.
"""

from __future__ import annotations

import html
import io
import threading
import time
from contextlib import closing, suppress

import ipywidgets as W
import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from PIL import Image  # matplotlib brings it

from ..engine.memory import ARENAS, BLOCK, TAGS
from ..errors import SettingError
from ..tune.memory_plan import PARTS
from ..units import format_size
from .plots import Picture
from .runner import Ticker
from .theme import CSS, FONT_PT, LIGHT

COLUMNS, ROWS = 128, 48  # most cells of a map; a cell then stands for several blocks
FADE = 0.3  # how much of its colour a block keeps that the system has not backed with memory yet
TAG_COLORS = {"slots": "hit", "kv": "attention", "arena": "prefetch", "rotary": "router", "other": "other"}
TAG_NAMES = {"slots": "expert slots", "kv": "KV pages", "arena": "arenas", "rotary": "rotary tables", "other": "other"}
PART_COLORS = {
    "dense_bytes": "kept", "embedding_bytes": "other", "router_bytes": "router", "slots_bytes": "hit",
    "transient_bytes": "sky", "kv_cache_bytes": "attention", "rotary_bytes": "head", "scratch_bytes": "prefetch",
    "loader_bytes": "miss", "tokenizer_bytes": "shared",
}  # fmt: skip
ARENA_COLORS = dict(zip(ARENAS, ("attention", "hit", "router", "prefetch"), strict=True))


def pool_map(lab, size: tuple[float, float] = (8.4, 3.4)) -> Picture:
    """Every block of the pool by what it is for, lowest address at the top left; pale where nothing was written yet."""
    pool = lab.engine.pool
    cells, per_cell = pool_cells(pool.snapshot(), pool.touched())
    counts = pool.counts()
    fig = Picture(size)
    ax = fig.add_subplot()
    ax.imshow(cells, interpolation="nearest", aspect="auto")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title("Memory pool", loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    note = f"{pool}; a cell is {format_size(per_cell * BLOCK, binary=True)}; pale: reserved, not touched"
    ax.set_title(note, loc="right", fontsize=FONT_PT)
    used = {tag: counts["used_by_tag"][tag] for tag in TAGS if counts["used_by_tag"][tag]}
    handles = [
        Patch(color=LIGHT[TAG_COLORS[tag]], label=f"{TAG_NAMES[tag]} {format_size(n)}") for tag, n in used.items()
    ]
    handles.append(
        Patch(facecolor=LIGHT["absent"], edgecolor=LIGHT["rule"], label=f"free {format_size(counts['free_bytes'])}")
    )
    fig.legend(handles=handles, fontsize=FONT_PT, ncols=5, loc="outside lower center", frameon=False, columnspacing=1.2)
    return fig


def pool_cells(snapshot: np.ndarray, touched: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """(cells as RGB float (rows, columns, 3), blocks in a cell): each the mean colour of its blocks.

    snapshot, touched: uint8 (blocks,) as `MemoryPool.snapshot` and `touched` give them; without the latter nothing is
    pale.
    """
    colors = np.array([to_rgb(LIGHT["absent"])] + [to_rgb(LIGHT[TAG_COLORS[tag]]) for tag in TAGS])
    blocks = colors[snapshot]
    if touched is not None:
        pale = (snapshot > 0) & (touched == 0)
        blocks[pale] = FADE * blocks[pale] + (1 - FADE) * colors[0]
    per_cell = -(-len(snapshot) // (COLUMNS * ROWS))
    columns = min(COLUMNS, -(-len(snapshot) // per_cell))
    rows = -(-len(snapshot) // (per_cell * columns))
    room = np.full((rows * columns * per_cell, 3), np.nan)
    room[: len(blocks)] = blocks
    inside = ~np.isnan(room[:, 0]).reshape(rows, columns, per_cell)
    cells = np.nansum(room.reshape(rows, columns, per_cell, 3), axis=2) / np.maximum(inside.sum(axis=2), 1)[..., None]
    cells[~inside.any(axis=2)] = 1.0  # behind the end: white
    return cells, per_cell


def record_arenas(lab, prompt: str, samples: int = 20_000, **generate) -> dict[str, np.ndarray]:
    """Generate, and return the bytes in use of each arena over time: int64 (n, 2) of nanoseconds and bytes, by
    arena."""
    arenas = lab.engine.request.arenas
    arenas.record(samples)
    try:
        lab.generate(prompt, **generate)
        return arenas.samples()
    finally:
        arenas.record(0)


def arena_timeline(lab, samples: dict[str, np.ndarray], size: tuple[float, float] = (8.4, 4.6)) -> Picture:
    """Bytes in use of the four arenas over a run recorded by `record_arenas`, with high-water mark and reserve."""
    counts = lab.engine.request.arenas.counts()
    start = min((s[0, 0] for s in samples.values() if len(s)), default=0)
    fig = Picture(size)
    axes = fig.subplots(len(ARENAS), 1, sharex=True)
    for ax, name in zip(axes, ARENAS, strict=True):
        taken, c = samples[name], counts[name]
        color = LIGHT[ARENA_COLORS[name]]
        ax.fill_between((taken[:, 0] - start) / 1e6, taken[:, 1] / 1e3, step="post", color=color, alpha=0.75, lw=0.5)
        ax.axhline(c.high_water / 1e3, color=LIGHT["ink"], lw=1, ls="--")
        ax.set_ylim(0, max(1.15 * c.high_water / 1e3, 1e-3))
        ax.set_title(name, loc="left", fontsize=FONT_PT, fontweight="bold")
        grown = f", grown {c.growths} times" if c.growths else ""
        note = f"high-water mark (dashed) {format_size(c.high_water)}, reserved {format_size(c.capacity)}{grown}"
        ax.set_title(note, loc="right", fontsize=FONT_PT)
        ax.set_ylabel("kB", fontsize=FONT_PT)
        ax.tick_params(labelsize=FONT_PT)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms since the run began", fontsize=FONT_PT)
    return fig


def plan_bar(lab, size: tuple[float, float] = (8.4, 2.9)) -> Picture:
    """The memory plan beside what is allocated now and what was at most, by part."""
    rows = {"planned": lab.plan, "at most so far": lab.memory(peak=True), "now": lab.memory()}
    fig = Picture(size)
    ax = fig.add_subplot()
    left = np.zeros(len(rows))
    for part, what in PARTS.items():
        sizes = np.array([row[part] for row in rows.values()]) / 1e6
        if sizes.any():
            label = f"{what.split(',')[0]} {format_size(lab.plan[part])}"
            ax.barh(
                list(rows), sizes, left=left, color=LIGHT[PART_COLORS[part]], edgecolor="white", lw=0.6, label=label
            )
            left += sizes
    for y, (row, end) in enumerate(zip(rows.values(), left, strict=True)):
        ax.text(end, y, f" {format_size(row['total_bytes'])}", va="center", fontsize=FONT_PT)
    ax.set_xlim(0, 1.14 * left.max())
    ax.invert_yaxis()
    ax.set_title("Memory by part", loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    ax.set_xlabel("MB (10^6 bytes)", fontsize=FONT_PT)
    ax.tick_params(labelsize=FONT_PT)
    ax.spines[["top", "right"]].set_visible(False)
    fig.legend(
        fontsize=FONT_PT, ncols=3, loc="outside lower center", frameon=False, columnspacing=1.2, handlelength=1.2
    )
    return fig


def memory_map(lab, prompt: str = "def read_lines(path):", **generate) -> MemoryMap:
    """A live map of the pool: press Start, or call `run`. `generate` are settings of scope "generate"."""
    return MemoryMap(lab, prompt, **generate)


class MemoryMap(W.VBox):
    """See `memory_map`. Naming it in a cell shows it; `data` is what it shows, as tables."""

    interval_s = 0.1

    def __init__(self, lab, prompt: str, **generate):
        self.lab, self.prompt, self.generate = lab, prompt, generate
        self.error: BaseException | None = None
        self._history: list[dict] = []
        self._lock = threading.Lock()  # over the worker; never held while the engine computes
        self._worker: threading.Thread | None = None
        self._cancel = threading.Event()
        self._image = W.Image(format="png", layout=W.Layout(width="100%", max_width="840px"))
        self._text = W.HTML()
        self._start = W.Button(description="Start", tooltip="generate, and watch the pool")
        self._stop = W.Button(description="Stop", tooltip="end after the current token")
        self._start.on_click(self.start)
        self._stop.on_click(self.stop)
        super().__init__([W.HTML(CSS), W.HBox([self._start, self._stop]), self._image, self._text])
        self.add_class("colibri")
        self.paint()

    def run(self, prompt: str | None = None, **generate):
        """Generate in this thread while the map moves; the run. Raises what the engine raises."""
        self._cancel.clear()
        return self._run(self.prompt if prompt is None else prompt, {**self.generate, **generate})

    def start(self, _=None) -> None:
        """Generate in the background; nothing happens while a run started here lasts."""
        with self._lock:
            if self._worker is None or not self._worker.is_alive():
                self._cancel.clear()
                self._worker = threading.Thread(target=self._serve, name="colibri-memory", daemon=True)
                self._worker.start()

    def stop(self, _=None) -> None:
        """End the run after its current token, and wait for a run in the background to have ended."""
        self._cancel.set()
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.join()

    def paint(self) -> None:
        """Draw the pool as it is now."""
        engine = self.lab.engine
        if engine is None:  # being opened anew with other settings
            return
        cells, per_cell = pool_cells(engine.pool.snapshot(), engine.pool.touched())
        self._image.value = _png(cells)
        used = engine.pool.counts()["used_by_tag"]
        self._history.append({"time_s": time.perf_counter(), **used})
        legend = "".join(
            f'<span style="color: {LIGHT[TAG_COLORS[tag]]}">■</span> {TAG_NAMES[tag]} {format_size(size)} &ensp;'
            for tag, size in used.items() if size
        )  # fmt: skip
        now, plan, kv = self.lab.memory()["total_bytes"], self.lab.plan["total_bytes"], engine.kv
        words = (
            f"{engine.pool}, a cell is {format_size(per_cell * BLOCK, binary=True)}, pale: not touched yet; {kv.pages_used} KV "
            f"pages hold {kv.length} positions; {format_size(now)} allocated of {format_size(plan)} planned"
        )
        fault = f'<p class="colibri-error">{html.escape(str(self.error))}</p>' if self.error else ""
        self._text.value = f"{fault}<p>{legend}</p><p>{html.escape(words)}</p>"

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`parts`: bytes planned, at most and now, a row per part. `history`: bytes by use at each picture so far."""
        columns = {"planned": self.lab.plan, "most": self.lab.memory(peak=True), "now": self.lab.memory()}
        parts = pd.DataFrame({name: [row[part] for part in PARTS] for name, row in columns.items()}, index=list(PARTS))
        return {"parts": parts.rename_axis("part").reset_index(), "history": pd.DataFrame(self._history)}

    def _run(self, prompt: str, generate: dict):
        self.error = None
        try:
            with Ticker(self.paint, self.interval_s), closing(self.lab.stream(prompt, **generate)) as steps:
                for _ in steps:
                    if self._cancel.is_set():
                        break
            return self.lab.last_run
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.paint()

    def _serve(self) -> None:
        with suppress(Exception):  # `paint` has shown it
            self._run(self.prompt, self.generate)


def _png(cells: np.ndarray, zoom: int = 6) -> bytes:
    """Cells as a PNG, each `zoom` pixels wide and high: a hundred times faster than a figure."""
    pixels = (255 * cells).round().astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="png", compress_level=1)
    return out.getvalue()


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
