"""Splits, regimes, floors, warnings and unequal slots."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import SettingError, TraceError
from colibri_lab.trace import Trace, load_trace
from colibri_lab.trace.bounds import (
    allocate,
    best_split,
    cycle,
    gap,
    miss_split,
    regime,
    summary,
    too_small,
    warnings,
)  # fmt: skip


@pytest.fixture(scope="module")
def olmoe(traces) -> Trace:
    return load_trace(traces / "warp_olmoe_1b7b_299.jsonl")


@pytest.fixture(scope="module")
def qwen(traces) -> Trace:
    return load_trace(traces / "bigmoe_qwen.route.csv")


def misses(trace, policy, slots, **settings):
    return trace.replay(policy=policy, slots=slots, **settings).attrs["totals"]["misses"]


def test_the_gap_and_where_it_comes_from(olmoe):
    found = gap(olmoe, 16)
    own, forced, bypass = (misses(olmoe, p, 16) for p in ("lru", "belady", "belady-bypass"))
    assert found["gap"] == pytest.approx((own - bypass) / own)
    assert found["admission_share"] + found["victim_share"] == pytest.approx(1)
    assert found["victim_share"] == pytest.approx((own - forced) / (own - bypass))
    assert found["valid_bound"] and found["note"] is None


def test_at_k_slots_the_whole_gap_is_admission(olmoe):
    found = gap(olmoe, 8)
    assert (found["admission_share"], found["victim_share"]) == (1, 0)
    assert "no policy that keeps every missed block can matter" in found["note"]


def test_the_bound_is_not_claimed_where_it_does_not_hold(olmoe, qwen):
    assert not gap(olmoe, 16, lookup="serial", order="id")["valid_bound"]
    assert not gap(qwen, 500, scope="global")["valid_bound"]  # blocks of two sizes
    assert gap(olmoe, 500, scope="global")["valid_bound"]


def test_misses_split_into_compulsory_capacity_and_policy(olmoe):
    found = miss_split(olmoe, 16, "lfu")
    assert (
        found["compulsory"] == sum(len(np.unique(olmoe.experts[olmoe.layer == layer])) for layer in olmoe.layers) == 974
    )
    assert found["compulsory"] + found["capacity"] + found["policy_misses"] == found["misses"]
    assert found["policy_misses"] == found["misses"] - misses(olmoe, "belady-bypass", 16)
    everything = miss_split(olmoe, 64)
    assert (everything["capacity"], everything["policy_misses"]) == (0, 0)


def test_the_regime_of_a_trace(qwen):
    """Decode events ask for 6 experts: r = 6 / 12. The prompt's unions are larger than 12 slots in every layer."""
    decode = regime(qwen, 12, phase="decode")
    assert decode["mean"] == 0.5 and decode["share_above_1"] == 0
    prompt = regime(qwen, 12, phase="prefill")
    assert prompt["events"] == 48 and prompt["share_above_1"] > 0.9
    assert prompt["histogram"]["events"].sum() == 48
    both = regime(qwen, 12)
    assert both["events"] == decode["events"] + prompt["events"]


def test_one_tokens_cycle(olmoe, qwen):
    assert cycle(olmoe) == {"blocks_per_layer": 8, "blocks": 128, "bytes": None}
    assert cycle(qwen) == {"blocks_per_layer": 6, "blocks": 288, "bytes": int(qwen.expert_bytes.sum() * 6)}


def test_warnings_name_the_number(olmoe, qwen):
    assert warnings(olmoe, 16) == []
    (below,) = warnings(qwen, 200, scope="global")
    assert "200 slots are below one token's cycle of 288 blocks (823 MB)" in below and "at least 288" in below
    assert warnings(qwen, 288, scope="global") == []
    few = warnings(olmoe, 4)
    assert "4 slots per layer are fewer than the 8 experts of one token" in few[0]
    assert too_small(olmoe, 8) and not too_small(olmoe, 9)
    assert too_small(olmoe, 8, admission="bypass") is None


def test_allocation_is_exact_and_judged_on_the_rest(qwen):
    table, found = allocate(qwen, 16)
    sizes = qwen.expert_bytes
    assert (table["slots"] * sizes).sum() <= found["budget"] == (16 * sizes).sum()
    assert found["loaded_fitted"] <= found["loaded_fitted_equal"]
    late = qwen.select(steps=slice(found["steps_fitted"], None))
    per_slot = {s: late.replay(slots=int(s)) for s in set(table["slots"])}
    loaded = sum(per_slot[s]["bytes_loaded"][i] for i, s in enumerate(table["slots"]))
    assert found["loaded_held_out"] == loaded
    assert found["loaded_held_out_equal"] == late.replay(slots=16)["bytes_loaded"].sum()
    assert found["saving_held_out"] == pytest.approx(1 - loaded / found["loaded_held_out_equal"])


def test_allocation_in_bytes(qwen):
    table, found = allocate(qwen, "2000 MiB", held_out=0.25)
    assert found["unit"] == "bytes" and found["steps_held_out"] == 32
    assert (table["slots"] * qwen.expert_bytes).sum() <= 2000 * 2**20


@settings(max_examples=40)
@given(data=st.data())
def test_best_split_is_the_best_of_all(data):
    layers, most = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    cost = np.array(data.draw(st.lists(st.lists(st.integers(0, 50), min_size=most + 1, max_size=most + 1),
                                       min_size=layers, max_size=layers)))  # fmt: skip
    cost = -np.sort(-cost, axis=1)  # more slots never cost more
    sizes = np.array(data.draw(st.lists(st.integers(1, 4), min_size=layers, max_size=layers)))
    budget = data.draw(st.integers(int(sizes.sum()), int(sizes.sum()) * most + 2))
    split = best_split(cost, sizes, budget)
    assert (split >= 1).all() and (split <= most).all() and (split * sizes).sum() <= budget
    every = itertools.product(range(1, most + 1), repeat=layers)
    best = min(sum(cost[i, s] for i, s in enumerate(c)) for c in every if np.dot(c, sizes) <= budget)
    assert cost[np.arange(layers), split].sum() == best


def test_a_curve_beside_its_bounds(olmoe):
    table = summary(olmoe, "arc", [8, 16])
    captured = table.set_index(["policy", "slots"])["gap_captured"]
    assert captured["lru"].tolist() == [0, 0] and captured["belady-bypass"].tolist() == [1, 1]
    assert -1 < captured["arc", 16] < 1


def test_refusals(olmoe):
    with pytest.raises(SettingError, match="scope must be layer"):
        allocate(olmoe, 16, scope="global")
    with pytest.raises(SettingError, match="one-pass curve .*, got 'arc'"):
        allocate(olmoe, 16, "arc")
    with pytest.raises(SettingError, match="held_out must be above 0 and below 1, got 1"):
        allocate(olmoe, 16, held_out=1)
    with pytest.raises(TraceError, match="leaves one side of the trace without steps; it has 1"):
        allocate(olmoe.select(steps=slice(0, 1)), 16)
    with pytest.raises(SettingError, match="one slot per layer takes 7 bytes, the budget is 6"):
        best_split(np.zeros((2, 3), int), np.array([3, 4]), 6)
    with pytest.raises(TraceError, match="no prefill events"):
        regime(olmoe, 8, phase="prefill")
    with pytest.raises(SettingError, match="the split needs first uses to miss"):
        miss_split(olmoe, 64, prefetch="oracle", prefetch_budget=8)
