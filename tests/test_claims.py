"""Claims: judges see both outcomes, a failing experiment is a card, and every experiment runs."""

from __future__ import annotations

import inspect
import re

import pytest

from colibri_lab import claim_experiments, claims
from colibri_lab.claims import (
    CLAIMS,
    FAILED,
    IMPLAUSIBLE,
    NOT,
    OTHER,
    REPRODUCED,
    TOPICS,
    UNTESTABLE,
    VERDICTS,
    Claim,
    Verdict,
)
from colibri_lab.errors import SettingError
from colibri_lab.ui import claim_lessons

FAST = {"at_0_percent_ns": 30, "at_50_percent_ns": 30, "at_95_percent_ns": 31, "past_holes_ns": 32}
LOSS = {"bytes_share": 0.51, "change_percent": 0.1, "plus_minus": 0.1}
MACHINE = {"cpu": "some CPU", "cores": 2, "ram_GB": 8.0, "avx512_fp16": False, "model": None}
JUDGED = {
    "pool-constant-time": [(FAST, REPRODUCED), (FAST | {"past_holes_ns": 90}, NOT), (FAST | {"at_95_percent_ns": 60}, NOT)],
    "pool-37-ns": [(FAST, REPRODUCED), (FAST | {"at_50_percent_ns": 200}, OTHER)],
    "scratch-by-layer": [
        ({"layers_2_bytes": 8, "layers_6_bytes": 8}, REPRODUCED),
        ({"layers_2_bytes": 8, "layers_6_bytes": 24}, NOT),
    ],
    "arena-peak": [({"ratio": 1.3}, REPRODUCED), ({"ratio": 1.31}, NOT)],
    "kv-128-bytes": [({"Mixtral-8x7B": 4096, "a": 128}, REPRODUCED), ({"Mixtral-8x7B": 4096, "a": 1152}, IMPLAUSIBLE)],
    "kv-pages": [({"saving_even_lengths": 0.49}, UNTESTABLE)],
    "weighted-lru": [({"a": 8.0, "b": 12.0}, REPRODUCED), ({"a": 8.0, "b": -3.0}, NOT)],
    "sweet-spot": [({"a": 0.8, "b": 0.9}, REPRODUCED), ({"a": 0.0, "b": 0.9}, NOT)],
    "slots-1.2-GB": [
        ({"one_pool_bytes": 1.1e9, "each_layer_bytes": 1e10}, REPRODUCED),
        ({"one_pool_bytes": 5e7, "each_layer_bytes": 8e8}, IMPLAUSIBLE),
    ],
    "router-15-percent": [
        ({"hit_rate_4_slots": 0.3, "hit_rate_32_slots": 0.9, "router_share_4_slots": 0.2, "router_share_32_slots": 0.1}, REPRODUCED),
        ({"hit_rate_4_slots": 0.3, "hit_rate_32_slots": 0.9, "router_share_4_slots": 0.01, "router_share_32_slots": 0.03}, NOT),
    ],
    "warm-up": [
        ({"cold_first_ms": 90, "warm_first_ms": 9, "cold_later_ms": 4, "warm_later_ms": 4}, REPRODUCED),
        ({"cold_first_ms": 9, "warm_first_ms": 9, "cold_later_ms": 4, "warm_later_ms": 4}, NOT),
    ],
    "int8": [({"int8": LOSS}, REPRODUCED), ({"int8": LOSS | {"change_percent": 2.5}}, NOT),
             ({"int8": LOSS | {"bytes_share": 0.7}}, NOT)],
    "int8-0.3-percent": [({"int8": LOSS}, REPRODUCED), ({"int8": LOSS | {"plus_minus": 0.3}}, NOT)],
    "int4": [
        ({"int4-g64": LOSS | {"bytes_share": 0.27, "change_percent": 1.0}, "int4-row": LOSS}, REPRODUCED),
        ({"int4-g64": LOSS | {"bytes_share": 0.27, "change_percent": 0.0}, "int4-row": LOSS}, NOT),
    ],
    "repacking": [({"ratio": 1.02}, REPRODUCED), ({"ratio": 1.2}, NOT)],
    "gemm-naive": [({"over_naive": 3.1}, REPRODUCED), ({"over_naive": 2.0}, NOT)],
    "gemm-blas": [({"of_blas": 0.7}, REPRODUCED), ({"of_blas": 0.5}, NOT)],
    "stacked": [
        ({"slots_GB_per_s": 42, "stacked_GB_per_s": 89}, REPRODUCED),
        ({"slots_GB_per_s": 22, "stacked_GB_per_s": 21}, NOT),
    ],
    "near-limit": [({"here_GB_per_s": 20.0}, IMPLAUSIBLE)],
    "scatter": [
        ({"slots_GB_per_s": 20, "gathered_GB_per_s": 15}, REPRODUCED),
        ({"slots_GB_per_s": 20, "gathered_GB_per_s": 19}, NOT),
    ],
    "sigmoid-error": [({"error": 9e-5}, REPRODUCED), ({"error": 2e-4}, NOT)],
    "sigmoid-speed": [({"times_faster": 15}, REPRODUCED), ({"times_faster": 1.2}, NOT)],
    "half-floats": [(MACHINE, IMPLAUSIBLE)],
    "experts-at-once": [
        ({"cores": 8, "at_once_1": 10, "at_once_4": 21, "at_once_8": 18}, REPRODUCED),
        ({"cores": 8, "at_once_1": 10, "at_once_4": 12, "at_once_8": 18}, NOT),
        ({"cores": 2, "at_once_1": 10, "at_once_4": 12, "at_once_8": 18}, OTHER),
    ],
    "no-softmax": [({"same": 1.0}, REPRODUCED), ({"same": 0.99}, NOT)],
    "reference-run": [(MACHINE, OTHER), (MACHINE | {"cpu": "Core i7-12700"}, UNTESTABLE)],
    "gpu-latency": [(MACHINE, UNTESTABLE)],
}  # fmt: skip
CASES = [(name, numbers, kind) for name, cases in JUDGED.items() for numbers, kind in cases]


