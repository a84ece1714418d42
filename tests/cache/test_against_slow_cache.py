"""Every policy, contract and scope against `slow_cache.py`, live and in replay; and what must hold of any of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cache import POLICIES, simulate

from colibri_lab import kernels
from colibri_lab.cache import policies as registry

LOOKUPS = ("atomic", "serial", "serial-hits-first")
PARAMS = {
    "clock": {"bits": 2.0}, "lru-k": {"k": 3.0}, "slru": {"protected": 0.75}, "2q": {"in": 0.5, "out": 1.0},
    "s3-fifo": {"small": 0.3, "threshold": 1.0}, "lfu-aged": {"half_life": 3.0}, "weighted-lru": {"half_life": 2.0},
    "gate-weighted": {"half_life": 5.0},
}  # fmt: skip


@st.composite
def workloads(draw):
    """(layers, blocks, events): each event (layer, distinct blocks in router order, weights)."""
    layers, blocks = draw(st.integers(1, 3)), draw(st.integers(2, 9))
    width = draw(st.integers(1, blocks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    popular = rng.permutation(blocks)
    events = []
    for _ in range(draw(st.integers(1, 25))):
        for layer in range(layers):
            if rng.random() < 0.05:
                continue  # a layer that did not run
            size = blocks if rng.random() < 0.05 else width
            members = popular[np.argsort(rng.random(blocks) * (np.arange(blocks) + 1))[:size]]
            events.append((layer, members.tolist(), rng.random(size).astype(np.float32).tolist()))
    return layers, blocks, events or [(0, [0], [1.0])]


def arrays(events):
    offsets = np.cumsum([0] + [len(members) for _, members, _ in events]).astype(np.int64)
    experts = np.array([x for _, members, _ in events for x in members], np.uint16)
    weights = np.array([w for _, _, gates in events for w in gates], np.float32)
    return offsets, experts, np.array([layer for layer, _, _ in events], np.int32), weights


def stream(layers, blocks, events, **contract):
    offsets, experts, layer, weights = arrays(events)
    n = len(events)
    return kernels.load("replay").Stream.make(
        layers, blocks, offsets, experts, layer, np.ones(n, np.uint8), np.zeros(n, np.int32), weights, **contract
    )


def totals(counted) -> dict[str, int]:
    return {name: int(counted[name].sum()) for name in ("hits", "misses", "evictions", "drops", "full_events")}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=25)
@given(data=st.data(), workload=workloads())
def test_policy_agrees_with_the_slow_one(policy, data, workload):
    layers, blocks, events = workload
    scope = data.draw(st.sampled_from(("layer", "global")))
    lookup = data.draw(st.sampled_from(LOOKUPS))
    admission = data.draw(st.sampled_from(registry.ADMISSIONS))
    params = data.draw(st.sampled_from(({}, PARAMS.get(policy, {}))))
    slots = data.draw(st.integers(1, blocks * (layers if scope == "global" else 1) + 1))
    contract = {"lookup": lookup, "admission": admission, "params": params}
    slow = simulate(events, policy, slots, layers=layers, blocks=blocks, scope=scope, **contract)

    replayed = kernels.load("replay").replay(
        stream(layers, blocks, events, scope=scope, lookup=lookup), policy, slots, **contract
    )
    wanted = {name: getattr(slow, name) for name in ("hits", "misses", "evictions", "drops", "full_events")}
    assert totals(replayed) == wanted

    offsets, experts, layer, _ = arrays(events)
    live = kernels.load("expert_cache").ExpertCache(
        layers, blocks, slots, scope, policy, future=(layer, offsets, experts), **contract
    )
    for e, (at, members, weights) in enumerate(events):
        step = live.step(at, np.array(members, np.uint16), 1, np.array(weights, np.float32))
        assert set(step.blocks[step.hit > 0].tolist()) == slow.hit_sets[e]
        assert set(map(tuple, np.argwhere(live.residency()).tolist())) == slow.residents[e]
    assert totals(live.counters()) == wanted


@pytest.mark.parametrize("policy", [name for name in registry.POLICIES if name != "static-pin"])
@settings(max_examples=20)
@given(data=st.data(), workload=workloads())
def test_no_policy_beats_the_bypass_oracle(policy, data, workload):
    layers, blocks, events = workload
    scope = data.draw(st.sampled_from(("layer", "global")))
    slots = data.draw(st.integers(1, blocks))
    admission = data.draw(st.sampled_from(registry.ADMISSIONS))
    native, flat = kernels.load("replay"), stream(layers, blocks, events, scope=scope)
    pins = [(0, 0)] if policy == "pin+lru" else []
    found = native.replay(flat, policy, slots, admission=admission, pins=pins, seed=3)
    bound = native.replay(flat, "belady-bypass", slots, preload=pins)
    assert found["hits"].sum() <= bound["hits"].sum()
    assert found["hits"].sum() + found["misses"].sum() == len(arrays(events)[1])
    kept = found["misses"].sum() + len(pins) - found["evictions"].sum() - found["drops"].sum()
    assert 0 <= kept <= slots * (1 if scope == "global" else layers)


@pytest.mark.parametrize("policy", ["lru", "fifo", "clock", "sieve", "slru", "2q", "arc", "s3-fifo", "lfu", "lru-k"])
@settings(max_examples=10)
@given(data=st.data(), seed=st.integers(0, 99))
def test_relabelling_experts_changes_nothing_but_ties(policy, data, seed):
    """Events of one block have no ties: any names give the same counts."""
    rng = np.random.default_rng(seed)
    blocks = 12
    ids = rng.geometric(0.25, 200) % blocks
    names = np.array(data.draw(st.permutations(range(blocks))))
    slots = data.draw(st.integers(1, blocks))
    runs = [[(0, [int(x)], [1.0]) for x in labelled] for labelled in (ids, names[ids])]
    native = kernels.load("replay")
    first, second = (totals(native.replay(stream(1, blocks, events), policy, slots)) for events in runs)
    assert first == second


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("policy", ["lru", "lfu", "arc", "s3-fifo", "weighted-lru", "random"])
def test_from_one_slot_to_all(policy, lookup):
    """Whatever the size: residents never exceed slots, and with a slot for every block only first uses miss."""
    rng = np.random.default_rng(0)
    layers, blocks = 2, 8
    events = [(e % layers, rng.permutation(blocks)[:3].tolist(), [1.0] * 3) for e in range(200)]
    for scope, most in (("layer", blocks), ("global", layers * blocks)):
        for slots in range(1, most + 1):
            cache = kernels.load("expert_cache").ExpertCache(layers, blocks, slots, scope, policy, lookup=lookup)
            for layer, members, _ in events:
                cache.step(layer, np.array(members, np.uint16), 1)
                held = (cache.residency() > 0).sum(1)
                assert (held.sum() if scope == "global" else held.max()) <= slots
            counts = cache.counters()
            assert counts["hits"].sum() + counts["misses"].sum() == 600
        assert counts["misses"].sum() == layers * blocks


def test_the_registry_names_what_the_cache_knows():
    """Every registered policy exists in C++ with the registry's parameters and defaults, and no other parameter."""
    core = kernels.load("expert_cache").ExpertCache
    rng = np.random.default_rng(1)
    events = [(0, rng.permutation(10)[:2].tolist(), rng.random(2).astype(np.float32).tolist()) for _ in range(300)]
    native, flat = kernels.load("replay"), stream(1, 10, events)
    future = (np.zeros(1, np.int32), np.array([0, 1]), np.zeros(1, np.uint16))
    for name, policy in registry.POLICIES.items():
        defaults = {key: p.default for key, p in policy.params.items()}
        assert totals(native.replay(flat, name, 4)) == totals(native.replay(flat, name, 4, params=defaults)), name
        with pytest.raises(ValueError, match=f"policy '{name.replace('+', '.')}' has no parameter 'speed'"):
            core(1, 4, 2, policy=name, params={"speed": 1.0}, future=future)
        for key, p in policy.params.items():
            with pytest.raises(ValueError, match=f"policy parameter {key} must be"):
                core(1, 4, 2, policy=name, params={key: p.high * 2 + 1}, future=future)


def test_a_python_policy_in_replay_is_the_cpp_one():
    class Oldest:
        """fifo, in Python"""

        def __init__(self, slots):
            self.order = []

        def insert(self, layer, block, now, weight):
            self.order.append((layer, block))

        def evict(self, layer, block):
            self.order.remove((layer, block))

        def victim(self, candidates):
            return min(candidates, key=self.order.index)

    rng = np.random.default_rng(5)
    events = [(e % 2, rng.permutation(8)[:3].tolist(), [1.0] * 3) for e in range(100)]
    native = kernels.load("replay")
    for scope in ("layer", "global"):
        flat = stream(2, 8, events, scope=scope)
        assert totals(native.replay(flat, Oldest, 5)) == totals(native.replay(flat, "fifo", 5))
