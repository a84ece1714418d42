"""Bytes against quality and one matrix in few bits: what the views show, and how they behave when hurried."""

from __future__ import annotations

import numpy as np
import pytest
from looking import together, values_of
from traitlets import TraitError

import colibri_lab as cl
from colibri_lab import rounding
from colibri_lab.errors import ColibriError, StorageError
from colibri_lab.ui import matrix_explorer, quality_explorer
from colibri_lab.ui import quality_frames as frames

TEXTS = {
    "code": ["def read_lines(path):\n    return open(path).read()"],
    "german": ["Der Speicher ist voll, weil er klein ist."],
}


@pytest.fixture(scope="module")
def survey():
    survey = rounding.Survey(cl.open("data/colibri-tiny", expert_cache_slots=32), TEXTS)
    survey.measure("int8", quantize="int8")
    survey.measure("int4-g64", quantize="int4-g64")
    return survey


@pytest.fixture
def view(survey):
    view = quality_explorer(survey)
    yield view
    view.close()


@pytest.fixture
def one():
    return matrix_explorer(np.random.default_rng(0).normal(size=(32, 192)))


def said(view) -> str:
    return view._verdict.value


def test_it_begins_with_the_last_copy_and_says_what_it_costs(view, survey):
    assert view.state == "ready" and view.row is survey.rows["int4-g64"]
    assert "instead of 34.5 MB" in said(view) and "mnat per token" in said(view)
    assert "4.38 bits per weight; a slot takes 41 kB" in view._cost.value
    stars = [mark for mark in view._panels[0].spec["marks"] if mark["shape"] == "star"]
    assert [(s["text"], s["x"]) for s in stars] == [("int4-g64", pytest.approx(view.row.total_bytes / 1e6))]
    assert values_of(view._panels[1])[::-1, 0] == pytest.approx(list(view.row.by_domain().values()))
    assert (values_of(view._panels[3])[0] == 2).all()  # every expert is off by 2 to 10 %


def test_a_survey_without_copies_says_what_to_do():
    bare = rounding.Survey(cl.open("data/colibri-tiny", expert_cache_slots=32), {"code": ["import os"]})
    view = quality_explorer(bare)
    assert view._panels[0].spec["empty"] == "nothing measured yet: choose a format" and "Choose another format" in said(
        view
    )
    assert len(view.data["copies"]) == 1 and view.png().png().startswith(b"\x89PNG")


def test_a_known_copy_shows_at_once_and_a_new_one_is_made(view, survey):
    view.format.value = "int8"
    assert view.row is survey.rows["int8"] and view.state == "ready"
    view.format.value = "int4-row"
    assert view.wait(60) and view.state == "ready"
    assert view.row is survey.rows["int4-row"] and view.row.options == {"quantize": "int4-row"}


def test_measure_in_this_thread_follows_every_control(view, survey):
    row = view.measure(format="int4-g64", hot="25 %")
    assert (
        row is view.row
        and row.name == "int4-g64, hot 25 % int8"
        and (view.format.value, view.hot.value) == ("int4-g64", "25 %")
    )
    states = values_of(view._panels[3])[0]
    assert ((states == 1).sum(axis=1) == 8).all()  # a quarter of each layer's experts is int8
    assert row.slot_bytes == survey.rows["int8"].slot_bytes and "room for a hot expert" in said(view)
    with pytest.raises(ColibriError, match="hot cannot be '30 %'; it is one of none, 25 %"):
        view.measure(hot="30 %")
    with pytest.raises(ColibriError, match="no control 'bits'"):
        view.measure(bits=3)


def test_what_a_format_leaves_no_choice_of_is_refused(view):
    view.format.value = "int8"
    assert view.hot.disabled and not view.matrices.disabled
    view.format.value = "as it is"
    assert view.hot.disabled and view.matrices.disabled
    with pytest.raises(ColibriError, match="hot has no effect on weights in format 'as it is'; choose another"):
        view.measure(hot="50 %")
    with pytest.raises(ColibriError, match="matrices has no effect"):
        view.measure(matrices="all", hot="none")
    view.format.value = "int4-g64"
    assert not view.hot.disabled and not view.matrices.disabled


@pytest.mark.filterwarnings("error")
def test_copies_are_made_without_a_word_about_router_calibration(survey):
    survey.measure("int8 by groups", quantize="int8-g64")


