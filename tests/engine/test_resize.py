"""Growing and shrinking the cache between texts: residents stay as far as they fit, tokens never change."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab as cl

PROMPT = "def read_lines(path):"


@pytest.mark.parametrize("scope, small, large", [("layer", 6, 20), ("global", 40, 120)])
@pytest.mark.parametrize("policy", ["lru", "lfu", "s3-fifo"])
def test_residents_survive_growing_and_shrinking(tiny, scope, small, large, policy):
    lab = cl.open(tiny, expert_cache_slots=small, scope=scope, policy=policy)
    tokens = lab.generate(PROMPT, max_tokens=20, temperature=0.0).tokens
    before = lab.residency() > 0
    lab.resize(large)
    np.testing.assert_array_equal(lab.residency() > 0, before)
    warm = lab.generate(PROMPT, max_tokens=20, temperature=0.0)
    assert warm.tokens == tokens
    cold = cl.open(tiny, expert_cache_slots=large, scope=scope, policy=policy).generate(
        PROMPT, max_tokens=20, temperature=0.0
    )
    assert warm.cache.misses.sum() < cold.cache.misses.sum()
    grown = lab.residency() > 0
    lab.resize(small)
    shrunk = lab.residency() > 0
    assert not (shrunk & ~grown).any()
    counts = shrunk.sum(1) if scope == "layer" else np.array([shrunk.sum()])
    assert (counts == small).all()
    assert lab.generate(PROMPT, max_tokens=20, temperature=0.0).tokens == tokens


def test_resizing_while_prefetching_keeps_every_read_in_place(tiny):
    lab = cl.open(tiny, expert_cache_slots=4, prefetch="same", loader_threads=1)
    tokens = lab.generate(PROMPT, max_tokens=12, temperature=0.0).tokens
    for slots in (9, 3, 32, 1):
        lab.resize(slots)
        assert lab.settings["expert_cache_slots"] == slots
        assert lab.generate(PROMPT, max_tokens=12, temperature=0.0).tokens == tokens


def test_an_impossible_size_changes_nothing(tiny):
    lab = cl.open(tiny, expert_cache_slots=4)
    lab.generate(PROMPT, max_tokens=4)
    with pytest.raises(cl.errors.SettingError, match="at least 1, got 0"):
        lab.resize(0)
    assert lab.settings["expert_cache_slots"] == 4 and (lab.residency() > 0).any()
