"""Pictures of memory show what the pool counts; the live map moves, ends and reports errors."""

from __future__ import annotations

import threading

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

import colibri_lab as cl
from colibri_lab.engine.memory import ARENAS, TAGS
from colibri_lab.errors import SettingError
from colibri_lab.tune.memory_plan import PARTS
from colibri_lab.ui import memory_plots
from colibri_lab.ui.memory_plots import (
    FADE,
    PART_COLORS,
    TAG_COLORS,
    arena_timeline,
    latency_picture,
    memory_map,
    plan_bar,
    pool_cells,
    pool_map,
    record_arenas,
)
from colibri_lab.ui.theme import LIGHT

PNG = b"\x89PNG"


@pytest.fixture
def lab():
    return cl.open("colibri-tiny", expert_cache_slots=2, max_seq_len=256, page_size=16)


def texts(picture) -> str:
    words = [t.get_text() for ax in picture.axes for t in (ax.title, ax._left_title, ax._right_title, *ax.texts)]
    words += [t.get_text() for legend in picture.legends for t in legend.get_texts()]
    return "\n".join(words)


def test_every_use_and_every_part_has_a_colour():
    assert set(TAG_COLORS) == set(TAGS) and set(PART_COLORS) == set(PARTS)


def test_a_cell_is_the_mean_of_its_blocks_and_pale_where_nothing_was_written(monkeypatch):
    monkeypatch.setattr(memory_plots, "COLUMNS", 2)
    monkeypatch.setattr(memory_plots, "ROWS", 2)
    kv, free = np.array(to_rgb(LIGHT["attention"])), np.array(to_rgb(LIGHT["absent"]))
    snapshot = np.array([2, 0, 2, 2, 0], np.uint8)  # KV, free, KV, KV, free: two blocks a cell
    cells, per_cell = pool_cells(snapshot, np.array([1, 0, 1, 0, 0], np.uint8))
    assert per_cell == 2 and cells.shape == (2, 2, 3)
    pale = FADE * kv + (1 - FADE) * free
    np.testing.assert_allclose(cells[0], [(kv + free) / 2, (kv + pale) / 2])
    np.testing.assert_allclose(cells[1], [free, [1, 1, 1]])
    np.testing.assert_allclose(pool_cells(snapshot)[0][0, 1], kv)


def test_the_map_names_every_use_with_its_bytes(lab):
    for step in lab.stream("def read_lines(path):", max_tokens=30, stop_at_eos=False):
        if step.index == 10:
            shown = texts(pool_map(lab))
    assert "expert slots 2.36 MB" in shown and "KV pages" in shown and "arenas" in shown and "free" in shown
    assert "KV pages" not in texts(pool_map(lab))
    assert pool_map(lab).png().startswith(PNG)


def test_the_timeline_shows_the_high_water_mark_of_each_arena(lab):
    samples = record_arenas(lab, "def read_lines(path):", max_tokens=3)
    assert set(samples) == set(ARENAS) and all(len(s) for s in samples.values())
    counts = lab.engine.request.arenas.counts()
    assert {name: s[:, 1].max() for name, s in samples.items()} == {name: c.high_water for name, c in counts.items()}
    shown = texts(arena_timeline(lab, samples))
    assert all(name in shown for name in ARENAS)
    lab.generate("more", max_tokens=2)
    assert not len(lab.engine.request.arenas.samples()["decode"])


def test_the_bars_end_at_the_totals(lab):
    shown = texts(plan_bar(lab))
    total = lab.plan["total_bytes"] / 1e6
    assert f"{total:.3g} MB" in shown and "expert slots 1.77 MB" in shown


def test_the_live_map_draws_while_a_run_lasts_and_says_what_it_saw(lab):
    view = memory_map(lab, max_tokens=40, temperature=0.0, stop_at_eos=False)
    view.interval_s = 0.01
    first = view._image.value
    run = view.run()
    assert len(run.tokens) == 40
    history = view.data["history"]
    assert len(history) >= 3 and history.kv.max() > 0 and history.kv.iloc[-1] == 0
    assert view._image.value != first
    parts = view.data["parts"].set_index("part")
    assert parts.planned.sum() == lab.plan["total_bytes"]
    assert (parts.most <= parts.planned).all() and (parts.now <= parts.most).all()


def test_start_runs_in_the_background_and_stop_ends_it(lab):
    view = memory_map(lab, max_tokens=200, stop_at_eos=False)
    view.start()
    view.start()
    assert sum(t.name == "colibri-memory" for t in threading.enumerate()) == 1
    view.stop()
    assert not any(t.name == "colibri-memory" for t in threading.enumerate())
    assert view.error is None and len(lab.last_run.tokens) < 200


def test_an_error_is_shown_and_the_next_run_works(lab):
    view = memory_map(lab)
    with pytest.raises(SettingError, match="max_tokens must be at least 1"):
        view.run(max_tokens=0)
    assert "colibri-error" in view._text.value and "max_tokens" in view._text.value
    view.run(max_tokens=2)
    assert "colibri-error" not in view._text.value


def test_latencies_are_drawn_for_every_size():
    rows = [("pool", b, o, 40.0, 50.0) for b in (4096, 65536) for o in (0.1, 0.9)]
    table = pd.DataFrame(rows, columns=["allocator", "bytes", "occupancy", "median_ns", "p99_ns"])
    picture = latency_picture(table)
    assert [ax.get_title() for ax in picture.axes] == ["4 KiB", "64 KiB"]
    with pytest.raises(SettingError, match="no latencies to draw"):
        latency_picture(table[:0])