def test_the_kept_copy_stays_in_grey(view):
    view.measure(format="int4-g64")
    view.keep()
    view.measure(format="int8")
    assert view._panels[1].spec["note"] == "tick: int4-g64" and np.isfinite(values_of(view._panels[1])[:, 1]).all()
    assert [s["label"].split(":")[0] for s in view._panels[2].spec["series"]] == ["kept", "int8"]


def test_an_error_is_shown_and_the_last_picture_stays(view, survey, monkeypatch):
    def fail(name, router="fp32", **options):
        raise StorageError("/tmp: the disk is too small")

    monkeypatch.setattr(survey, "measure", fail)
    before, row = [p.data for p in view._panels], view.row
    view.format.value = "int4-g128"
    assert view.wait(60) and view.state == "error" and isinstance(view.error, StorageError)
    assert "the disk is too small – the last picture stays" in view._message.value
    assert [p.data for p in view._panels] == before and view.row is row
    view.format.value = "int8"
    assert view.state == "ready" and view.error is None


def test_data_code_and_png(view, survey, tmp_path):
    view.measure(format="int4-g64", matrices="experts", hot="none")
    data = view.data
    assert data["copies"].equals(survey.table) and len(data["experts"]) == 6 * 32
    assert data["layers"].router_agreement.mean() == view.row.router_agreement
    assert "colibri convert --input colibri-tiny --output DIR --quantize int4-g64" in view.code()
    assert "cl.convert('colibri-tiny', 'DIR', quantize='int4-g64')" in view.code()
    view.png(tmp_path / "q.png")
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_the_frontier_leaves_out_what_another_copy_beats(survey):
    names = [row.name for row in frames.frontier(list(survey.rows.values()))]
    assert names[-1] == "bf16" and "int8" in names
    row = survey.measure("router", router="int4-row")
    edge = frames.frontier(list(survey.rows.values()))
    assert row not in edge and "no larger and moves the answers less" in frames.verdict(survey, row)
    assert [r.total_bytes for r in edge] == sorted(r.total_bytes for r in edge)
    assert [r.kl_mnat for r in edge] == sorted((r.kl_mnat for r in edge), reverse=True)


def test_matrix_explorer_shows_what_is_lost(one):
    assert one.state == "ready" and "No column block is lost" in said(one)
    rounded = one.look(format="int4-row", shrink=30)
    assert rounded is one.rounded and "3 of 6 column blocks became zeros (from 0, 32, 64)" in said(one)
    bars = one._panels[1].spec
    assert [s["label"] for s in bars["series"]][::-1][:3] == ["0 – 31", "32 – 63", "64 – 95"] and bars["texts"][
        -1
    ] == "all zeros"
    assert one.data["blocks"].lost.tolist() == [True] * 3 + [False] * 3
    one.look(format="int4-g32")
    assert "No column block is lost" in said(one)
    with pytest.raises(TraitError):
        one.look(format="int3")


def test_matrix_explorer_follows_rows_and_formats(one):
    one.look(format="int4-g64", row=7)
    line = values_of(one._panels[0])
    assert np.array_equal(line[0], one.w[7, :96]) and np.array_equal(line[1], one.rounded.back[7, :96])
    assert one._panels[2].spec["title"] == "int4 is not 4 bits"
    one.look(format="int8")
    assert one._panels[2].spec["title"] == "int8 is not 8 bits" and one.png().png().startswith(b"\x89PNG")
    assert list(one.data["scales"].columns) == ["scale", "zero"] and len(one.data["scales"]) == 1


def test_png_panels_where_there_is_no_canvas(survey):
    assert bytes(quality_explorer(survey, live="png")._panels[0].value).startswith(b"\x89PNG")


def test_two_threads_at_the_quality_explorer(view):
    def turn(names):
        for _ in range(6):
            for name in names:
                view.format.value = name
                view.keep()

    together(lambda: turn(["int8", "int4-g64"]), lambda: turn(["as it is", "int8"]))
    assert view.wait(60) and view.state == "ready"
    assert np.array_equal(values_of(view._panels[1])[::-1, 0], np.float32(list(view.row.by_domain().values())))


def test_two_threads_at_the_matrix_explorer(one):
    together(
        lambda: [one.look(format=name) for name in ("int4-row", "int8", "int4-g64") * 4],
        lambda: [one.look(shrink=times, row=times % 7) for times in (1, 30, 100) * 4],
    )
    assert np.array_equal(values_of(one._panels[0])[1], one.rounded.back[one.shown_row.value, :96])
