"""The profile view: what it shows is what was clocked, whatever is done to it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fake_lab import FakeLab
from looking import hammer, threads, until, values_of

import colibri_lab as cl
from colibri_lab.engine.generate import Run
from colibri_lab.errors import ColibriError, SettingError, StorageError
from colibri_lab.ui import ProfileView, profile_frames, profile_view


class ProfiledLab(FakeLab):
    """Also keeps `last_run`, as a `Lab` does; reads take 0.2 ms of a loader thread each."""

    container = SimpleNamespace(blocks=32)

    def stream(self, prompt, **generate):
        run = self.last_run = Run(prompt, dict(self.settings) | generate, stop_reason="interrupted")
        for step in super().stream(prompt, **generate):
            step.load_service_s = 2e-4 * step.misses
            run.steps.append(step)
            run.tokens.append(step.token)
            asked = [(s.hits, s.misses) for s in run.steps if s.phase == "decode"]
            hits, misses = map(sum, zip(*asked, strict=True)) if asked else (step.hits, step.misses)
            step.running_hit_rate = hits / (hits + misses)
            if len(run.tokens) == generate["max_tokens"]:
                run.stop_reason = "length"
                run.cache = pd.DataFrame({"layer": [1], "phase": ["decode"], "hits": [hits], "misses": [misses]})
            yield step


@pytest.fixture
def view():
    view = profile_view(ProfiledLab(), "def f(x):", max_tokens=20, seed=3)
    yield view
    assert view.stop()


def test_before_the_first_run_it_says_what_to_do(view):
    assert view.state == "empty" and all(panel.spec["empty"] == "no run yet: press Start" for panel in view._panels)
    assert "press Start" in view._verdict.value and all(len(table) == 0 for table in view.data.values())
    with pytest.raises(ColibriError, match=r"nothing to draw yet; press Start or call run_once\(\)"):
        view.png()


def test_numbers_are_those_of_the_run(view):
    run = view.run_once()
    steps = [s for s in run.steps if s.phase == "decode"]
    wait = 1e3 * np.mean([s.stages["expert_load_wait"] for s in steps])
    service = 0.2 * np.mean([s.misses for s in steps])
    bars = dict(
        zip([s["label"] for s in view._panels[2].spec["series"]], values_of(view._panels[2])[:, 0], strict=True)
    )
    assert bars["waited for"] == pytest.approx(wait, rel=1e-5) and bars["reads, in all"] == pytest.approx(
        service, rel=1e-5
    )
    assert bars["reads, hidden"] == pytest.approx(service - wait, rel=1e-4)
    assert bars["wall time"] == pytest.approx(1e3 * np.mean([s.wall_s for s in steps]), rel=1e-5)
    assert values_of(view._panels[0]).sum() / len(steps) == pytest.approx(bars["wall time"], rel=1e-4)
    row = view.data["runs"].iloc[0]
    assert row.wait_ms + row.work_ms == pytest.approx(row.wall_ms) and row.hit_rate == run.hit_rate
    assert f"{bars['waited for']:.2f} ms are waiting for experts" in view._verdict.value
    assert view.state == "done" and threads() == []


def test_advice_follows_the_verdict(view):
    view.run_once()
    assert "Rule in print" in view._verdict.value and "Hit rate" in view._verdict.value


def test_a_moved_control_runs_again_over_the_kept_run(view):
    first = view.run_once()
    view.controls["slots"].value = 16
    assert view.wait(60)
    assert view.kept is first and view.run.settings["expert_cache_slots"] == 16 and len(view.runs) == 2
    assert np.isfinite(values_of(view._panels[2])[:, 1]).all() and view._panels[2].spec["note"] == "tick: kept run"
    marks = view._panels[3].spec["marks"]
    assert [m["text"] for m in marks] == ["8 slots", "16 slots"] and [m["shape"] for m in marks] == ["dot", "star"]
    view.buttons["Keep"].click()
    assert view.kept is view.run and view._panels[2].spec["note"] == ""


def test_points_that_stand_together_share_one_name():
    def run(slots, hit, speed):
        return SimpleNamespace(settings={"expert_cache_slots": slots}, hit_rate=hit, decode_tokens_per_s=speed)

    runs = [run(8, 0.50, 400), run(9, 0.52, 404), run(10, 0.54, 401), run(30, 0.95, 400), run(11, 0.53, 200)]
    marks = profile_frames.all_runs(runs, runs[1]).marks
    assert [(m.text, m.shape) for m in marks if m.text] == [
        ("30 slots", "dot"), ("11 slots", "dot"), ("9 slots", "star")
    ]  # fmt: skip
    assert len(marks) == 5 and sorted(m.x for m in marks) == pytest.approx([50, 52, 53, 54, 95])


def test_runs_of_different_lengths_are_compared_over_the_same_tokens():
    view = profile_view(ProfiledLab(), "f", rerun_tokens=12, max_tokens=40, seed=3)
    whole = view.run_once()
    view.controls["slots"].value = 16
    assert view.wait(60)
    short = view.run
    assert len(short.tokens) == 12 and len(whole.tokens) == 40 and view.kept is whole
    expected = [profile_frames.times(whole.first(12))[key] for key in ("wait", "hidden", "service", "wall")]
    np.testing.assert_allclose(values_of(view._panels[2])[:, 1], expected, rtol=1e-6)
    marks = {mark.text: mark.x for mark in view._frame(3).marks}
    assert marks == {
        "8 slots": pytest.approx(100 * whole.first(12).hit_rate), "16 slots": pytest.approx(100 * short.hit_rate)
    }  # fmt: skip
    assert whole.first(12).hit_rate != whole.hit_rate  # the test can tell
    view.start()
    assert view.wait(60) and len(view.run.tokens) == 40
    assert view._panels[0].spec["xlim"][1] >= 38
    with pytest.raises(SettingError, match="max_tokens must be"):
        profile_view(ProfiledLab(), rerun_tokens=0)


def test_a_moved_control_shows_before_the_model_answers(view, monkeypatch):
    view.run_once()
    go, stream = threading.Event(), view.lab.stream

    def slow(prompt, **generate):
        go.wait(60)
        return stream(prompt, **generate)

    monkeypatch.setattr(view.lab, "stream", slow)
    view.controls["slots"].value = 9
    assert view._panels[3].spec["note"] == "next: 9 slots"
    assert [m["shape"] for m in view._panels[3].spec["marks"]] == [
        "dot"
    ]  # what is on show is no longer what was asked for
    go.set()
    assert view.wait(60) and view._panels[3].spec["note"] == "star: this run"


def test_memory_is_shared_by_slots_and_page_cache(view):
    view.run_once(storage="modelled", disk="200 MB/s", slots=10, memory_mb=17.7)
    slots = 10 * 6 * view.lab.slot_bytes
    assert view.lab.settings["disk_page_cache"] == f"{17_700_000 - slots} B"
    assert "slots 8.85 MB, page cache 8.85 MB" in view._memory.value
    assert "modelled · 200 MB/s with 8.85 MB of page cache" in view._head.value
    view.run_once(slots=32)
    assert view.lab.settings["disk_page_cache"] == "0 B" and "slots exceed the memory" in view._memory.value


def test_what_was_not_measured_is_not_zero():
    lab = ProfiledLab()
    view = profile_view(lab, max_tokens=5)
    run = view.run_once()
    for s in run.steps:
        s.load_service_s = None
    assert profile_frames.times(run)["service"] is None and profile_frames.row(run)["hidden_ms"] is None
    frame = profile_frames.reads(run)
    assert frame.texts[1:3] == ("not measured", "not measured") and np.isnan(frame.values[1:3, 0]).all()
    assert "reads took" not in profile_frames.verdict(run)


def test_stop_ends_after_the_current_step_and_is_no_run():
    view = profile_view(ProfiledLab(step_s=0.01), max_tokens=100_000)
    view.start()
    until(lambda: view.run is not None and len(view.run.steps) > 3)
    assert view.state == "running"
    view.buttons["Stop"].click()
    assert threads() == [] and view.state == "stopped" and view.runs == [] and view.lab.streams == 0


def test_a_burst_of_slider_moves_does_not_queue():
    lab = ProfiledLab(step_s=0.002)
    view = profile_view(lab, max_tokens=20)
    for slots in range(9, 29):
        view.controls["slots"].value = slots
    assert view.wait(60)
    assert (
        [r.settings["expert_cache_slots"] for r in view.runs] == [28] and view.state == "done" and lab.most_streams == 1
    )


def test_two_threads_hammering_one_view():
    lab = ProfiledLab(step_s=0.0005)
    view = profile_view(lab, max_tokens=20)

    def actions(pick):
        return (
            lambda: setattr(view.controls["slots"], "value", pick.randint(1, 32)),
            lambda: setattr(view.controls["threads"], "value", pick.randint(1, view.controls["threads"].max)),
            lambda: setattr(view.controls["storage"], "value", pick.choice(["pread", "modelled"])),
            lambda: setattr(view.controls["memory_mb"], "value", pick.uniform(0, 20)),
            view.buttons["Start"].click,
            view.buttons["Stop"].click,
            view.buttons["Keep"].click,
            view.buttons["Copy settings"].click,
            lambda: view.data,
        )

    hammer(actions, 100)
    assert view.wait(60)
    assert lab.streams == 0 and lab.most_streams == 1 and threads() == []
    run = view.run_once(slots=5)
    assert view.state == "done" and run.settings["expert_cache_slots"] == 5


def test_error_shows_its_message_and_leaves_the_last_picture(view):
    run = view.run_once()
    before = [panel.data for panel in view._panels]
    view.lab.fail_at = 0
    view.buttons["Start"].click()
    assert view.wait(60)
    assert view.state == "error" and isinstance(view.error, StorageError)
    assert "layer_3/expert_17.bin: read failed" in view._message.value and "colibri-error" in view._message.value
    assert [panel.data for panel in view._panels] == before and view.run is run and threads() == []
    with pytest.raises(StorageError, match="expert_17"):
        view.run_once()
    view.lab.fail_at = None
    view.run_once()
    assert view.state == "done" and view.error is None


def test_impossible_settings_are_refused_by_name(view):
    for changes, message in (
        ({"slots": 0}, "slots must be 1 to 32, got 0"),
        ({"threads": True}, "threads must be 1 to"),
        ({"storage": "mmpa"}, "storage cannot be 'mmpa'; did you mean 'mmap'"),
        ({"slot": 3}, "unknown 'slot'; did you mean 'slots'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ):
        with pytest.raises(SettingError, match=message):
            view.run_once(**changes)
    with pytest.raises(SettingError, match="unknown setting 'max_token'"):
        profile_view(view.lab, max_token=5)
    assert view.state == "empty"


def test_code_reproduces_the_run(view):
    view.run_once(slots=12, storage="modelled", disk="100 MB/s")
    cli, python = view.code().split("\n\n")
    assert cli.startswith("colibri run --model colibri-tiny --prompt 'def f(x):' --expert-cache-slots 12 --policy lru")
    assert (
        "--storage modelled --disk-bandwidth '100 MB/s'" in cli
        and "storage='modelled', disk_bandwidth='100 MB/s'" in python
    )
    view.buttons["Copy settings"].click()
    assert view._code.value == view.code() and view._code.layout.display is None


def test_png_and_png_mode(view, tmp_path):
    view.run_once()
    picture = view.png(tmp_path / "view.png")
    assert (tmp_path / "view.png").read_bytes().startswith(b"\x89PNG") and len(picture.axes) == 4
    assert "waiting for experts" in picture.get_supxlabel()
    drawn = profile_view(ProfiledLab(), live="png", max_tokens=5)
    drawn.run_once()
    assert all(bytes(panel.value).startswith(b"\x89PNG") for panel in drawn._panels)


def test_controls_have_names_and_tooltips(view):
    for control in (*view.controls.values(), view.prompt, *view.buttons.values()):
        assert control.description and control.tooltip
    assert isinstance(view, ProfileView)


def test_a_real_model_too():
    lab = cl.open("data/colibri-tiny", expert_cache_slots=8, threads=1)
    view = profile_view(lab, max_tokens=12, seed=1)
    view.run_once(storage="modelled", disk="100 MB/s")
    row = view.data["runs"].iloc[0]
    stages = view.data["stages"].query("phase == 'decode'")
    assert 1e3 * stages.seconds.sum() / 11 == pytest.approx(row.wall_ms, rel=0.01)  # reads are not among the stages
    assert row.service_ms > row.wait_ms > 0 and row.hidden_ms == pytest.approx(row.service_ms - row.wait_ms)
    assert "Rule in print" in view._verdict.value
