"""The course of a replay: its sums are replay's, its cells follow from a slow simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import SettingError, TraceError
from colibri_lab.trace import Trace, load_trace
from colibri_lab.trace.history import Overtaken, history

TRACES = Path(__file__).resolve().parents[2] / "data/traces"


def random_trace(seed=0, steps=12, layers=3, experts=8, k=2, prompt=3) -> Trace:
    """One prompt of `prompt` tokens, then decode steps; rank order means something, weights fall."""
    rng = np.random.default_rng(seed)
    rows = [(0, layer, 0, t) for layer in range(layers) for t in range(prompt)]
    rows += [(step, layer, 1, 0) for step in range(1, steps) for layer in range(layers)]
    ids = np.array([rng.permutation(experts)[:k] for _ in rows], np.uint16)
    step, layer, phase, row = np.array(rows).T
    weights = np.tile(np.linspace(0.6, 0.4, k), (len(rows), 1))
    header = {
        "num_experts": experts,
        "ranked": True,
        "model": "random",
        "expert_bytes": dict.fromkeys(range(layers), 1000),
    }
    return Trace.from_rows(step=step, layer=layer, phase=phase, row=row, experts=ids, weights=weights, header=header)


@pytest.mark.parametrize("policy", ["lru", "lfru", "gate-weighted", "belady", "belady-bypass", "static-pin", "pin+lru"])
@pytest.mark.parametrize(
    "contract",
    [{}, {"lookup": "serial"}, {"lookup": "serial-hits-first"}, {"admission": "bypass"}, {"scope": "global"}],
    ids=str,
)
def test_sums_are_those_of_replay(policy, contract):
    trace = random_trace(steps=40)
    for slots in (1, 2, 5):
        course = history(trace, policy, slots, **contract)
        for phase in ("all", "prefill", "decode"):
            totals = trace.replay(policy, slots, phase=phase, **contract).attrs["totals"]
            table = course.table(phase)
            assert (table.hits.sum(), table.accesses.sum()) == (totals["hits"], totals["accesses"])


@pytest.mark.parametrize(
    "name", ["warp_olmoe_1b7b_299.jsonl", "bigmoe_qwen.route.csv", "colibri_tiny_six_domains.parquet"]
)
def test_shipped_traces_hit_what_replay_hits(name):
    trace = load_trace(TRACES / name)
    for slots, contract in ((8, {}), (64, {"scope": "global"}), (8, {"reset": "per-sequence"})):
        per_layer = trace.replay("lru", slots, **contract)
        events = history(trace, "lru", slots, **contract).events()
        assert events[events.hit].groupby("layer").size().reindex(per_layer.layer, fill_value=0).tolist() == list(
            per_layer.hits
        )


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 8))
def test_cells_follow_a_slow_lru(seed, slots):
    trace = random_trace(seed)
    course = history(trace, "lru", slots)
    events = trace.events()
    for layer in range(3):
        last, since, uses = {}, {}, np.zeros(8, int)
        for step in range(len(course)):
            at = int(np.flatnonzero((events.step == step) & (events.layer_index == layer))[0])
            asked = sorted(events.experts[events.offsets[at] : events.offsets[at + 1]].tolist())
            missed = [e for e in asked if e not in last]
            since |= dict.fromkeys(missed, step)
            last |= dict.fromkeys(asked, step)
            uses[asked] += 1
            for gone in sorted(last, key=lambda e: (last[e], e))[: max(0, len(last) - slots)]:
                del last[gone]
            state, begun, used = course.grid(step)[:, layer]
            for expert in range(8):
                if expert in asked:
                    assert state[expert] == (3 if expert in missed else 2)
                else:
                    assert state[expert] == (expert in last)
                assert (begun[expert] == since[expert]) if expert in last else np.isnan(begun[expert])
            np.testing.assert_array_equal(used, uses)


def test_pinned_experts_are_there_from_the_start():
    course = history(random_trace(), "static-pin", 4)
    _, since, _ = course.grid(len(course) - 1)
    assert (since == -1).sum() == 3 * 4 and np.isnan(since).sum() == 3 * 4


def test_table_tells_phases_apart():
    course = history(random_trace(), "lru", 4)
    assert course.steps("prefill").tolist() == [0] and course.steps("decode").tolist() == list(range(1, 12))
    assert set(course.table("decode").phase) == {"decode"} and course.table("prefill").step.tolist() == [0]
    assert (course.table().hits + course.table().misses == course.table().accesses).all()


def test_nobody_waits_for_an_answer_that_is_not_wanted():
    with pytest.raises(Overtaken):
        history(random_trace(), "lru", 4, stale=lambda: True)


def test_what_it_cannot_follow_it_refuses():
    trace = random_trace()
    with pytest.raises(SettingError, match="block_size must be 1 and prefetch none"):
        history(trace, "lru", 4, block_size=2)
    with pytest.raises(SettingError, match="belady through resets"):
        history(trace, "belady", 4, reset="per-sequence")
    with pytest.raises(SettingError, match="unknown policy 'lur'"):
        history(trace, "lur", 4)
    counts = Trace.from_counts(np.ones((2, 4), int), {})
    with pytest.raises(TraceError, match="needs rows"):
        history(counts, "lru", 2)
    trace.weights = None
    with pytest.raises(TraceError, match="policy gate-weighted needs gates"):
        history(trace, "gate-weighted", 4)
