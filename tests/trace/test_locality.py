"""Locality measures: hand-worked traces, slow obvious references, and known numbers of the two real traces."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import TraceError
from colibri_lab.trace import Trace, load_trace
from colibri_lab.trace import locality as loc
from colibri_lab.trace.windows import sch, srp


@pytest.fixture(scope="module")
def olmoe(traces):
    return load_trace(traces / "warp_olmoe_1b7b_299.jsonl")


@pytest.fixture(scope="module")
def qwen(traces):
    return load_trace(traces / "bigmoe_qwen.route.csv")


def one_layer(*sets, num_experts=6, sequence=None) -> Trace:
    return Trace.from_rows(
        step=np.arange(len(sets)),
        layer=np.zeros(len(sets)),
        sequence=sequence,
        experts=[list(s) for s in sets],
        header={"num_experts": num_experts},
    )


def test_next_token_overlap_of_olmoe_is_44_percent_by_chance_12_5(olmoe):
    """Known: overlap 44 %, the same set as the last token 1.2 %, chance 12.5 %."""
    near = loc.overlap(olmoe, distances=(1,))
    assert near.overlap.mean() == pytest.approx(0.4352, abs=5e-5)
    assert near.same_set.mean() == pytest.approx(0.012, abs=5e-4)
    assert near.chance.unique() == [0.125]
    assert near.pairs.tolist() == [298] * 16


def test_experts_used_one_token_ago_are_what_k_slots_hit(olmoe):
    """At slots = k, pinned forced admission holds exactly the last set: hit rate 0.4337 of all assignments."""
    table = loc.reuse(olmoe).query("measure == 'gap_tokens' and at_most == 1")
    assert table.share.item() == pytest.approx(0.4337, abs=5e-5)


def test_299_olmoe_tokens_touch_61_of_64_experts_a_layer(olmoe):
    touched = loc.touched(olmoe)
    assert touched["mean"].iloc[-1] == pytest.approx(60.875)
    assert (touched.least.iloc[-1], touched.most.iloc[-1]) == (58, 64)
    assert touched["mean"].iloc[0] == 8


def test_four_olmoe_tokens_in_a_row_load_2_4_times_one(olmoe):
    mean = loc.working_set(olmoe, windows=(1, 4)).groupby("window")["mean"].mean()
    assert mean[4] == pytest.approx(19.38, abs=5e-3)
    assert mean[4] / mean[1] == pytest.approx(2.4, abs=0.05)


def test_in_one_text_24_to_44_of_64_experts_are_in_effective_use(olmoe):
    layers = loc.popularity(olmoe).query("layer != 'all'")
    assert round(layers.effective.min()) == 24
    assert round(layers.effective.max()) == 44


def test_a_qwen_prompt_of_28_tokens_touches_57_of_128_experts(qwen):
    """Layers 0 to 46; the last layer logs one of the 28 tokens, of which a decode token has 6."""
    touched = loc.touched(qwen.select(phase="prefill", layers=range(47)))
    assert touched["mean"].iloc[-1] == pytest.approx(56.51, abs=5e-3)
    assert round(touched["mean"].iloc[-1]) == 57


def test_last_tokens_experts_are_38_percent_right_on_qwen(qwen):
    near = loc.overlap(qwen.select(phase="decode"), distances=(1,))
    assert near.overlap.mean() == pytest.approx(0.38, abs=0.005)


def test_static_set_of_olmoe_fitted_on_the_first_half(olmoe):
    """16 of 64 pinned from the first half hit 46 % of the second, and 55 % when judged on what they were fitted on."""
    row = loc.coverage(olmoe).query("experts == 16")
    assert row.held_out.item() == pytest.approx(0.46, abs=0.005)
    assert row.share.item() > row.held_out.item() + 0.05


def test_olmoe_compulsory_misses(olmoe):
    """974 of 1024 blocks are used at all: each is a first use once."""
    assert loc.reuse(olmoe)["count"].iloc[0] == 974


def test_overlap_by_hand():
    """{0,1} {1,2} {0,1} {0,1}: overlaps 1/2, 1/2, 1 at distance 1; 1, 1/2 at distance 2."""
    table = loc.overlap(one_layer({0, 1}, {1, 2}, {0, 1}, {0, 1}), distances=(1, 2, 9))
    assert table.overlap.tolist() == pytest.approx([2 / 3, 3 / 4])
    assert table.same_set.tolist() == pytest.approx([1 / 3, 1 / 2])
    assert table.pairs.tolist() == [3, 2]


def test_texts_are_not_compared_across_their_border():
    table = loc.overlap(one_layer({0, 1}, {0, 1}, {0, 1}, {0, 1}, sequence=[0, 0, 1, 1]), distances=(1, 2))
    assert table.pairs.tolist() == [2]


def test_reuse_by_hand():
    """0 1 2 1 0: 1 comes back after 2 tokens (2 in between), 0 after 4 (1 and 2 in between); three first uses."""
    table = loc.reuse(one_layer({0}, {1}, {2}, {1}, {0}))
    rows = [tuple(row) for row in table[["measure", "at_least", "at_most", "count"]].itertuples(index=False)]
    assert rows[0][0] == "first use" and rows[0][3] == 3
    assert ("gap_tokens", 2, 2, 1) in rows and ("gap_tokens", 3, 4, 1) in rows
    assert ("distinct_experts", 1, 1, 1) in rows and ("distinct_experts", 2, 2, 1) in rows
    assert table[table.measure != "distinct_experts"].share.sum() == pytest.approx(1)


def test_popularity_by_hand():
    """Counts 3, 1, 0, 0: top expert 3/4, 1/sum p^2 = 1.6, Gini 0.625, entropy 0.811 of 2 bits."""
    trace = Trace.from_counts(np.array([[1, 3, 0, 0]]), {"moe_layers": [5]})
    row = loc.popularity(trace).iloc[0]
    assert (row.layer, row.used, row.assignments) == (5, 2, 4)
    assert row.top_1 == row.top_10 == pytest.approx(0.75)
    assert row.top_30 == pytest.approx(1)
    assert row.effective == pytest.approx(1.6)
    assert row.gini == pytest.approx(0.625)
    assert row.entropy == pytest.approx(0.8113 / 2, abs=1e-4)
    assert loc.coverage(trace).share.tolist() == pytest.approx([0.75, 1, 1, 1])


def test_equal_use_has_no_concentration():
    row = loc.popularity(Trace.from_counts(np.full((1, 10), 7), {})).iloc[0]
    assert row.gini == pytest.approx(0, abs=1e-12)
    assert row.entropy == pytest.approx(1)
    assert row.effective == pytest.approx(10)


def test_matrices_by_hand():
    trace = Trace.from_rows(
        step=[0, 0, 1, 1, 2], layer=[2, 4, 2, 4, 2], experts=[[0, 1], [2, 3], [0, 2], [2, 1], [0, 1]],
        header={"num_experts": 4},
    )  # fmt: skip
    within = loc.coactivation(trace, 2).to_numpy()
    assert np.diag(within).tolist() == [3, 2, 1, 0]
    assert within[0, 1] == within[1, 0] == 2
    onward = loc.transitions(trace, 2).to_numpy()
    assert onward[0].tolist() == [0, 1, 2, 1], "the third token has no layer 4 and does not count"
    with pytest.raises(TraceError, match="layer 4 has no routing layer after it"):
        loc.transitions(trace, 4)
    with pytest.raises(TraceError, match="layer 3 is not in the trace"):
        loc.coactivation(trace, 3)


def test_strongest_pairs_name_the_planted_one():
    rng = np.random.default_rng(0)
    first = rng.integers(0, 8, 200)
    trace = Trace.from_rows(
        step=np.repeat(np.arange(200), 2),
        layer=np.tile([0, 1], 200),
        experts=np.stack([first, (first + 3) % 8], axis=1).reshape(-1, 1),
        header={"num_experts": 8},
    )
    pairs = loc.strongest(trace, within=False, top=8)
    assert all((pair.a + 3) % 8 == pair.b for pair in pairs.itertuples())
    assert pairs.lift.min() > 4
    found = loc.predictability(trace).set_index(["predictor", "budget"]).recall
    assert found["transition", 1] == 1
    assert found["chance", 2] == pytest.approx(0.25)
    assert found["popularity", 1] < 0.4


def test_predictability_is_judged_on_tokens_it_was_not_fitted_on(olmoe):
    table = loc.predictability(olmoe)
    assert (table.fitted_on + table.tested_on).unique() == [299]
    mean = table.groupby(["predictor", "budget"]).recall.mean()
    assert mean["transition", 8] > mean["last token", 8] > mean["popularity", 8] > mean["chance", 8]
    assert mean["chance", 8] == pytest.approx(8 / 64)


def test_domains_differ_more_than_halves_of_one():
    rng = np.random.default_rng(1)
    texts = [rng.choice(4, 100), rng.choice(4, 100) + 4, rng.choice(8, 100)]
    trace = one_layer(*[[e] for text in texts for e in text], num_experts=8, sequence=np.repeat([0, 1, 2], 100))
    trace.header["domains"] = ["low", "high", "both"]
    table = loc.domains(trace).set_index(["a", "b"])
    assert table.between["low", "high"] == pytest.approx(1)
    assert table.ratio["low", "high"] > table.ratio["low", "both"] > 1
    assert table.shared_top["low", "high"] == 0
    trace.header["domains"] = None
    with pytest.raises(TraceError, match="domains needs header"):
        loc.domains(trace)


def slow_srp(sets, num_experts, window):
    """The definition word by word: every window, every threshold."""
    best = 0.0
    for threshold in range(window + 1):
        matches = predictions = actual = 0
        for start in range(len(sets) - window + 1):
            inside = sets[start : start + window]
            for expert in range(num_experts):
                count = sum(expert in s for s in inside)
                actual += count
                if count >= threshold:
                    matches += count
                    predictions += window
        best = max(best, 2 * matches / (predictions + actual))
    return best


def slow_sch(sets, num_experts, window, slots):
    """Simulate one cache: rank by uses in the next `window` tokens, then recency, then the lower id; keep the best."""
    last, held, hits = {}, set(), 0
    for t, asked in enumerate(sets):
        hits += len(held & asked)
        for expert in asked:
            last[expert] = t
        ahead = sets[t + 1 : t + 1 + window]
        rank = {e: (sum(e in s for s in ahead), last[e], -e) for e in held | asked}
        held = set(sorted(rank, key=rank.get, reverse=True)[:slots])
    return hits / sum(map(len, sets))


token_sets = st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2), min_size=5, max_size=20)


@settings(max_examples=40)
@given(token_sets, st.integers(1, 5))
def test_srp_equals_the_slow_definition(sets, window):
    table = srp(one_layer(*sets), windows=(window,))
    assert table.query("layer == 'all'").srp.item() == pytest.approx(slow_srp(sets, 6, window))


@settings(max_examples=40)
@given(token_sets, st.integers(1, 6))
def test_sch_one_pass_equals_a_cache_per_slot_count(sets, window):
    curve = sch(one_layer(*sets), window).hit_rate.tolist()
    assert curve == pytest.approx([slow_sch(sets, 6, window, slots) for slots in range(1, 7)])


def test_srp_of_a_fixed_set_is_1_and_intervals_need_two_samples():
    same = one_layer(*[{1, 2}] * 8)
    row = srp(same, windows=(4,)).iloc[0]
    assert (row.srp, row.group_size, row.samples) == (1, 1, 1)
    assert np.isnan(row.low)
    sets = [{t % 6, (t * t) % 5} | {5} for t in range(40)]
    sets = [set(sorted(s)[:2]) if len(s) > 2 else s | {3} if len(s) < 2 else s for s in sets]
    several = srp(one_layer(*sets), windows=(4,), sample_tokens=10, bootstrap=200, seed=3)
    row = several.iloc[0]
    assert row.samples == 4
    assert row.low <= row.srp <= row.high
    assert several.equals(srp(one_layer(*sets), windows=(4,), sample_tokens=10, bootstrap=200, seed=3))


def test_sch_free_first_use_is_the_studys_convention():
    """{0} {1} {0}: with two slots everything hits when first uses are free, else one of three."""
    trace = one_layer({0}, {1}, {0}, num_experts=2)
    assert sch(trace, 4).hit_rate.tolist() == pytest.approx([1 / 3, 1 / 3])
    assert sch(trace, 4, free_first_use=True).hit_rate.tolist() == pytest.approx([2 / 3, 1])


def test_sch_of_olmoe_rises_with_slots_up_to_the_first_uses(olmoe):
    part = olmoe.select(layers=[0, 8])
    near, far = sch(part, 4).hit_rate, sch(part, 64).hit_rate
    assert (near.diff().dropna() >= 0).all()
    assert near.iloc[-1] == far.iloc[-1] == pytest.approx(1 - loc.reuse(part).share[0])
    with pytest.raises(TraceError, match="at least 1 token, got 0"):
        sch(part, 0)


def test_report_is_complete_and_json_able(olmoe):
    from colibri_lab.cli import plain

    report = loc.locality(olmoe.select(layers=[0, 1, 2]), sch_windows=(4,))
    assert report["summary"]["next_token_overlap"] > 0.3
    assert report["what"]["tokens"] == 299
    assert report["what"]["denominators"]["recall"].startswith("experts that the next layer did use")
    assert report["domains"] is None
    text = json.dumps(plain(report), allow_nan=False)
    assert json.loads(text)["overlap"][0]["distance"] == 1


def test_phase_decode_is_the_default_where_there_is_any(qwen):
    small = qwen.select(layers=[0, 1])
    assert loc.locality(small)["what"]["tokens"] == 128
    assert loc.locality(small, phase="all")["what"]["tokens"] == 156
    assert loc.locality(small, phase="prefill")["what"]["phase"] == "prefill"


def test_counts_only_traces_get_what_needs_no_order():
    report = loc.locality(Trace.from_counts(np.array([[3, 1]]), {}))
    assert report["popularity"].gini[0] == pytest.approx(0.25)
    assert report["overlap"] is None and report["summary"] is None
    with pytest.raises(TraceError, match="locality needs rows"):
        loc.overlap(Trace.from_counts(np.array([[3, 1]]), {}))


def test_measures_do_not_depend_on_expert_numbers(olmoe):
    part = olmoe.select(layers=[3, 4])
    renamed = part.select()
    renamed.experts = np.random.default_rng(5).permutation(64).astype(np.uint16)[part.experts]
    for measure in (loc.overlap, loc.reuse, loc.working_set, loc.touched, loc.popularity):
        first, second = (measure(t).select_dtypes("number") for t in (part, renamed))
        np.testing.assert_allclose(first.astype(float), second.astype(float), rtol=1e-9)
