"""Arenas: aligned views, rewinding, growth that moves nothing, and misuse that is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.engine.memory import ARENAS, BLOCK, Arenas, MemoryPool
from colibri_lab.engine.sizes import ALIGN, Tally
from colibri_lab.errors import KernelError, MemoryPlanError, PoolExhausted

F32 = np.float32


def arenas(size: int = 64 * BLOCK, pool_blocks: int = 1024, **options) -> tuple[MemoryPool, Arenas]:
    pool = MemoryPool(pool_blocks * BLOCK, warn_above=None)
    return pool, Arenas(pool, dict.fromkeys(ARENAS, size), **options)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_arrays_are_aligned_and_the_same_place_gives_the_same_array():
    _, a = arenas()
    arena = a.router
    first = [
        arena.take((3, 5), F32),
        arena.take((7,), np.int32),
        arena.take((2, 2, 2), np.uint16),
        arena.take((0,), np.uint8),
    ]
    assert [x.dtype for x in first] == [np.float32, np.int32, np.uint16, np.uint8]
    assert [x.shape for x in first] == [(3, 5), (7,), (2, 2, 2), (0,)]
    assert all(address(x) % ALIGN == 0 for x in first)
    assert np.diff([address(x) for x in first]).tolist() == [64, 64, 64]
    arena.reset()
    again = [arena.take((3, 5), F32), arena.take((7,), np.int32)]
    assert again[0] is first[0] and again[1] is first[1]
    assert arena.take((7,), np.int32) is not first[1]


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(1, 900), st.sampled_from(["mark", "rewind", "reset"])), max_size=60))
def test_use_and_high_water_are_those_of_a_plain_tally(steps):
    _, a = arenas(size=BLOCK * 20)
    arena, plain, marks = a.decode, Tally(checks=False), []
    for step in steps:
        if step == "mark":
            marks.append((arena.mark(), plain.mark()))
        elif step == "rewind" and marks:
            mark, other = marks.pop()
            arena.rewind(mark)
            plain.rewind(other)
        elif step == "reset":
            arena.reset()
            plain.rewind()
            marks = []
        elif isinstance(step, int):
            arena.take((step,), np.uint8)
            plain.take(step, item=1)
        counts = a.counts()["decode"]
        assert (counts.used, counts.high_water, counts.requested) == (plain.used, plain.peak, plain.requested)


def test_reset_takes_the_pointer_to_zero_and_keeps_the_high_water_mark():
    _, a = arenas()
    a.prefill.take((100,), F32)
    a.decode.take((200,), F32)
    a.reset()
    counts = a.counts()
    assert {name: (c.used, c.high_water) for name, c in counts.items()} == {
        "prefill": (0, 448), "decode": (0, 832), "router": (0, 0), "expert_compute": (0, 0),
    }  # fmt: skip
    assert counts["prefill"].ratio == 64 * BLOCK / 400
    assert counts["router"].ratio is None


def test_a_full_arena_says_so_and_works_on():
    _, a = arenas(size=BLOCK)
    with pytest.raises(
        MemoryPlanError, match="arena router: 4160 bytes more are needed than the 4096 that were planned"
    ):
        a.router.take((1025,), F32)
    assert a.router.take((1024,), F32).nbytes == 4096


def test_a_growing_arena_moves_nothing_counts_growths_and_merges_at_the_end_of_the_step():
    pool, a = arenas(size=BLOCK, growing=True)
    before = pool.counts()["used_bytes"]
    arrays = [a.prefill.take((n,), F32) for n in (500, 900, 3000, 100, 9000)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [array.max() for array in arrays] == [array.min() for array in arrays] == [0, 1, 2, 3, 4]
    ranges = sorted((address(array), address(array) + array.nbytes) for array in arrays)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    grown = a.counts()["prefill"]
    # Blocks had: 1; then, as large as all before or as the array: 1, 3, 5 and 10 more.
    assert (grown.growths, grown.capacity) == (4, 20 * BLOCK)
    a.reset()
    merged = a.counts()["prefill"]
    assert merged.high_water <= merged.capacity < merged.high_water + BLOCK
    assert merged.ratio <= 1.3
    for n in (500, 900, 3000, 100, 9000):
        a.prefill.take((n,), F32)
    assert a.counts()["prefill"].growths == 4
    a.close()
    assert pool.counts()["used_by_tag"]["arena"] == 0 < before


def test_a_growing_arena_in_a_full_pool_is_exhaustion():
    _, a = arenas(size=BLOCK, pool_blocks=6, growing=True)
    with pytest.raises(PoolExhausted, match="needed for arena"):
        a.prefill.take((8 * BLOCK,), np.uint8)


def test_beyond_the_plan_memory_comes_from_outside_and_goes_at_the_end_of_the_step():
    pool, a = arenas(size=BLOCK)
    used = pool.counts()["used_bytes"]
    a.beyond_plan(True)
    array = a.expert_compute.take((5000,), F32)
    array[:] = 1
    assert a.extra_bytes[0] >= array.nbytes and address(array) % ALIGN == 0
    assert pool.counts()["used_bytes"] == used
    a.reset()
    assert a.extra_bytes[0] == 0 < a.extra_bytes[1]
    assert a.counts()["expert_compute"].capacity == BLOCK


def test_writing_past_an_end_is_found_at_the_end_of_the_step():
    pool, a = arenas(checks=True)
    array = a.router.take((10,), F32)
    offset = address(array) - pool.memory.ctypes.data
    pool.memory[offset + array.nbytes] = 0
    with pytest.raises(KernelError, match="router arena: the 40 bytes allocated at 0 were written past their end"):
        a.reset()
    a.reset()


def test_memory_given_back_reads_as_nan_and_writing_to_it_is_found():
    _, a = arenas(checks=True)
    start = a.decode.mark()
    array = a.decode.take((10,), F32)
    array[:] = 1
    a.decode.rewind(start)
    assert np.isnan(array).all()
    array[3] = 1
    with pytest.raises(RuntimeError, match="arena: memory at 0 was written after it had been given back"):
        a.decode.take((10,), F32)


def test_the_use_of_an_arena_over_time_can_be_recorded():
    _, a = arenas()
    a.record(3)
    a.router.take((16,), F32)
    a.router.take((16,), F32)
    a.router.reset()
    a.router.take((16,), F32)
    samples = a.samples()["router"]
    assert samples[:, 1].tolist() == [64, 128, 0]
    assert (np.diff(samples[:, 0]) >= 0).all()
    assert len(a.samples()["prefill"]) == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((), F32, "1 to 4 dimensions, got 0"),
        ((1, 1, 1, 1, 1), F32, "1 to 4 dimensions, got 5"),
        ((-1,), F32, "impossible dimension -1"),
        ((1 << 50,), F32, "impossible dimension"),
        ((1,), np.float64, "dtype must be numpy.float32, int32, uint16 or uint8"),
    ],
)
def test_impossible_arrays_are_refused(shape, dtype, message):
    _, a = arenas()
    with pytest.raises(ValueError, match=message):
        a.router.take(shape, dtype)
