"""KV cache: pages out of the pool, float32 or float16, shared prefixes, and what paging saves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab import kernels
from colibri_lab.config import SETTINGS
from colibri_lab.engine.kv_cache import KvCache, KvPages
from colibri_lab.engine.memory import BLOCK, MemoryPool
from colibri_lab.engine.sizes import kv_bytes
from colibri_lab.errors import MemoryPlanError, PoolExhausted, SettingError
from colibri_lab.reference import attend

PROMPT = list(range(40, 100))


class Shape:
    """What KvPages asks of a model."""

    num_layers, num_kv_heads, head_dim = 3, 2, 24


def pages(pool_blocks: int = 64, **given) -> KvPages:
    settings = dict(kv_dtype="fp32", kv_cache_type="paged", page_size=4, max_seq_len=40) | given
    return KvPages(MemoryPool(pool_blocks * BLOCK, warn_above=None), Shape, settings)


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(("kind", "page_size"), [("paged", 1), ("paged", 7), ("paged", 64), ("naive", 64)])
@pytest.mark.parametrize("window", [0, 5])
def test_attention_over_pages_is_attention(kv_dtype, kind, page_size, window):
    rng = np.random.default_rng(0)
    kv = KvCache(pages(kv_dtype=kv_dtype, kv_cache_type=kind, page_size=page_size, pool_blocks=200))
    k, v = rng.normal(size=(2, 3, 33, 2, 24)).astype(np.float32)
    q = rng.normal(size=(33, 6, 24)).astype(np.float32)
    out = np.full((3, *q.shape), np.nan, np.float32)
    for first, last in ((0, 20), (20, 32), (32, 33)):
        kv.reserve(last - first)
        for layer in range(3):
            part = slice(first, last)
            kv.write(layer, k[layer, part].copy(), v[layer, part].copy())
            kv.attend(layer, q[part].copy(), window, 0.2, out[layer, part], 2)
        kv.advance(last - first)
    stored = [a.astype(np.float16).astype(np.float32) if kv_dtype == "fp16" else a for a in (k, v)]
    for layer in range(3):
        wanted = attend(q, stored[0][layer], stored[1][layer], 0, window, 0.2)
        np.testing.assert_allclose(out[layer], wanted, atol=5e-6)


def test_a_number_too_large_for_float16_is_refused_by_name():
    kv = KvCache(pages(kv_dtype="fp16"))
    kv.reserve(1)
    k = np.zeros((1, 2, 24), np.float32)
    kv.write(1, k + 65504, k)
    k[0, 1, 3] = -70000
    with pytest.raises(
        SettingError, match="kv_dtype fp16 cannot hold a key or value of 70000 in layer 1; .*kv_dtype='fp32'"
    ):
        kv.write(1, k, k)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (4, 1), (5, 2), (40, 10)])
def test_a_sequence_holds_the_pages_it_reached(length, count):
    kv = KvCache(pages())
    for _ in range(length):
        kv.reserve(1)
        kv.advance(1)
    assert kv.pages_used == kv.pages.used == count
    # A page has 3 layers * (keys, values) * 4 positions * 2 heads * 24 numbers * 4 bytes = 4608: two blocks.
    assert kv.nbytes == kv.pages.pool.counts()["used_by_tag"]["kv"] == count * 2 * BLOCK
    kv.release()
    assert kv.pages.pool.counts()["used_bytes"] == 0


def test_beyond_max_seq_len_and_beyond_the_pool():
    kv = KvCache(pages(pool_blocks=6))
    kv.reserve(12)
    kv.advance(12)
    with pytest.raises(PoolExhausted, match="needed for kv"):
        kv.reserve(1)
    with pytest.raises(MemoryPlanError, match="41 positions are needed, max_seq_len is 40"):
        kv.reserve(29)


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "adopt", "release"]), st.integers(0, 3), st.integers(0, 12)), max_size=40
    )
)
def test_shared_pages_are_counted_and_a_writer_gets_its_own(steps):
    """Four sequences, each position holding its sequence's mark: nobody sees what another wrote after they parted."""
    store = pages(pool_blocks=200)
    sequences = [KvCache(store) for _ in range(4)]
    written: list[list[float]] = [[] for _ in sequences]
    for turn, (what, which, count) in enumerate(steps):
        kv, other = sequences[which], sequences[(which + 1) % 4]
        if what == "grow" and count and kv.length + count <= 40:
            kv.reserve(count)
            k = np.full((count, 2, 24), turn + 1, np.float32)
            for layer in range(3):
                kv.write(layer, k, -k)
            kv.advance(count)
            written[which] += [turn + 1.0] * count
        elif what == "adopt" and not kv.length and other.length:
            kv.adopt(other, min(count, other.length))
            written[which] = written[(which + 1) % 4][: kv.length]
        elif what == "release":
            kv.release()
            written[which] = []
        for kv, marks in zip(sequences, written, strict=True):
            found = [
                store.pool.array(int(kv.table[i // 4]) * BLOCK, (3, 2, 4, 2, 24), np.float32)[:, :, i % 4]
                for i in range(kv.length)
            ]
            for keys_and_values, mark in zip(found, marks, strict=True):
                assert (keys_and_values[:, 0] == mark).all() and (keys_and_values[:, 1] == -mark).all()
        held = {int(page) for kv in sequences for page in kv.table[: kv.pages_used]}
        assert store.used == len(held)
    for kv in sequences:
        kv.release()
    assert store.pool.counts()["used_bytes"] == 0


def test_only_an_empty_sequence_of_the_same_engine_can_begin_with_another():
    store = pages()
    kv, other = KvCache(store), KvCache(store)
    kv.reserve(3)
    kv.advance(3)
    for bad in (lambda: kv.adopt(other, 0), lambda: other.adopt(kv, 4), lambda: KvCache(pages()).adopt(kv, 1)):
        with pytest.raises(SettingError, match="adopt: an empty sequence of the same engine"):
            bad()


def test_a_shared_prefix_gives_the_logits_of_one_that_was_read_again(tiny):
    lab = cl.open(tiny, max_batch_size=3, page_size=16, threads=1)
    engine = lab.engine
    first = engine.request
    engine.forward(np.array(PROMPT), "prefill")
    used = engine.pages.used
    alone = [engine.forward(np.array([t]), "decode")[-1].copy() for t in (7, 8)]
    with engine.new_request() as request:
        request.kv.adopt(first.kv, len(PROMPT))
        assert engine.pages.used == used
        shared = [engine.forward(np.array([t]), "decode", request=request)[-1].copy() for t in (7, 8)]
        assert engine.pages.used == used + 1  # the partial page, copied when it was written
    np.testing.assert_array_equal(shared, alone)
    first.kv.release()
    assert engine.pages.used == 0


def test_float16_halves_the_cache_moves_logits_a_little_and_says_so(tiny):
    assert SETTINGS["kv_dtype"].changes_tokens
    wide, narrow = (cl.open(tiny, kv_dtype=kind, max_seq_len=512) for kind in ("fp32", "fp16"))
    assert 2 * narrow.plan["kv_cache_bytes"] == wide.plan["kv_cache_bytes"]
    a, b = wide.logits(PROMPT), narrow.logits(PROMPT)
    assert 0 < np.abs(a - b).max() < 0.05
    assert (a.argmax(1) == b.argmax(1)).mean() > 0.95


def test_paging_saves_what_the_model_says_for_a_mix_of_lengths(tiny):
    """Sixteen answers: one of 2000 tokens, the others between 20 and 300."""
    lengths = [2000, *range(20, 305, 20)]
    held = {}
    for kind in ("paged", "naive"):
        lab = cl.open(tiny, kv_cache_type=kind, page_size=64, max_seq_len=2048, max_batch_size=len(lengths))
        engine = lab.engine
        for request, length in zip(engine.requests, lengths, strict=True):
            request.kv.reserve(length)
        held[kind] = lab.memory()["kv_cache_bytes"]
        assert held[kind] == kv_bytes(lab.config, lengths, lab.settings)
        assert lab.plan["kv_cache_bytes"] == 16 * 2048 // 64 * kv_bytes(
            lab.config, [64], {**lab.settings, "kv_cache_type": "paged"}
        )
        for request in engine.requests:
            request.kv.release()
        assert lab.memory()["kv_cache_bytes"] == 0
    pages_used = sum(-(-n // 64) for n in lengths)
    assert held["naive"] == 16 * 32 * held["paged"] // pages_used
    assert 1 - held["paged"] / held["naive"] > 0.8


def test_the_kernel_refuses_pages_outside_the_pool():
    memory = np.zeros(4 * BLOCK, np.uint8)
    attention = kernels.load("attention")
    q = np.zeros((1, 2, 8), np.float32)
    for table, message in (
        ([4], "page 4 of 4 does not exist"),
        ([-1], "page -1 of 4"),
        ([], "the page table has 0 pages, 1 are"),
    ):
        pages = np.array(table, np.int32)
        with pytest.raises(ValueError, match=message):
            attention.attend_pool(q, memory, pages, 0, 256, 4, 1, False, 0, 0, 1.0, q.copy(), 1)
        with pytest.raises(ValueError, match=message):
            attention.write_pool(q[:, :1].copy(), q[:, :1].copy(), memory, pages, 0, 256, 4, False, 0)
    with pytest.raises(ValueError, match="page 3 of 3 does not exist"):  # its values would end outside
        attention.attend_pool(q, memory, np.array([3], np.int32), 0, BLOCK, 4, 1, False, 0, 0, 1.0, q.copy(), 1)
