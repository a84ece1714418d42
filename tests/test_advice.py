"""Thresholds at their edges, published rule and corrected rule apart, and the sentences made from a run's tables."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from colibri_lab.advice import advise, on_compute, on_hit_rate, on_router, on_sampling


@pytest.mark.parametrize(
    ("hit_rate", "verdict"), [(0.849, "add slots"), (0.85, None), (0.90, None), (0.95, None), (0.951, "reduce slots")]
)
def test_the_published_hit_rate_rule_speaks_below_85_and_above_95_percent(hit_rate, verdict):
    published = on_hit_rate(hit_rate, wait=0.10).published
    assert verdict in published if verdict else published is None


@pytest.mark.parametrize(
    ("wait", "verdict"),
    [(0.151, "add slots"), (0.15, None), (0.05, None), (0.049, "more slots would not be noticed")],
)
@pytest.mark.parametrize("hit_rate", [0.5, 0.9, 0.99])
def test_the_corrected_hit_rate_rule_follows_the_wait_whatever_the_hit_rate(hit_rate, wait, verdict):
    corrected = on_hit_rate(hit_rate, wait).corrected
    assert verdict in corrected if verdict else corrected is None


def test_a_slot_for_every_expert_is_never_told_to_add_slots():
    corrected = on_hit_rate(0.2, wait=0.6, all_resident=True).corrected
    assert "add slots" not in corrected
    assert "first read" in corrected


@pytest.mark.parametrize(("router", "speaks"), [(0.149, False), (0.15, False), (0.151, True)])
def test_the_published_router_rule_speaks_above_15_percent(router, speaks):
    advice = on_router(router, wait=0.0)
    assert (advice is not None) == speaks
    if speaks:
        assert "add slots" in advice.published
        assert "slots will not help" in advice.corrected


@pytest.mark.parametrize(("wait", "speaks"), [(0.149, False), (0.15, False), (0.151, True)])
def test_the_corrected_router_rule_is_keyed_on_the_wait_for_experts(wait, speaks):
    advice = on_router(router=0.01, wait=wait)
    assert (advice is not None) == speaks
    if speaks:
        assert advice.published is None
        assert "add slots" in advice.corrected


@pytest.mark.parametrize(("compute", "speaks"), [(0.699, False), (0.70, False), (0.701, True)])
def test_the_compute_rule_speaks_above_70_percent(compute, speaks):
    advice = on_compute(compute, threads=1, cores=2)
    assert (advice is not None) == speaks
    if speaks:
        assert "AVX-512" in advice.published
        assert "1 of 2 physical cores" in advice.corrected


def test_more_threads_are_not_advised_when_every_core_computes():
    assert "raise threads" not in on_compute(0.9, threads=2, cores=2).corrected


@pytest.mark.parametrize(
    ("temperature", "top_p", "says"),
    [
        (1.51, 0.95, "falls apart"),
        (1.5, 0.95, None),
        (0.0, 0.95, "greedy"),
        (0.7, 0.09, "repetition"),
        (0.7, 0.1, None),
    ],
)
def test_sampler_settings_known_to_spoil_text_are_named(temperature, top_p, says):
    sentence = on_sampling(temperature, top_p)
    assert says in sentence if says else sentence is None


def finished_run(hits: int, misses: int, shares: dict[str, float], phase: str = "decode"):
    stages = pd.DataFrame(
        [(stage, phase, 1, share, share) for stage, share in shares.items()],
        columns=["stage", "phase", "calls", "seconds", "share"],
    )
    cache = pd.DataFrame(
        [(1, "prefill", 0, 50, 50, 0), (1, "decode", hits, misses, misses, 0)],
        columns=["layer", "phase", "hits", "misses", "loads", "bytes"],
    )
    return SimpleNamespace(stages=stages, cache=cache, settings={"threads": 2, "temperature": 0.7, "top_p": 0.95})


def test_advise_reads_decode_only_and_states_what_it_measured():
    run = finished_run(60, 40, {"router": 0.2, "expert_load_wait": 0.3, "expert_compute": 0.4, "shared_expert": 0.1})
    said = advise(run, cores=2)
    assert len(said) == 2
    assert "Hit rate 60.0% in decode, waiting for experts 30.0%" in said[0]
    assert "Router 20.0%" in said[1]


def test_advise_adds_routed_and_shared_experts_up():
    run = finished_run(9, 1, {"expert_compute": 0.6, "shared_expert": 0.11, "expert_load_wait": 0.1})
    assert any("Expert products 71.0%" in sentence for sentence in advise(run, cores=2))


def test_what_was_not_measured_gets_no_sentence():
    assert advise(finished_run(0, 0, {"router": 0.9}, phase="prefill"), cores=2) == []


@pytest.mark.parametrize(
    ("scope", "slots", "everything"),
    [("layer", 31, False), ("layer", 32, True), ("global", 32, False), ("global", 64, True)],
)
def test_the_opened_model_tells_whether_everything_has_a_slot(scope, slots, everything):
    lab = SimpleNamespace(config=SimpleNamespace(moe_layers=(1, 2)), container=SimpleNamespace(blocks=32))
    run = finished_run(2, 8, {"expert_load_wait": 0.5})
    run.settings |= {"scope": scope, "expert_cache_slots": slots}
    assert ("first read" in advise(run, lab, cores=2)[0]) == everything
