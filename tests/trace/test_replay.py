"""Replay on real traces: golden numbers, contracts, scopes, bytes, phases, starts, refusals."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import numpy as np
import pytest

from colibri_lab import kernels
from colibri_lab.cache import policies
from colibri_lab.errors import SettingError, TraceError
from colibri_lab.trace import Trace, load_trace
from colibri_lab.trace.replay import grid


@pytest.fixture(scope="module")
def olmoe(traces) -> Trace:
    return load_trace(traces / "warp_olmoe_1b7b_299.jsonl")


@pytest.fixture(scope="module")
def qwen(traces) -> Trace:
    return load_trace(traces / "bigmoe_qwen.route.csv")


def rate(trace, policy="lru", slots=16, **settings) -> float:
    return round(trace.replay(policy=policy, slots=slots, **settings).attrs["totals"]["hit_rate"], 4)


def tiny(steps, k=2, num_experts=8, **columns) -> Trace:
    """One layer; each step is one decoded token's experts."""
    header = {"num_experts": num_experts, "ranked": True, "expert_bytes": {0: 100}}
    return Trace.from_rows(
        step=np.arange(len(steps)), layer=np.zeros(len(steps)), experts=steps, header=header, **columns
    )


# ---- numbers from other programs


def test_the_toy_trace_has_12_hits_and_18_misses(traces):
    totals = load_trace(traces / "mce_toy_events.csv").replay(policy="lru", slots=2).attrs["totals"]
    assert (totals["hits"], totals["misses"], totals["accesses"]) == (12, 18, 30)


def test_two_events_tell_the_contracts_apart():
    trace = tiny([[0, 1], [2, 0]])
    hits = {look: trace.replay(slots=2, lookup=look).attrs["totals"]["hits"] for look in ("atomic", "serial")}
    assert hits == {"atomic": 1, "serial": 0}


@pytest.mark.parametrize(
    ("policy", "rates"),
    [
        ("lru", (0.3193, 0.5706, 0.6807)),
        ("lfu-in-cache", (0.2243, 0.4428, 0.6023)),
        ("belady", (0.5631, 0.7472, 0.8425)),
    ],
)
def test_serial_replay_gives_libcachesims_figures(olmoe, policy, rates):
    """Per layer at 8, 16 and 24 slots; libCacheSim 0.3.5 gives the same."""
    found = tuple(rate(olmoe, policy, slots, lookup="serial") for slots in (8, 16, 24))
    assert found == rates


def test_lru_under_the_atomic_contract(olmoe):
    """Ties broken by lowest id; with ids counted backwards the rate at 16 slots is 0.5982."""
    assert rate(olmoe, slots=16) == 0.5968
    backwards = dataclasses.replace(olmoe, experts=(63 - olmoe.experts).astype(np.uint16))
    assert rate(backwards, slots=16) == 0.5982


def test_full_event_hit_rate(olmoe):
    assert round(olmoe.replay(slots=16).attrs["totals"]["full_event_hit_rate"], 3) == 0.075


def test_serial_hits_first_is_atomic_but_for_ties(olmoe):
    """At k slots every miss pushes out a non-member under both; at more slots only ties differ."""
    assert rate(olmoe, slots=8, lookup="serial-hits-first") == 0.4337
    assert abs(rate(olmoe, slots=16, lookup="serial-hits-first") - 0.5968) < 0.002


def test_the_recording_engines_own_hits(qwen):
    """The engine ran one lru over all layers in 4000 MiB and wrote down which experts it found: 74.88 %."""
    found = qwen.replay(policy="lru", slots="4000 MiB", scope="global").attrs["totals"]
    assert found["hit_rate"] == pytest.approx(0.7488, abs=0.001)
    assert found["capacity_bytes"] == 4000 * 2**20
    decode = qwen.replay(policy="lru", slots="4000 MiB", scope="global", phase="decode").attrs["totals"]
    assert decode["hit_rate"] == pytest.approx(0.803, abs=0.001)
    events = qwen.events()
    said = events.resident[np.repeat(events.phase == 1, events.widths)]
    assert decode["hits"] == pytest.approx(said.sum(), rel=0.002)
    assert decode["accesses"] == len(said)


