from __future__ import annotations

import threading

import numpy as np
import pytest
from fake_lab import FakeLab
from looking import hammer, threads, until, values_of

from colibri_lab.config import SETTINGS
from colibri_lab.errors import ColibriError, SettingError, StorageError
from colibri_lab.ui import RunMonitor, run_monitor


def test_before_the_first_run_it_says_what_to_do(monitor):
    assert monitor.state == "empty" and monitor.run is None and monitor.runs == []
    for panel in monitor._panels:
        assert panel.spec["empty"] == "no run yet: press Start"
    assert "press Start" in monitor._verdict.value
    assert "def f(x):" in monitor._text.value
    assert all(len(table) == 0 for table in monitor.data.values())
    with pytest.raises(ColibriError, match=r"nothing to draw yet; press Start or call run_once\(\)"):
        monitor.png()


def test_run_once_shows_what_was_counted(monitor):
    run = monitor.run_once()
    assert monitor.state == "done" and monitor.run is run and monitor.runs == [run]
    table = run.table[run.table["phase"] == "decode"]
    hit, grid, latency, share = map(values_of, monitor._panels)
    np.testing.assert_allclose(hit[0], 100 * table["hit_rate"].astype(float), rtol=1e-6)
    np.testing.assert_allclose(latency.sum(axis=0), table["wall_ms"], rtol=1e-5)
    assert share[:, 0].sum() == pytest.approx(100, rel=1e-5)
    assert (grid[0] >= 2).sum() == (run.residency[-1] == 2).sum()
    asked = table["hits"].sum() + table["misses"].sum()
    assert f"hit {100 * table['hits'].sum() / asked:.1f} % of accesses" in monitor._counters.value
    assert monitor._verdict.value.count("8 slots, lru:") == 1
    assert threads() == []


def test_start_button_runs_in_the_background(monitor):
    monitor.buttons["Start"].click()
    assert monitor.wait(60)
    assert monitor.state == "done" and len(monitor.runs) == 1 and monitor.run.stop_reason == "length"
    assert threads() == []


def test_stop_ends_after_the_current_step_and_joins():
    monitor = run_monitor(FakeLab(step_s=0.01), max_tokens=100_000)
    monitor.start()
    until(lambda: monitor.run is not None and len(monitor.run.steps) > 3)
    assert monitor.state == "running"
    monitor.buttons["Stop"].click()
    assert threads() == [] and monitor.state == "stopped"
    count = len(monitor.run.tokens)
    assert monitor.run.stop_reason == "interrupted"
    assert f"stopped after {count} of 100000 tokens" in monitor._message.value
    assert monitor.runs == [monitor.run] and monitor.kept is None  # a stopped run is no baseline
    monitor.run_once(max_tokens=5)  # and the monitor goes on
    assert monitor.state == "done"


def test_stop_without_a_run_does_nothing(monitor):
    assert monitor.stop() and monitor.state == "empty"
    monitor.run_once()
    assert monitor.stop() and monitor.state == "done"


def test_moving_slots_runs_again_over_the_kept_run(monitor):
    first = monitor.run_once()
    monitor.slots.value = 16
    assert monitor.wait(60)
    assert monitor.kept is first and monitor.run is monitor.runs[-1]
    labels = [s["label"] for s in monitor._panels[0].spec["series"]]
    assert labels[0].startswith("kept: 8 slots, lru") and labels[-1].startswith("16 slots, lru")
    kept_line = values_of(monitor._panels[0])[0]
    np.testing.assert_allclose(kept_line, first.decode.trailing_hit_percent(8), rtol=1e-6)
    assert "16 slots × 6 layers = 14.2 MB" in monitor._memory.value
    assert "all 40 tokens equal" in monitor._verdict.value


