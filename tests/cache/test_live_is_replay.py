"""What a live cache counted, replay counts: the same calls in the order an engine makes them, prefetch included."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab import kernels
from colibri_lab.cache import policies
from colibri_lab.trace import Trace

LAYERS, EXPERTS, K = 3, 12, 3
COUNTERS = (
    "hits",
    "misses",
    "evictions",
    "drops",
    "full_events",
    "prefetch_issued",
    "prefetch_timely",
    "prefetch_wasted",
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two prompts of four tokens, each followed by 30 decoded ones; gates; experts in rank order."""
    rng = np.random.default_rng(7)
    rows = []
    for step in range(62):
        prompt = step % 31 == 0
        for layer in range(LAYERS):
            for token in range(4 if prompt else 1):
                experts = np.argsort(rng.random(EXPERTS) * np.arange(1, EXPERTS + 1))[:K]
                rows.append((step, layer, token, step // 31, 0 if prompt else 1, experts, -np.sort(-rng.random(K))))
    step, layer, row, sequence, phase, experts, weights = zip(*rows, strict=True)
    header = {"num_experts": EXPERTS, "ranked": True, "moe_layers": range(LAYERS)}
    return Trace.from_rows(step=step, layer=layer, row=row, sequence=sequence, phase=phase, experts=np.array(experts),
                           weights=np.array(weights), header=header)  # fmt: skip


def run_live(trace, cache, ahead: bool):
    """Step after step as the rows come; with `ahead` the next layer's last experts are fetched, and arrive at once."""
    last = {}
    for event in range(int(trace.event[-1]) + 1):
        mine = trace.event == event
        layer, phase = int(trace.layer[mine][0]), int(trace.phase[mine][0])
        ids, weights = trace.experts[mine].ravel(), trace.weights[mine].ravel()
        result = cache.step(layer, ids, phase, weights)
        last[layer] = result.blocks
        target = (layer + 1) % LAYERS
        if ahead and target in last:
            for _, slot in cache.prefetch(target, last[target][:K]).loads.tolist():
                cache.loaded(slot)
    return cache.counters()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("lookup", ["atomic", "serial", "serial-hits-first"])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("policy", [name for name, p in policies.POLICIES.items() if "pins" not in p.needs])
def test_counts_per_layer_and_phase_are_equal(trace, policy, scope, lookup, ahead):
    events = trace.events()
    for slots in (2, 5) if scope == "layer" else (7, 20):
        cache = kernels.load("expert_cache").ExpertCache(
            LAYERS, EXPERTS, slots, scope, policy, lookup=lookup, order="random", seed=11,
            future=(events.layer_index, events.offsets, events.experts),
        )  # fmt: skip
        live = run_live(trace, cache, ahead)
        fetch = {"prefetch": "same", "prefetch_budget": K} if ahead else {}
        settings = {"policy": policy, "slots": slots, "scope": scope, "lookup": lookup, "order": "random", "seed": 11}
        for at, phase in enumerate(("prefill", "decode")):
            replayed = trace.replay(phase=phase, **settings, **fetch)
            for name in COUNTERS:
                if name in replayed:
                    assert live[name][:, at].tolist() == replayed[name].tolist(), (slots, phase, name)
