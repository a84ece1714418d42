"""The committed data is complete, unchanged and within its size: a truncated file fails here, by name."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "data"
FAMILIES = ["qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "glm4_moe"]
DOMAINS = ["code", "verse", "dictionary", "english", "german", "chinese"]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_complete_and_small(family):
    files = [f for f in (HERE / family).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 1_000_000
    with np.load(HERE / family / "reference.npz") as ref:
        meta = json.loads(str(ref["meta"]))
        assert ref["logits"].shape == (2, 24, 256) and ref["logits"].dtype == np.float32
        assert ref["greedy"].shape == ref["greedy_gap"].shape == (2, 16)
        assert np.array_equal(ref["greedy"][:, 0], ref["logits"][:, -1].argmax(-1))
        assert ref["greedy_gap"].min() >= 0.02 and meta["routing_margin"] >= 5e-4 > 10 * meta["float64_noise"]
        for layer in meta["moe_layers"]:
            assert (np.diff(ref[f"router_idx_L{layer}"], axis=-1) > 0).all()


@pytest.mark.parametrize(("family", "renormalised"), [("olmoe", False), ("mixtral", True), ("qwen3_moe", True)])
def test_softmax_weights_follow_from_the_logits(family, renormalised):
    with np.load(HERE / family / "reference.npz") as ref:
        for layer in json.loads(str(ref["meta"]))["moe_layers"]:
            want = np.take_along_axis(softmax(ref[f"router_logits_L{layer}"]), ref[f"router_idx_L{layer}"], -1)
            want = want / want.sum(-1, keepdims=True) if renormalised else want
            np.testing.assert_allclose(ref[f"router_w_L{layer}"], want, atol=1e-5)


def test_tiny_reference_covers_every_domain():
    reference = json.loads((HERE / "tiny" / "reference.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(DATA / "colibri-tiny" / "tokenizer.json"))
    assert [row["domain"] for row in reference["prompts"]] == DOMAINS
    with np.load(HERE / "tiny" / "reference.npz") as arrays:
        for row in reference["prompts"]:
            logits = arrays[f"{row['domain']}.logits"]
            assert tokenizer.encode(row["prompt"], add_special_tokens=False).ids == row["prompt_ids"]
            assert logits.argmax() == row["greedy_ids"][0] and len(row["greedy_ids"]) == 32
            assert logits.sum(dtype=np.float64) == pytest.approx(row["logits_sum"], abs=1e-3)
            assert arrays[f"{row['domain']}.router_idx"].shape == (6, len(row["prompt_ids"]), 4)


def test_every_hash_in_provenance_is_the_hash_of_its_file():
    table = re.findall(r"\| `(\S+)` \| ([\d,]+) \| `([0-9a-f]{64})` \|", (DATA / "PROVENANCE.md").read_text("utf-8"))
    listed = {name for name, _, _ in table}
    assert {f"traces/{f.name}" for f in (DATA / "traces").iterdir()} <= listed
    for name, size, digest in table:
        content = (DATA / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (int(size.replace(",", "")), digest), name


def test_prompts_cover_every_domain_and_start_with_the_reference():
    prompts = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    reference = json.loads((HERE / "tiny" / "reference.json").read_text(encoding="utf-8"))["prompts"]
    assert list(prompts) == DOMAINS
    for row in reference:
        mine = prompts[row["domain"]]
        assert mine[0] == {"name": "reference", "text": row["prompt"]}
        assert len({p["name"] for p in mine}) == len({p["text"] for p in mine}) == len(mine) >= 4
