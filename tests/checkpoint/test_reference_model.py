"""Settings and arrays of a container are right when a plain forward pass over them gives transformers' logits."""

from __future__ import annotations

import numpy as np
from plain_model import forward

from colibri_lab.checkpoint.container import Container


def check(directory, reference):
    box = Container.open(directory, allow_fp32=True)
    with np.load(reference) as file:
        expected = dict(file)
    for row, tokens in enumerate(expected["input_ids"]):
        logits, routes = forward(box, tokens)
        assert np.abs(logits - expected["logits"][row]).max() < 2e-4
        assert routes.keys() == set(box.config.moe_layers)
        for layer, chosen in routes.items():
            assert np.array_equal([ids for ids, _ in chosen], expected[f"router_idx_L{layer}"][row])
            np.testing.assert_allclose([w for _, w in chosen], expected[f"router_w_L{layer}"][row], atol=2e-5)


def test_fp32_container_gives_the_logits_and_routes_of_transformers(family, converted, oracle):
    check(converted(family, quantize="fp32"), oracle / family / "reference.npz")


def test_blocks_of_several_experts_hold_the_same_model(converted, oracle):
    """8 experts in blocks of 3: the last block is short."""
    check(converted("qwen2_moe", quantize="fp32", expert_block_size=3), oracle / "qwen2_moe/reference.npz")


def test_published_file_with_a_next_token_prediction_layer_is_the_same_model(converted, oracle):
    check(converted("glm4_moe/published", quantize="fp32"), oracle / "glm4_moe/reference.npz")
