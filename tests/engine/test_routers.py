"""Routers in the place of the model's own: each against plain numpy, and what the engine makes of any choice."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab.config import RouterConfig
from colibri_lab.engine.router import RoutedLayer
from colibri_lab.engine.router_reference import route_numpy
from colibri_lab.engine.routers import (
    PAD,
    ExpertChoice,
    Gumbel,
    Noisy,
    Precomputed,
    Soft,
    Table,
    TopK,
    decide,
)
from colibri_lab.errors import SettingError

TEXT = "def read_lines(path):\n    with open(path) as stream:\n        return stream.read().splitlines()\n"
RULES = {
    "softmax": RouterConfig("softmax"),
    "softmax renormalised": RouterConfig("softmax", renormalise=True),
    "topk_softmax": RouterConfig("topk_softmax"),
    "sigmoid": RouterConfig("sigmoid_group", renormalise=True, scale=2.0, correction_bias=True),
    "grouped": RouterConfig("sigmoid_group", renormalise=True, groups=4, top_groups=2, correction_bias=True),
}
every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


@pytest.fixture(scope="module")
def lab(tiny):
    return cl.open(tiny, expert_cache_slots=16, threads=2)


@pytest.fixture(scope="module")
def ids(lab):
    return lab.tokenizer.encode(TEXT)


def layer_of(rules, tokens=9, experts=16, k=4, index=3, position=0):
    bias = np.random.default_rng(7).normal(0, 0.3, experts).astype(np.float32) if rules.correction_bias else None
    return RoutedLayer(index, experts, k, rules, bias, np.arange(tokens), position)


def logits_of(layer, seed=1):
    return np.random.default_rng(seed).normal(0, 1.5, (len(layer.token_ids), layer.experts)).astype(np.float32)


def dense(ids, weights, experts):
    """(tokens, experts) weights, 0 where not chosen."""
    out = np.zeros((len(ids), experts + 1), np.float32)
    np.put_along_axis(out, np.minimum(ids, experts).astype(int), weights, 1)
    return out[:, :experts]


def sigmoid_or_softmax(logits, rules):
    x = logits.astype(np.float64)
    if rules.kind == "sigmoid_group":
        return 1 / (1 + np.exp(-x))
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


# One router at a time


@every_rule
@pytest.mark.parametrize("k, temperature", [(None, 1.0), (1, 1.0), (7, 0.5), (4, 3.0)])
def test_top_k_is_the_reference_rule_at_another_k_and_temperature(rules, k, temperature):
    layer = layer_of(rules)
    logits = logits_of(layer)
    ids, weights = decide(TopK(k, temperature), layer, logits)
    expected = route_numpy(logits / np.float32(temperature), rules, k or 4, layer.bias)
    assert np.array_equal(ids, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)


@every_rule
def test_a_masked_expert_is_passed_over_and_the_others_keep_order_and_score(rules):
    layer = layer_of(rules, experts=16, k=3)
    logits = logits_of(layer)
    order, _ = route_numpy(logits, RouterConfig(rules.kind), 16, layer.bias)
    top = np.unique(order[:, :1])[:2]  # favourites of somebody
    ids, weights = decide(TopK(mask=[(3, int(e)) for e in top] + [(5, 0)]), layer, logits)
    assert not np.isin(ids, top).any()
    if rules.groups == 1:
        expected = np.array([[e for e in row if e not in top][:3] for row in order])
        assert np.array_equal(ids, expected)
    scores = sigmoid_or_softmax(logits, rules)
    chosen = dense(ids, np.ones_like(weights), 16) > 0
    expected = np.where(chosen, scores, 0)
    if rules.renormalise or rules.kind == "topk_softmax":
        expected = expected / expected.sum(1, keepdims=True)
    np.testing.assert_allclose(dense(ids, weights, 16), expected * rules.scale, rtol=1e-5, atol=1e-7)


def test_masking_nearly_all_experts_is_refused():
    layer = layer_of(RULES["softmax"], experts=6, k=4)
    with pytest.raises(SettingError, match="with 3 of 6 experts masked, layer 3 has fewer than 4"):
        TopK(mask=[(3, 0), (3, 1), (3, 2)])(layer, logits_of(layer))


@every_rule
def test_soft_weighs_every_expert_by_its_score(rules):
    layer = layer_of(rules)
    logits = logits_of(layer)
    ids, weights = decide(Soft(), layer, logits)
    assert (np.sort(ids, 1) == np.arange(16)).all() and (np.diff(weights, axis=1) <= 0).all()
    expected = sigmoid_or_softmax(logits, rules)
    if rules.renormalise:
        expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(dense(ids, weights, 16), expected * rules.scale, rtol=1e-5)


@given(st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(1, 50), st.integers(0, 99))
def test_expert_choice_is_exactly_balanced(tokens, experts, capacity, seed):
    layer = layer_of(RULES["softmax"], tokens, experts, k=min(2, experts))
    ids, weights = decide(ExpertChoice(capacity), layer, logits_of(layer, seed))
    taken = min(tokens, capacity or -(-tokens * layer.k // experts))
    assert (np.bincount(ids[ids != PAD], minlength=experts) == taken).all()
    assert ((weights > 0) == (ids != PAD)).all()


@every_rule
def test_expert_choice_takes_each_experts_best_tokens(rules):
    layer = layer_of(rules, tokens=11)
    logits = logits_of(layer)
    ids, weights = decide(ExpertChoice(3), layer, logits)
    scores = sigmoid_or_softmax(logits, rules)
    chosen = np.zeros(scores.shape, bool)
    for expert in range(16):
        for token in sorted(range(11), key=lambda t: -scores[t, expert])[:3]:
            chosen[token, expert] = True
    expected = np.where(chosen, scores, 0)
    if rules.renormalise or rules.kind == "topk_softmax":
        expected /= np.maximum(expected.sum(1, keepdims=True), 1e-20)
    np.testing.assert_allclose(dense(ids, weights, 16), expected * rules.scale, rtol=1e-5, atol=1e-7)
    widths = (ids != PAD).sum(1)
    assert widths.sum() == 48 and widths.min() < widths.max() == ids.shape[1]


def test_gumbel_is_a_function_of_seed_layer_and_position():
    layer = layer_of(RULES["softmax"], tokens=9)
    logits = logits_of(layer)
    ids, weights = decide(Gumbel(3), layer, logits)
    again, _ = decide(Gumbel(3), layer, logits)
    assert np.array_equal(ids, again)
    assert not np.array_equal(ids, decide(Gumbel(4), layer, logits)[0])
    late = layer_of(RULES["softmax"], tokens=5, position=4)  # the same text read in two pieces
    assert np.array_equal(decide(Gumbel(3), late, logits[4:])[0], ids[4:])
    elsewhere = layer_of(RULES["softmax"], tokens=9, index=4)
    assert not np.array_equal(decide(Gumbel(3), elsewhere, logits)[0], ids)
    np.testing.assert_allclose(
        weights, np.take_along_axis(sigmoid_or_softmax(logits, RULES["softmax"]), ids.astype(int), 1), rtol=1e-5
    )


def test_gumbel_draws_with_the_probabilities_of_the_softmax():
    layer = layer_of(RULES["softmax"], tokens=4000, experts=4, k=1)
    logits = np.tile(np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)), (4000, 1))
    ids, _ = decide(Gumbel(0), layer, logits)
    share = np.bincount(ids[:, 0], minlength=4) / 4000
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=4 * np.sqrt(0.25 / 4000))
    cold, _ = decide(Gumbel(0, temperature=1e-3), layer, logits)
    assert (cold == 0).all()


def test_noise_of_scale_zero_is_the_rule_and_noise_has_the_scale_it_says():
    layer = layer_of(RULES["sigmoid"], tokens=400)
    logits = logits_of(layer)
    assert np.array_equal(decide(Noisy(0.0), layer, logits)[0], layer.route(logits)[0])
    seen = []
    spy = RoutedLayer(3, 16, 4, RULES["softmax"], None, np.arange(400))
    object.__setattr__(spy, "route", lambda noisy: seen.append(noisy - logits) or layer.route(noisy))
    Noisy(0.25, seed=2)(spy, logits)
    assert seen[0].std() == pytest.approx(0.25, rel=0.05) and abs(seen[0].mean()) < 0.02


def test_a_table_goes_by_token_and_layer():
    layer = RoutedLayer(2, 8, 2, RouterConfig(scale=2.0), None, np.array([5, 6, 7]))
    ids, weights = decide(Table({5: [1, 2, 3], (2, 6): [4], (1, 6): [0], None: [7, 0]}), layer, None)
    assert ids.tolist() == [[1, 2, 3], [4, PAD, PAD], [7, 0, PAD]]
    np.testing.assert_allclose(weights, [[2 / 3, 2 / 3, 2 / 3], [2, 0, 0], [1, 1, 0]], rtol=1e-6)
    with pytest.raises(SettingError, match="no entry for token 6 in layer 2"):
        Table({5: [1]})(layer, None)


def test_ids_without_weights_weigh_the_same_and_say_so():
    with pytest.warns(UserWarning, match="ids without weights: all experts of a token weigh the same"):
        router = Precomputed({3: np.array([[1, 2], [3, PAD]], np.uint16)})
    layer = RoutedLayer(3, 8, 2, RouterConfig(), None, np.array([10, 11]))
    ids, weights = decide(router, layer, None)
    assert ids.tolist() == [[1, 2], [3, PAD]] and weights.tolist() == [[0.5, 0.5], [1, 0]]
    with pytest.raises(SettingError, match="no ids for position 3 of layer 3; they end at 1"):
        router(RoutedLayer(3, 8, 2, RouterConfig(), None, np.array([10, 11]), position=2), None)


# In the engine


def test_the_models_own_rule_from_outside_gives_the_same_bits(lab, ids):
    wanted = lab.logits(ids)
    for router in (
        TopK(),
        TopK(k=4, temperature=1),
        Precomputed.of(lab.routes(ids)),
        lambda layer, logits: layer.route(logits),
        None,
    ):
        with lab.routing(router):
            assert np.array_equal(lab.logits(ids), wanted)
    with lab.routing(TopK(k=2)):
        assert not np.array_equal(lab.logits(ids), wanted)
        assert lab.routes(ids).groupby(["layer", "token"]).size().eq(2).all()
    assert np.array_equal(lab.logits(ids), wanted)


def expected_output(lab, h, layer, ids, weights):
    """The routed experts' sum for one layer, in float64 and token by token, from the container's weights."""
    out = np.zeros(h.shape)
    for token, (row, gates) in enumerate(zip(ids, weights, strict=True)):
        for expert, gate in zip(row, gates, strict=True):
            if expert == PAD:
                continue
            parts = lab.container.block(layer, expert // lab.container.block_size).tensors
            w1, w3, w2 = (parts[f"{expert}.{name}"].array().astype(np.float64) for name in ("gate", "up", "down"))
            a = w1 @ h[token]
            out[token] += gate * (w2 @ (a / (1 + np.exp(-a)) * (w3 @ h[token])))
    return out


@pytest.mark.parametrize(
    "router", [Soft(), ExpertChoice(), ExpertChoice(1), Gumbel(2), TopK(k=9), Table({None: [3], 5: [1, 2]})], ids=repr
)
@pytest.mark.parametrize("slots", [2, 32])
def test_any_number_of_experts_per_token_is_summed_as_chosen(tiny, ids, router, slots, monkeypatch):
    lab = cl.open(tiny, expert_cache_slots=slots, threads=2)
    experts = lab.engine.layers[2].experts
    seen = {}
    monkeypatch.setattr(
        experts,
        "bucket",
        lambda x, chosen, active, arena, was=experts.bucket: (
            seen.update(x=x.copy(), ids=chosen.copy()),
            was(x, chosen, active, arena),
        ),
    )
    monkeypatch.setattr(
        experts,
        "combine",
        lambda weights, was=experts.combine: seen.update(w=weights.copy(), y=was(weights).copy()) or seen["y"],
    )
    with lab.routing(router):
        lab.logits(ids[:6])
    wanted = expected_output(lab, seen["x"], 2, seen["ids"], seen["w"])
    np.testing.assert_allclose(seen["y"], wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def test_a_token_without_experts_adds_nothing(lab, ids):
    def nobody(layer, logits):
        return np.full((len(logits), 3), PAD), np.zeros((len(logits), 3))

    with lab.routing(nobody):
        assert lab.routes(ids).empty
        run = lab.generate("x", max_tokens=4, stop_at_eos=False)
    assert run.settings["routing"] == "nobody"
    assert run.cache[["hits", "misses"]].to_numpy().sum() == 0 and len(run.tokens) == 4


def test_runs_say_who_routed_them(lab):
    def routing_of(router):
        with lab.routing(router):
            return lab.generate("x", max_tokens=1).settings["routing"]

    assert lab.generate("x", max_tokens=1).settings["routing"] == "model" == routing_of(None)
    assert routing_of(TopK(k=2, mask={(6, 1), (5, 30)})) == "TopK(k=2, mask=((5, 30), (6, 1)))"
    assert routing_of(ExpertChoice()) == "ExpertChoice()"
    assert routing_of(Gumbel(seed=9)) == "Gumbel(seed=9)"


def test_a_stream_keeps_the_router_it_was_made_with(lab):
    with lab.routing(TopK(k=1)):
        stream = lab.stream("x", max_tokens=6, stop_at_eos=False)
        wanted = lab.generate("x", max_tokens=6, temperature=0.7, stop_at_eos=False).tokens
    assert [step.token for step in stream] == wanted != lab.generate("x", max_tokens=6, stop_at_eos=False).tokens


def test_routing_belongs_to_a_thread_and_nests(lab):
    seen = []
    with lab.routing(TopK(k=3)):
        other = threading.Thread(target=lambda: seen.append(lab.generate("x", max_tokens=1).settings["routing"]))
        other.start()
        other.join()
        with lab.routing(None):
            seen.append(lab.generate("x", max_tokens=1).settings["routing"])
        seen.append(lab.generate("x", max_tokens=1).settings["routing"])
    assert seen == ["model", "model", "TopK(k=3)"]


def test_a_failing_router_leaves_the_model_usable(lab, ids):
    wanted = lab.logits(ids)
    with pytest.raises(ZeroDivisionError), lab.routing(lambda layer, logits: 1 / 0):
        lab.logits(ids)
    assert np.array_equal(lab.logits(ids), wanted)


def test_leaving_out_the_shared_expert_changes_the_text_and_no_event(lab, ids):
    before = lab.routes(ids), lab.logits(ids)
    with lab.routing(TopK(shared=False)):
        after = lab.routes(ids), lab.logits(ids)
    assert len(before[0]) == len(after[0]) == 6 * 4 * len(ids)
    assert np.abs(before[1] - after[1]).max() > 0.1
    first = lab.config.moe_layers[0]  # its input is still the same, so are its choices
    assert before[0][before[0].layer == first].equals(after[0][after[0].layer == first])


def test_replaying_recorded_experts_gives_the_same_text_and_cache_events(tiny, monkeypatch):
    options = {"expert_cache_slots": 6, "threads": 2, "log_level": "debug"}
    lab, settings = cl.open(tiny, **options), {"max_tokens": 20, "temperature": 0.8, "seed": 3, "stop_at_eos": False}
    with lab.record() as recorder:
        run = lab.generate(TEXT, **settings)
    offloaded = cl.open(tiny, **options, router_offload="none")
    for layer in offloaded.config.moe_layers:
        monkeypatch.setattr(offloaded.engine.layers[layer].router, "logits", None)  # nobody may ask for them
    with offloaded.routing(Precomputed.of(recorder.trace)):
        again = offloaded.generate(TEXT, **settings)
    assert again.tokens == run.tokens and again.events.equals(run.events)
    assert again.settings["routing"] == f"Precomputed(6 layers, {run.prompt_tokens + 19} positions)"
    with pytest.warns(UserWarning, match="ids without weights"):
        uniform = Precomputed.of(recorder.trace, weights=False)
    with offloaded.routing(uniform):
        offloaded.reset_cache()
        prompt = offloaded.generate(TEXT, **settings | {"max_tokens": 1}).events
    places = ["layer", "expert", "hit", "victim"]
    assert prompt[places].equals(run.events.loc[run.events.step < 6, places])


def test_recordings_of_other_routers_keep_what_they_chose(lab, ids):
    with lab.routing(ExpertChoice()), lab.record() as recorder:
        run = lab.generate(TEXT, max_tokens=3, temperature=0, stop_at_eos=False)
    trace = recorder.trace
    assert trace.experts.shape[1] == 32 and (trace.experts == PAD).any()
    replayed = trace.select(phase="prefill")
    for layer in replayed.layers:
        chosen = replayed.experts[replayed.layer == layer]
        counts = np.bincount(chosen[chosen != PAD], minlength=32)
        assert (counts == -(-run.prompt_tokens * 4 // 32)).all()
    assert (trace.bytes[trace.experts == PAD] == 0).all()
    assert trace.bytes.sum() == run.cache.bytes.sum()


@pytest.mark.parametrize("prefetch", ["same", "lookahead"])
def test_prefetching_goes_with_other_routers(tiny, ids, prefetch):
    lab = cl.open(tiny, expert_cache_slots=8, threads=2, prefetch=prefetch)
    plain = cl.open(tiny, expert_cache_slots=8, threads=2)
    for router in (ExpertChoice(), TopK(k=2), Table({None: [3, 4]})):
        with lab.routing(router), plain.routing(router):
            assert np.array_equal(lab.logits(ids), plain.logits(ids))


# What is refused


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TopK(k=0), "k must be a whole number of at least 1, got 0"),
        (lambda: TopK(k=2.5), "k must be a whole number of at least 1, got 2.5"),
        (lambda: TopK(temperature=0), "temperature must be above 0, got 0"),
        (lambda: TopK(temperature=float("inf")), "temperature must be above 0, got inf"),
        (lambda: Gumbel(-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: Noisy(-0.5), "scale must be a number of at least 0, got -0.5"),
        (lambda: ExpertChoice(0), "capacity must be a whole number of tokens, at least 1, got 0"),
        (lambda: Table({}), "got nothing"),
        (lambda: Table({3: [0.5]}), r"expert ids must be lists of whole numbers, got \[0.5\]"),
        (lambda: Precomputed({}), "got nothing"),
        (lambda: Precomputed({1: np.zeros((3, 2))}), r"layer 1: expert ids must be whole numbers of shape \(tokens, k\), got float64"),
        (lambda: Precomputed({1: np.array([[-1]])}), "got -1"),
        (
            lambda: Precomputed({1: np.zeros((3, 2), int)}, {1: np.zeros((3, 1))}),
            r"weights of layer 1 must have the shape of its ids, \(3, 2\); got \(3, 1\)",
        ),
    ],
)  # fmt: skip
def test_impossible_routers_are_named(make, message):
    with pytest.raises(SettingError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make()


@pytest.mark.parametrize(
    "router, message",
    [
        ("soft", r"a router is called as router\(layer, logits\); got 'soft'"),
        (TopK(k=33), "k must be at most 32, the experts a token may choose from, got 33"),
        (TopK(mask=[(0, 1)]), r"mask names \(0, 1\); MoE layers are 1 to 6, experts 0 to 31"),
        (TopK(mask=[(1, 32)]), r"mask names \(1, 32\)"),
        (Precomputed({1: np.array([[1]])}, {1: np.array([[1.0]])}), r"no ids for layer 2; ids are there for layers \[1\]"),
        (lambda layer, logits: None, "expected .ids, weights. back"),
        (lambda layer, logits: (logits, logits), "expert ids must be whole numbers"),
        (lambda layer, logits: (np.zeros((1, 4), int), np.zeros((1, 4))), r"must both be \(\d+ tokens, k\), got \(1, 4\)"),
        (lambda layer, logits: (np.full((len(logits), 1), 32), np.ones((len(logits), 1))), "must be 0 to 31, or 65535 for none; got 32"),
        (lambda layer, logits: (np.zeros((len(logits), 2), int), np.ones((len(logits), 2))), "given the same expert twice"),
        (lambda layer, logits: (np.zeros((len(logits), 1), int), np.full((len(logits), 1), np.nan)), "weights must be finite, found nan"),
    ],
)  # fmt: skip
def test_unusable_choices_are_named_and_nothing_runs_on(lab, ids, router, message):
    with pytest.raises(SettingError, match=message), lab.routing(router):
        lab.logits(ids)


def test_router_offload_says_what_it_needs(tiny, ids):
    with pytest.raises(SettingError, match="router_offload 'gpu': there is no device backend; use cpu, or none"):
        cl.open(tiny, router_offload="gpu")
    with pytest.raises(SettingError, match="router_offload cannot be 'tpu'"):
        cl.open(tiny, router_offload="tpu")
    with pytest.raises(SettingError, match="prefetch 'lookahead' runs the router early"):
        cl.open(tiny, router_offload="none", prefetch="lookahead")
    lab = cl.open(tiny, router_offload="none")
    with pytest.raises(SettingError, match=r"runs no router, and routing 'model' needs one; give the experts"):
        lab.generate("x")
    with pytest.raises(SettingError, match=r"routing 'TopK\(k=2\)' needs one"), lab.routing(TopK(k=2)):
        lab.logits(ids)
    with lab.routing(Table({None: [1, 2, 3, 4]})):
        assert lab.generate("x", max_tokens=2).settings["router_offload"] == "none"
