"""The recorder with a clock that ticks by hand: time belongs to the innermost stage and nothing is lost."""

from __future__ import annotations

import pytest

from colibri_lab.telemetry import Recorder, stage_table, step_table


class Clock:
    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns

    def tick(self, ms):
        self.ns += int(ms * 1e6)


@pytest.fixture
def clock():
    return Clock()


def test_time_goes_to_the_innermost_stage_and_the_rest_is_other(clock):
    recorder = Recorder(clock)
    recorder.begin("decode")
    clock.tick(1)
    with recorder.stage("expert_compute"):
        clock.tick(10)
        with recorder.stage("expert_load_wait"):
            clock.tick(5)
        clock.tick(3)
    clock.tick(2)
    step = recorder.end(tokens=1)
    assert {k: round(v * 1e3) for k, v in step.stages.items()} == {
        "other": 3,
        "expert_compute": 13,
        "expert_load_wait": 5,
    }
    assert step.calls == {"expert_compute": 1, "expert_load_wait": 1}
    assert step.wall_s == pytest.approx(0.021)


def test_a_stage_left_by_an_error_still_closes(clock):
    recorder = Recorder(clock)
    recorder.begin("decode")
    with pytest.raises(RuntimeError, match="boom"), recorder.stage("router"):
        clock.tick(4)
        raise RuntimeError("boom")
    clock.tick(1)
    assert recorder.end(tokens=1).stages == {"other": 0.001, "router": 0.004}


def test_hit_rates_are_null_until_an_expert_was_asked_for(clock):
    recorder = Recorder(clock)
    rates = []
    for phase, hits, misses in (("prefill", 0, 0), ("prefill", 1, 3), ("decode", 3, 1), ("decode", 4, 0)):
        recorder.begin(phase)
        step = recorder.end(tokens=1, hits=hits, misses=misses)
        rates.append((step.hit_rate, step.running_hit_rate))
    assert rates == [(None, None), (0.25, 0.25), (0.75, 0.75), (1.0, 0.875)]


def test_tables_have_a_row_per_stage_and_per_step(clock):
    recorder = Recorder(clock)
    for phase, ms in (("prefill", 8), ("decode", 2), ("decode", 2)):
        recorder.begin(phase)
        with recorder.stage("attention"):
            clock.tick(ms)
        clock.tick(ms)
        recorder.end(tokens=1)
    stages = stage_table(recorder.steps).set_index(["stage", "phase"])
    assert stages.loc[("attention", "prefill"), "share"] == pytest.approx(0.5)
    assert stages.loc[("attention", "decode"), ["calls", "seconds"]].tolist() == [2, pytest.approx(0.004)]
    steps = step_table(recorder.steps)
    assert steps.attention_ms.tolist() == pytest.approx([8, 2, 2])
    assert steps.load_service_ms.isna().all()
