"""Log-probabilities and divergence against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from colibri_lab.distributions import divergence, log_softmax

LOGITS = arrays(np.float32, (3, 5), elements=st.floats(-50, 50, width=32))


def test_logits_that_overflow_when_exponentiated():
    x = np.array([[1e4, 1e4 - 1.0, -1e4]], np.float32)
    assert np.exp(log_softmax(x)) == pytest.approx(np.array([[1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0]]))


def test_divergence_of_two_coins():
    fair, bent = (np.log(np.array([[p, 1 - p]])) for p in (0.5, 0.25))
    assert divergence(fair, bent) == pytest.approx([0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)])
    assert divergence(bent, fair) == pytest.approx([0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)])


@given(LOGITS, LOGITS)
def test_distributions_sum_to_one_and_are_no_nearer_than_themselves(x, y):
    p, q = log_softmax(x), log_softmax(y)
    assert p.dtype == np.float64 and np.exp(p).sum(-1) == pytest.approx(np.ones(3))
    assert (divergence(p, q) >= 0).all() and (divergence(p, p) == 0).all()
    assert (divergence(p.astype(np.float32), q.astype(np.float32)) >= 0).all()
