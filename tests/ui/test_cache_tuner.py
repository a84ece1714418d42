"""The cache tuner: what it shows is what replay counts, whatever is done to it."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from looking import hammer, threads, values_of

from colibri_lab.cache.policies import POLICIES
from colibri_lab.errors import ColibriError, SettingError, TraceError
from colibri_lab.trace import Trace, TraceRecorder, load_trace
from colibri_lab.trace.bounds import gap
from colibri_lab.ui import CacheTuner, cache_tuner, tuner, tuner_frames

TRACES = Path(__file__).resolve().parents[2] / "data/traces"
OLMOE = TRACES / "warp_olmoe_1b7b_299.jsonl"


def small(seed=0, experts=8, steps=30, header=None) -> Trace:
    rng = np.random.default_rng(seed)
    rows = [(0, layer, 0, t) for layer in (1, 2) for t in range(3)]
    rows += [(step, layer, 1, 0) for step in range(1, steps) for layer in (1, 2)]
    ids = np.array([rng.permutation(experts)[:2] for _ in rows], np.uint16)
    step, layer, phase, row = np.array(rows).T
    header = {"num_experts": experts, "ranked": True, "model": f"small-{experts}", **(header or {})}
    return Trace.from_rows(step=step, layer=layer, phase=phase, row=row, experts=ids, header=header)


@pytest.fixture(scope="module")
def olmoe() -> Trace:
    return load_trace(OLMOE)


@pytest.fixture
def view(olmoe):
    view = cache_tuner(olmoe, expert_bytes=6_291_456, slots=8)
    assert view.wait(60)
    yield view
    view.close()


def said(view) -> str:
    return html.unescape(re.sub("<[^>]+>", " ", view._verdict.value))


def line(panel, name: str) -> np.ndarray:
    labels = [s["label"] for s in panel.spec["series"]]
    return values_of(panel)[labels.index(name)]


def test_numbers_are_replays(view, olmoe):
    found = view.set(slots=16, policy="lru")
    totals = olmoe.replay("lru", 16, phase="decode").attrs["totals"]
    assert found.hit_rate == totals["hit_rate"] == pytest.approx(0.5968, abs=5e-5)
    assert "hit 59.7 % of accesses, oracle +16.0 points" in view._numbers.value
    assert f"{totals['misses'] / 299:.1f} misses per token, 325 MB" in view._numbers.value
    assert "16 slots × 16 layers = 1.61 GB, 25 % of all" in view._memory.value
    curve = view._panels[0]
    assert line(curve, "lru")[16] == pytest.approx(100 * totals["hit_rate"], rel=1e-6)
    marks = curve.spec["marks"]
    assert marks[-1]["x"] == 16 and marks[-1]["text"] == "59.7 %" and curve.spec["cursor"] == 16


@pytest.mark.parametrize("policy", ["lru", "lfru", "belady"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_curve_is_that_of_curve(policy, scope):
    trace = small()
    view = cache_tuner(trace, slots=4, policy=policy, scope=scope)
    assert view.wait(60) and view.state == "done"
    table = trace.curve(policy, phase="decode", scope=scope, progress=False)
    np.testing.assert_allclose(line(view._panels[0], policy)[table.slots], 100 * table.hit_rate, rtol=1e-6)
    for oracle, name in (("belady-bypass", "oracle, may drop"), ("belady", "oracle, keeps all")):
        if policy != oracle:
            bound = trace.curve(oracle, phase="decode", scope=scope, progress=False)
            np.testing.assert_allclose(line(view._panels[0], name)[bound.slots], 100 * bound.hit_rate, rtol=1e-6)


def test_a_large_pool_is_replayed_at_spread_sizes_and_drawn_between(olmoe):
    subject = tuner.subjects({"x": olmoe})["x"]
    contract = tuner.Choice("x", 128, scope="global").contract
    done = list(tuner.curve_parts(subject, "sieve", contract, lambda: False))
    assert done[0] == (8, 64) and done[-1] == (64, 64)
    drawn = tuner.rates(subject, "sieve", contract)
    assert np.isnan(drawn[0]) and np.isfinite(drawn[1:]).all()
    table = subject.curves[("sieve", *contract.values())]
    np.testing.assert_allclose(drawn[table.slots], 100 * table.hit_rate)


def test_a_curve_nobody_waits_for_stops_and_goes_on_later(olmoe):
    subject = tuner.subjects({"x": olmoe})["x"]
    contract = tuner.Choice("x", 8).contract
    answers = iter([False, True])
    assert len(list(tuner.curve_parts(subject, "fifo", contract, lambda: next(answers)))) == 1
    assert list(tuner.curve_parts(subject, "fifo", contract, lambda: False))[0] == (16, 64)


@pytest.mark.parametrize(
    "change", [{}, {"lookup": "serial"}, {"admission": "bypass"}, {"policy": "lfru"}, {"slots": 24}]
)
def test_causes_sum_to_the_misses_and_split_as_bounds_do(olmoe, change):
    subject = tuner.subjects({"x": olmoe})["x"]
    found = tuner.outcome(subject, replace(tuner.Choice("x", 16), **change))
    assert sum(found.misses.values()) == found.totals["misses"]
    assert min(found.misses.values()) >= 0
    if change.get("lookup") != "serial" and change.get("admission") != "bypass":
        split = gap(olmoe, found.choice.slots, found.choice.policy, phase="decode")
        own = split["misses"] - split["misses_belady_bypass"]
        assert found.misses["choice of victim"] == round(split["victim_share"] * own)
        assert found.misses["forced admission"] == round(split["admission_share"] * own)
    bars = tuner_frames.causes(found)
    assert bars.values[:, 0].sum() == pytest.approx(100 * (1 - found.hit_rate), rel=1e-5)


def test_course_and_grid_agree_with_the_totals(view):
    found = view.set(slots=16)
    table = view.data["steps"]
    assert table.hits.sum() == found.totals["hits"] and len(table) == 299
    first = line(view._panels[1], f"16 slots, lru: {100 * found.hit_rate:.1f} %")
    assert first[0] == pytest.approx(100 * table.hit_rate[0])
    view.token.value = 40
    grid = values_of(view._panels[2])
    assert (grid[0] >= 2).sum() == 128 and (grid[0] == 3).sum() == table.misses[40]
    assert view._panels[2].spec["title"] == "Experts in memory, token 40" and view._panels[1].spec["cursor"] == 40
    cells = view.data["residency"]
    assert cells.resident.sum() == 16 * 16 and cells.missed.sum() == table.misses[40]
    assert (cells.groupby("layer").resident.sum() == 16).all()


def test_first_choice_is_kept_in_grey_and_keep_moves_it(view):
    assert view.kept.choice.slots == 8
    view.set(slots=16, policy="lfru")
    labels = [s["label"] for s in view._panels[0].spec["series"]]
    assert "kept: policy lru" not in labels and "kept: lru" in labels
    assert any(s["label"].startswith("kept: 8 slots, lru") for s in view._panels[1].spec["series"])
    assert "Kept 8 slots, lru: 43.4 %" in said(view)
    view.buttons["Keep"].click()
    assert view.kept.choice.policy == "lfru"
    assert "Kept" not in said(view) and "tick" not in view._panels[3].spec["note"]


def test_the_choice_it_began_with_is_kept_however_soon_the_next_comes(olmoe):
    view = cache_tuner(olmoe, slots=8)
    view.set(slots=16)
    assert view.kept.choice.slots == 8 and view.kept.history is not None and view.outcome.choice.slots == 16
    view.close()


def test_global_scope_keeps_the_memory_and_shows_one_tokens_cycle(view):
    view.choices["scope"].value = "global"
    assert view.wait(60)
    assert view.slots.max == 1024 and view.outcome.choice.slots == 128 and view.slots.value == 128
    uprights = [m for m in view._panels[0].spec["marks"] if m["y"] is None]
    assert [(m["x"], m["text"]) for m in uprights] == [(128, "one token: 128")]
    view.set(slots=120)
    assert view.outcome.hit_rate == 0
    assert "below one token's working set (128 in all)" in said(view)
    view.choices["scope"].value = "layer"
    assert view.wait(60) and view.outcome.choice.slots == 8


def test_verdict_names_the_gap_and_the_best_change(view):
    view.set(slots=16)
    assert "16 slots, lru: 59.7 % of accesses hit, 51.6 misses per token = 325 MB, 325 ms of reading at 1 GB/s" in said(
        view
    )
    assert "would hit 16.0 points more; 79 % of that gap is choice of victim" in said(view)
    assert re.search(
        r"What would help: policy [\w-]+ \(\+\d\.\d points, no more memory\), or 24 slots \(\+10\.0 points", said(view)
    )
    view.set(slots=4)
    assert "below one token's working set (8 per layer)" in said(view)
    assert "What would help: 8 slots (+22.2 points)" in said(view)


def test_advice_is_the_best_of_trying_each(olmoe):
    subject = tuner.subjects({"x": olmoe})["x"]
    found = tuner.outcome(subject, tuner.Choice("x", 16))
    best = {
        name: olmoe.replay(name, 16, phase="decode").attrs["totals"]["hit_rate"]
        for name in subject.policies()
        if not POLICIES[name].oracle and "pins" not in POLICIES[name].needs
    }
    name = max(best, key=best.get)
    assert f"policy {name} (+{100 * (best[name] - found.hit_rate):.1f} points" in tuner.advise(found)


def test_traces_by_name_share_one_view():
    view = cache_tuner({"a": small(), "b": small(3, experts=16)}, slots=4)
    assert view.wait(60)
    assert view.trace.layout.display is None and list(view.trace.options) == ["a", "b"]
    view.trace.value = "b"
    assert view.wait(60)
    assert view.outcome.choice.trace == "b" and view.slots.max == 16 and view.slots.value == 8  # the same share
    assert any(s["label"] == "kept: a" for s in view._panels[0].spec["series"])
    assert view.data["choices"].trace.tolist() == ["a", "b"]


def test_only_phases_and_policies_the_trace_can_feed_are_offered(view):
    assert view.choices["phase"].options == ("decode",)
    assert "gate-weighted" not in view.choices["policy"].options and "lru" in view.choices["policy"].options
    both = cache_tuner(small())
    assert both.choices["phase"].options == ("decode", "prefill", "all")
    both.set(phase="prefill")
    assert (
        both.outcome.totals["accesses"] == both.outcome.subject.trace.replay("lru", 8, phase="prefill").accesses.sum()
    )
    both.close()


def test_star_stands_where_the_engine_measured():
    view = cache_tuner(TRACES / "colibri_tiny_six_domains.parquet", slots=8)
    assert view.wait(60)
    star, dot = view._panels[0].spec["marks"]
    assert star["shape"] == "star" and star["y"] == pytest.approx(dot["y"])
    assert dot["text"].endswith("= measured (star)")
    view.set(slots=9)
    assert [m["shape"] for m in view._panels[0].spec["marks"]] == ["dot", "dot"]  # the kept one and this one


def test_a_burst_of_slider_moves_ends_at_the_last(view):
    for slots in range(9, 29):
        view.slots.value = slots
    assert view.wait(60)
    assert view.outcome.choice.slots == 28 and view.state == "done" and threads() == []


def test_two_threads_hammering_one_view():
    view = cache_tuner({"a": small(), "b": small(3, experts=16)}, slots=4)

    def actions(pick):
        return (
            lambda: setattr(view.slots, "value", pick.randint(1, view.slots.max)),
            lambda: setattr(view.trace, "value", pick.choice("ab")),
            lambda: setattr(view.choices["policy"], "value", pick.choice(["lru", "lfru", "fifo", "belady"])),
            lambda: setattr(view.choices["scope"], "value", pick.choice(["layer", "global"])),
            lambda: setattr(view.choices["lookup"], "value", pick.choice(["atomic", "serial"])),
            lambda: setattr(view.choices["phase"], "value", pick.choice(["decode", "all"])),
            lambda: setattr(view.token, "value", pick.randint(0, view.token.max)),
            view.buttons["Keep"].click,
            view.buttons["Copy settings"].click,
            lambda: view.data,
        )

    hammer(actions, 100)
    assert view.wait(60) and view.state in ("done", "running") and threads() == []
    found = view.set(slots=3, policy="lru", trace="a", scope="layer", lookup="atomic", phase="decode")
    assert (
        view.state == "done" and found.totals["hits"] == found.subject.trace.replay("lru", 3, phase="decode").hits.sum()
    )
    assert line(view._panels[0], "lru")[3] == pytest.approx(100 * found.hit_rate, rel=1e-6)


def test_error_shows_its_message_and_leaves_the_last_picture(view, monkeypatch):
    view.set(slots=16)
    before = [panel.data for panel in view._panels]

    def broken(*_):
        raise TraceError("row 7: experts must be distinct, got 3, 3")

    monkeypatch.setattr(tuner, "outcome", broken)
    view.slots.value = 20
    assert view.wait(60)
    assert view.state == "error" and isinstance(view.error, TraceError)
    assert "row 7: experts must be distinct" in view._message.value and "colibri-error" in view._message.value
    assert [panel.data for panel in view._panels] == before and threads() == []
    with pytest.raises(TraceError, match="row 7"):
        view.set(slots=21)
    monkeypatch.undo()
    assert view.set(slots=22).choice.slots == 22 and view.state == "done" and view.error is None


def test_an_empty_recorder_says_what_to_do_and_reloads():
    recorder = TraceRecorder(num_experts=8, top_k=2)
    view = cache_tuner(recorder)
    assert view.state == "empty" and "generate inside `with lab.record() as rec:`" in view._message.value
    assert all(panel.spec["empty"] == "no routing yet" for panel in view._panels)
    assert all(len(table) == 0 for table in view.data.values())
    with pytest.raises(ColibriError, match="nothing to draw yet; no routing yet"):
        view.png()
    with pytest.raises(TraceError, match="press Reload"):
        view.set(slots=4)
    for step in range(6):
        for layer in (0, 1):
            recorder.add(step, layer, "decode", 0, None, [[step % 8, (step + 1) % 8]])
    view.buttons["Reload"].click()
    assert view.wait(60) and view.state == "done"
    assert view.outcome.totals["hits"] == recorder.trace.replay("lru", view.slots.value).hits.sum() > 0


def test_a_run_with_its_events_is_a_trace(step):
    class Run:
        settings = {"log_level": "debug"}
        steps = [step(phase="prefill"), step(), step()]
        events = pd.DataFrame(
            [(0, 1, e) for e in (3, 1, 2)]
            + [(1, 2, 0), (1, 2, 5)]
            + [(2, 1, 3), (3, 2, 5), (4, 1, 1), (4, 1, 7), (5, 2, 0)],
            columns=["step", "layer", "expert"],
        )

    view = cache_tuner(Run(), slots=2, phase="all")
    assert view.wait(60)
    trace = view.outcome.subject.trace
    assert trace.layers == [1, 2] and len(trace) == 6 and trace.phase.tolist() == [0, 0, 1, 1, 1, 1]
    assert view.outcome.totals["accesses"] == 10
    Run.events = Run.events[:0]
    with pytest.raises(SettingError, match='generate inside `with lab.record.*log_level="debug"'):
        cache_tuner(Run())


def test_impossible_choices_are_refused_by_name(olmoe):
    for choice, message in (
        ({"slots": 0}, "slots must be 1 to 64, the experts there are; got 0"),
        ({"slots": 65}, "slots must be 1 to 64"),
        ({"policy": "lur"}, "policy cannot be 'lur'; did you mean 'lru'"),
        ({"policy": "gate-weighted"}, "policy cannot be 'gate-weighted'"),
        ({"phase": "prefill"}, "phase cannot be 'prefill'"),
        ({"slot": 3}, "no control 'slot'; did you mean 'slots'"),
        ({"trace": "x"}, "trace cannot be 'x'"),
        ({"live": "gif"}, "live cannot be 'gif'"),
    ):
        with pytest.raises(SettingError, match=message):
            cache_tuner(olmoe, **choice)
    with pytest.raises(SettingError, match="takes a trace, a trace file, a recorder .* got int"):
        cache_tuner(3)
    with pytest.raises(SettingError, match="dict of traces is empty"):
        cache_tuner({})
    with pytest.raises(TraceError, match="cache_tuner needs rows"):
        cache_tuner(Trace.from_counts(np.ones((2, 4), int), {}))


def test_code_reproduces_the_choice(view, monkeypatch):
    view.set(slots=12, lookup="serial")
    cli, python = view.code().split("\n\n")
    assert cli == (
        "colibri replay trace.parquet --policy lru --slots 12 --scope layer --lookup serial --admission forced --phase decode"
    )
    assert "trace.replay('lru', 12, scope='layer', lookup='serial', admission='forced', phase='decode')" in python
    assert "cl.open('MODEL', expert_cache_slots=12, policy='lru', scope='layer', lookup='serial'" in python
    view.buttons["Copy settings"].click()
    assert view._code.value == view.code() and view._code.layout.display is None
    filed = cache_tuner(OLMOE)
    assert f"cl.load_trace({str(OLMOE)!r})" in filed.code()
    filed.close()


def test_data_are_tables(view):
    view.set(slots=16)
    data = view.data
    assert data["choices"].slots.tolist() == [8, 16]
    assert set(data["curves"].policy) == {"lru", "belady", "belady-bypass"} and len(data["curves"]) == 3 * 64
    assert len(data["layers"]) == 16 and len(data["residency"]) == 16 * 64


def test_png_is_written_and_tells_the_verdict(view, tmp_path):
    view.set(slots=16)
    picture = view.png(tmp_path / "view.png")
    assert (tmp_path / "view.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "59.7 % of accesses hit" in picture.get_supxlabel() and "16 layers × 64 experts" in picture.get_suptitle()
    assert len(picture.axes) == 4


def test_png_mode_shows_the_same_panels():
    view = cache_tuner(small(), live="png", slots=4)
    assert view.wait(60)
    before = [bytes(panel.value) for panel in view._panels]
    assert all(value.startswith(b"\x89PNG") for value in before)
    view.set(slots=6)
    assert all(bytes(panel.value) != value for panel, value in zip(view._panels, before, strict=True))
    view.close()


def test_bytes_are_unknown_where_nobody_told(olmoe):
    view = cache_tuner(olmoe, slots=8)
    assert view.wait(60)
    assert "for bytes give expert_bytes=" in view._memory.value
    assert view.data["choices"].bytes_per_token.tolist() == [None] and "GB/s" not in said(view)


def test_every_control_has_a_name_and_a_tooltip(view):
    for control in (view.trace, view.slots, *view.choices.values(), view.token, *view.buttons.values()):
        assert control.description and control.tooltip
    assert isinstance(view, CacheTuner)
    assert view.trace.layout.display == "none"  # there is one trace only
    assert all(c.layout.display is None for c in (view.slots, *view.choices.values(), view.token))