@pytest.mark.parametrize("policy", [p.name for p in policies.POLICIES.values() if not p.needs or p.oracle])
def test_at_k_slots_forced_admission_leaves_no_choice(olmoe, policy):
    if policy == "belady-bypass":  # the one that may drop what it loaded
        assert rate(olmoe, policy, 8) == 0.5897
    else:
        assert rate(olmoe, policy, 8) == 0.4337


@pytest.mark.parametrize("slots", [4, 8, 12, 16, 32, 48, 64])
def test_the_bypass_oracle_is_the_bound(olmoe, slots):
    """A block loaded before the start saves its set at most one miss, which the oracle had to take."""
    totals = [table.attrs["totals"] for table in grid(olmoe, "all", [slots], progress=False)]
    hits = {t["policy"]: t["hits"] - t["preloaded"] for t in totals}
    assert len(hits) == len(policies.POLICIES) - 1  # gate-weighted needs gates
    assert max(hits.values()) == hits["belady-bypass"]
    if slots == 64:  # every expert has a slot
        assert {h for name, h in hits.items() if "pin" not in name} == {38272 - 974}


def test_a_global_lru_below_the_cycle(olmoe):
    """16 layers x 8 experts. Serial: nothing below 128 slots. Atomic: nothing up to 120, then a ramp to the per-layer rate."""
    assert [rate(olmoe, slots=s, scope="global", lookup="serial") for s in (64, 120)] == [0, 0]
    found = [rate(olmoe, slots=s, scope="global") for s in (120, 127, 128)]
    assert found[0] == 0 and 0.36 < found[1] < 0.39 and found[2] == 0.4337
    assert round(rate(olmoe, slots=127, scope="global", lookup="serial-hits-first"), 2) == 0.36


def test_a_static_set_hits_its_share_of_the_histogram(olmoe):
    """Top 12 experts of each layer by count: their share of all uses, in any order."""
    top = np.sort(olmoe.popularity(), axis=1)[:, -12:].sum() / olmoe.popularity().sum()
    table = olmoe.replay(policy="static-pin", slots=12)
    assert table.attrs["totals"]["hit_rate"] == pytest.approx(top, abs=1e-12)
    assert any("judged on" in note for note in table.attrs["totals"]["notes"])
    assert table.attrs["totals"]["preloaded"] == 12 * 16


def test_a_static_set_from_another_part_of_the_trace(olmoe):
    early, late = olmoe.select(steps=slice(0, 150)), olmoe.select(steps=slice(150, None))
    honest = late.replay(policy="static-pin", slots=16, fit=early).attrs["totals"]
    flattered = late.replay(policy="static-pin", slots=16).attrs["totals"]
    assert honest["hit_rate"] < flattered["hit_rate"]
    assert not any("judged on" in note for note in honest["notes"])


# ---- the table and the totals


def test_the_table_and_the_totals_agree(qwen):
    table = qwen.replay(policy="arc", slots=16)
    totals = table.attrs["totals"]
    assert table["layer"].tolist() == qwen.layers
    for name in ("accesses", "hits", "misses", "evictions", "compulsory", "bytes_loaded", "events", "loads"):
        assert table[name].sum() == totals[name], name
    assert (table["hits"] + table["misses"] == table["accesses"]).all()
    assert totals["bytes_loaded"] == sum(table["misses"] * qwen.expert_bytes)
    wanted = {"policy", "slots", "scope", "lookup", "admission", "accesses", "hits", "misses", "hit_rate",
              "full_event_hit_rate", "evictions", "bytes_loaded", "compulsory", "per_layer", "denominators"}  # fmt: skip
    assert wanted <= set(totals)
    assert json.loads(json.dumps(totals))["per_layer"][3]["hits"] == table["hits"][3]