def test_a_moved_control_may_run_fewer_tokens_and_is_compared_with_as_many():
    monitor = run_monitor(FakeLab(), max_tokens=40, rerun_tokens=15, seed=1)
    whole = monitor.run_once()
    monitor.slots.value = 16
    assert monitor.wait(60)
    assert len(monitor.run.tokens) == 15 and monitor.tokens.value == 40
    assert monitor.run.tokens == whole.tokens[:15] and monitor.kept is whole
    hit = monitor._panels[0]
    assert hit.spec["xlim"] == [0, 13] and values_of(hit).shape[1] == 14  # the first token is the prompt's
    np.testing.assert_allclose(values_of(hit)[0], whole.first(15).decode.trailing_hit_percent(8), rtol=1e-6)
    assert "all 15 tokens equal" in monitor._verdict.value
    before, after = whole.first(15).misses_per_token, monitor.run.misses_per_token
    assert f"{before:.1f} → {after:.1f} misses" in monitor._verdict.value
    monitor.start()
    assert monitor.wait(60) and len(monitor.run.tokens) == 40
    with pytest.raises(SettingError, match="max_tokens must be"):
        run_monitor(FakeLab(), rerun_tokens=0)


def test_policy_dropdown_offers_the_settings_choices_and_runs(monitor):
    assert monitor.policy.options == SETTINGS["policy"].choices
    monitor.policy.value = "weighted-lru"
    assert monitor.wait(60)
    assert monitor.run.settings["policy"] == monitor.lab.settings["policy"] == "weighted-lru"


def test_keep_makes_the_run_on_show_the_baseline(monitor):
    monitor.run_once()
    second = monitor.run_once(slots=12)
    monitor.buttons["Keep"].click()
    monitor.run_once(slots=20)
    assert monitor.kept is second
    assert monitor._panels[0].spec["series"][0]["label"].startswith("kept: 12 slots")


def test_run_again_repeats_the_run_and_counts_it(monitor):
    monitor.run_once(slots=10)
    monitor._set_controls(monitor.run.job.__class__("other", 3, "lru", monitor.run.job.generate))
    monitor.buttons["Run again"].click()
    assert monitor.wait(60)
    assert len(monitor.runs) == 2 and monitor.runs[0].job == monitor.runs[1].job
    assert monitor.slots.value == 10
    assert "n = 2, spread" in monitor._counters.value


def test_every_run_starts_cold(monitor):
    a, b = monitor.run_once(), monitor.run_once()
    assert [s.misses for s in a.steps] == [s.misses for s in b.steps]


def test_a_burst_of_slider_moves_does_not_queue():
    lab = FakeLab(step_s=0.002)
    monitor = run_monitor(lab, max_tokens=30)
    for slots in range(9, 29):
        monitor.slots.value = slots
    assert monitor.wait(60)
    assert monitor.run.settings["expert_cache_slots"] == 28 and monitor.state == "done"
    complete = [r for r in monitor.runs if r.stop_reason == "length"]
    assert [r.settings["expert_cache_slots"] for r in complete] == [28]
    assert lab.most_streams == 1


def test_two_threads_hammering_one_view():
    lab = FakeLab(step_s=0.0005)
    monitor = run_monitor(lab, max_tokens=30)

    def actions(pick):
        return (
            lambda: setattr(monitor.slots, "value", pick.randint(1, 32)),
            lambda: setattr(monitor.policy, "value", pick.choice(SETTINGS["policy"].choices)),
            lambda: setattr(monitor.token, "value", pick.randint(0, monitor.token.max)),
            monitor.buttons["Start"].click,
            monitor.buttons["Stop"].click,
            monitor.buttons["Keep"].click,
            monitor.buttons["Run again"].click,
            monitor.buttons["Copy settings"].click,
            lambda: monitor.data,
        )

    hammer(actions, 120)
    assert monitor.wait(60)
    assert lab.streams == 0 and lab.most_streams == 1 and threads() == []
    monitor.slots.value = 5 if monitor.slots.value != 5 else 6  # still alive, and still showing the truth
    assert monitor.wait(60) and monitor.state == "done", monitor.error
    assert monitor.run.settings["expert_cache_slots"] == monitor.slots.value
    assert values_of(monitor._panels[2]).shape[1] == len(monitor.run.decode)


def test_a_kept_run_equal_to_the_last_kept_one_is_still_another_run(monitor):
    for _ in range(3):  # the fake model takes the same time every time
        monitor.run_again()
        assert monitor.wait(60) and monitor.state == "done", monitor.error
        monitor.keep()
    monitor.slots.value = 16
    assert monitor.wait(60) and monitor.state == "done", monitor.error
    assert "all 40 tokens equal" in monitor._verdict.value


