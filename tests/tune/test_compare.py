"""Comparisons: chance never wins, a real difference does, and whatever else differs is named."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

import colibri_lab as cl
from colibri_lab.errors import SettingError
from colibri_lab.tune import runs
from colibri_lab.tune.compare import (
    _confounds,
    compare,
    compare_records,
    differences,
    judge,
    percentiles,
    sign_flip_chance,
    verdict,
)  # fmt: skip


def speeds(rng, factor: float, noise: float):
    return lambda: 100 * factor * (1 + rng.uniform(-noise, noise))


@pytest.mark.parametrize("seed", range(10))
def test_a_knob_without_effect_never_wins(seed):
    rng = np.random.default_rng(seed)
    _, found = judge(speeds(rng, 1, 0.15), speeds(rng, 1, 0.15), n=10)
    assert found["winner"] is None
    assert "No winner" in found["reason"]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("more_is_better", "winner"), [(True, "b"), (False, "a")])
def test_a_fifth_more_is_found_under_fifteen_percent_noise(seed, more_is_better, winner):
    rng = np.random.default_rng(seed)
    samples, found = judge(speeds(rng, 1, 0.15), speeds(rng, 1.2, 0.15), n=10, more_is_better=more_is_better)
    assert found["winner"] == winner
    assert found["low"] < 1.2 < found["high"] or abs(found["ratio"] - 1.2) < 0.12
    assert "n = 20 pairs" in found["reason"]
    assert samples.groupby("side").size().to_dict() == {"a": 40, "b": 20, "control": 20}


def test_runs_take_turns_in_both_orders():
    seen = []
    judge(lambda: seen.append("a") or 1.0, lambda: seen.append("b") or 1.0, n=3)
    assert "".join(seen) == 3 * "abbaaaaa"


def test_whoever_runs_second_does_not_win_for_that():
    turn = itertools.count()
    rng = np.random.default_rng(0)

    def second_is_faster():
        return 100 * (1.2 if next(turn) % 2 else 1.0) * (1 + rng.uniform(-0.02, 0.02))

    _, found = judge(second_is_faster, second_is_faster, n=8)
    assert found["winner"] is None


def test_a_control_that_differs_takes_the_win_away():
    rows, values = [], {"a": 100.0, "b": 130.0, "control": 140.0}
    for control, order, pair in itertools.product((False, True), ("forward", "reverse"), range(6)):
        for side in ("a", "control" if control else "b"):
            rows.append({"side": side, "order": order, "control": control, "pair": pair, "value": values[side]})
    found = verdict(pd.DataFrame(rows))
    assert found["winner"] is None
    assert "A against itself differs as well" in found["reason"]


def test_three_samples_are_taken_but_cannot_name_a_winner():
    _, found = judge(lambda: 1.0, lambda: 2.0, n=3)
    assert found["winner"] is None
    assert "take a larger n" in found["reason"]
    with pytest.raises(SettingError, match="n must be at least 3"):
        judge(lambda: 1.0, lambda: 2.0, n=2)
    with pytest.raises(SettingError, match="side b measured 0.0; expected a positive number"):
        judge(lambda: 1.0, lambda: 0.0, n=3)


def test_chance_is_that_of_the_exact_randomisation_test():
    logs = np.array([0.3, 0.1, -0.05, 0.2, 0.4])
    means = [abs(np.dot(signs, logs)) for signs in itertools.product((1, -1), repeat=5)]
    assert sign_flip_chance(logs) == np.mean(np.array(means) >= abs(logs.sum()) - 1e-12)
    assert sign_flip_chance(np.zeros(5)) == 1.0
    assert sign_flip_chance(np.full(30, 0.1)) < 1e-3


def test_far_percentiles_need_their_samples():
    assert set(percentiles(range(9))) == {"n", "p50"}
    assert set(percentiles(range(99))) == {"n", "p50", "p90"}
    assert set(percentiles(range(999))) == {"n", "p50", "p90", "p99"}
    assert percentiles(range(1000))["p99.9"] == pytest.approx(998.001)


def test_a_real_comparison_runs_records_and_says_n(tiny):
    found = compare(tiny, {"expert_cache_slots": 4}, {"expert_cache_slots": 32}, n=3, max_tokens=6, progress=False)
    assert found.table().n.tolist() == [12, 6, 6]
    assert "n = 6" in str(found)
    assert found.confounds == []
    kept = runs.load(found.record)
    assert kept.manifest["kind"] == "compare"
    assert len(kept.table("samples")) == 24
    assert cl.runs("compare").id.tolist() == [found.record]


def test_sides_that_did_other_work_or_began_otherwise_are_confounded():
    def row(tokens, share):
        return {"tokens_hash": tokens, "page_cache": share}

    settings = {"a": {"threads": 1, "seed": 1, "simd": "avx2"}, "b": {"threads": 2, "seed": 2, "simd": "avx2"}}
    same, other = [row(7, 1.0)] * 3, [row(8, 1.0)] * 3
    assert _confounds(settings, {"threads", "seed"}, {"a": same, "b": same}) == []
    assert _confounds(settings, {"threads"}, {"a": same, "b": same}) == ["seed 1 and 2"]
    both = _confounds(settings | {"b": settings["a"]}, {"threads"}, {"a": same, "b": other})
    assert both == ["the two sides generated different tokens, so their work differs"]
    # A seed changes tokens by its nature: where it is what was varied, that is no confound.
    assert _confounds(settings, {"threads", "seed"}, {"a": same, "b": other}) == []
    cold = _confounds(settings, {"threads", "seed"}, {"a": same, "b": [row(7, 0.5)] * 3})
    assert cold == ["the page cache held 100% of the experts before A and 50% before B"]


def test_unknown_settings_and_metrics_are_refused(tiny):
    with pytest.raises(SettingError, match="unknown setting 'slots'; did you mean 'expert_cache_slots'"):
        compare(tiny, {"slots": 4}, {})
    with pytest.raises(SettingError, match="metric cannot be 'speed'"):
        compare(tiny, {}, {}, metric="speed")


def test_stored_runs_never_win_and_name_what_else_differs(tiny, monkeypatch):
    def kept(share, **effective):
        return runs.save("generate", requested={"policy": effective["policy"]}, effective=effective,
                         facts={"tokens_per_s": 1.0}, model=tiny, page_cache_before=share)  # fmt: skip

    a, b = kept(1.0, policy="lru", threads=2), kept(1.0, policy="arc", threads=2)
    assert differences(a, b, ["policy"]) == []
    c = kept(0.2, policy="arc", threads=1)
    found = compare_records(a.id, c.id)
    assert found["varied"] == ["policy"] and found["winner"] is None and found["n"] == [1, 1]
    assert found["confounds"] == ["setting threads: 2 and 1", "page cache before the run: 100% and 20% of the experts"]
    assert differences(b, runs.save("generate", requested={}, effective={"policy": "arc", "threads": 2}), ["policy"])[
        0
    ].startswith("model")
