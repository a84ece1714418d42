"""Law 1: placement never changes tokens. Slots, policy, scope, storage, KV layout, pages, threads, block size, tile size:
logits stay bit-identical. The prefill chunk may move the last bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab.cache.policies import POLICIES
from colibri_lab.config import SETTINGS

PROMPT = list(range(40, 100))


def decoded(lab, ids=PROMPT, steps=6):
    """Logits of a prefill and a few decode steps, (steps + 1, vocab)."""
    rows = [lab.engine.forward(np.array(ids), "prefill")[-1].copy()]
    for _ in range(steps):
        rows.append(lab.engine.forward(np.array([rows[-1].argmax()]), "decode")[-1].copy())
    lab.engine.kv.release()
    return np.array(rows)


@pytest.fixture(scope="module")
def baseline(family_container):
    return decoded(cl.open(family_container("glm4_moe"), allow_fp32=True, threads=1, expert_cache_slots=8))


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_cache_settings_leave_every_bit_alone(family_container, baseline, block_size, scope):
    container = family_container("glm4_moe", expert_block_size=block_size)
    for slots, policy, (kv, threads) in itertools.product(
        (1, 4, 16, 1000), ("lru", "weighted-lru"), (("paged", 1), ("paged", 2), ("naive", 1), ("naive", 2))
    ):
        lab = cl.open(
            container,
            allow_fp32=True,
            expert_cache_slots=slots,
            policy=policy,
            scope=scope,
            kv_cache_type=kv,
            threads=threads,
        )
        np.testing.assert_array_equal(decoded(lab), baseline, err_msg=f"{slots} {policy} {scope} {kv} {threads}")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.integers(1, 12),
    page=st.integers(1, 300),
    tile=st.sampled_from([16, 32, 64, 128, 256, 1000]),
    lanes=st.integers(1, 4),
    storage=st.sampled_from(SETTINGS["storage"].choices),
    threads=st.integers(1, 4),
    policy=st.sampled_from([p.name for p in POLICIES.values() if not p.needs]),
    lookup=st.sampled_from(SETTINGS["lookup"].choices),
    order=st.sampled_from(SETTINGS["order"].choices),
    admission=st.sampled_from(SETTINGS["admission"].choices),
    scope=st.sampled_from(SETTINGS["scope"].choices),
    prefetch=st.sampled_from(SETTINGS["prefetch"].choices),
    block_size=st.sampled_from([1, 3]),
)
def test_any_placement_leaves_every_bit_alone(
    family_container, baseline, slots, page, tile, lanes, storage, threads, policy, lookup, order, admission, scope, prefetch,
    block_size,
):  # fmt: skip
    lab = cl.open(
        family_container("glm4_moe", expert_block_size=block_size), allow_fp32=True, expert_cache_slots=slots, page_size=page,
        gemm_block_size=tile, loader_threads=lanes, storage=storage, threads=threads, policy=policy, lookup=lookup, order=order,
        admission=admission, scope=scope, prefetch=prefetch,
    )  # fmt: skip
    np.testing.assert_array_equal(decoded(lab), baseline)


@pytest.mark.parametrize("chunk", [1, 5, 64, 255])
def test_prefill_chunk_moves_at_most_the_last_bits(tiny, chunk):
    ids = list(range(100, 400))
    whole = cl.open(tiny, prefill_chunk=300).logits(ids)
    parts = cl.open(tiny, prefill_chunk=chunk).logits(ids)
    assert np.abs(parts - whole).max() <= 1e-4
    np.testing.assert_array_equal(parts.argmax(1), whole.argmax(1))


def test_a_cold_and_a_warm_cache_give_the_same_text(tiny):
    lab = cl.open(tiny, expert_cache_slots=5)
    first = lab.generate("In the beginning", max_tokens=20, temperature=0.8, seed=3)
    warm = lab.generate("In the beginning", max_tokens=20, temperature=0.8, seed=3)
    lab.reset_cache()
    cold = lab.generate("In the beginning", max_tokens=20, temperature=0.8, seed=3)
    assert first.text == warm.text == cold.text
    assert warm.cache.misses.sum() < cold.cache.misses.sum() == first.cache.misses.sum()


def test_polynomial_sigmoid_is_close_and_says_that_it_may_change_tokens(tiny):
    assert SETTINGS["sigmoid"].changes_tokens
    ids = list(range(50, 90))
    exact, fast = (cl.open(tiny, sigmoid=s).logits(ids) for s in ("exact", "polynomial"))
    assert 0 < np.abs(exact - fast).max() < 5e-3