def test_error_shows_its_message_and_leaves_the_last_picture(monitor):
    run = monitor.run_once()
    before = [panel.data for panel in monitor._panels]
    monitor.lab.fail_at = 0
    monitor.buttons["Start"].click()
    assert monitor.wait(60)
    assert monitor.state == "error" and isinstance(monitor.error, StorageError)
    assert "layer_3/expert_17.bin: read failed" in monitor._message.value
    assert "colibri-error" in monitor._message.value
    assert [panel.data for panel in monitor._panels] == before
    assert monitor.runs == [run] and threads() == []
    monitor.lab.fail_at = None
    monitor.run_once()
    assert monitor.state == "done" and monitor.error is None


def test_error_in_the_middle_keeps_the_steps_so_far():
    monitor = run_monitor(FakeLab(fail_at=11), max_tokens=40)
    with pytest.raises(StorageError, match="expert_17.bin"):
        monitor.run_once()
    assert monitor.state == "error" and len(monitor.run.steps) == 11
    assert values_of(monitor._panels[2]).shape[1] == 10  # the last picture shows all that arrived
    assert monitor.runs == [] and monitor.kept is None


def test_interrupt_ends_the_run_cleanly(monitor, monkeypatch):
    steps = iter(range(100))

    def residency():
        if next(steps) == 6:
            raise KeyboardInterrupt
        return np.zeros((6, 32), np.uint8)

    monkeypatch.setattr(monitor.lab, "residency", residency)
    with pytest.raises(KeyboardInterrupt):
        monitor.run_once()
    assert monitor.state == "stopped" and "interrupted" in monitor._message.value
    assert monitor.lab.streams == 0 and threads() == []


def test_a_moved_control_shows_before_the_model_answers(monitor, monkeypatch):
    monitor.run_once()
    go, stream = threading.Event(), monitor.lab.stream

    def slow(prompt, **generate):
        go.wait(60)
        return stream(prompt, **generate)

    monkeypatch.setattr(monitor.lab, "stream", slow)
    monitor.slots.value = 9
    until(lambda: monitor._panels[0].spec["series"][-1]["label"] == "9 slots, lru")
    assert monitor.state == "running" and np.isnan(values_of(monitor._panels[0])[-1]).all()
    go.set()
    assert monitor.wait(60)
    assert monitor._panels[0].spec["series"][-1]["label"].startswith("9 slots, lru: ")


def test_a_run_stopped_before_its_first_step_gives_the_picture_back(monitor, monkeypatch):
    run, go = monitor.run_once(), threading.Event()
    before = [panel.data for panel in monitor._panels]
    monkeypatch.setattr(monitor.lab, "reset_cache", lambda: go.wait(60))
    monitor.start()
    until(lambda: monitor.run is not run)
    threading.Timer(0.05, go.set).start()
    assert monitor.stop()
    assert monitor.run is run and monitor.runs == [run] and monitor.state == "stopped"
    assert [panel.data for panel in monitor._panels] == before


def test_token_slider_goes_back_in_time(monitor):
    run = monitor.run_once()
    assert monitor.token.max == monitor.token.value == 39
    assert monitor._panels[0].spec["cursor"] is None
    monitor.token.value = 10
    assert monitor._panels[1].spec["title"] == "Experts in memory, token 9"
    assert monitor._panels[0].spec["cursor"] == monitor._panels[2].spec["cursor"] == 9
    np.testing.assert_array_equal(values_of(monitor._panels[1])[0] > 0, run.residency[10] > 0)
    monitor.token.value = 0
    assert monitor._panels[1].spec["title"] == "Experts in memory, prompt"


def test_time_axis_holds_still_while_slots_move(monitor):
    monitor.run_once(slots=4, max_tokens=120)
    top = monitor._panels[2].spec["ylim"]
    monitor.run_once(slots=24)
    assert monitor._panels[2].spec["ylim"] == top


def test_text_is_shown_not_interpreted(monitor):
    monitor.run_once(prompt="<script>alert(1)</script> & more")
    assert "<script>" not in monitor._text.value
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in monitor._text.value


def test_copy_settings_shows_both_forms(monitor):
    monitor.run_once(slots=12)
    monitor.buttons["Copy settings"].click()
    cli, python = monitor._code.value.split("\n\n")
    assert cli.startswith("colibri run --model colibri-tiny --prompt 'def f(x):' --expert-cache-slots 12")
    assert python.startswith("lab = cl.open('colibri-tiny', expert_cache_slots=12, policy='lru')\nrun = lab.generate(")
    assert monitor._code.layout.display is None
    monitor.buttons["Copy settings"].click()
    assert monitor._code.layout.display == "none"


