"""The live cache as an engine uses it: slots, loads, what must wait, pins, prefetch, resizing, counters, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab import kernels


def make(layers=1, blocks=8, slots=2, scope="layer", policy="lru", **rest):
    return kernels.load("expert_cache").ExpertCache(layers, blocks, slots, scope, policy, **rest)


def u16(*ids):
    return np.array(ids, np.uint16)


class Engine:
    """Memory that does what a step says, in the only order allowed: hits are read before their slots are loaded again."""

    def __init__(self, cache):
        self.cache, self.memory = cache, {}

    def step(self, layer, ids, phase=1):
        r = self.cache.step(layer, ids, phase)
        blocks, slots, hit = r.blocks.tolist(), r.slots.tolist(), r.hit.tolist()
        assert sorted(set(ids.tolist())) == sorted(blocks)
        for late in (False, True):
            for (index, slot), is_late in zip(r.loads.tolist(), r.late.tolist(), strict=True):
                if bool(is_late) == late and slot >= 0:
                    self.memory[slot] = (layer, blocks[index])
            if not late:
                for block, slot, found in zip(blocks, slots, hit, strict=True):
                    if found:
                        assert self.memory[slot] == (layer, block), "a hit was overwritten before it was read"
        for block, slot, found in zip(blocks, slots, hit, strict=True):
            if not found and slot >= 0:
                assert self.memory[slot] == (layer, block)
                assert self.cache.slot_of(layer, block) == slot
        loaded = [index for index, _ in r.loads.tolist()]
        assert sorted(loaded) == [i for i, found in enumerate(hit) if not found], "every miss is loaded once"
        assert len(set(loaded)) == len(loaded)
        return r

    def check(self, layers, blocks):
        """Every resident block is where the cache says, and nothing shares a slot."""
        residents = np.argwhere(self.cache.residency()).tolist()
        slots = [self.cache.slot_of(layer, block) for layer, block in residents]
        assert len(set(slots)) == len(slots) and min(slots, default=0) >= 0
        for (layer, block), slot in zip(residents, slots, strict=True):
            assert self.cache.occupant(slot) == (layer, block)
            assert self.memory[slot] == (layer, block)
        absent = {(a, b) for a in range(layers) for b in range(blocks)} - set(map(tuple, residents))
        assert all(self.cache.slot_of(layer, block) == -1 for layer, block in absent)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(["lru", "weighted-lru", "lfu", "random", "arc", "s3-fifo", "sieve"]),
    lookup=st.sampled_from(["atomic", "serial", "serial-hits-first"]),
    admission=st.sampled_from(["forced", "bypass"]),
    scope=st.sampled_from(["layer", "global"]),
    slots=st.integers(1, 9),
)
def test_slots_hold_what_the_cache_says(seed, policy, lookup, admission, scope, slots):
    rng = np.random.default_rng(seed)
    layers, blocks = 2, 8
    engine = Engine(make(layers, blocks, slots, scope, policy, lookup=lookup, admission=admission, seed=seed))
    for e in range(40):
        ids = rng.integers(0, blocks, rng.integers(1, 10)).astype(np.uint16)  # with repeats
        engine.step(e % layers, ids, phase=e % 3 // 2)
        engine.check(layers, blocks)


def test_a_step_in_full():
    """2 slots. {0 1}: loaded into slots 0 and 1. {2 0}: 0 hits in slot 0; 1 leaves slot 1 to 2. {2 0 3 4}, more than the
    slots: 2 and 0 hit; 3 and 4 stay, in the slots that 0 and 2 are still read from, so those loads are late."""
    cache = make()
    r = cache.step(0, u16(0, 1), 1)
    assert (r.slots.tolist(), r.hit.tolist(), r.loads.tolist()) == ([0, 1], [0, 0], [[0, 0], [1, 1]])
    r = cache.step(0, u16(2, 0), 1)
    assert (r.slots.tolist(), r.hit.tolist(), r.loads.tolist()) == ([1, 0], [0, 1], [[0, 1]])
    assert r.victims.tolist() == [[0, 1, 1]] and r.late.tolist() == [0]
    r = cache.step(0, u16(2, 0, 3, 4, 4), 0)
    assert r.blocks.tolist() == [2, 0, 3, 4] and r.hit.tolist() == [1, 1, 0, 0]
    assert r.late.tolist() == [1, 1]
    assert cache.residency().tolist() == [[0, 0, 0, 2, 2, 0, 0, 0]]


def test_blocks_that_are_not_kept_have_no_slot():
    cache = make(slots=1)
    r = cache.step(0, u16(5, 6, 7), 0)
    assert r.slots.tolist() == [-1, -1, 0]
    assert sorted(map(tuple, r.loads.tolist())) == [(0, -1), (1, -1), (2, 0)]


def test_dtypes_and_shapes():
    r = make().step(0, u16(3), 1)
    kinds = {name: (getattr(r, name).dtype.name, getattr(r, name).shape) for name in
             ("blocks", "slots", "hit", "loads", "late", "victims")}  # fmt: skip
    assert kinds == {"blocks": ("uint16", (1,)), "slots": ("int32", (1,)), "hit": ("uint8", (1,)),
                     "loads": ("int32", (1, 2)), "late": ("uint8", (1,)), "victims": ("int32", (0, 3))}  # fmt: skip


def test_counters_by_layer_and_phase():
    cache = make(layers=2, slots=2)
    cache.step(0, u16(0, 1, 2), 0)
    cache.step(1, u16(0), 0)
    cache.step(0, u16(1, 2), 1)
    counts = cache.counters()
    assert counts["misses"].tolist() == [[3, 0], [1, 0]]
    assert counts["hits"].tolist() == [[0, 2], [0, 0]]
    assert counts["events"].tolist() == [[1, 1], [1, 0]]
    assert counts["full_events"].tolist() == [[0, 1], [0, 0]]
    assert counts["drops"].tolist() == [[1, 0], [0, 0]]
    cache.reset_counters()
    assert all((values == 0).all() for values in cache.counters().values())
    assert cache.residency().any()


def test_reset_is_cold_and_forgets_history():
    """lfu: 0 has many uses; after the reset 1 and 2, both new, push it out on equal terms."""
    cache = make(policy="lfu")
    for _ in range(5):
        cache.step(0, u16(0), 1)
    cache.reset()
    assert not cache.residency().any() and cache.occupant(0) is None
    for block in (0, 1, 2):
        cache.step(0, u16(block), 1)
    assert cache.residency()[0].nonzero()[0].tolist() == [1, 2]


def test_weights_count_once_with_the_largest():
    """Two tokens give block 0 weights 0.2 and 0.9, block 1 0.5: 1 leaves. With the first weight only, 0 would."""
    cache = make(policy="gate-weighted")
    cache.step(0, u16(0, 1, 0), 0, np.array([0.2, 0.5, 0.9], np.float32))
    r = cache.step(0, u16(2), 1, np.array([0.1], np.float32))
    assert r.victims[:, 1].tolist() == [1]


def test_pins_stay_and_are_loaded_once():
    cache = make(slots=3)
    cache.step(0, u16(0, 1, 2), 1)
    r = cache.pin([(0, 1), (0, 5)])
    assert r.hit.tolist() == [1, 0] and r.loads[:, 0].tolist() == [1]
    assert r.victims[:, 1].tolist() == [0]  # the oldest, of equal age the lowest
    for block in (3, 4, 6):
        cache.step(0, u16(block), 1)
    assert {1, 5} <= set(cache.residency()[0].nonzero()[0].tolist())
    cache.reset()
    assert cache.residency()[0].nonzero()[0].tolist() == [1, 5]
    with pytest.raises(ValueError, match="cannot pin block 7 of layer 0: all slots of its pool hold pinned blocks"):
        cache.pin([(0, 2), (0, 7)])


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_resizing_while_running(scope):
    rng = np.random.default_rng(4)
    layers, blocks = 3, 10
    engine = Engine(make(layers, blocks, 12 if scope == "global" else 6, scope))
    for e in range(60):
        if e % 10 == 9:
            slots = int(rng.integers(2, 20 if scope == "global" else 10))
            victims, moves = engine.cache.resize(slots)
            for layer, block, slot in victims.tolist():
                assert engine.memory.pop(slot) == (layer, block)
            engine.memory = {new: engine.memory[old] for old, new in moves.tolist()}
            assert len(engine.memory) <= slots * (1 if scope == "global" else layers)
            assert engine.cache.slot_count == slots * (1 if scope == "global" else layers)
            engine.check(layers, blocks)
        engine.step(e % layers, rng.integers(0, blocks, 3).astype(np.uint16))
        engine.check(layers, blocks)


def test_shrinking_keeps_what_the_policy_would():
    cache = make(slots=4)
    for block in (0, 1, 2, 3, 0):
        cache.step(0, u16(block), 1)
    victims, _ = cache.resize(2)
    assert victims[:, 1].tolist() == [1, 2]


def test_bytes_hold_blocks_of_different_sizes():
    """100 bytes for both layers. Layer 0 blocks take 60, layer 1 blocks 30: one of each fits, a third does not."""
    cache = make(2, 4, 1, "global", capacity_bytes=100, block_bytes=[60, 30])
    cache.step(0, u16(0), 1)
    cache.step(1, u16(0), 1)
    r = cache.step(1, u16(1), 1)
    assert r.victims[:, :2].tolist() == [[0, 0]]
    assert cache.residency().astype(bool).sum() == 2
    r = cache.step(0, u16(1), 1)
    assert r.victims[:, :2].tolist() == [[1, 0]]  # 30 + 60 fit


def test_bytes_per_layer_are_shared_equally():
    cache = make(2, 8, 1, "layer", capacity_bytes=240, block_bytes=[60, 30])
    assert cache.slot_count == 2 + 4


def test_prefetched_blocks_are_their_own_kind():
    """2 slots, 0 resident. 3 is fetched ahead into the free slot, arrives, and is used: timely, not a hit of the policy.
    4 was never used, so it may not push out 0 or 3: refused."""
    cache = make()
    cache.step(0, u16(0), 1)
    r = cache.prefetch(0, u16(3, 0))
    assert r.blocks.tolist() == [3] and r.loads.tolist() == [[0, 1]]
    cache.loaded(1)
    r = cache.step(0, u16(3), 1)
    assert r.hit.tolist() == [2] and r.slots.tolist() == [1]
    assert cache.prefetch(0, u16(4)).blocks.tolist() == []
    counts = {name: int(values.sum()) for name, values in cache.counters().items()}
    assert (counts["hits"], counts["misses"]) == (0, 1)
    assert (counts["prefetch_issued"], counts["prefetch_timely"], counts["prefetch_late"]) == (1, 1, 0)
    assert counts["full_events"] == 1


def test_a_prefetch_still_loading_is_late_and_one_never_used_is_wasted():
    """3 is used before it arrives: late. 5 is fetched for an event that wants 6: it expires, is evicted first, wasted."""
    cache = make(slots=3)
    cache.prefetch(0, u16(3, 5))
    assert cache.step(0, u16(3), 1).hit.tolist() == [3]
    cache.step(0, u16(6), 1)
    r = cache.step(0, u16(7), 1)
    assert r.victims[:, 1].tolist() == [5]
    counts = {name: int(values.sum()) for name, values in cache.counters().items()}
    assert (counts["prefetch_late"], counts["prefetch_wasted"], counts["prefetch_timely"]) == (1, 1, 0)


def test_members_of_the_running_step_are_never_prefetched_away():
    """1 slot for two layers. Block 2 of layer 1 is the warmer one, but layer 0 may still compute with its block 0."""
    cache = make(2, 4, 1, "global")
    for layer, block in ((1, 2), (1, 2), (0, 0)):
        cache.step(layer, u16(block), 1)
    assert cache.prefetch(1, u16(2)).blocks.tolist() == []


def test_prefetch_into_a_shared_pool_takes_the_colder_block():
    """2 slots, two layers. After the steps layer 0 holds block 0 (1 use) and layer 1 block 2, the running one. Block 3 of
    layer 0 was used twice: it takes the slot of block 0."""
    cache = make(2, 4, 2, "global")
    for layer, block in ((0, 3), (0, 3), (0, 0), (1, 2)):
        cache.step(layer, u16(block), 1)
    r = cache.prefetch(0, u16(3))
    assert r.blocks.tolist() == [3]
    assert r.victims[:, :2].tolist() == [[0, 0]]


def test_events_keep_the_newest():
    cache = make(events=3)
    for block in (0, 1, 0, 2):
        cache.step(0, u16(block), 1)
    assert cache.events().tolist() == [[1, 0, 1, 0, 1, -1, -1], [2, 0, 0, 1, 0, -1, -1], [3, 0, 2, 0, 1, 0, 1]]
    assert make().events().shape == (0, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"blocks": 0}, "blocks_per_layer must be 1 to 65535, got 0"),
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"scope": "all"}, "scope must be one of layer, global; got 'all'"),
        ({"policy": "mru"}, "unknown policy 'mru'"),
        ({"lookup": "atom"}, "lookup must be one of atomic, serial, serial-hits-first; got 'atom'"),
        ({"order": "up"}, "order must be one of rank, id, random; got 'up'"),
        ({"admission": "maybe"}, "admission must be one of forced, bypass; got 'maybe'"),
        ({"params": {"half_life": 3}}, "policy 'lru' has no parameter 'half_life'"),
        ({"events": -1}, "events must be at least 0, got -1"),
        ({"capacity_bytes": 50, "block_bytes": [60], "scope": "global"}, "capacity_bytes must hold a block, 60 bytes, got 50"),
        ({"capacity_bytes": 50, "block_bytes": []}, "block_bytes must have one value per layer, 1, got 0"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make(**arguments)


def test_impossible_steps_are_refused():
    cache = make(layers=2)
    cases = [
        ((2, u16(0), 1), "layer must be 0 to 1, got 2"),
        ((0, u16(0), 2), "phase must be 0 to 1, got 2"),
        ((0, u16(1, 8), 1), "block ids must be below 8, got 8 at position 1"),
        ((0, np.array([1], np.int64), 1), "blocks must be uint16, got int64"),
        ((0, np.zeros((1, 2), np.uint16), 1), r"blocks must have 1 dimension\(s\), got 2"),
        ((0, u16(0, 1, 2, 3)[::2], 1), "blocks must be C-contiguous"),
        ((0, u16(0, 1), 1, np.zeros(1, np.float32)), "one value per block: 2 blocks, 1 weights"),
        ((0, u16(0), 1, np.zeros(1)), "weights must be float32, got float64"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            cache.step(*arguments)
    assert not cache.residency().any()
    r = cache.step(0, u16(), 1)
    assert r.blocks.shape == (0,) and r.loads.shape == (0, 2)
