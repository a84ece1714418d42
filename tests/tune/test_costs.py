"""Calibration: costs that went in come out, bounds hold, and every setting of it works or is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab.errors import SettingError
from colibri_lab.telemetry import Step
from colibri_lab.tune import calibrate as module
from colibri_lab.tune import predict
from colibri_lab.tune.calibrate import Calibrator, bounded_fit, calibrate, serve_settings, trimmed_mean
from colibri_lab.tune.served import DECODE, PREFILL, serve
from colibri_lab.tune.shapes import Shape
from colibri_lab.tune.storage_model import Rates

INSTANT = dict(storage="modelled", disk_bandwidth="100 GB/s", disk_latency_us=0.0)
STEP_S, POSITION_S, EXPERT_S, MISS_S, WAIT_S = 2e-3, 2e-7, 50e-6, 30e-6, 150e-6


@pytest.fixture
def lab(tiny):
    return cl.open(tiny, expert_cache_slots=8, **INSTANT)


def made_up(trace, slots: dict, shape: Shape, jitter: np.ndarray) -> list[Step]:
    """Steps that cost exactly what the constants above say, times 1 + jitter."""
    served = serve(trace, **serve_settings(slots, shape))
    steps, at = (
        [],
        int(np.bincount(served.layer[served.phase == PREFILL], served.tokens[served.phase == PREFILL]).max()),
    )
    for i, step in enumerate(np.unique(served.step)):
        mine = served.step == step
        decode = (served.phase[mine] == DECODE).all()
        dense = shape.hidden * shape.dense_width * (shape.layers - len(shape.moe_layers))
        routed = EXPERT_S * served.blocks[mine].sum()
        share = dense / (dense + len(shape.moe_layers) * shape.top_k * shape.hidden * shape.expert_width)
        extra = MISS_S * served.misses[mine].sum() + WAIT_S * np.count_nonzero(served.misses[mine])
        wall = (STEP_S + POSITION_S * at + routed + extra) * (1 + jitter[i])
        steps.append(
            Step(
                index=i, phase="decode" if decode else "prefill", tokens=1 if decode else at, token=1, text="",
                stages={"expert_compute": routed / (1 - share), "expert_load_wait": 0.0}, calls={}, wall_s=wall,
                hits=0, misses=int(served.misses[mine].sum()), bytes_loaded=0, hit_rate=None,
            )
        )  # fmt: skip
        at += decode
    return steps


def calibrated_on_made_up_steps(lab, monkeypatch, spread: float, rounds: int):
    calibrator = Calibrator(lab, tokens=40)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        module, "run_cold",
        lambda lab, prompt, tokens: made_up(calibrator.trace, lab.settings, calibrator.shape, rng.normal(0, spread, 64)),
    )  # fmt: skip
    for _ in range(rounds):
        calibrator.round()
    return calibrator.result()


def test_costs_that_went_in_come_out(lab, monkeypatch):
    found = calibrated_on_made_up_steps(lab, monkeypatch, 0.0, 1)
    assert found.slots == (5, 9, 17, 32) and found.n == 1 and found.steps == 40
    costs = found.costs
    assert (costs.step_s, costs.expert_s) == (pytest.approx(STEP_S, rel=1e-6), pytest.approx(EXPERT_S, rel=1e-6))
    assert costs.position_s == pytest.approx(POSITION_S, rel=1e-4)
    assert (costs.miss_s, costs.wait_s) == (pytest.approx(MISS_S, rel=1e-6), pytest.approx(WAIT_S, rel=1e-6))
    assert found.read_factor == 1.0 and found.reads == (None, None)


def test_noise_of_single_steps_averages_out(lab, monkeypatch):
    costs = calibrated_on_made_up_steps(lab, monkeypatch, 0.15, 9).costs
    total = costs.step_s + 24 * costs.expert_s + 12 * costs.miss_s + 5 * costs.wait_s
    assert total == pytest.approx(STEP_S + 24 * EXPERT_S + 12 * MISS_S + 5 * WAIT_S, rel=0.05)
    assert 0 < costs.spread < 0.15


@pytest.mark.parametrize("slots", [4, 8, 24])
def test_a_prediction_from_them_is_the_time_they_make(lab, monkeypatch, slots):
    found = calibrated_on_made_up_steps(lab, monkeypatch, 0.0, 1)
    shape = Shape.of_container(lab.container)
    one = predict.calibrated(shape, found, 10**10, dict(INSTANT)).at(expert_cache_slots=slots)
    steps = made_up(found.trace, dict(lab.settings, expert_cache_slots=slots), shape, np.zeros(64))
    decode = np.array([step.wall_s for step in steps if step.phase == "decode"])
    np.testing.assert_allclose(one.steps.seconds, decode, rtol=1e-3)  # what is left is reading at 100 GB/s


def test_calibrating_leaves_the_lab_as_it_was(lab):
    before = dict(lab.settings)
    found = calibrate(lab, tokens=8, repeats=2)
    assert lab.settings == before and found.n == 2
    assert found.costs.step_s > 0 and found.costs.expert_s > 0 and found.costs.miss_s >= 0 and found.costs.wait_s >= 0


def test_reads_are_measured_where_there_are_any(tiny):
    found = calibrate(cl.open(tiny, expert_cache_slots=8, storage="pread"), tokens=12, repeats=2, read_s=0.1)
    assert found.reads[1].at(147_456, 2, 4) > 1e6 and found.read_factor > 0


def test_without_contrast_the_cost_of_a_miss_is_assumed(lab, monkeypatch):
    calibrator = Calibrator(lab, tokens=12, slots=[8])
    monkeypatch.setattr(
        module, "run_cold", lambda lab, *_: made_up(calibrator.trace, lab.settings, calibrator.shape, np.zeros(64))
    )
    calibrator.round()
    costs = calibrator.result().costs
    assert costs.miss_s == module.MISS_S and costs.wait_s == 0
    assert 0 < costs.step_s < STEP_S + 24 * MISS_S + 6 * WAIT_S


def test_slots_stay_within_the_memory_they_may_take(lab):
    ten = 10 * 6 * lab.slot_bytes
    assert Calibrator(lab, tokens=8, memory=ten).slots == (5, 6, 8, 10)
    assert Calibrator(lab, tokens=8, memory=1).slots == (1,)
    assert Calibrator(lab, tokens=8, slots=[9, 4, 9]).slots == (4, 9)


def test_all_layers_share_the_slots_of_a_global_pool(tiny):
    assert Calibrator(cl.open(tiny, expert_cache_slots=40, scope="global", **INSTANT), tokens=8).slots == (
        30,
        56,
        103,
        192,
    )


def test_too_little_is_refused(lab):
    with pytest.raises(SettingError, match="calibration needs at least 8 decoded tokens, got 7"):
        Calibrator(lab, tokens=7)
    calibrator = Calibrator(lab, tokens=8)
    with pytest.raises(SettingError, match="no round was run; call round"):
        calibrator.result()
    lab.configure(max_seq_len=16)
    with pytest.raises(SettingError, match="fewer than 4 of 48 tokens were decoded; give a shorter prompt"):
        calibrate(lab, "def main(argument, other, third):\n")


# ---- the fit


def test_a_fit_within_its_bounds_is_least_squares():
    x = np.arange(10.0)
    found = bounded_fit({"a": x, "b": x**2}, 3 + 2 * x + 0.5 * x**2, {"a": np.inf, "b": np.inf})
    assert found == {"step_s": pytest.approx(3), "a": pytest.approx(2), "b": pytest.approx(0.5)}


def test_coefficients_are_held_at_their_bounds():
    x = np.arange(10.0)
    falling = bounded_fit({"a": x}, 5 - x, {"a": np.inf})
    assert falling == {"step_s": pytest.approx(0.5), "a": 0.0}  # the mean of 5 … -4
    steep = bounded_fit({"a": x}, 1 + 4 * x, {"a": 3.0})
    assert steep == {"step_s": pytest.approx(1 + 4.5), "a": 3.0}


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 2))
def test_no_coefficient_leaves_its_bounds(seed, most):
    rng = np.random.default_rng(seed)
    columns = {"a": rng.normal(size=20), "b": rng.normal(size=20), "c": np.zeros(20)}
    found = bounded_fit(columns, rng.normal(size=20), dict.fromkeys(columns, most))
    assert set(found) == {"step_s", "a", "b", "c"}
    assert all(0 <= found[name] <= most for name in columns) and found["step_s"] >= 0


def test_the_slowest_and_the_fastest_tenth_do_not_count():
    values = np.array([*range(1, 9), 1000.0, -1000.0])
    assert trimmed_mean(values) == pytest.approx(4.5) and trimmed_mean(values[:3]) == 2
    np.testing.assert_allclose(trimmed_mean(np.c_[values, values]), [4.5, 4.5])


# ---- rates of several measurements


def test_pooled_rates_are_medians_cell_by_cell():
    several = [Rates(((1, 1, rate), (1, 4, 2 * rate)), spread) for rate, spread in ((1e9, 0.1), (4e9, 0.3), (2e9, 0.2))]
    pooled = Rates.pooled([several[0], None, *several[1:]])
    assert pooled.cells == ((1, 1, 2e9), (1, 4, 4e9)) and pooled.spread == 0.2
    assert Rates.pooled([None, None]) is None