def test_data_are_tables(monitor):
    monitor.run_once(slots=4)
    monitor.run_once(slots=16)
    data = monitor.data
    assert data["runs"]["slots"].tolist() == [4, 16]
    assert data["runs"]["hit_rate"].is_monotonic_increasing
    assert len(data["steps"]) == 40
    assert set(data["stages"]["phase"]) == {"prefill", "decode"}
    grid = data["residency"]
    assert len(grid) == 6 * 32 and grid["layer"].unique().tolist() == [1, 2, 3, 4, 5, 6]
    assert grid["resident"].sum() == (monitor.run.residency[-1] > 0).sum()


def test_png_is_written_and_tells_the_verdict(monitor, tmp_path):
    monitor.run_once()
    picture = monitor.png(tmp_path / "view.png")
    assert (tmp_path / "view.png").read_bytes()[:8] == picture.png()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "misses per token" in picture.get_supxlabel()
    assert picture.get_suptitle() == "colibri-tiny · 8 slots per layer · lru · 2 threads · pread · cold start"


def test_png_mode_shows_the_same_panels(lab):
    monitor = run_monitor(lab, live="png", max_tokens=20)
    blank = [bytes(panel.value) for panel in monitor._panels]
    monitor.run_once()
    for before, panel in zip(blank, monitor._panels, strict=True):
        assert bytes(panel.value).startswith(b"\x89PNG") and bytes(panel.value) != before


def test_settings_are_checked_before_anything_runs(lab):
    with pytest.raises(SettingError, match="unknown setting 'max_token': did you mean 'max_tokens'"):
        run_monitor(lab, max_token=5)
    with pytest.raises(SettingError, match="live cannot be 'gif'"):
        run_monitor(lab, live="gif")
    monitor = run_monitor(lab, max_tokens=5)
    with pytest.raises(SettingError, match="slots must be 1 to 32, the experts there are; got 33"):
        monitor.run_once(slots=33)
    with pytest.raises(SettingError, match="expert_cache_slots must be at least 1, got 0"):
        monitor.run_once(slots=0)
    with pytest.raises(SettingError, match="policy cannot be 'lur'; did you mean 'lru'"):
        monitor.run_once(policy="lur")
    assert monitor.state == "empty" and monitor.runs == []


def test_global_scope_counts_slots_in_all():
    monitor = run_monitor(FakeLab(slots=48, scope="global"), max_tokens=5)
    assert monitor.slots.max == 32 * 6
    assert "48 slots in all = 7.08 MB" in monitor._memory.value
    assert "48 slots in all" in monitor._head.value


def test_every_control_has_a_name_and_a_tooltip(monitor):
    for control in (
        monitor.slots,
        monitor.policy,
        monitor.tokens,
        monitor.prompt,
        monitor.token,
        *monitor.buttons.values(),
    ):
        assert control.description and control.tooltip
    assert list(monitor.buttons)[:2] == ["Start", "Stop"]


def test_stop_from_inside_the_run_does_not_wait_for_itself(lab, monkeypatch):
    monitor = run_monitor(lab, max_tokens=50)
    answers, residency = [], lab.residency
    monkeypatch.setattr(lab, "residency", lambda: (answers.append(monitor.stop()), residency())[1])
    assert monitor.run_once().stop_reason == "interrupted"
    assert answers == [False] and monitor.state == "stopped"


def test_close_stops_the_run():
    monitor = run_monitor(FakeLab(step_s=0.01), max_tokens=100_000)
    monitor.start()
    until(lambda: monitor.run is not None)
    monitor.close()
    assert monitor.state == "stopped" and threads() == []


def test_class_is_what_the_function_makes(lab):
    assert isinstance(run_monitor(lab), RunMonitor)


def test_a_picture_that_cannot_be_drawn_is_an_error_not_silence(monitor, monkeypatch):
    def show(frame):
        raise ValueError("no room for the picture")

    monkeypatch.setattr(monitor._panels[0], "show", show)
    with pytest.raises(ValueError, match="no room for the picture"):
        monitor.run_once()
    assert monitor.state == "error" and "no room for the picture" in monitor._message.value
    assert threads() == []
