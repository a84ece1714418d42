"""The kernel bench and its roofline: states, points, edits that are taken and edits that are not."""

from __future__ import annotations

import numpy as np
import pytest
from looking import together

from colibri_lab import kernels
from colibri_lab.errors import ColibriError, CompileError, SettingError
from colibri_lab.limits import Limits
from colibri_lab.timing import Sample, Timing
from colibri_lab.trial import Trial, workloads
from colibri_lab.ui.kernel_bench import kernel_bench
from colibri_lab.workloads import workload

EDIT = {"float inverse = 1.0f /": "const float inverse = 1.0f /"}


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    monkeypatch.setattr("colibri_lab.limits.READ_BYTES", 1 << 20)
    monkeypatch.setattr("colibri_lab.limits.ROUNDS", 1000)


@pytest.fixture
def bench():
    view = kernel_bench("norm", rounds=1)
    yield view
    assert view.wait(60)


def test_before_the_first_measurement_it_says_what_to_do(bench):
    assert bench.state == "empty" and len(bench.data) == 0
    assert "press Measure" in bench._verdict.value
    with pytest.raises(ColibriError, match=r"nothing to draw yet; press Measure or call measure\(\)"):
        bench.png()


def test_measuring_adds_points_and_draws_them(bench):
    rows = bench.measure(tokens=(1, 4))
    assert list(rows.case) == ["1 token", "4 tokens"]
    assert bench.state == "done" and bench.data.equals(rows)
    marks = bench._panels[0].spec["marks"]
    assert [m["text"] for m in marks] == ["1 token", "4 tokens", "chosen: 1 token"]
    assert [10 ** m["y"] for m in marks[:2]] == pytest.approx(list(rows.GOP_per_s))
    assert bench._panels[0].spec["log"] and "Of what the roof allows: 1 token at" in bench._verdict.value


def test_measuring_again_replaces_the_point_and_other_threads_have_their_own_picture(bench):
    bench.measure(tokens=2)
    bench.measure(tokens=2)
    assert len(bench.data) == 1
    bench.measure(tokens=2, threads=2)
    assert list(bench.data.threads) == [1, 2]
    assert "2 threads" in bench.png().axes[0].get_title(loc="left")


def test_an_edit_shows_old_and_new_and_a_verdict(bench):
    trial = bench.try_edit(EDIT, tokens=2)
    assert bench.trial is trial
    assert list(bench.data.version) == ["old", "new"]
    assert "the same bits" in bench._verdict.value
    old, new = (next(m for m in bench._panels[0].spec["marks"] if m["shape"] == shape) for shape in ("ring", "star"))
    assert [10 ** old["y"], 10 ** new["y"]] == pytest.approx(list(bench.data.GOP_per_s))
    assert {old["text"], new["text"]} == {"", "2 tokens"} and bench._panels[0].spec["note"] == "ring: old, star: new"


def chosen(bench) -> list[dict]:
    return [m for m in bench._panels[0].spec["marks"] if m["text"].startswith("chosen")]


def test_a_moved_control_shows_at_once_where_that_work_meets_the_roof(bench):
    bench.measure(tokens=(1, 8))
    bench.tokens.value = 64
    (mark,) = chosen(bench)
    work = workload("norm", tokens=64)
    assert mark["text"] == "chosen: 64 tokens" and mark["y"] is None
    assert 10 ** mark["x"] == pytest.approx(work.operations / work.bytes)
    assert len(bench.data) == 2  # looking is not measuring


def test_what_is_said_belongs_to_what_is_shown(bench):
    assert "press Try" in bench._verdict.value
    bench.measure(tokens=1)
    bench.threads.value = 2  # nothing was measured with two
    assert bench._panels[0].spec["empty"] and "Of what the roof allows" not in bench._verdict.value
    bench.threads.value = 1
    assert "Of what the roof allows: 1 token at" in bench._verdict.value and "press Try" not in bench._verdict.value


def test_controls_that_do_not_go_together_choose_nothing(bench):
    bench.measure(kernel="gemm", format="fp16", tokens=1)
    assert len(chosen(bench)) == 1
    bench.int8_activations.value = True
    assert chosen(bench) == [] and len(bench._panels[0].spec["marks"]) == 1


