"""Experiments on traces: what a control takes away, and counts by hand or by brute force."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from colibri_lab.errors import SettingError, TraceError
from colibri_lab.trace import Trace, experiments, load_trace

TRACES = Path(__file__).resolve().parents[2] / "data/traces"


@pytest.fixture(scope="module")
def olmoe() -> Trace:
    return load_trace(TRACES / "warp_olmoe_1b7b_299.jsonl")


@pytest.fixture(scope="module")
def qwen() -> Trace:
    return load_trace(TRACES / "bigmoe_qwen.route.csv")


def decode(sets, experts=6, prompt=()) -> Trace:
    """One layer; `prompt` sets are the rows of one prefill step, `sets` are decoded tokens."""
    rows = [(0, 0, i) for i in range(len(prompt))] + [(i + 1, 1, 0) for i in range(len(sets))]
    step, phase, row = np.array(rows).T
    header = {"num_experts": experts, "ranked": True}
    return Trace.from_rows(
        step=step, layer=np.zeros(len(rows), int), phase=phase, row=row, experts=[*prompt, *sets], header=header
    )


def hit_rate(trace, slots=16) -> float:
    return trace.replay("lru", slots).attrs["totals"]["hit_rate"]


def test_shuffling_keeps_every_tokens_experts_and_their_popularity(olmoe):
    mixed = experiments.shuffled(olmoe, seed=3)
    np.testing.assert_array_equal(mixed.popularity(), olmoe.popularity())

    def tokens(trace):  # all layers of a token stay together
        return sorted(tuple(map(tuple, np.sort(trace.experts.reshape(299, 16, 8)[t]))) for t in range(299))

    assert tokens(mixed) == tokens(olmoe) and not np.array_equal(mixed.experts, olmoe.experts)
    assert np.array_equal(experiments.shuffled(olmoe, seed=3).experts, mixed.experts)


def test_random_picks_hit_the_cached_share_and_order_is_worth_points(olmoe):
    drawn = experiments.uniform(olmoe)
    assert hit_rate(drawn) == pytest.approx(16 / 64, abs=0.01)
    assert hit_rate(drawn) < hit_rate(experiments.shuffled(olmoe)) - 0.1 < hit_rate(olmoe) - 0.2
    assert "experts drawn at random" in drawn.header["notes"] and not drawn.header["ranked"]


def test_controls_are_of_decode_only(qwen):
    for control in (experiments.shuffled, experiments.uniform):
        assert (control(qwen).phase == 1).all()
    with pytest.raises(TraceError, match="selection phase=decode"):
        experiments.shuffled(qwen.select(phase="prefill"))


@pytest.mark.parametrize(("layers", "k"), [(16, 8), (3, 2)])
def test_a_pool_below_one_token_hits_nothing_until_the_last_layer_fits(layers, k, olmoe):
    if layers == 16:
        trace = olmoe
    else:
        rng = np.random.default_rng(0)
        ids = [rng.permutation(16)[:k] for _ in range(200 * layers)]
        trace = Trace.from_rows(
            step=np.repeat(np.arange(200), layers), layer=np.tile(np.arange(layers), 200), experts=ids,
            header={"num_experts": 16, "ranked": True},
        )  # fmt: skip
    table = experiments.cliff(trace)
    assert table.attrs == {"first": (layers - 1) * k + 1, "cycle": layers * k}
    for slots in (table.attrs["first"] - 1, table.attrs["first"], table.attrs["cycle"]):
        totals = trace.replay("lru", slots, scope="global").attrs["totals"]
        assert table.hit_rate[slots] == totals["hit_rate"] and (totals["hits"] > 0) == (slots >= table.attrs["first"])
        if slots >= layers:
            assert table.per_layer[slots] == trace.replay("lru", slots // layers).attrs["totals"]["hit_rate"]


def test_pins_of_the_first_half_are_judged_on_the_second(olmoe):
    found = experiments.held_out_pins(olmoe, 16)
    past, judged = olmoe.select(steps=slice(0, 149)), olmoe.select(steps=slice(149, None))
    top = np.argsort(-past.popularity(), axis=1, kind="stable")[:, :16]
    by_hand = np.take_along_axis(judged.popularity(), top, axis=1).sum() / judged.popularity().sum()
    assert found["pins"] == pytest.approx(by_hand) == pytest.approx(0.4605, abs=5e-5)
    assert found["lru"] == pytest.approx(0.6347, abs=5e-5) and found["pins"] < found["pins_hindsight"]
    with pytest.raises(TraceError, match="two decode steps"):
        experiments.held_out_pins(decode([(0, 1)]), 2)


def test_prefetch_counts_are_replays(qwen):
    table = experiments.prefetching(qwen, "markov", 16, budgets=[0, 4])
    ahead = qwen.replay("lru", 16, phase="decode", prefetch="markov", prefetch_budget=4).attrs["totals"]
    row = table.iloc[1]
    assert table.waits[0] == table.reads[0] == qwen.replay("lru", 16, phase="decode").misses.sum() / 128
    assert row.waits == ahead["misses"] / 128
    assert row.reads == (ahead["misses"] + ahead["prefetch"]["issued"]) / 128
    assert row.precision == ahead["prefetch"]["precision"] and np.isnan(table.precision[0])


def test_the_last_tokens_experts_are_a_poor_guess_because_lru_has_them(qwen):
    table = experiments.prefetching(qwen, "same", 16, budgets=[6])
    assert table.precision[0] == pytest.approx(0.377, abs=5e-4)
    assert table.useful[0] == table.wasted[0] == 0


def test_a_slow_disk_turns_prefetching_into_waiting(qwen):
    fast, slow = (experiments.prefetching(qwen, "markov", 16, [4], bandwidth=b).iloc[0] for b in (0, 4))
    none = experiments.prefetching(qwen, "markov", 16, [0]).iloc[0]
    assert fast.waits < none.waits < slow.waits and fast.late == 0 < slow.late


def test_unions_by_brute_force():
    sets = [(0, 1), (1, 2), (0, 1), (3, 4), (4, 5)]
    trace = decode(sets)
    for n in (1, 2, 3):
        rows = [len(set().union(*sets[i : i + n])) for i in range(len(sets) - n + 1)]
        drawn = [len(set().union(*some)) for some in itertools.combinations(sets, n)]
        in_a_row, apart = (experiments.unions(trace, [n], in_a_row=which).iloc[0] for which in (True, False))
        assert in_a_row.distinct == pytest.approx(np.mean(rows)) and apart.distinct == pytest.approx(np.mean(drawn))
        assert apart.per_token == pytest.approx(np.mean(drawn) / n)
    with pytest.raises(SettingError, match="tokens must be 1 to 5, the longest text of this trace; got 6"):
        experiments.unions(trace, [6])


def test_known_unions_of_the_shipped_traces(olmoe, qwen):
    apart, row = (experiments.unions(olmoe, [4, 8], in_a_row=which) for which in (False, True))
    assert apart.distinct[1] == pytest.approx(34.4, abs=0.05) and apart.per_token[1] == pytest.approx(4.3, abs=0.01)
    assert row.distinct[0] == pytest.approx(19.4, abs=0.05)
    prompt = experiments.prompt_unions(qwen)
    assert len(prompt) == 28 and prompt.distinct[0] == 6 and prompt.distinct[27] == pytest.approx(56.5, abs=0.05)


def test_prompt_unions_by_hand():
    table = experiments.prompt_unions(decode([(0, 1)], prompt=[(0, 1), (1, 2), (0, 5)]))
    assert table.distinct.tolist() == [2, 3, 4] and table.per_token.tolist() == [2, 1.5, 4 / 3]


def test_warm_up_starts_with_a_miss_for_every_expert(olmoe):
    table = experiments.warm_up(olmoe, 16)
    assert table.misses[0] == 128 and table.misses.sum() == olmoe.replay("lru", 16).misses.sum()
    assert table.misses[8:32].mean() == pytest.approx(58.4, abs=0.05) and table.misses.min() > 0
