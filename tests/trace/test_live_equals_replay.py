"""Law 2: a recorded trace, replayed with the run's settings, gives the engine's own counts, layer by layer, exactly."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab.cache.policies import POLICIES
from colibri_lab.config import SETTINGS

TEXTS = ("def read_lines(path):", "And it came to pass in those days, that the king", "Wählen Sie im Menü")
ONLINE = [p.name for p in POLICIES.values() if not p.needs or p.needs == ("gates",)]
COLUMNS = ["hits", "misses", "evictions"]


@pytest.fixture(scope="module")
def tiny():
    from colibri_lab.front import container_of

    return container_of("colibri-tiny", progress=False)


def run_and_replay(tiny, live: dict, replayed: dict):
    """(the engine's counts per layer, the replay's) of three short texts."""
    lab = cl.open(tiny, **live)
    with lab.record() as recording:
        runs = [lab.generate(text, max_tokens=8, temperature=0.0) for text in TEXTS]
    counted = sum(run.cache.groupby("layer").sum(numeric_only=True) for run in runs)
    table = recording.trace.replay(**replayed).set_index("layer")
    return counted, table, recording.trace


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(ONLINE),
    slots=st.integers(1, 40),
    scope=st.sampled_from(SETTINGS["scope"].choices),
    lookup=st.sampled_from(SETTINGS["lookup"].choices),
    order=st.sampled_from(SETTINGS["order"].choices),
    admission=st.sampled_from(SETTINGS["admission"].choices),
    reset=st.sampled_from(SETTINGS["cache_reset"].choices),
    chunk=st.sampled_from([5, 256]),
)
def test_replay_counts_what_the_engine_counted(tiny, policy, slots, scope, lookup, order, admission, reset, chunk):
    contract = dict(policy=policy, scope=scope, lookup=lookup, order=order, admission=admission)
    most = 32 if scope == "layer" else 6 * 32
    counted, table, _ = run_and_replay(
        tiny,
        dict(contract, expert_cache_slots=slots, cache_seed=7, cache_reset=reset, prefill_chunk=chunk),
        dict(contract, slots=min(slots, most), seed=7, reset=reset),
    )
    for column in COLUMNS:
        assert table[column].tolist() == counted[column].tolist(), column


@pytest.mark.parametrize("predictor", ["same", "markov", "popular"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "s3-fifo"])
@pytest.mark.parametrize("scope, slots", [("layer", 8), ("layer", 3), ("global", 40)])
def test_replay_prefetches_what_the_engine_prefetched(tiny, predictor, policy, scope, slots):
    counted, table, _ = run_and_replay(
        tiny,
        dict(policy=policy, scope=scope, expert_cache_slots=slots, prefetch=predictor, prefetch_budget=3),
        dict(policy=policy, scope=scope, slots=slots, prefetch=predictor, prefetch_budget=3),
    )
    for column in [*COLUMNS, "prefetch_issued", "prefetch_wasted"]:
        assert table[column].tolist() == counted[column].tolist(), column
    found = counted.prefetch_timely + counted.prefetch_late  # which of the two is a matter of time
    assert (table.prefetch_timely + table.prefetch_late).tolist() == found.tolist()


def test_an_oracle_runs_live_on_the_future_it_was_given(tiny):
    live = dict(expert_cache_slots=6)
    _, _, trace = run_and_replay(tiny, live, dict(policy="lru", slots=6))
    lru = trace.replay(policy="lru", slots=6).hits.sum()
    for oracle in ("belady", "belady-bypass"):
        counted, table, _ = run_and_replay(tiny, dict(live, policy=oracle, future=trace), dict(policy=oracle, slots=6))
        for column in COLUMNS:
            assert table[column].tolist() == counted[column].tolist(), column
        assert counted.hits.sum() > lru


@pytest.mark.parametrize("start", ["pinned", "preloaded"])
@pytest.mark.parametrize("scope, slots", [("layer", 6), ("global", 30)])
def test_blocks_held_from_the_start_count_the_same(tiny, start, scope, slots):
    blocks = [(layer, block) for layer in range(1, 7) for block in (0, 5)]
    counted, table, _ = run_and_replay(
        tiny,
        dict(expert_cache_slots=slots, scope=scope, cache_start=start, cache_blocks=blocks),
        dict(policy="lru", slots=slots, scope=scope, start=start, blocks=blocks),
    )
    for column in COLUMNS:
        assert table[column].tolist() == counted[column].tolist(), column


def test_held_blocks_and_their_policy_must_go_together(tiny):
    for wrong in (dict(cache_start="pinned"), dict(cache_blocks=[(1, 0)]), dict(policy="static-pin")):
        with pytest.raises(cl.errors.SettingError, match="do not go together"):
            cl.open(tiny, **wrong)
    with pytest.raises(cl.errors.SettingError, match=r"\(9, 0\) does not exist; MoE layers are 1 to 6"):
        cl.open(tiny, cache_start="pinned", cache_blocks=[(9, 0)])
    with pytest.raises(ValueError, match="cannot pin block 2 of layer 0: all slots of its pool hold pinned blocks"):
        cl.open(tiny, expert_cache_slots=2, cache_start="pinned", cache_blocks=[(1, 0), (1, 1), (1, 2)])


def test_a_static_set_serves_what_it_holds_and_streams_the_rest(tiny):
    blocks = [(layer, block) for layer in range(1, 7) for block in range(4)]
    lab = cl.open(tiny, policy="static-pin", expert_cache_slots=4, cache_blocks=blocks)
    free = cl.open(tiny).generate(TEXTS[0], max_tokens=8, temperature=0.0)
    run = lab.generate(TEXTS[0], max_tokens=8, temperature=0.0)
    assert run.tokens == free.tokens
    assert (lab.residency()[:, :4] > 0).all() and not lab.residency()[:, 4:].any()


def test_recording_nothing_is_an_error(tiny):
    lab = cl.open(tiny)
    with lab.record() as recording:
        pass
    with pytest.raises(cl.errors.TraceError, match="nothing was recorded"):
        _ = recording.trace


def test_recorded_residency_and_bytes_are_what_the_cache_found(tiny):
    lab = cl.open(tiny, expert_cache_slots=8)
    with lab.record() as recording:
        run = lab.generate(TEXTS[0], max_tokens=8, temperature=0.0)
    trace = recording.trace
    assert trace.bytes.sum() == run.cache.bytes.sum()
    assert (trace.bytes > 0).sum() == run.cache.misses.sum()
    assert trace.header["moe_layers"] == list(lab.config.moe_layers)
    assert trace.token_id.tolist()[: run.prompt_tokens] == lab.tokenizer.encode(TEXTS[0])
