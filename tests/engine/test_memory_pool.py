"""The memory pool: rounding, views that never overlap, exhaustion that says how much, and numbers that add up."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab import machine
from colibri_lab.engine.memory import BLOCK, TAGS, MemoryPool
from colibri_lab.errors import MemoryPlanError, PoolExhausted, SettingError


@pytest.mark.parametrize(("asked", "blocks"), [(1, 1), (4096, 1), (4097, 2), (10 * 4096 - 1, 10)])
def test_sizes_are_rounded_up_to_blocks(asked, blocks):
    pool = MemoryPool(16 * BLOCK)
    offset = pool.allocate(asked, "other")
    assert offset % BLOCK == 0
    assert (pool.memory.ctypes.data + offset) % BLOCK == 0
    assert pool.counts()["used_bytes"] == blocks * BLOCK
    assert pool.counts()["wasted_bytes"] == blocks * BLOCK - asked


def test_the_fine_view_fills_from_below_and_the_coarse_view_from_above():
    pool = MemoryPool(10 * BLOCK + 1, unit=3 * BLOCK, warn_above=None)  # 11 blocks
    assert [pool.allocate(BLOCK, "kv") // BLOCK for _ in range(2)] == [0, 1]
    assert [pool.allocate(1, "slots", coarse=True) // BLOCK for _ in range(3)] == [8, 5, 2]
    assert pool.snapshot().tolist() == [2, 2] + [1] * 9
    with pytest.raises(PoolExhausted):
        pool.allocate(1, "kv")


class PlainPool:
    """Live runs as sets of block numbers, searched one position at a time."""

    def __init__(self, blocks: int, unit: int):
        self.blocks, self.unit, self.runs = blocks, unit, {}

    def find(self, count: int, coarse: bool) -> int | None:
        taken = set().union(*(set(range(at, at + n)) for at, (n, _) in self.runs.items()))
        if coarse:
            count = -(-count // self.unit) * self.unit
            places = range(self.blocks - count, -1, -self.unit)
        else:
            places = range(self.blocks - count + 1)
        return next((at for at in places if taken.isdisjoint(range(at, at + count))), None), count


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 12 * BLOCK), st.booleans(), st.sampled_from(sorted(TAGS))),
        st.tuples(st.just("give"), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=120)
@given(blocks=st.integers(1, 150), unit=st.integers(1, 9), steps=steps)
def test_no_byte_belongs_to_two_runs_and_all_given_back_is_all_free(blocks, unit, steps):
    pool, plain = MemoryPool(blocks * BLOCK, unit * BLOCK, warn_above=None), PlainPool(blocks, unit)
    for step in steps:
        if step[0] == "take":
            _, size, coarse, tag = step
            wanted, count = plain.find(-(-size // BLOCK), coarse)
            if wanted is None:
                with pytest.raises(PoolExhausted):
                    pool.allocate(size, tag, coarse)
            else:
                assert pool.allocate(size, tag, coarse) == wanted * BLOCK
                plain.runs[wanted] = count, tag
        elif plain.runs:
            at = sorted(plain.runs)[step[1] % len(plain.runs)]
            pool.release(at * BLOCK)
            del plain.runs[at]
        expected = np.zeros(blocks, np.uint8)
        for at, (count, tag) in plain.runs.items():
            assert not expected[at : at + count].any()
            expected[at : at + count] = TAGS[tag]
        np.testing.assert_array_equal(pool.snapshot(), expected)
        free = "".join("x" if tag else " " for tag in expected).split("x")
        counts = pool.counts()
        assert counts["used_bytes"] == np.count_nonzero(expected) * BLOCK == sum(counts["used_by_tag"].values())
        assert counts["largest_run_bytes"] == max(map(len, free)) * BLOCK
        assert counts["free_runs"] == sum(map(bool, free))
    for at in plain.runs:
        pool.release(at * BLOCK)
    assert pool.counts()["used_bytes"] == pool.counts()["wasted_bytes"] == 0
    assert pool.fragmentation() == {"external": 0.0, "internal": 0.0}


def test_exhaustion_says_what_is_needed_free_and_in_one_run_and_the_pool_works_on():
    pool = MemoryPool(8 * BLOCK, warn_above=None)
    runs = [pool.allocate(2 * BLOCK, "kv") for _ in range(4)]
    pool.release(runs[0])
    pool.release(runs[2])
    with pytest.raises(PoolExhausted, match=r"12288 bytes in one run are needed for kv, 16384 of 32768 are free and the largest "
                       r"run has 8192") as caught:  # fmt: skip
        pool.allocate(3 * BLOCK, "kv")
    assert (caught.value.need, caught.value.free, caught.value.largest_run) == (12288, 16384, 8192)
    assert isinstance(caught.value, MemoryError)
    assert pool.counts()["refusals"] == 1
    assert pool.fragmentation()["external"] == 0.5
    assert pool.allocate(2 * BLOCK, "kv") == runs[0]


def test_there_is_no_realloc_and_what_is_not_live_cannot_be_released():
    pool = MemoryPool(8 * BLOCK)
    assert not hasattr(pool, "realloc") and not hasattr(pool._core, "realloc")
    run = pool.allocate(3 * BLOCK, "other")
    pool.release(run)
    for offset in (run, run + BLOCK, 1, -BLOCK, 1 << 40):
        with pytest.raises(ValueError, match="no live run begins at offset"):
            pool.release(offset)
    with pytest.raises(ValueError, match="bytes must be positive"):
        pool.allocate(0, "other")


def test_above_nine_tenths_the_pool_warns_once():
    pool = MemoryPool(100 * BLOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.allocate(50 * BLOCK, "slots")
        pool.allocate(40 * BLOCK, "slots")
    with pytest.warns(UserWarning, match=r"377 kB of 410 kB used \(92%\)"):
        pool.allocate(2 * BLOCK, "kv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.allocate(BLOCK, "kv")


def test_a_size_that_is_no_power_of_two_is_refused_when_that_is_the_rule():
    with pytest.raises(
        SettingError, match=r"power of two.*got 3221225472; the nearest are 2147483648 \(2 GiB\) and 4294967296"
    ):
        MemoryPool(3 << 30, power_of_two=True)
    with pytest.raises(SettingError, match="at least 4096 bytes, got 2048"):
        MemoryPool(2048, power_of_two=True)
    assert MemoryPool(1 << 20, power_of_two=True).size == 1 << 20


def test_more_than_the_machine_has_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: (10**9, 5 * 10**8))
    with pytest.raises(
        MemoryPlanError, match=r"500004096 bytes \(500 MB\) does not fit: 500000000 bytes.*nothing was allocated"
    ):
        MemoryPool(500_004_096)


def test_memory_outlives_the_pool_while_somebody_looks_at_it():
    pool = MemoryPool(1 << 20)
    view = pool.array(pool.allocate(BLOCK, "other"), (4,), np.float32)
    view[:] = 7
    del pool
    gc.collect()
    assert view.sum() == 28


def test_only_touched_blocks_have_memory_unless_prefault_touches_all():
    lazy = MemoryPool(64 * BLOCK)
    lazy.memory[5 * BLOCK] = 1
    assert np.flatnonzero(lazy.touched()).tolist() == [5]
    assert MemoryPool(64 * BLOCK, prefault=True).touched().all()


def test_huge_pages_leave_the_pool_aligned_to_them():
    pool = MemoryPool(3 << 20, huge_pages=True)
    assert pool.memory.ctypes.data % (2 << 20) == 0
    assert pool.size == 3 << 20
    assert not MemoryPool(BLOCK).huge_pages
