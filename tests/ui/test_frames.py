from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.telemetry import STAGES, step_table
from colibri_lab.ui import frames
from colibri_lab.ui.frames import Decode, Frame, Mark, Series, decode_of
from colibri_lab.ui.theme import STAGE_GROUPS, both

counts = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60)


def decode(pairs, ms=None) -> Decode:
    hits, misses = np.array(pairs, float).T
    stage_ms = np.ones((len(STAGE_GROUPS), len(hits))) if ms is None else np.array(ms, float)
    return Decode(hits, misses, 10 * misses, stage_ms.sum(axis=0), stage_ms)


def test_every_stage_is_shown_exactly_once():
    assert sorted(stage for _, stages, _ in STAGE_GROUPS for stage in stages) == sorted(STAGES)


def test_steps_and_their_table_show_the_same(lab):
    steps = list(lab.stream("x", max_tokens=12))
    a, b = decode_of(steps), decode_of(step_table(steps))
    assert len(a) == len(b) == 11  # the first step reads the prompt
    for name in ("hits", "misses", "bytes_loaded", "wall_ms", "stage_ms"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name))


def test_stack_adds_up_to_wall_time(lab):
    steps = list(lab.stream("x", max_tokens=30))
    frame = frames.stage_latency(steps)
    np.testing.assert_allclose(frame.values.sum(axis=0), [1e3 * s.wall_s for s in steps[1:]], rtol=1e-5)


@given(counts, st.integers(1, 12))
def test_trailing_hit_rate_is_that_of_the_last_tokens_together(pairs, count):
    got = decode(pairs).trailing_hit_percent(count)
    for i, value in enumerate(got):
        window = pairs[max(0, i + 1 - count) : i + 1]
        hits, asked = sum(h for h, _ in window), sum(h + m for h, m in window)
        assert math.isnan(value) if asked == 0 else value == pytest.approx(100 * hits / asked)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.integers(1, 9))
def test_groups_are_means_and_lose_no_time(values, size):
    ms = np.zeros((len(STAGE_GROUPS), len(values)))
    ms[0] = values
    got = decode([(1, 1)] * len(values), ms).grouped_ms(size)[0]
    slow = [values[i : i + size] for i in range(0, len(values), size)]
    np.testing.assert_allclose(got, [sum(g) / len(g) for g in slow], atol=1e-9)


def test_long_runs_are_drawn_in_groups_and_say_so(lab):
    frame = frames.stage_latency(list(lab.stream("x", max_tokens=80)), tokens=600)
    assert (frame.stride, frame.values.shape[1]) == (4, 20)
    assert frame.ylabel == "ms per token, mean of 4"
    assert frames.stage_latency([], tokens=100).ylabel == "ms per token"


def test_hit_rate_by_hand(step):
    steps = [step(hits=9, misses=0, phase="prefill"), step(hits=3, misses=1), step(hits=0, misses=4), step(0, 0)]
    d = decode_of(steps)
    assert d.hit_rate == 3 / 8
    np.testing.assert_array_equal(d.hit_percent, [75, 0, np.nan])


def test_nothing_asked_is_not_a_rate_of_zero(step):
    assert decode_of([step(0, 0)]).hit_rate is None
    assert decode_of([]).hit_rate is None


def test_axes_hold_still_between_runs(lab):
    long = list(lab.stream("x", max_tokens=50))
    short = long[:10]
    a, b = (frames.hit_rate(run, tokens=60) for run in (long, short))
    assert a.xlim == b.xlim == (0, 59) and a.ylim == b.ylim == (0, 100)
    top = frames.stage_latency(long).ylim[1]
    assert frames.stage_latency(short, top=2 * top).ylim == (0, 2 * top)


