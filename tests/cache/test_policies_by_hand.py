"""Each policy on a trace worked out on paper. One access is one event of one block, in a single layer, unless said."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab import kernels


class Cache:
    """A live cache fed with letters; `play("ab")` is two events, `play(["ab"])` one event of two blocks."""

    def __init__(self, policy, slots, **settings):
        blocks = settings.pop("blocks", 26)
        self.core = kernels.load("expert_cache").ExpertCache(1, blocks, slots, "layer", policy, **settings)

    def play(self, events, weights=None):
        for i, event in enumerate(events):
            ids = np.array([ord(letter) - ord("a") for letter in event], np.uint16)
            gates = None if weights is None else np.full(len(ids), weights[i], np.float32)
            self.core.step(0, ids, 1, gates)
        return self

    @property
    def residents(self) -> str:
        return "".join(chr(ord("a") + b) for b in np.flatnonzero(self.core.residency()[0]))

    @property
    def hits(self) -> int:
        return int(self.core.counters()["hits"].sum())


def check(cache, events, hits, residents, weights=None):
    cache.play(events, weights)
    assert (cache.hits, cache.residents) == (hits, residents)


def test_lru():
    """a b c fill. a hits: oldest first b c a. d evicts b: c a d. b evicts c: a d b."""
    check(Cache("lru", 3), "abcadb", hits=1, residents="abd")


def test_fifo():
    """a b c fill. a hits and does not move. d evicts a: b c d. b hits."""
    check(Cache("fifo", 3), "abcadb", hits=2, residents="bcd")


def test_clock():
    """a hits: counter 1. d: a has 1, goes round with 0; b leaves: c a d. e: c leaves: a d e. f: a leaves: d e f. a misses,
    d leaves."""
    check(Cache("clock", 3), "abcadefa", hits=1, residents="aef")


def test_clock_with_two_bits():
    """a hits three times: counter 3. d: a goes round (2), b leaves. e: c leaves. f: a goes round (1), d leaves. a hits."""
    check(Cache("clock", 3, params={"bits": 2}), "abcaaadefa", hits=4, residents="aef")


def test_sieve():
    """a hits: visited. d: the hand clears a and takes b, waits at c. e: takes c, waits at d. f: takes d. a is still there."""
    check(Cache("sieve", 3), "abcadefa", hits=2, residents="aef")


def test_lfu_remembers_what_left():
    """a 2 uses, b 1. c evicts b. b is back with 2 uses and evicts c (1). c is back with 2: a, used longest ago of the
    twos, leaves. a misses; b, used longer ago than c, leaves."""
    check(Cache("lfu", 2), "aabcbca", hits=1, residents="ac")


def test_lfu_in_cache_forgets_what_left():
    """As above, but b and c come back with 1 use each and replace one another. a hits."""
    check(Cache("lfu-in-cache", 2), "aabcbca", hits=2, residents="ac")


def test_lfu_aged():
    """Half-life 1 pass. a after three uses: 1.75; b after two: 1.5. When c comes a is worth 1.75 / 8, b 1.5 / 2: a leaves,
    though lfu would send b."""
    check(Cache("lfu-aged", 2, params={"half_life": 1}), "aaabbc", hits=3, residents="bc")


def test_gate_weighted():
    """No decay to speak of. Masses a 0.9, b 0.1; c (0.5) evicts b. b is back with 0.1 + 0.2 and evicts c."""
    cache = Cache("gate-weighted", 2, params={"half_life": 1e9})
    check(cache, "abcb", hits=0, residents="ab", weights=[0.9, 0.1, 0.5, 0.2])


def test_weighted_lru():
    """Half-life 1 pass. When c comes: a 3 x 2^-2 = 0.75, b 1 x 2^-1 = 0.5: b leaves, though a is older. When d comes:
    a 3 x 2^-3 = 0.375, c 0.5: a leaves, though it has more hits."""
    check(Cache("weighted-lru", 2, params={"half_life": 1}), "aaabcd", hits=2, residents="cd")


def test_lfru():
    """Uses / (age + 1). When c comes (pass 4): a 2 / 3, b 1 / 2: b leaves. When d comes: a 2 / 4 = c 1 / 2: the lower id, a,
    leaves."""
    check(Cache("lfru", 2), "aabcd", hits=1, residents="cd")


def test_colibri_lfru():
    """Heat first: c (1) evicts b (1), not a (2). b is back with heat 2 and evicts c (1). c is back with 2: of the twos a is
    the less recent."""
    check(Cache("colibri-lfru", 2), "aabcbc", hits=1, residents="bc")


def test_colibri_lfru_forgets_recency_after_255_accesses():
    """b a fill, then 256 hits on c: the recency of both is 0, so the lower id, a, leaves, although b is older. With only
    100 hits between, b leaves."""
    check(Cache("colibri-lfru", 3), "ba" + "c" * 257 + "d", hits=256, residents="bcd")
    check(Cache("colibri-lfru", 3), "ba" + "c" * 101 + "d", hits=100, residents="acd")


def test_slru():
    """Half of 4 slots protected. a hits: protected a. c d fill. b hits: protected a b, probation c d. e: c leaves. d hits:
    protected would be a b d, so a goes back: protected b d, probation e a. f: e leaves."""
    check(Cache("slru", 4, params={"protected": 0.5}), "abacdbedf", hits=3, residents="abdf")


def test_2q():
    """4 slots: fifo 1, memory 2. a b c d fill the fifo. e: a leaves, remembered. a is back in main; b leaves. b back; c
    leaves. a hits: main b a. c back; d leaves. f: the fifo holds 1 (e), so main gives b."""
    check(Cache("2q", 4), "abcdeabacf", hits=1, residents="acef")


def test_arc():
    """2 slots. a hits: t1 b, t2 a. c: t1 exceeds target 0, b leaves to b1. b is in b1: target 1, now t1 = 1 does not exceed
    it, so t2 gives a to b2; t2 b. a is in b2: target 0, t1 gives c; t2 b a."""
    check(Cache("arc", 2), "abacba", hits=1, residents="ab")


def test_s3_fifo():
    """4 slots: small 1. a b c d wait in small, a is hit twice. e: a has 2, moves to main; b leaves, remembered. b is back,
    in main; c leaves. f: d leaves."""
    check(Cache("s3-fifo", 4), "abcdaaebf", hits=2, residents="abef")


def test_lru_k():
    """k = 2. a was used twice, b once: b leaves for c, c for d, though a is the oldest."""
    check(Cache("lru-k", 2, params={"k": 2}), "aabcd", hits=1, residents="ad")


def test_lru_k_with_k_1_is_lru():
    check(Cache("lru-k", 2, params={"k": 1}), "aabcd", hits=1, residents="cd")


def test_least_stale_is_lru_without_fetching_ahead():
    check(Cache("least-stale", 3), "abcadb", hits=1, residents="abd")


def future(events):
    ids = np.array([ord(letter) - ord("a") for event in events for letter in event], np.uint16)
    offsets = np.cumsum([0] + [len(event) for event in events]).astype(np.int64)
    return np.zeros(len(events), np.int32), offsets, ids


def test_belady_keeps_every_missed_block():
    """c comes: a is wanted next, b after it, so b leaves. a hits. b comes: nobody is wanted again, the lowest id leaves."""
    check(Cache("belady", 2, future=future("abcab")), "abcab", hits=1, residents="bc")


def test_belady_bypass_drops_what_is_not_wanted_again():
    """c is never wanted again: it is used and dropped. a and b hit."""
    cache = Cache("belady-bypass", 2, future=future("abcab"))
    check(cache, "abcab", hits=2, residents="ab")
    assert cache.core.counters()["drops"].sum() == 1


def test_belady_live_refuses_another_run():
    cache = Cache("belady", 2, future=future("abcab"))
    cache.play("ab")
    with pytest.raises(ValueError, match="step 2 .* is not the one the cache was told to expect"):
        cache.play("d")


def test_belady_without_a_future_is_refused():
    with pytest.raises(ValueError, match="belady must know the future"):
        Cache("belady", 2)


def test_layer_aware_survives_below_one_cycle():
    """Three layers of one expert, two slots in all. Pass 1: a b fill; at layer 2 layer 1 is furthest ahead: b leaves for c.
    Pass 2: a hits; b evicts a (layer 0 is now furthest); c hits. Pass 3: a evicts c, b hits, c evicts b. lru gets nothing."""
    hits = {}
    for policy in ("layer-aware", "lru"):
        cache = kernels.load("expert_cache").ExpertCache(3, 1, 2, "global", policy)
        for layer in (0, 1, 2) * 3:
            cache.step(layer, np.zeros(1, np.uint16), 1)
        hits[policy] = int(cache.counters()["hits"].sum())
    assert hits == {"layer-aware": 3, "lru": 0}


def test_random_is_seeded():
    letters = "abcdefgh" * 500
    first, again, other = (Cache("random", 4, seed=seed).play(letters).hits for seed in (1, 1, 2))
    assert first == again != other


def test_random_is_even():
    """2000 evictions from 4 blocks that are never used again: the victim is each of the four, by age, about 500 times."""
    cache = Cache("random", 4, blocks=2004)
    victims, residents = np.zeros(4, int), []
    for x in range(2004):
        result = cache.core.step(0, np.array([x], np.uint16), 1)
        for _, victim, _ in result.victims.tolist():
            victims[residents.index(victim)] += 1
            residents.remove(victim)
        residents.append(x)
    assert victims.sum() == 2000
    assert (abs(victims - 500) < 80).all(), victims  # 4 standard deviations


def test_static_pin_keeps_its_set():
    """Pins a b. c streams through, a and b hit."""
    cache = Cache("static-pin", 2)
    cache.core.pin([(0, 0), (0, 1)])
    check(cache, "cabc", hits=2, residents="ab")
    assert cache.core.counters()["drops"].sum() == 2


def test_pin_and_lru():
    """a is pinned, one slot is left for lru: b, then c, then b again; a hits."""
    cache = Cache("pin+lru", 2)
    cache.core.pin([(0, 0)])
    check(cache, "bcab", hits=1, residents="ab")


class Mru:
    """The most recently used block leaves."""

    def __init__(self, slots):
        self.slots, self.last = slots, {}

    def hit(self, layer, block, now, weight):
        self.last[layer, block] = now

    insert = hit

    def victim(self, candidates):
        return max(candidates, key=self.last.get)


def test_a_policy_in_python():
    """mru: c evicts b, b evicts c, a hits."""
    check(Cache(Mru, 2), "abcba", hits=1, residents="ab")


def test_a_policy_in_python_must_answer_with_a_candidate():
    class Wrong(Mru):
        def victim(self, candidates):
            return (0, 25)

    with pytest.raises(ValueError, match=r"must return one of the 2 candidates, got \(0, 25\)"):
        Cache(Wrong, 2).play("abc")


def test_what_a_python_policy_raises_arrives():
    class Broken(Mru):
        def victim(self, candidates):
            raise ZeroDivisionError("no idea")

    with pytest.raises(ZeroDivisionError, match="no idea"):
        Cache(Broken, 2).play("abc")


def test_atomic_and_serial_differ_inside_one_event():
    """{a b} then {c a} at 2 slots. Atomic: a hits, b leaves. Serial, in router order: c evicts a, a evicts b, no hit.
    Hits first: a hits, then c evicts b."""
    for lookup, hits in (("atomic", 1), ("serial", 0), ("serial-hits-first", 1)):
        check(Cache("lru", 2, lookup=lookup), ["ab", "ca"], hits=hits, residents="ac")


def test_an_event_larger_than_the_cache():
    """2 slots, {a b}, then {b c d e}: b hits, the rest is loaded once each, and the best two by lru stay: all have one time,
    so the lowest ids leave first. Then {a}: a miss."""
    cache = Cache("lru", 2)
    check(cache, ["ab", "bcde"], hits=1, residents="de")
    totals = {name: int(values.sum()) for name, values in cache.core.counters().items()}
    assert (totals["misses"], totals["evictions"], totals["drops"]) == (5, 2, 1)
    cache.play("a")
    assert cache.residents == "ae"


def test_members_of_one_event_leave_lowest_id_first():
    """{d c b} fill 3 slots at one time. e sends b, f sends c."""
    check(Cache("lru", 3), ["dcb", "e", "f"], hits=0, residents="def")


def test_bypass_keeps_the_more_used():
    """lfu, 2 slots: a 2 uses, b 2 uses; c has 1 and is dropped after use; d too."""
    cache = Cache("lfu", 2, admission="bypass")
    check(cache, "aabbcdab", hits=4, residents="ab")
    assert cache.core.counters()["evictions"].sum() == 0


def test_order_random_is_seeded():
    events = ["abcd", "dcef", "abef", "cdab"] * 20
    rates = [Cache("lru", 4, lookup="serial", order="random", seed=seed).play(events).hits for seed in (1, 1, 2, 3, 4)]
    assert rates[0] == rates[1]
    assert len(set(rates)) > 1


def test_order_id_ignores_router_order():
    for events in (["ab", "ca"], ["ba", "ac"]):
        check(Cache("lru", 2, lookup="serial", order="id"), events, hits=1, residents="ac")