@pytest.mark.parametrize(("name", "numbers", "kind"), CASES, ids=[f"{c[0]}-{c[2]}-{i}" for i, c in enumerate(CASES)])
def test_a_judge_says_what_the_numbers_say(name, numbers, kind):
    verdict = CLAIMS[name].judge(numbers)
    assert verdict.kind == kind
    assert re.search(r"\d", verdict.measured) and verdict.measured.endswith(".")


def test_every_claim_is_judged_here_and_belongs_to_one_topic():
    assert set(JUDGED) == set(CLAIMS)
    assert sorted(name for names in TOPICS.values() for name in names) == sorted(CLAIMS)


def test_a_failing_experiment_or_judge_is_a_card_and_the_rest_goes_on(monkeypatch):
    def broken():
        raise OSError("disk: <unplugged>")

    for name, claim in (
        ("broken", Claim("broken", "It works.", "somebody", broken, lambda n: Verdict(REPRODUCED, "1."))),
        ("wrong", Claim("wrong", "It works.", "somebody", lambda: {"a": 1}, lambda n: Verdict(REPRODUCED, n["b"]))),
    ):
        monkeypatch.setitem(CLAIMS, name, claim)
    cards = claims.run(["broken", "wrong", "no-softmax"], progress=False)
    assert cards.table.verdict.tolist() == [FAILED, FAILED, REPRODUCED]
    assert isinstance(cards[0].error, OSError) and "KeyError: 'b'" in cards[1].verdict.measured
    assert cards[1].numbers == {"a": 1}
    assert "OSError: disk: &lt;unplugged&gt;" in cards._repr_html_() and "OSError: disk: <unplugged>" in str(cards)
    assert "2 experiments failed" in claim_lessons.verdicts(cards).said


def test_unknown_claims_are_refused():
    with pytest.raises(SettingError, match="no claim 'int5'.*int4"):
        claims.run(["int5"], progress=False)


def test_claims_of_one_experiment_run_it_once(monkeypatch):
    calls = []

    def once():
        calls.append(1)
        return {"int8": LOSS, "int4-g64": LOSS, "int4-row": LOSS}

    for name in ("int8", "int4"):
        claim = CLAIMS[name]
        monkeypatch.setitem(CLAIMS, name, Claim(name, claim.text, claim.source, once, claim.judge))
    assert len(claims.run(["int8", "int4"], progress=False)) == 2 and calls == [1]
    claims.run(["int8"], progress=False)
    assert calls == [1, 1]  # measured anew by every run


@pytest.mark.parametrize(
    "name",
    ["pool-constant-time", "scratch-by-layer", "arena-peak", "kv-128-bytes", "kv-pages", "weighted-lru", "sweet-spot",
     "slots-1.2-GB", "repacking", "sigmoid-error", "sigmoid-speed", "half-floats", "no-softmax", "reference-run", "gpu-latency"],
)  # fmt: skip
def test_cheap_experiments_end_in_a_verdict(name):
    (card,) = claims.run([name], progress=False)
    assert card.error is None and card.verdict.kind in VERDICTS
    assert card.verdict.kind in card._repr_html_() and CLAIMS[name].text in str(card)


def test_what_does_not_depend_on_the_machine_comes_out_as_computed_elsewhere():
    assert claim_experiments.kv_bytes_per_token()["Mixtral-8x7B"] == 2 * 2 * 8 * 128
    assert claim_experiments.small_pool()["OLMoE, 24 slots"] == 0
    assert claim_experiments.slots_cost()["one_pool_bytes"] == pytest.approx(8 * 3 * 2048 * 1024, rel=0.01)
    assert claim_experiments.sigmoid()["error"] < 1e-4


def test_experiments_are_documented():
    for _, function in inspect.getmembers(claim_experiments, inspect.isfunction):
        if function.__module__ == claim_experiments.__name__ and not function.__name__.startswith("_"):
            assert inspect.getdoc(function), function


def test_the_gain_over_lru_is_that_of_replays():
    import colibri_lab as cl

    trace = cl.load_trace(claims.traces()["colibri-tiny"])
    found = claim_lessons.gain_over_lru({"tiny": trace}, "lfu-aged")
    row = found.table[found.table.slots == 8].iloc[0]
    rates = [trace.replay(p, 8, phase="decode").attrs["totals"]["hit_rate"] for p in ("lfu-aged", "lru")]
    assert row.points == pytest.approx(100 * (rates[0] - rates[1]))
    assert claim_lessons.gain_over_lru({"tiny": trace}, "lru").table.points.abs().max() == 0
