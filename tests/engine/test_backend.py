"""numpy in the place of the compiled kernels, and experts computed one by one or all at once."""

from __future__ import annotations

import numpy as np
import pytest
from test_oracle import FAMILIES, TOLERANCE, greedy

import colibri_lab as cl
from colibri_lab import kernels
from colibri_lab.engine import numpy_kernels
from colibri_lab.errors import SettingError


@pytest.mark.parametrize("name", ["gemm", "ffn", "norm", "attention", "router"])
def test_numpy_kernels_pass_the_checks_of_the_compiled_ones(name):
    assert len(kernels.check(name, numpy_kernels.load(name))) >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_on_numpy_matches_transformers(family_container, reference, family):
    ref = reference(family)
    lab = cl.open(family_container(family), allow_fp32=True, backend="numpy", expert_cache_slots=3)
    ids = ref["input_ids"][0]
    assert np.abs(lab.logits(ids) - ref["logits"][0]).max() <= TOLERANCE
    assert greedy(lab, ids, 4) == ref["greedy"][0].tolist()[:4]


@pytest.mark.parametrize("activations", ["fp32", "int8"])
@pytest.mark.parametrize("quantize", ["int8", "int4", "mxfp4"])
def test_quantised_models_agree_between_backends(family_container, reference, quantize, activations):
    path = family_container("qwen3_moe", quantize=quantize, tensors="all")
    ids = reference("qwen3_moe")["input_ids"][0]
    both = [cl.open(path, backend=b, activations=activations).logits(ids) for b in ("native", "numpy")]
    # Activations that round the other way move a result by a step; without rounding only float32 sums differ.
    limit = 0.05 if activations == "int8" else 1e-3
    assert np.abs(both[0] - both[1]).max() <= limit * both[0].std()


def test_the_run_says_which_backend_it_used(tiny):
    run = cl.open(tiny, backend="numpy").generate("In those days", max_tokens=2, temperature=0)
    assert run.settings["backend"] == "numpy"
    assert run.tokens == cl.open(tiny).generate("In those days", max_tokens=2, temperature=0).tokens


def test_kernels_that_do_not_compute_have_no_stand_in():
    with pytest.raises(SettingError, match="kernel 'storage' has no stand-in in numpy"):
        numpy_kernels.load("storage")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at_once", [1, 2, 4, 8])
def test_experts_computed_at_once_change_no_bit(tiny, at_once, threads):
    ids = np.arange(40) * 7 % 4096
    wanted = cl.open(tiny, expert_cache_slots=8).logits(ids)
    lab = cl.open(tiny, expert_cache_slots=8, expert_parallelism=at_once, threads=threads)
    np.testing.assert_array_equal(lab.logits(ids), wanted)
    assert lab.settings["expert_parallelism"] == at_once


def test_experts_at_once_are_at_least_one(tiny):
    with pytest.raises(SettingError, match="expert_parallelism must be at least 1, got 0"):
        cl.open(tiny, expert_parallelism=0)
