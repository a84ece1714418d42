"""The sampler against distributions worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.engine.sampling import Sampler

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def shares(draws=4000, **options):
    sampler = Sampler(seed=1, **options)
    return np.bincount([sampler(LOGITS) for _ in range(draws)], minlength=4) / draws


def test_temperature_one_draws_from_the_softmax():
    assert shares(temperature=1.0, top_p=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.025)


def test_top_p_keeps_the_token_that_reaches_it_and_renormalises():
    assert shares(temperature=1.0, top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0], abs=0.025)
    assert shares(temperature=1.0, top_p=0.81) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.025)


def test_temperature_two_flattens_and_small_temperature_sharpens():
    flat = np.sqrt([0.5, 0.3, 0.15, 0.05])
    assert shares(temperature=2.0, top_p=1.0) == pytest.approx(flat / flat.sum(), abs=0.025)
    assert shares(temperature=0.05, top_p=1.0)[0] > 0.99


def test_zero_temperature_and_zero_top_p_are_greedy_with_ties_to_the_lower_id():
    tied = np.array([1.0, 3.0, 3.0], np.float32)
    assert Sampler(0.0)(tied) == 1
    assert {Sampler(1.0, 0.0, seed)(tied) for seed in range(20)} == {1}


def test_huge_logits_do_not_overflow():
    assert Sampler(1.0, 0.9, 0)(np.array([1e30, -1e30, 0], np.float32)) == 0