def test_phases_add_up(qwen):
    whole, prefill, decode = (qwen.replay(slots=16, phase=p).attrs["totals"] for p in ("all", "prefill", "decode"))
    for name in ("accesses", "hits", "misses", "evictions", "compulsory", "events"):
        assert whole[name] == prefill[name] + decode[name], name


def test_logical_counts_weigh_by_tokens(qwen):
    """Every assignment counts; a block missed for five tokens is five misses and still one load."""
    union = qwen.replay(slots=16).attrs["totals"]
    logical = qwen.replay(slots=16, count="logical").attrs["totals"]
    assert logical["accesses"] == qwen.popularity().sum() == 44766
    assert logical["loads"] == union["loads"] == union["misses"]
    assert logical["bytes_loaded"] == union["bytes_loaded"]
    trace = Trace.from_rows(
        step=[0, 0, 1], layer=[0, 0, 0], experts=[[0, 1], [0, 2], [0, 3]], header={"num_experts": 4, "ranked": True}
    )  # fmt: skip
    counted = trace.replay(slots=3, count="logical").attrs["totals"]
    assert (counted["hits"], counted["misses"], counted["loads"]) == (1, 5, 4)


def test_warmup_steps_run_but_do_not_count(olmoe):
    """Counts of the first 100 steps and of the rest add up to all."""
    early = olmoe.select(steps=slice(0, 100))
    for settings in ({}, {"scope": "global"}, {"lookup": "serial"}):
        whole = olmoe.replay(slots=128, **settings).attrs["totals"]
        rest = olmoe.replay(slots=128, warmup_steps=100, **settings).attrs["totals"]
        first = early.replay(slots=128, **settings).attrs["totals"]
        for name in ("hits", "misses", "accesses", "compulsory", "evictions"):
            assert first[name] + rest[name] == whole[name], (settings, name)
    with pytest.raises(SettingError, match="warmup_steps=299 leaves nothing to count: the trace has 299 steps"):
        olmoe.replay(slots=8, warmup_steps=299)


def test_reset_per_sequence_is_the_sum_of_separate_replays(olmoe):
    parts = [olmoe.select(steps=slice(a, a + 60)) for a in (0, 60, 120)]
    for part, name in zip(parts, range(3), strict=True):
        part.sequence[:] = name
    joined = Trace.concat(parts)
    for policy in ("lru", "lfu", "belady", "belady-bypass", "arc", "weighted-lru", "random"):
        for settings in ({"slots": 16}, {"slots": 200, "scope": "global"}):
            alone = [part.replay(policy=policy, **settings).attrs["totals"] for part in parts]
            cold = joined.replay(policy=policy, reset="per-sequence", **settings).attrs["totals"]
            for name in ("hits", "misses", "compulsory"):
                assert cold[name] == sum(t[name] for t in alone), (policy, settings, name)
            assert joined.replay(policy=policy, **settings).attrs["totals"]["hits"] != cold["hits"]


def test_start_pinned_and_preloaded():
    """2 slots, lru, experts one by one. Preloaded 3 hits once, then ages like any block; pinned 3 hits always."""
    trace = tiny([[3], [0], [1], [3], [0]], k=1)
    blocks = [(0, 3)]
    empty, preloaded, pinned = (
        trace.replay(slots=2, start=start, blocks=[] if start == "empty" else blocks).attrs["totals"]
        for start in ("empty", "preloaded", "pinned")
    )
    assert (empty["hits"], preloaded["hits"], pinned["hits"]) == (0, 1, 2)
    assert (empty["preloaded"], preloaded["preloaded"], pinned["preloaded"]) == (0, 1, 1)
    with pytest.raises(TraceError, match=r"block \(1, 3\) is not in the trace: layers \[0\], blocks 0 to 7"):
        trace.replay(slots=2, start="pinned", blocks=[(1, 3)])
    with pytest.raises(SettingError, match="give blocks="):
        trace.replay(slots=2, start="pinned")
    with pytest.raises(SettingError, match="start cannot be 'warm'"):
        trace.replay(slots=2, start="warm", blocks=blocks)
    with pytest.raises(ValueError, match="cannot pin block 2 of layer 0"):
        trace.replay(slots=2, start="pinned", blocks=[(0, 0), (0, 1), (0, 2)])


