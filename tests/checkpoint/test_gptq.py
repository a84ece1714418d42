"""Rounding with error feedback, against the method's formula written out column by column."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.checkpoint import formats
from colibri_lab.checkpoint.formats import FORMATS, decode, encode
from colibri_lab.checkpoint.gptq import DAMPING, Rounding, best_range

QUANTISED = [name for name, kind in FORMATS.items() if kind.scaled]


def correlated(rng, tokens, cols):
    """Inputs whose columns move together, some ten times stronger than others."""
    return (
        rng.normal(size=(tokens, 12)) @ rng.normal(size=(12, cols)) + 0.3 * rng.normal(size=(tokens, cols))
    ) * np.exp(rng.normal(size=cols))


def slow_gptq(w, moment, kind):
    """Optimal brain quantisation in fixed order: after each column the inverse of the remaining moment, computed anew, says
    how its error is spread over the columns that follow (arXiv:2210.17323, equation 2)."""
    w, cols = w.copy(), w.shape[1]
    h = moment + DAMPING * np.trace(moment) / cols * np.eye(cols)
    back = np.zeros_like(w)
    for i in range(cols):
        if i % kind.group == 0:
            end = min(cols, i + kind.group)
            single = formats.Format("", kind.kind, kind.dtype, 4, kind.scale_dtype, 0, False, kind.symmetric)
            scale, zero = best_range(w[:, i:end], np.diag(h)[i:end], single)
        code = formats.round_to_codes(w[:, i : i + 1], scale, zero, single)
        back[:, i] = (formats.steps(code, zero, kind) * scale)[:, 0]
        inverse = np.linalg.inv(h[i:, i:])
        error = (w[:, i] - back[:, i]) / inverse[0, 0]
        w[:, i:] -= np.outer(error, inverse[0])
    return back


@pytest.mark.parametrize("format", ["int4-g32", "int4-g32-sym", "int8-g64", "mxfp4"])
def test_rounding_is_the_formula_of_the_paper(format):
    rng, kind = np.random.default_rng(0), FORMATS[format]
    w, x = rng.normal(size=(5, 70)), correlated(rng, 300, 70)
    moment = x.T @ x / 300
    found = Rounding(moment).encode(w.astype(np.float32), kind)
    np.testing.assert_allclose(
        decode(found, format), slow_gptq(w.astype(np.float32).astype(float), moment, kind), atol=1e-5
    )


@pytest.mark.parametrize("format", QUANTISED)
def test_outputs_are_nearer_than_with_nearest_rounding(format):
    rng, kind = np.random.default_rng(1), FORMATS[format]
    w, x = rng.normal(size=(48, 200)).astype(np.float32), correlated(rng, 2000, 200)
    moment = x.T @ x / 2000
    factor = 1.0 if format == "mxfp4" else formats.expert_factor(float(np.abs(w).max()))
    bounds = (float(w.min()), float(w.max()))

    def error(rows):
        delta = decode(rows, format, factor).astype(float) - w
        return np.trace(delta @ moment @ delta.T)

    assert error(Rounding(moment).encode(w, kind, factor, bounds)) < 0.8 * error(encode(w, format, factor))


@pytest.mark.parametrize("format", ["int4-g64", "int4-row", "int8-tensor", "mxfp4"])
def test_rows_do_not_touch_each_other(format):
    rng, kind = np.random.default_rng(2), FORMATS[format]
    w, x = rng.normal(size=(33, 90)).astype(np.float32), correlated(rng, 500, 90)
    rounding, bounds = Rounding(x.T @ x / 500), (float(w.min()), float(w.max()))
    whole = decode(rounding.encode(w, kind, 4.0, bounds), format, 4.0)
    for part in (slice(0, 16), slice(16, 33)):
        np.testing.assert_array_equal(decode(rounding.encode(w[part], kind, 4.0, bounds), format, 4.0), whole[part])


def test_inputs_that_never_came_or_never_varied_do_no_harm():
    w = np.random.default_rng(3).normal(size=(16, 64)).astype(np.float32)
    for moment in (np.zeros((64, 64)), np.ones((64, 64)), np.diag([1.0] * 10 + [0.0] * 54)):
        back = decode(Rounding(moment).encode(w, FORMATS["int8-g32"]), "int8-g32")
        assert np.abs(back - w).max() < 0.3


def test_zero_rows_stay_zero():
    w = np.zeros((16, 64), np.float32)
    x = correlated(np.random.default_rng(4), 100, 64)
    assert not decode(Rounding(x.T @ x).encode(w, FORMATS["int4-g32"]), "int4-g32").any()


@pytest.mark.parametrize("moment", [np.ones((3, 4)), np.full((3, 3), np.nan), np.ones(3)])
def test_a_moment_that_is_none_is_refused(moment):
    with pytest.raises(ValueError, match="finite square matrix"):
        Rounding(moment)
