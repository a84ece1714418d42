"""The engine against Hugging Face transformers: tiny checkpoints of every family, and the shipped model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as cl

FAMILIES = ["glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
ORACLE = Path(__file__).parents[1] / "oracle"
TOLERANCE = 2e-4  # of logits with standard deviation 2.5; float32 against float64 alone is about 1e-5

TINY = json.loads((ORACLE / "tiny" / "reference.json").read_text(encoding="utf-8"))["prompts"]


def greedy(lab, ids, count):
    """Greedy continuation through prefill and cached decode steps."""
    engine, out = lab.engine, []
    logits = engine.forward(np.array(ids), "prefill")
    for _ in range(count):
        out.append(int(logits[-1].argmax()))
        logits = engine.forward(np.array(out[-1:]), "decode")
    engine.kv.release()
    return out


def uncached_greedy(lab, ids, count):
    """The same without a KV cache: every token recomputes the whole sequence."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(lab.logits(ids)[-1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [256, 7])
def test_logits_and_routes_match_transformers(family_container, reference, family, chunk):
    ref = reference(family)
    lab = cl.open(family_container(family), allow_fp32=True, prefill_chunk=chunk, expert_cache_slots=3)
    for row in range(2):
        ids = ref["input_ids"][row]
        assert np.abs(lab.logits(ids) - ref["logits"][row]).max() <= TOLERANCE
        routes = lab.routes(ids)
        assert sorted(routes.layer.unique()) == sorted(lab.config.moe_layers)
        for layer in lab.config.moe_layers:
            mine = routes[routes.layer == layer].sort_values(["token", "expert"])
            shape = (len(ids), lab.config.top_k)
            np.testing.assert_array_equal(mine.expert.to_numpy().reshape(shape), ref[f"router_idx_L{layer}"][row])
            weights = mine.weight.to_numpy().reshape(shape)
            np.testing.assert_allclose(weights, ref[f"router_w_L{layer}"][row], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation_matches_transformers(family_container, reference, family):
    ref = reference(family)
    lab = cl.open(family_container(family), allow_fp32=True, expert_cache_slots=2)
    for row in range(2):
        ids, wanted = ref["input_ids"][row], ref["greedy"][row].tolist()
        assert greedy(lab, ids, len(wanted)) == wanted
        assert uncached_greedy(lab, ids, 4) == wanted[:4]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_older_config_spelling_gives_the_same_model(tmp_path, family_container, reference, family):
    old = tmp_path / "checkpoint"
    shutil.copytree(ORACLE / family, old, ignore=shutil.ignore_patterns("reference.npz", "published", "config.json"))
    (old / "config.legacy.json").rename(old / "config.json")
    cl.convert(old, tmp_path / "out", quantize="fp32", tensors="all", progress=False)
    ids = reference(family)["input_ids"][0]
    new = cl.open(family_container(family), allow_fp32=True).logits(ids)
    np.testing.assert_array_equal(cl.open(tmp_path / "out", allow_fp32=True).logits(ids), new)


def test_the_published_layout_with_an_extra_prediction_layer_is_the_same_model(family_container, reference):
    ref = reference("glm4_moe")
    lab = cl.open(family_container("glm4_moe", "published"), allow_fp32=True)
    assert np.abs(lab.logits(ref["input_ids"][0]) - ref["logits"][0]).max() <= TOLERANCE


@pytest.mark.parametrize("case", TINY, ids=[p["domain"] for p in TINY])
def test_shipped_model_says_what_transformers_says(tiny, case):
    lab = cl.open(tiny, expert_cache_slots=8)
    assert lab.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    last = lab.logits(case["prompt_ids"])[-1]
    with np.load(ORACLE / "tiny" / "reference.npz") as ref:
        assert np.abs(last - ref[f"{case['domain']}.logits"]).max() <= TOLERANCE
        routes = lab.routes(case["prompt_ids"]).sort_values(["layer", "token", "expert"])
        wanted = ref[f"{case['domain']}.router_idx"]
    np.testing.assert_array_equal(routes.expert.to_numpy().reshape(wanted.shape), wanted)
    run = lab.generate(case["prompt"], max_tokens=len(case["greedy_ids"]), temperature=0.0, stop_at_eos=False)
    assert run.tokens == case["greedy_ids"]