def test_blocks_of_several_experts():
    """Blocks of 2 experts: {0 1} is block 0, {1 4} blocks 0 and 2."""
    trace = tiny([[0, 1], [1, 4]])
    totals = trace.replay(slots=4, block_size=2).attrs["totals"]
    assert (totals["accesses"], totals["hits"], totals["bytes_loaded"]) == (3, 1, 400)


def test_bytes_shared_by_the_layers(qwen):
    """Larger blocks of some layers mean fewer slots there."""
    table = qwen.replay(slots="4000 MiB")
    share = 4000 * 2**20 // 48
    assert table["slots"].tolist() == [share // size for size in qwen.expert_bytes]
    with pytest.raises(SettingError, match="one block per layer takes"):
        qwen.replay(slots="1 MiB")
    with pytest.raises(TraceError, match="needs expert_bytes"):
        dataclasses.replace(qwen, header=qwen.header | {"expert_bytes": None}).replay(slots="4000 MiB")


def test_policies_that_need_gates(olmoe, qwen):
    assert 0.5 < rate(qwen, "gate-weighted", 16) < 0.7
    with pytest.raises(TraceError, match="policy gate-weighted needs gates"):
        olmoe.replay(policy="gate-weighted", slots=16)


def test_rank_order_of_an_unranked_trace_is_noted(olmoe, qwen):
    assert any("rank order" in note for note in olmoe.replay(slots=8, lookup="serial").attrs["totals"]["notes"])
    assert olmoe.replay(slots=8, lookup="serial", order="id").attrs["totals"]["notes"] == []
    assert qwen.replay(slots=8, lookup="serial").attrs["totals"]["notes"] == []


def test_more_slots_than_blocks_is_said(olmoe):
    totals = olmoe.replay(slots=100).attrs["totals"]
    assert totals["slots"] == 64 and "100 slots are more than the 64 blocks there are" in totals["notes"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"policy": "lur"}, SettingError, "unknown policy 'lur'; did you mean 'lru'"),
        ({"scope": "pool"}, SettingError, "scope cannot be 'pool'"),
        ({"lookup": "Atomic"}, SettingError, "lookup cannot be 'Atomic'; did you mean 'atomic'"),
        ({"phase": "decoding"}, SettingError, "phase cannot be 'decoding'"),
        ({"slots": 0}, SettingError, "slots must be at least 1, got 0"),
        ({"slots": "4 G"}, SettingError, "slots '4 G' could be powers of 1000 or of 1024"),
        ({"slot": 4}, SettingError, "unknown replay setting 'slot'"),
        ({"params": {"half_life": 3}}, SettingError, "policy 'lru' has no parameter 'half_life'; it has none"),
        (
            {"policy": "lru-k", "params": {"k": 99}},
            SettingError,
            "parameter k of policy 'lru-k' must be 1 to 16, got 99",
        ),
        ({"warmup_steps": -1}, SettingError, "warmup_steps must be a whole number of at least 0, got -1"),
        ({"prefetch": "markov"}, SettingError, "prefetch='markov' needs prefetch_budget"),
    ],
)
def test_refusals(olmoe, settings, error, message):
    with pytest.raises(error, match=message):
        olmoe.replay(**settings)


# ---- fetching ahead