def test_kept_run_is_grey_dashed_and_named(monitor):
    kept = monitor.run_once(slots=4)
    frame = frames.hit_rate(monitor.run_once(slots=16, policy="weighted-lru"), kept)
    grey, raw, strong = frame.series
    assert grey.color == "kept" and grey.dash and grey.label.startswith("kept: 4 slots, lru: ")
    assert raw.label == "" and raw.alpha < strong.alpha
    assert strong.label.startswith("16 slots, weighted-lru: ") and strong.dash != grey.dash


def test_share_sums_to_a_hundred_and_names_ms(step):
    frame = frames.stage_share([step(attention=1, expert_compute=2, expert_load_wait=1)])
    assert frame.values[:, 0].sum() == pytest.approx(100)
    by_name = dict(zip([s.label for s in frame.series], frame.texts, strict=True))
    assert by_name["expert compute"] == "50 % · 2 ms" and by_name["attention"] == "25 % · 1 ms"
    assert np.isnan(frame.values[:, 1]).all()


def test_cells_by_hand():
    before = np.array([[0, 1, 2, 1]], np.uint8)
    now = np.array([[2, 2, 1, 0]], np.uint8)
    assert frames.cell_states([before, now], 1).tolist() == [
        [frames.MISSED, frames.USED, frames.RESIDENT, frames.ABSENT]
    ]


def test_first_step_starts_from_an_empty_cache():
    assert frames.cell_states([np.array([[2, 1, 0]])], 0).tolist() == [[frames.MISSED, frames.RESIDENT, frames.ABSENT]]


def test_residency_tells_since_when_and_how_often():
    history = [[[2, 1, 0]], [[1, 0, 2]], [[2, 2, 1]]]
    state, since, uses = frames.residency(history).values
    assert state.tolist() == [[frames.USED, frames.MISSED, frames.RESIDENT]]
    assert since.tolist() == [[0, 2, 1]]
    assert uses.tolist() == [[2, 1, 1]]


def test_single_residency_array_claims_no_misses():
    assert frames.residency(np.array([[2, 1, 0]])).values[0].tolist() == [[2, 1, 0]]


def test_residency_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"expected \(layers, experts\).*found \(3,\)"):
        frames.residency(np.zeros(3))


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=60))
def test_time_axis_holds_nearly_all_tokens(values):
    ms = np.zeros((len(STAGE_GROUPS), len(values)))
    ms[0] = values
    top = frames.latency_top(decode([(1, 1)] * len(values), ms))
    assert np.mean(np.array(values) <= top) >= 0.9
    assert top <= 3 * np.percentile(values, 90, method="higher")


def test_spikes_are_counted_not_hidden(step):
    frame = frames.stage_latency([step(attention=1) for _ in range(99)] + [step(attention=500)])
    assert frame.ylim[1] < 3
    assert frame.note == "1 above, up to 500 ms"


def test_specs_are_plain_json(monitor):
    run = monitor.run_once()
    made = [
        frames.hit_rate(run, run, cursor=3),
        frames.stage_latency(run),
        frames.stage_share(run),
        frames.residency(run.residency),
    ]
    for frame in [*made, frames.hit_rate([]), frames.stage_latency([]), frames.stage_share([])]:
        json.dumps(frame.spec(), allow_nan=False)
        assert frame.spec()["shape"] == list(frame.values.shape)
        assert frame.values.dtype == np.float32


def test_marks_travel_with_their_colours():
    marks = (Mark(8, 40.5, "40.5 %", "hit", "star"), Mark(120, text="one token"))
    values = np.array([[1, np.nan, 3]], np.float32)
    frame = Frame("lines", "t", "x", "y", values, (Series("a", "hit"),), x=(1, 4, 16), marks=marks)
    spec = frame.spec()
    json.dumps(spec, allow_nan=False)
    assert spec["x"] == [1, 4, 16]
    assert spec["marks"][0]["color"] == both("hit") and spec["marks"][0]["shape"] == "star"
    assert spec["marks"][1]["y"] is None and spec["marks"][1]["text"] == "one token"
