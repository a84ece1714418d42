from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.text import Text

from colibri_lab.telemetry import step_table
from colibri_lab.ui import frames, plots
from colibri_lab.ui.theme import LIGHT

PNG = b"\x89PNG\r\n\x1a\n"
OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}


@pytest.fixture
def runs(monitor):
    return monitor.run_once(slots=16), monitor.run_once(slots=6)


def words(picture) -> list[str]:
    return [t.get_text() for t in picture.findobj(Text) if t.get_text().strip()]


def test_every_axis_has_its_unit(runs):
    run, kept = runs
    labels = [
        (ax.get_xlabel(), ax.get_ylabel())
        for make in (plots.hit_rate, plots.stage_latency, plots.stage_share)
        for ax in make(run, kept).axes
    ]
    assert labels == [
        ("decoded token", "% of accesses"),
        ("decoded token", "ms per token"),
        ("% of decode wall time", ""),
    ]


def test_nothing_is_smaller_than_nine_points(runs, lab):
    run, kept = runs
    for picture in (plots.run_summary(run, kept), plots.pipeline(lab.config)):
        assert min(t.get_fontsize() for t in picture.findobj(Text) if t.get_text().strip()) >= 9


def test_summary_has_four_panels_and_the_names_of_both_runs(runs):
    run, kept = runs
    picture = plots.run_summary(run, kept)
    assert len(picture.axes) == 4
    text = " ".join(words(picture))
    for part in ("16 slots, lru", "kept: 6 slots, lru", "expert load wait", "resident", "missed, read now"):
        assert part in text


def test_a_table_alone_makes_the_pictures_too(runs):
    table = step_table(runs[0].steps)
    assert plots.hit_rate(table).png().startswith(PNG)
    assert "residency was not recorded" in words(plots.run_summary(table))


def test_kept_run_is_dashed_not_only_grey(runs):
    lines = plots.hit_rate(*runs).axes[0].lines
    kept = next(line for line in lines if line.get_label().startswith("kept"))
    now = next(line for line in lines if line.get_label().startswith("16 slots"))
    assert kept.is_dashed() and not now.is_dashed()


def test_missed_cells_carry_a_cross(lab):
    history = [np.array([[0, 1, 1]]), np.array([[2, 1, 2]])]
    crosses = plots.residency(history, layers=(5,)).axes[0].lines[0]
    assert crosses.get_marker() == "x"
    assert crosses.get_xydata().tolist() == [[0.5, 0.5]]


def test_pictures_show_themselves_and_are_opaque(runs):
    picture = plots.stage_share(runs[0])
    assert picture._repr_png_().startswith(PNG)
    assert picture.get_facecolor() == (1, 1, 1, 1)


@pytest.mark.parametrize("slots", [None, 1, 2, 4, 8, 32, 99])
def test_pipeline_tells_the_models_own_numbers(lab, slots):
    text = " ".join(words(plots.pipeline(lab.config, slots)))
    for part in ("4 experts", "scores all 32", "192 values", "one MoE layer, 6 times", "1 more with one dense block"):
        assert part in text
    assert f"{min(slots or 16, 32)} slots a layer" in text


def test_pipeline_of_a_model_without_dense_layers_or_shared_experts(lab):
    config = dataclasses.replace(lab.config, ffn=("moe",) * 7, shared="none", top_k=1, num_experts=3)
    text = " ".join(words(plots.pipeline(config)))
    assert "dense" not in text and "shared" not in text and "by weight" in text


def test_main_colours_are_okabe_and_itos():
    for name in ("hit", "miss", "attention", "router", "prefetch", "head", "sky", "oracle"):
        assert LIGHT[name] in OKABE_ITO


def test_views_do_not_touch_pyplot():
    code = "import sys, colibri_lab.ui; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_lines_stand_where_they_say_and_marks_are_drawn():
    marks = (frames.Mark(16, 3.0, "16 slots", "hit", "star"), frames.Mark(4, text="one token"))
    values = np.array([[1, 2, 3]], np.float32)
    frame = frames.Frame(
        "lines", "t", "x", "y", values, (frames.Series("a", "hit"),), (0, 20), (0, 4), x=(1, 4, 16), marks=marks
    )
    picture = plots.picture(frame)
    line, star, upright = picture.axes[0].lines
    assert line.get_xdata().tolist() == [1, 4, 16]
    assert star.get_xydata().tolist() == [[16, 3]] and star.get_marker() == "*"
    assert upright.get_xdata() == [4, 4] and upright.get_linestyle() == ":"
    assert {"16 slots", "one token"} <= set(words(picture))


def test_rows_of_a_tall_grid_are_named_now_and_then():
    grid = np.zeros((1, 48, 8), np.uint8)
    ax = plots.picture(frames.residency(grid, layers=range(48))).axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == [str(n) for n in range(0, 48, 3)]