def test_a_perfect_predictor_turns_misses_into_prefetches(olmoe):
    """It names the next layer's 8 experts and the channel is infinite: what still misses are the first event and blocks that
    would have pushed out a warmer one."""
    plain = olmoe.replay(slots=16).attrs["totals"]
    ahead = olmoe.replay(slots=16, prefetch="oracle", prefetch_budget=8).attrs["totals"]
    p = ahead["prefetch"]
    assert p["precision"] == 1 and p["recall"] == 1
    assert ahead["hits"] + p["timely"] + p["late"] + ahead["misses"] == ahead["accesses"]
    assert p["late"] == 0 and p["timely"] > 0
    assert ahead["misses"] < 0.7 * plain["misses"]
    assert ahead["misses"] + p["issued"] >= plain["compulsory"]


def test_a_slow_channel_makes_prefetches_late(olmoe):
    found = [
        olmoe.replay(slots=16, prefetch="oracle", prefetch_budget=8, prefetch_bandwidth=b).attrs["totals"]["prefetch"]
        for b in (0.0, 4.0, 1.0)
    ]
    late = [p["late"] / (p["late"] + p["timely"]) for p in found]
    assert late[0] == 0 < late[1] < late[2]


@pytest.mark.parametrize("predictor", ["same", "markov", "popular"])
def test_predictors_learn_from_the_past_only(olmoe, predictor):
    """What they say of the first 100 tokens does not depend on the rest, and it is better than chance (8 of 64)."""
    settings = {"slots": 24, "prefetch": predictor, "prefetch_budget": 8}
    p = olmoe.replay(**settings).attrs["totals"]["prefetch"]
    assert 1 / 8 < p["recall"] < 1
    assert p["issued"] == p["timely"] + p["late"] + p["wasted"] + pending(olmoe, settings)
    early = olmoe.select(steps=slice(0, 100))
    changed = dataclasses.replace(olmoe, experts=olmoe.experts.copy())
    changed.experts[100 * 16 :] = 63 - changed.experts[100 * 16 :]
    again = changed.select(steps=slice(0, 100))
    assert again.replay(**settings).attrs["totals"] == early.replay(**settings).attrs["totals"]


def pending(trace, settings) -> int:
    """Blocks still waiting for their first use at the end: what the counters leave open must fit the slots."""
    p = trace.replay(**settings).attrs["totals"]["prefetch"]
    left = p["issued"] - p["timely"] - p["late"] - p["wasted"]
    assert 0 <= left <= settings["slots"] * len(trace.layers)
    return left


def test_same_as_last_token_predicts_the_overlap(olmoe):
    """One layer ahead by the last token's set: recall is the next-token overlap, 44 % on this trace."""
    p = olmoe.replay(slots=8, prefetch="same", prefetch_budget=8).attrs["totals"]["prefetch"]
    assert p["recall"] == pytest.approx(0.44, abs=0.01)


# ---- running


def test_grid_runs_policies_and_sizes_in_order(olmoe):
    tables = grid(olmoe, ["lru", "fifo"], [8, 16], progress=False, lookup="serial")
    assert [(t.attrs["totals"]["policy"], t.attrs["totals"]["slots"]) for t in tables] == [
        ("lru", 8), ("lru", 16), ("fifo", 8), ("fifo", 16),
    ]  # fmt: skip
    assert tables[0].attrs["totals"] == olmoe.replay(slots=8, lookup="serial").attrs["totals"]


def test_a_running_replay_can_be_stopped():
    """Far more work than the time until the stop: 20 M accesses by the slowest policy."""
    native = kernels.load("replay")
    rng = np.random.default_rng(0)
    n = 4_000_000
    flat = native.Stream.make(
        1, 4096, np.arange(n + 1), rng.integers(0, 4096, n).astype(np.uint16), np.zeros(n, np.int32),
        np.ones(n, np.uint8), np.zeros(n, np.int32),
    )  # fmt: skip
    stop, ended = native.Stop(), []

    def work():
        with pytest.raises(native.Interrupted, match="stopped by another thread"):
            while True:
                native.replay(flat, "lfru", 2048, stop=stop)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.05)
    stop.set()
    thread.join(timeout=30)
    assert ended == [True]
