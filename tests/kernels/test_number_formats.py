"""Products with weights in every number format: an output's bits depend on its own row of x and its own row of W alone."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab import kernels
from colibri_lab.checkpoint.formats import FORMATS
from colibri_lab.engine.linear import ABSENT
from colibri_lab.reference import stored


def product(format, w, x, threads=1, block_size=64, factor=1.0):
    memory, place, _ = stored(w, format, factor)
    out = np.empty((len(x), len(w)), np.float32)
    kernels.load("gemm").matmul(x, memory, np.array(place, np.int64), factor, None, out, threads, block_size)
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_threads_and_tiles_leave_every_bit_alone(format):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(70, 203)).astype(np.float32), rng.normal(size=(13, 203)).astype(np.float32)
    wanted = np.concatenate([product(format, w, x[t : t + 1]) for t in range(13)])
    for threads, block_size in ((1, 64), (2, 16), (3, 32), (4, 256)):
        assert np.array_equal(product(format, w, x, threads, block_size), wanted)
    some = np.array([5, 40, 69])
    if not FORMATS[format].shared:
        assert np.array_equal(product(format, w[some], x), wanted[:, some])


@pytest.mark.parametrize("format", [name for name, kind in FORMATS.items() if kind.scaled])
def test_the_expert_factor_rounds_nothing(format):
    """A power of two in the scale or beside it: the same bits."""
    rng = np.random.default_rng(1)
    w, x = rng.normal(size=(16, 96)).astype(np.float32), rng.normal(size=(3, 96)).astype(np.float32)
    assert np.array_equal(product(format, w, x), product(format, w * np.float32(4), x, factor=4.0) / 4)


@pytest.mark.parametrize("cols", [1, 7, 31, 33, 63, 65, 127, 129, 257])
def test_groups_cut_short_by_the_end_of_the_row(cols):
    """One scale of 1 and zero point 8 in a group of 64: a product by hand."""
    rng = np.random.default_rng(cols)
    codes, x = rng.integers(0, 16, (3, cols)), rng.integers(-4, 5, (2, cols)).astype(np.float32)
    full = np.zeros((16, -(-cols // 8) * 8), np.uint8)
    full[:3, :cols] = codes
    lines = full.reshape(16, -1, 2, 4).transpose(1, 0, 2, 3)
    data = (lines[:, :, 0] | lines[:, :, 1] << 4).tobytes()
    groups = -(-cols // 64)
    data += bytes(-len(data) % 64)
    region = data + np.ones(16 * groups, np.float16).tobytes()
    place = np.array([3, cols, 4, 0, len(data), ABSENT, 64], np.int64)
    out = np.empty((2, 3), np.float32)
    kernels.load("gemm").matmul(x, np.frombuffer(region, np.uint8), place, 1.0, None, out)
    assert np.array_equal(out, x @ (codes - 8).T.astype(np.float32))
