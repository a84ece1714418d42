"""The numpy router against transformers' recorded choices and against arithmetic done by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri_lab.checkpoint.families import read_config
from colibri_lab.config import RouterConfig
from colibri_lab.engine.router_reference import route_numpy
from colibri_lab.errors import SettingError
from colibri_lab.trace import load_trace

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "glm4_moe")


@pytest.fixture(params=FAMILIES)
def family(request, project) -> Path:
    return project / "tests" / "oracle" / request.param


def correction_biases(directory: Path, layers) -> dict[int, np.ndarray]:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "np") as tensors:
        return {n: tensors.get_tensor(f"model.layers.{n}.mlp.gate.e_score_correction_bias") for n in layers}


def test_choices_and_weights_are_those_of_transformers(family):
    config, reference = read_config(family), np.load(family / "reference.npz")
    biases = correction_biases(family, config.moe_layers) if config.router.correction_bias else {}
    for layer in config.moe_layers:
        logits = reference[f"router_logits_L{layer}"].reshape(-1, config.num_experts)
        experts, weights = route_numpy(logits, config.router, config.top_k, biases.get(layer))
        by_id = np.argsort(experts, axis=1)
        assert np.array_equal(
            np.take_along_axis(experts, by_id, 1), reference[f"router_idx_L{layer}"].reshape(experts.shape)
        )
        expected = reference[f"router_w_L{layer}"].reshape(experts.shape)
        np.testing.assert_allclose(np.take_along_axis(weights, by_id, 1), expected, rtol=1e-5, atol=1e-7)


def test_a_logits_file_imports_as_what_the_model_chose(family, tmp_path):
    config, reference = read_config(family), np.load(family / "reference.npz")
    arrays = {f"layer_{layer}": reference[f"router_logits_L{layer}"][0] for layer in config.moe_layers}
    if config.router.correction_bias:
        biases = correction_biases(family, config.moe_layers)
        arrays["correction_bias"] = np.stack([biases[layer] for layer in config.moe_layers])
    np.savez(tmp_path / "logits.npz", input_ids=reference["input_ids"][0], **arrays)
    trace = load_trace(tmp_path / "logits.npz", config=family)
    assert trace.layers == list(config.moe_layers)
    for layer in trace.layers:
        chosen = np.sort(trace.experts[trace.layer == layer], axis=1)
        assert np.array_equal(chosen, reference[f"router_idx_L{layer}"][0])


Z = np.array([[2.0, 1.0, 0.0, -1.0]])


def test_softmax_renormalised_and_sigmoid_by_hand():
    """e^2 / (e^2 + e) = 0.731; sigmoid(2) / (sigmoid(2) + sigmoid(1)) = 0.8808 / 1.6119 = 0.546."""
    for kind in ("softmax", "topk_softmax"):
        experts, weights = route_numpy(Z, RouterConfig(kind, renormalise=True), 2)
        assert experts.tolist() == [[0, 1]]
        assert weights[0] == pytest.approx([0.731, 0.269], abs=1e-3)
    _, weights = route_numpy(Z, RouterConfig("sigmoid_group", renormalise=True), 2)
    assert weights[0] == pytest.approx([0.546, 0.454], abs=1e-3)
    _, weights = route_numpy(Z, RouterConfig("softmax"), 2)
    assert weights[0] == pytest.approx([0.644, 0.237], abs=1e-3)


def test_correction_bias_selects_and_never_weighs():
    experts, weights = route_numpy(Z, RouterConfig("sigmoid_group"), 2, bias=[0, 0, 0, 10])
    assert experts.tolist() == [[3, 0]]
    assert weights[0, 0] == pytest.approx(1 / (1 + np.e), rel=1e-6)


def test_groups_keep_the_best_sum_of_two():
    """Groups {0,1}, {2,3}, {4,5}: the largest logit sits in the group with the smallest sum of two."""
    logits = np.array([[3.0, -9.0, 1.0, 1.0, 0.5, 0.5]])
    experts, _ = route_numpy(logits, RouterConfig("sigmoid_group", groups=3, top_groups=2), 2)
    assert experts.tolist() == [[2, 3]]


def test_ties_go_to_the_lower_id_and_large_logits_do_not_overflow():
    experts, weights = route_numpy(np.zeros((1, 5)), RouterConfig("softmax"), 3)
    assert experts.tolist() == [[0, 1, 2]]
    experts, weights = route_numpy([[1000.0, -1000.0, 999.0]], RouterConfig("sigmoid_group", scale=2.5), 2)
    assert experts.tolist() == [[0, 2]]
    assert weights.tolist() == [[2.5, 2.5]]


@pytest.mark.parametrize(
    ("logits", "router", "bias", "match"),
    [
        (np.zeros(3), RouterConfig(), None, r"got shape \(3,\)"),
        (np.zeros((1, 1)), RouterConfig(), None, "at least top_k 2"),
        ([[np.inf, 0]], RouterConfig(), None, "logit of token 0, expert 0 is inf"),
        (np.zeros((1, 4)), RouterConfig("sparsemixer"), None, "got 'sparsemixer'"),
        (np.zeros((1, 4)), RouterConfig("sigmoid_group"), [0, 0], r"bias must have shape \(4,\), got \(2,\)"),
        (np.zeros((1, 4)), RouterConfig("sigmoid_group", groups=3), None, "4 experts do not split into 3 groups"),
    ],
)
def test_refusals(logits, router, bias, match):
    with pytest.raises(SettingError, match=match):
        route_numpy(logits, router, 2, bias)
