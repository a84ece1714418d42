"""What is said about routing, against counting by hand and against the model card of the shipped model."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import colibri_lab as cl
from colibri_lab import routers, routing
from colibri_lab.config import RouterConfig
from colibri_lab.engine.router import RoutedLayer
from colibri_lab.errors import ModelError, SettingError
from colibri_lab.routing import Reading
from colibri_lab.trace import locality

DOMAINS = ["code", "verse", "dictionary", "english", "german", "chinese"]
CARD_FAVOURITES = {  # data/colibri-tiny/README.md, "Most used experts", layer 6
    "code": {3, 23, 16, 5}, "verse": {11, 4, 18, 17}, "dictionary": {22, 10, 13, 12},
    "english": {14, 2, 30, 8}, "german": {26, 24, 29, 28}, "chinese": {0, 6, 21, 27},
}  # fmt: skip
CARD_NMI = [0.014, 0.031, 0.085, 0.09, 0.197, 0.283]  # by layer


@pytest.fixture(scope="module")
def lab():
    return cl.open("colibri-tiny", expert_cache_slots=32, threads=2)


@pytest.fixture(scope="module")
def readings(lab):
    return routing.read_domains(lab)


def made_up(choices: dict[str, list[list[int]]], experts: int = 4) -> dict[str, list[Reading]]:
    """Readings of one layer (number 5) in which the tokens of a domain choose exactly these experts, best first."""
    out = {}
    for domain, rows in choices.items():
        logits = np.full((len(rows), experts), -9.0, np.float32)
        for token, row in enumerate(rows):
            logits[token, row] = np.arange(len(row), 0, -1)
        ids = np.arange(len(rows))
        layer = RoutedLayer(5, experts, len(rows[0]), RouterConfig(), None, ids)
        out[domain] = [Reading("", ids, ("x",) * len(rows), (layer,), logits[None], np.ones(len(rows) - 1))]
    return out


def test_a_reading_holds_what_the_model_did(lab):
    text = "def f(x):\n    return x + 1\n"
    reading = routing.read(lab, text)
    ids = lab.tokenizer.encode(text)
    assert reading.token_ids.tolist() == ids and "".join(reading.pieces) == text
    table = lab.routes(ids)
    for layer in lab.config.moe_layers:
        chosen, weights = reading.choose(layer)
        rows = table[table.layer == layer]
        assert np.array_equal(chosen.ravel(), rows.expert) and np.array_equal(weights.ravel(), rows.weight.astype("f4"))
    x = lab.logits(ids).astype(np.float64)
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.testing.assert_allclose(reading.nats, [-np.log(p[i, ids[i + 1]]) for i in range(len(ids) - 1)], rtol=1e-6)
    with pytest.raises(SettingError, match="layer 0 does not route; those that do are 1 to 6"):
        reading.choose(0)


def test_a_reading_in_pieces_is_the_same(lab, readings):
    pieces = cl.open("colibri-tiny", expert_cache_slots=32, threads=2, prefill_chunk=50)
    whole = readings["verse"][0]
    again = routing.read(pieces, whole.text)
    assert again.logits.shape == whole.logits.shape == (6, len(whole.token_ids), 32)
    np.testing.assert_allclose(again.logits, whole.logits, atol=2e-3)


def test_texts_without_tokens_and_without_files_are_named(lab):
    with pytest.raises(SettingError, match="text is empty"):
        routing.read(lab, "")
    with pytest.raises(ModelError, match=r"nothing\.json: No such file.*give your own"):
        routing.texts("nothing")
    assert list(routing.texts()) == list(routing.texts("prompts")) == DOMAINS


def test_usage_and_balance_count_choices():
    found = made_up({"a": [[0, 1], [0, 2], [0, 1], [0, 1]], "b": [[3, 1], [3, 2]]})
    table = routing.usage(found)
    assert table[table.domain == "a"]["count"].tolist() == [4, 3, 1, 0]
    assert table[table.domain == "b"].share.tolist() == [0, 0.25, 0.25, 0.5]
    rows = routing.balance(found).set_index("of")
    pooled = np.array([4 / 8, 3 / 8 + 2 / 8, 1 / 8 + 2 / 8, 4 / 8]) / 2 * 4  # domains weigh the same
    assert rows.loc["all domains", "most"] == pytest.approx(pooled.max())
    assert rows.loc["all domains", "least"] == pytest.approx(pooled.min())
    assert rows.loc["a", "effective"] == pytest.approx(1 / (0.5**2 + 0.375**2 + 0.125**2))
    assert routing.favourites(found, "a", n=2) == [(5, 0), (5, 1)]


def test_information_is_all_or_nothing_where_it_must_be():
    apart = routing.specialisation(made_up({"a": [[0], [1]] * 50, "b": [[2], [3]] * 50})).iloc[0]
    assert apart.mutual_information_bits == pytest.approx(1) and apart.nmi == pytest.approx(2 / 3)  # 2·1 / (1 + 2)
    assert apart.owned == 4 and apart.effective == pytest.approx(4) and apart.effective_in_domain == pytest.approx(2)
    assert 0 <= apart.by_chance < 0.1
    alike = routing.specialisation(made_up({"a": [[0], [1]] * 50, "b": [[1], [0]] * 50})).iloc[0]
    assert alike.nmi == pytest.approx(0, abs=1e-9) and alike.owned == 0


def test_the_shipped_model_specialises_as_its_card_says(readings):
    table = routing.specialisation(readings)
    assert table.layer.tolist() == [1, 2, 3, 4, 5, 6]
    # the card counted ten times as many tokens: with fewer, all of these come out a little higher
    np.testing.assert_allclose(table.nmi, CARD_NMI, atol=0.06)
    assert (table.nmi - table.by_chance > 0.01).all()
    assert table.nmi.iloc[-1] == table.nmi.max() > 50 * table.by_chance.iloc[-1]
    for domain, experts in CARD_FAVOURITES.items():
        mine = {expert for _, expert in routing.favourites(readings, domain, 4, [6])}
        assert len(mine & experts) >= 2, domain


def test_the_trace_of_readings_is_what_was_chosen(readings):
    trace = routing.trace_of(readings)
    assert len(trace) == 6 * sum(len(r.token_ids) for group in readings.values() for r in group)
    use = routing.usage(readings).groupby(["layer", "expert"])["count"].sum()
    assert np.array_equal(trace.popularity().ravel(), use)
    table = locality.domains(trace)
    assert len(table) == 15 and (table.between > 3 * table.within).all()


def test_masking_a_domains_favourites_raises_that_domains_loss_most(lab, readings):
    change = routing.masking(lab, *routing.split(readings))
    assert change.index.tolist() == change.columns.tolist() == DOMAINS
    # the card, on other text: +0.24 +0.39 +0.21 +0.16 +0.62 +0.37 on the diagonal
    card = [0.237, 0.385, 0.205, 0.163, 0.624, 0.367]
    own = np.diag(change)
    np.testing.assert_allclose(own, card, atol=0.2)
    for domain in DOMAINS:
        assert change[domain].idxmax() == domain and change.loc[domain].idxmax() == domain


def test_sweep_finds_that_the_trained_k_is_best_and_counts_experts(lab, readings):
    short = {domain: readings[domain][:1] for domain in ("code", "verse")}
    counted = {"model": None} | {f"k = {k}": routers.TopK(k=k) for k in (1, 2, 8)}
    table = routing.sweep(lab, counted | {"soft": routers.Soft()}, short)
    assert table.experts_per_token.tolist() == [4, 1, 2, 8, 32]
    assert table.change["model"] == pytest.approx(0, abs=1e-12) and table["mean"].idxmin() == "model"
    assert table["code"]["model"] == pytest.approx(short["code"][0].nats.mean())
    assert table.change["k = 1"] > table.change["k = 2"] > 0.02 and table.change["soft"] > table.change["k = 8"]
    assert (table.ms_per_token > 0).all()


def test_least_used_experts_are_worth_less_than_random_ones(lab, readings):
    counted, tested = routing.split(readings)
    table = routing.without_experts(lab, counted, tested, masked=(12,)).set_index("which")
    assert table.masked.tolist() == [12, 12]
    assert 0 < table.picks_percent["least used"] < table.picks_percent["random"] < 100 * 12 / 192 * 2
    assert table.nats["least used"] < table.nats["random"]
    np.testing.assert_allclose(table.nats_per_percent, table.nats / table.picks_percent)
    again = routing.without_experts(lab, counted, {"code": tested["code"]}, masked=(500,))
    assert (again.masked == 6 * 28).all()  # every layer keeps four to choose from


def test_a_frequency_table_knows_tokens_and_nothing_around_them(lab, readings):
    table = routing.frequency_table({"code": readings["code"]})
    reading = readings["code"][0]
    token = int(reading.token_ids[3])
    seen = [row for r in readings["code"] for row, t in zip(r.choose(2)[0], r.token_ids, strict=True) if t == token]
    counts = np.bincount(np.concatenate(seen), minlength=32)
    assert sorted(counts[list(table.experts[2, token])]) == sorted(np.sort(counts)[-4:])
    change = routing.losses(lab, {"code": readings["code"]}, table) - routing.losses(lab, {"code": readings["code"]})
    assert 0 < change["code"] < 1


def test_divergence_is_zero_for_the_same_router_and_small_for_a_small_mistake(lab, readings):
    short = {"code": readings["code"][:1]}
    assert routing.divergence(lab, short, routers.TopK())["code"] == 0
    wrong, random = (
        routing.divergence(lab, short, routing.bias_in_weight),
        routing.divergence(lab, short, routers.Gumbel(1)),
    )
    assert 0 < wrong["code"] < random["code"]


def test_the_bias_chooses_and_in_the_weight_is_a_mistake(readings):
    reading = readings["code"][0]
    layer, logits = reading.layer(6), reading.logits_of(6)
    right, wrong = layer.route(logits), routing.bias_in_weight(layer, logits)
    assert np.array_equal(right[0], wrong[0]) and np.abs(right[1] - wrong[1]).max() > 0.01
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits, right[0].astype(int), 1).astype(np.float64)))
    np.testing.assert_allclose(right[1], 2 * scores / scores.sum(1, keepdims=True), rtol=1e-5)


def test_flips_happen_where_the_margin_is_small(readings):
    table = routing.flips(readings["verse"][0], scales=(0, 1e-7, 1e-2, 1e-1))
    share = table.groupby("scale").flipped.mean()
    assert share[0] == 0 and share[1e-7] < 1e-3 and 0 < share[1e-2] < share[1e-1] < 1
    noisy = table[table.scale == 1e-2]
    assert noisy[noisy.flipped].margin.max() < noisy.margin.median()
    layer = readings["verse"][0].layer(3)
    logits = readings["verse"][0].logits_of(3)
    choice = np.sort(1 / (1 + np.exp(-logits[7].astype(np.float64))) + layer.bias)[::-1]
    assert routing.margins(layer, logits)[7] == pytest.approx(choice[3] - choice[4], abs=1e-6)


def test_rules_side_by_side_are_the_numbers_of_a_hand_calculation():
    table = routing.rules([2.0, 1.0, 0.0, -1.0], 2, bias=[0, 0, 0, 10], groups=2, top_groups=1)
    expected = {
        "softmax, then top-k": (0.6439, 0.2369, 0, 0),
        "softmax, top-k, renormalised": (0.7311, 0.2689, 0, 0),
        "top-k, then softmax": (0.7311, 0.2689, 0, 0),
        "sigmoid, top-k, renormalised": (0.5464, 0.4536, 0, 0),
        "sigmoid, bias chooses": (0.7661, 0, 0, 0.2339),
        "sigmoid, 1 of 2 groups": (0, 0, 0.6502, 0.3498),  # the group of the expert with the bias
    }
    assert table.index.tolist() == list(expected)
    np.testing.assert_allclose(table[[0, 1, 2, 3]], list(expected.values()), atol=1e-4)
    assert table.chosen["sigmoid, bias chooses"] == (3, 0)


def test_parameters_add_up_to_the_tensors_in_the_file(lab, project):
    from safetensors import safe_open

    with safe_open(project / "data/colibri-tiny/model.safetensors", "np") as file:
        in_file = sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())
    found = routing.parameters(lab.config)
    assert found["total"] == in_file == sum(v for name, v in found.items() if name not in ("total", "active"))
    assert found["active"] / found["total"] == pytest.approx(0.234, abs=0.001)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe"])
def test_parameters_of_every_family(project, family):
    from safetensors import safe_open

    from colibri_lab.checkpoint.families import read_config

    directory = project / "tests/oracle" / family
    in_file = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            in_file += sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())
    assert routing.parameters(read_config(directory))["total"] == in_file


def test_every_name_is_there():
    for name in routing.__all__:
        assert callable(getattr(routing, name))
    assert isinstance(routing.rules([1.0, 0.0], 1), pd.DataFrame)