def test_formats_have_colours_and_points_their_tokens(bench):
    bench.measure(kernel="gemm", format="int8", tokens=(1, 8))
    assert [s["label"] for s in bench._panels[0].spec["series"][1:]] == []
    assert bench._panels[0].spec["title"] == "Roofline, int8, 1 thread"
    bench.measure(format="int4-g64", tokens=(1, 8))
    spec = bench._panels[0].spec
    colors = {s["label"]: s["color"] for s in spec["series"][1:]}
    assert list(colors) == ["int8", "int4-g64"] and spec["title"] == "Roofline, 1 thread"
    points = [m for m in spec["marks"] if m["y"] is not None]
    assert [m["text"] for m in points] == ["1 token", "1 token", "8 tokens", "8 tokens"]  # from left to right
    assert [m["color"] for m in points] == [colors["int8"], colors["int4-g64"]] * 2
    assert [m["above"] for m in points] == [False, True, False, True]


def test_the_bench_has_a_picture_where_there_is_no_canvas():
    view = kernel_bench("norm", rounds=1, live="png")
    before = bytes(view._panels[0].value)
    view.measure(tokens=1)
    assert before.startswith(b"\x89PNG") and bytes(view._panels[0].value) != before


def test_a_broken_edit_shows_its_place_and_changes_nothing(bench):
    bench.measure(tokens=2)
    before, picture = bench.data, bench._panels[0].data
    with pytest.raises(CompileError, match=r"^norm_core.hpp:\d+:\d+"):
        bench.try_edit({"float inverse = 1.0f /": "flat inverse = 1.0f /"})
    assert bench.state == "error" and "norm_core.hpp:" in bench._message.value
    assert "Nothing was changed" in bench._message.value
    assert bench.data.equals(before) and bench._panels[0].data == picture and bench.trial is None
    bench.measure(tokens=2)
    assert bench.state == "done" and bench.error is None and "Nothing was changed" not in bench._message.value


def test_buttons_work_in_the_background_and_show_errors(bench):
    bench.buttons["Measure"].click()
    assert bench.wait(60) and bench.state == "done" and len(bench.data) == 1
    bench.old.value, bench.new.value = "no such text", "x"
    bench.buttons["Try"].click()
    assert bench.wait(60) and bench.state == "error" and "is in none of" in bench._message.value
    assert not any(button.disabled for button in bench.buttons.values())


def test_threads_that_press_at_once_leave_whole_rows(bench):
    def press():
        for _ in range(3):
            bench.buttons["Measure"].click()
            bench.threads.value = 3 - bench.threads.value
            bench.wait(60)

    together(press, press)
    assert bench.wait(60) and bench.state == "done"
    assert set(bench.data.threads) <= {1, 2} and bench.data.notna().all().all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kernel": "storage"}, "kernel cannot be 'storage'"),
        ({"tokens": 3}, "tokens cannot be 3"),
        ({"format": "int9"}, "format cannot be 'int9'"),
        ({"colour": 1}, "no control 'colour'"),
    ],
)
def test_controls_and_values_that_do_not_exist_are_refused(options, says):
    with pytest.raises(SettingError, match=says):
        kernel_bench(**options)


def test_the_roofline_shows_measured_roofs_and_what_is_reached():
    def three(per):
        return Timing((Sample(per, 1.0),) * 3)

    limits = Limits(2, "any", three(1 / 20e9), three(1 / 100e9), three(1 / 400e9))
    works = workloads("gemm", format="int8", rows=16, cols=64, tokens=(1, 8))
    trial = Trial("gemm", "", [], works, [(three(2e-6), three(1e-6))] * 2, [0, 0], limits, (kernels, kernels))
    picture = trial.roofline()
    ax = picture.axes[0]
    texts = [text.get_text() for text in ax.texts]
    roofs = [text.get_text() for text in ax.get_legend().get_texts()]
    assert roofs == ["20.0 GB/s, then 100 GOP/s of float32"]  # no work here multiplies bytes
    assert {"1 token", "8 tokens"} <= set(texts) and "int8" in ax.get_title(loc="left")
    roof = ax.lines[0]
    at = 10 ** np.interp(np.log10([1.0, 100.0]), roof.get_xdata(), roof.get_ydata())
    assert at == pytest.approx([20, 100], rel=0.01)  # one operation per byte; and beyond the ridge at five
    assert "Of what the roof allows: int8, 1 token at" in picture._supxlabel.get_text()
