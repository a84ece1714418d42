"""What rounding does to a matrix, by hand; to the model, against itself."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab as cl
from colibri_lab import rounding
from colibri_lab.errors import ModelError, SettingError

TEXTS = {
    "code": ["def read_lines(path):\n    return open(path).read()"],
    "german": ["Der Speicher ist voll, weil er klein ist."],
}


@pytest.fixture(scope="module")
def survey():
    survey = rounding.Survey(cl.open("data/colibri-tiny", expert_cache_slots=32), TEXTS)
    survey.measure("int4", quantize="int4-g64")
    survey.measure("router", router="int4-row")
    return survey


def matrix(rows=32, cols=192, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32)


def test_four_codes_by_hand():
    rounded = rounding.round_matrix(np.array([[-1.0, 0.0, 1.0, 2.0]], np.float32), "int4-row")  # 15 steps of 0.2
    assert rounded.codes.tolist() == [[0, 5, 10, 15]] and rounded.zero.tolist() == [[5.0]]
    assert rounded.scale[0, 0] == pytest.approx(0.2) and np.allclose(rounded.back, rounded.w, atol=1e-6)


@pytest.mark.parametrize(
    ("format", "bits"),
    [("int4-g64", 4 + 24 / 64), ("int4-g32-sym", 4 + 16 / 32), ("int4-row", 4 + 40 / 192), ("int8", 8 + 40 / 192)],
)
def test_bits_count_scales_and_zero_points(format, bits):
    rounded = rounding.round_matrix(matrix(), format)
    assert rounded.bits_per_weight == pytest.approx(bits)
    assert sum(rounded.parts.values()) * 8 / rounded.w.size == pytest.approx(bits)


@pytest.mark.parametrize("format", ["int8", "int8-g64", "int4-row", "int4-g32", "int4-tensor"])
def test_no_weight_is_off_by_more_than_half_a_step(format):
    assert 0.4 < rounding.round_matrix(matrix(), format).worst <= 0.50001


def test_a_small_half_is_lost_to_a_scale_per_row_and_kept_by_groups():
    w = rounding.shrink_left(matrix(), 30)
    assert np.array_equal(w[:, 96:], matrix()[:, 96:])
    assert rounding.round_matrix(w, "int4-row").column_blocks().lost.tolist() == [True] * 3 + [False] * 3
    assert rounding.round_matrix(w, "int4-g32").column_blocks().lost.tolist() == [False] * 6
    straddled = rounding.round_matrix(w, "int4-g64").column_blocks()
    assert straddled.first_column[straddled.lost].tolist() == [64]  # the group 64 to 127 has both kinds


def test_zero_columns_are_not_lost():
    w = matrix()
    w[:, :32] = 0
    first = rounding.round_matrix(w, "int4-row").column_blocks().iloc[0]
    assert not first.lost and first.relative_error == 0


def test_only_integer_formats_round():
    with pytest.raises(SettingError, match="expected an int8 or int4 format, got 'bf16'"):
        rounding.round_matrix(matrix(), "bf16")
    with pytest.raises(SettingError, match="did you mean 'int4'|int4"):
        rounding.round_matrix(matrix(), "int5")


def test_front_is_ordered_by_bits():
    table = rounding.front(matrix(), ["int8", "int4-g32", "int4-row"])
    assert table.format.tolist() == ["int4-row", "int4-g32", "int8"] and table.relative_error.is_monotonic_decreasing


def test_the_model_beside_itself_does_not_differ(survey):
    row = survey.rows["bf16"]
    assert (
        row.kl_mnat == 0 and row.change == 0 and row.router_agreement == 1 and not row.errors.any() and not row.telling
    )
    assert row.total_bytes == sum(tensor.nbytes for name in survey.container.files
                                  for tensor in survey.container.read(name).tensors.values())  # fmt: skip
    assert survey.tokens == len(row.kl) == len(row.domain)


def test_divergence_and_losses_are_those_of_the_two_distributions(survey, tmp_path):
    cl.convert(survey.container.dir, tmp_path / "copy", quantize="int4-g64", progress=False)
    models = cl.open("data/colibri-tiny"), cl.open(tmp_path / "copy")
    ids = np.array(models[0].tokenizer.encode(TEXTS["code"][0]))
    p, q = (np.exp(x := m.logits(ids)[:-1].astype(float)) / np.exp(x).sum(1, keepdims=True) for m in models)
    row = survey.rows["int4"]
    assert row.by_domain()["code"] == pytest.approx(1e3 * (p * np.log(p / q)).sum(1).mean(), rel=1e-3)
    chosen = row.domain == "code"
    assert np.allclose(row.nats[chosen], -np.log(q[np.arange(len(q)), ids[1:]]), atol=1e-4)
    assert np.allclose(row.reference_nats[chosen], -np.log(p[np.arange(len(p)), ids[1:]]), atol=1e-4)


def test_int4_is_smaller_and_further_off_and_every_expert_is_rounded(survey):
    row = survey.rows["int4"]
    assert row.bits == pytest.approx(4.375) and row.bytes["dense"] == survey.rows["bf16"].bytes["dense"]
    assert (
        row.kl_mnat > 0 and 0.9 < row.router_agreement < 1 and (0.05 < row.errors).all() and (row.errors < 0.15).all()
    )


def test_rounded_routers_save_little_and_cost_choices(survey):
    row = survey.rows["router"]
    assert row.bytes["expert"] == survey.rows["bf16"].bytes["expert"] and not row.errors.any()
    assert row.router_agreement < survey.rows["int4"].router_agreement
    cost = survey.cost
    assert list(cost.index) == ["int4", "router"] and cost.saved_percent["router"] < 1
    assert cost.kl_mnat_per_MB["router"] > 20 * cost.kl_mnat_per_MB["int4"]


def test_known_copies_are_looked_up_and_bad_ones_leave_the_rest(survey):
    before = list(survey.rows)
    assert survey.measure("int4", quantize="int4-g64") is survey.rows["int4"]
    with pytest.raises(SettingError, match="quantize cannot be 'int3'"):
        survey.measure("int3", quantize="int3")
    assert list(survey.rows) == before == list(survey.table.index)


def test_hot_experts_are_the_most_used_of_each_layer(survey):
    rules = survey.hot_cold(0.25)["rules"]
    assert rules[0] == {"format": "int4"} and [rule["layers"] for rule in rules[1:]] == [[n] for n in range(1, 7)]
    assert all(len(rule["experts"]) == 8 and rule["format"] == "int8" for rule in rules[1:])


def test_texts_that_predict_nothing_are_refused():
    lab = cl.open("data/colibri-tiny")
    with pytest.raises(SettingError, match="at least two tokens"):
        rounding.Survey(lab, {"none": [""]})
    assert issubclass(SettingError, Exception) and ModelError
