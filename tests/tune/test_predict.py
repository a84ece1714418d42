"""The predictor: counts against replay and the engine, the formula against a simulation, seconds against a modelled disk."""

from __future__ import annotations

import heapq
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab.cache.storage import ModelledDevice
from colibri_lab.errors import MemoryPlanError, SettingError
from colibri_lab.trace.table import Trace
from colibri_lab.tune import assumed, predict
from colibri_lab.tune.calibrate import calibrate, serve_settings
from colibri_lab.tune.memory_of import memory_of
from colibri_lab.tune.served import DECODE, Served, serve
from colibri_lab.tune.shapes import PRESETS, Shape
from colibri_lab.tune.storage_model import FixedReader, ModelledReader, Rates, Reader
from colibri_lab.tune.timeline import Costs, decode_seconds, read_all, timeline

# ---- what the cache serves


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("policy", ["lru", "arc", "belady", "static-pin"])
def test_events_sum_to_what_replay_counts(olmoe, policy, scope):
    slots = 12 if scope == "layer" else 200
    served = serve(olmoe, slots, policy=policy, scope=scope)
    totals = olmoe.replay(policy=policy, slots=slots, scope=scope).attrs["totals"]
    assert (served.hits.sum(), served.misses.sum()) == (totals["hits"], totals["misses"])
    assert served.hit_rate(DECODE) == totals["hit_rate"]
    assert len(served.loaded) == totals["misses"] == served.ends[-1]


def test_misses_by_event_by_hand(trace_of):
    served = serve(trace_of([[[0, 1]], [[2, 0]], [[3, 4]], [[3, 0]]]), 2)
    assert served.hits.tolist() == [0, 1, 0, 1]
    assert served.misses.tolist() == [2, 1, 2, 1]
    assert served.loaded.tolist() == [0, 1, 2, 3, 4, 0]


def test_blocks_beyond_the_slots_are_late(trace_of):
    served = serve(trace_of([[[0, 1, 2, 3]]]), 2)
    assert (served.early[0] + served.late[0], served.late[0] >= 2) == (4, True)


@pytest.mark.parametrize("prefetch", ["none", "same", "markov"])
def test_a_recorded_run_is_served_as_the_engine_served_it(tiny, prefetch):
    lab = cl.open(
        tiny,
        expert_cache_slots=6,
        prefetch=prefetch,
        storage="modelled",
        disk_bandwidth="100 GB/s",
        disk_latency_us=0.0,
    )
    with lab.record() as recorder:
        run = lab.generate("def read_lines(path):", max_tokens=24, temperature=1.0, seed=3, stop_at_eos=False)
    served = serve(recorder.trace, **serve_settings(lab.settings, Shape.of_container(lab.container)))
    decode = [step for step in run.steps if step.phase == "decode"]
    assert served.per_step(served.misses).tolist() == [step.misses for step in decode]
    assert served.per_step(served.blocks).sum() == sum(s.hits + s.prefetch_hits + s.misses for s in decode)


# ---- the formula


def simulate(blocks: int, misses: int, lanes: int, read_s: float, compute_s: float) -> float:
    """One layer as the engine runs it: residents first while `lanes` threads read, then groups as they arrive."""
    free = [0.0] * lanes
    arrived = []
    for _ in range(misses):
        done = heapq.heappop(free) + read_s
        heapq.heappush(free, done)
        arrived.append(done)
    now = (blocks - misses) * compute_s
    for first in range(0, misses, lanes):
        group = arrived[first : first + lanes]
        now = max(now, *group) + len(group) * compute_s
    return now


def one_layer(blocks: int, misses: int) -> Served:
    one = {name: np.array([value]) for name, value in dict(
        step=0, layer=0, phase=DECODE, tokens=1, assignments=blocks, blocks=blocks, hits=blocks - misses, early=misses, late=0, ahead=0
    ).items()}  # fmt: skip
    return Served(**one, loaded=np.arange(misses), ends=np.array([0, misses]), layers=1, blocks_per_layer=64, slots=32)


@settings(max_examples=200)
@given(st.integers(1, 16), st.integers(0, 16), st.integers(1, 8), st.floats(0, 10), st.floats(0, 10))
def test_the_formula_bounds_a_simulated_layer(blocks, misses, lanes, read_s, compute_s):
    misses = min(misses, blocks)
    served = one_layer(blocks, misses)
    reads = read_all(served, FixedReader(1, read_s, lanes), 4)
    found = timeline(served, reads, Costs(step_s=0, expert_s=compute_s), lanes, 1).total_s[0]
    real = simulate(blocks, misses, lanes, read_s, compute_s)
    # It leaves out only that nothing can be computed before the first read of a layer without residents is done.
    assert found <= real + 1e-9
    assert real <= found + read_s + 1e-9
    if misses <= lanes or compute_s == 0 or lanes * compute_s <= read_s:
        assert found == pytest.approx(real)


def test_waiting_computing_and_managing_sum_to_the_layer():
    served = one_layer(8, 3)
    costs = Costs(step_s=0, expert_s=0.002, miss_s=0.0001, wait_s=0.0005)
    line = timeline(served, read_all(served, FixedReader(1, 0.02, 1), 4), costs, 1, 1)
    assert line.total_s[0] == pytest.approx(0.06 + 0.002 + 0.0003 + 0.0005)
    assert line.total_s[0] == pytest.approx(line.compute_s[0] + line.wait_device_s[0] + line.manage_s[0])


def test_blocks_fetched_ahead_have_a_lead():
    served = replace(one_layer(4, 0), ahead=np.array([2]), loaded=np.array([0, 1]), ends=np.array([0, 2]))
    reads = read_all(served, FixedReader(1, 0.01, 2), 4)
    late = timeline(served, reads, Costs(step_s=0.0, expert_s=0.001), 2, 1)
    early = timeline(served, reads, Costs(step_s=0.05, expert_s=0.001), 2, 1)
    assert late.total_s[0] == pytest.approx(0.01)
    assert early.total_s[0] == pytest.approx(0.004)


def test_a_loader_that_sleeps_five_milliseconds_a_miss_on_four_lanes(olmoe):
    served = serve(olmoe.select(steps=slice(0, 4)), 16)
    predicted = timeline(served, read_all(served, FixedReader(1, 0.005, 4), 4), Costs(0, 0), 4, 16).total_s
    with ThreadPoolExecutor(4) as lanes:
        begun = time.perf_counter()
        for count in served.misses.tolist():
            list(lanes.map(time.sleep, [0.005] * count))
        measured = time.perf_counter() - begun
    by_hand = sum(-(-count // 4) * 0.005 for count in served.misses.tolist())
    assert predicted.sum() == pytest.approx(by_hand)
    assert predicted.sum() <= measured  # sleeping is never shorter than asked for
    assert threading.active_count() < 50


# ---- readers


def test_rates_are_interpolated_and_end_where_the_table_ends():
    rates = Rates(((1 << 16, 1, 1e8), (1 << 16, 4, 4e8), (1 << 20, 1, 1e9), (1 << 20, 4, 1e9)))
    assert rates.at(1 << 16, 1, 8) == pytest.approx(1e8)
    assert rates.at(1 << 16, 4, 2) == pytest.approx(2e8)  # two lanes: two reads under way
    assert rates.at(1 << 18, 4, 4) == pytest.approx((4e8 * 1e9) ** 0.5)
    assert rates.at(1 << 30, 64, 64) == pytest.approx(1e9)
    assert rates.scaled(0.5).at(1 << 20, 1, 1) == pytest.approx(5e8)


def test_the_page_cache_keeps_what_was_read_last():
    slow, fast = Rates.constant(1e6), Rates.constant(1e9)
    reader = Reader(1000, slow, fast, page_cache_bytes=2000, lanes=1, blocks=4, warm=False)
    assert [reader.seconds([key])[2] for key in (0, 1, 0, 2, 1, 0)] == [1000, 1000, 0, 1000, 1000, 1000]
    assert Reader(1000, slow, fast, 4000, 1, 4).seconds([0, 1, 2, 3]) == (pytest.approx(4e-6), 0.0, 0)
    assert Reader(1000, slow, None, 4000, 1, 4).seconds([0])[2] == 1000  # past the page cache


def test_a_modelled_device_is_asked_as_the_engine_asks_it():
    reader = ModelledReader(1000, ModelledDevice(1e6, latency_s=0.01, queue_depth=8))
    assert reader.seconds([1, 2, 3]) == (pytest.approx(0.013), pytest.approx(0.013), 3000)
    assert reader.seconds([]) == (0.0, 0.0, 0)


# ---- against the engine


@pytest.fixture(scope="module")
def slow_disk(tiny):
    """The shipped model on a modelled disk so slow that nothing else matters, calibrated with few slots."""
    lab = cl.open(tiny, expert_cache_slots=5, storage="modelled", disk_bandwidth="1 MB/s", disk_latency_us=20_000.0,
                  disk_page_cache="2 MB")  # fmt: skip
    found = calibrate(lab, tokens=24)
    return lab, predict.calibrated(Shape.of_container(lab.container), found, 10**10, dict(storage="modelled", disk_bandwidth="1 MB/s",
                                   disk_latency_us=20_000.0, disk_page_cache="2 MB"))  # fmt: skip


@pytest.mark.parametrize(("slots", "scope"), [(4, "layer"), (8, "layer"), (16, "layer"), (32, "layer"), (60, "global")])
def test_prediction_meets_measurement_on_a_modelled_disk(slow_disk, slots, scope):
    lab, predictor = slow_disk
    lab.configure(expert_cache_slots=slots, scope=scope)
    run = lab.generate(
        "def main():\n    ", max_tokens=25, temperature=1.0, seed=1, stop_at_eos=False
    )  # as in calibration
    found = predictor.at(expert_cache_slots=slots, scope=scope)
    decode = [step for step in run.steps if step.phase == "decode"]
    assert found.hit_rate == run.hit_rate
    assert found.steps.misses.tolist() == [step.misses for step in decode]
    assert found.steps.bytes_read.tolist() == [step.bytes_loaded for step in decode]
    assert found.steps.device_bytes.tolist() == [step.device_bytes for step in decode]
    assert found.memory == lab.memory(peak=True)
    assert found.tokens_per_s.value == pytest.approx(run.decode_tokens_per_s, rel=0.15)
    assert found.tokens_per_s.low < found.tokens_per_s.value < found.tokens_per_s.high
    assert found.ttft_s.value == pytest.approx(run.ttft_s, rel=0.25)
    assert found.bottleneck == "disk"
    assert sum(found.shares.values()) == pytest.approx(1)


def test_memory_is_exactly_what_the_engine_takes(tiny):
    for given_ in (
        {"expert_cache_slots": 8, "kv_dtype": "fp16"},
        {"expert_cache_slots": 32, "storage": "mmap", "page_size": 16},
    ):
        lab = cl.open(tiny, **given_)
        run = lab.generate("def f(x):", max_tokens=20, stop_at_eos=False)
        context = run.prompt_tokens + len(run.tokens) - 1
        assert memory_of(Shape.of_container(lab.container), lab.settings, context) == lab.memory(peak=True)


# ---- a recorded run of another engine, with its own measurements


def test_bytes_and_io_time_of_a_real_run(qwen, project):
    """Qwen3-30B-A3B on a phone: 4000 MiB of shared slots, experts read as three tensors each, on page boundaries.

    A prompt goes through its tokens one by one there, and an expert's three tensors touch one page more each than they
    fill. The very last expert of the file ends 512 bytes before its last page does.
    """
    metrics = pd.read_csv(project / "data" / "traces" / "bigmoe_qwen.metrics.csv", comment="#")
    served = serve(qwen, "4000 MiB", scope="global", recency="listed")
    read = served.misses * (qwen.expert_bytes[served.layer] + 3 * 4096)
    last = (len(qwen.layers) - 1) * qwen.num_experts + qwen.num_experts - 1
    ends_at = np.searchsorted(served.ends, np.flatnonzero(served.loaded == last), side="right") - 1
    read[ends_at] -= 512
    predicted = served.per_step(read)
    assert predicted.tolist() == metrics.read_bytes.tolist()

    half = len(metrics) // 2
    rate = metrics.read_bytes[:half].sum() / metrics.io_ms[:half].sum()
    error = predicted[half:] / rate / metrics.io_ms[half:].to_numpy() - 1
    assert np.abs(error).max() < 0.2
    assert abs(predicted[half:].sum() / rate / metrics.io_ms[half:].sum() - 1) < 0.02


# ---- what is assumed, and said


def test_without_a_trace_routing_is_assumed_and_the_band_is_wide(probe_of, olmoe):
    shape = PRESETS["OLMoE-1B-7B"].in_format("int8")
    with_trace = predict.from_probe(shape, probe_of, 4 * 2**30, {}, olmoe, prompt=16)
    without = predict.from_probe(shape, probe_of, 4 * 2**30, {}, None)
    mine, other = with_trace.at(expert_cache_slots=16), without.at(expert_cache_slots=16)
    assert "no trace" in " ".join(other.assumptions) and "no trace" not in " ".join(mine.assumptions)
    width = [p.tokens_per_s.high / p.tokens_per_s.low for p in (mine, other)]
    assert width[1] > width[0]
    assert other.tokens_per_s.low < mine.tokens_per_s.value < other.tokens_per_s.high


def test_assumed_routing_hits_as_the_recorded_models_do(olmoe):
    made = assumed.routing(16, 64, 8, tokens=299, prompt_tokens=0)
    for slots in (8, 16, 32):
        mine, real = (t.replay(policy="lru", slots=slots).attrs["totals"]["hit_rate"] for t in (made, olmoe))
        assert mine == pytest.approx(real, abs=0.08)


def test_counts_alone_give_a_prediction_that_says_so(probe_of, olmoe):
    shape = PRESETS["OLMoE-1B-7B"].in_format("int8")
    counts = Trace.from_counts(olmoe.popularity(), {"top_k": 8, "moe_layers": olmoe.layers})
    found = predict.from_probe(shape, probe_of, 4 * 2**30, {}, counts).at(expert_cache_slots=16)
    assert "counts only" in " ".join(found.assumptions)
    assert found.hit_rate == pytest.approx(olmoe.replay(policy="lru", slots=16).attrs["totals"]["hit_rate"], abs=0.15)


def test_a_trace_of_another_model_is_refused(probe_of, olmoe):
    with pytest.raises(SettingError, match="16 MoE layers x 64 experts, Qwen3-30B-A3B has 48 x 128"):
        predict.from_probe(PRESETS["Qwen3-30B-A3B"], probe_of, 2**34, {}, olmoe)


def test_a_decode_only_trace_gets_a_prompt_of_its_first_tokens(olmoe):
    made = predict.with_prompt(olmoe, 20)
    assert (made.phase == 0).sum() == 20 * 16
    assert len(np.unique(made.step[made.phase == 1])) == len(np.unique(olmoe.step)) - 20
    assert np.array_equal(made.popularity(), olmoe.popularity())
    first = made.experts[(made.phase == 0) & (made.layer == 3)]
    assert np.array_equal(first, olmoe.experts[olmoe.layer == 3][:20])
    with pytest.raises(SettingError, match="a prompt of 299 leaves none to decode"):
        predict.with_prompt(olmoe, 299)


# ---- curves


def test_slots_that_starve_the_page_cache_slow_down(probe_of, olmoe):
    """Memory for slots is memory the page cache has not: more slots, more hits, and yet slower on a slow disk."""
    disk, slots = Rates.constant("200 MB/s"), [8, 12, 16, 20]
    predictor = predict.from_probe(PRESETS["OLMoE-1B-7B"], probe_of, 10**10, {"storage": "pread"}, olmoe, disk=disk)
    table = predictor.curve(slots)
    assert table.hit_rate.is_monotonic_increasing
    assert table.tokens_per_s.is_monotonic_decreasing
    assert (table.total_bytes + table.page_cache_bytes == 10**10).all()
    direct = predictor.curve(slots, storage="direct")
    assert direct.tokens_per_s.is_monotonic_increasing and (direct.page_cache_bytes == 0).all()
    assert direct.device_bytes_per_token.tolist() == direct.bytes_per_token.tolist()


def test_what_does_not_fit_is_refused_with_the_most_that_does(probe_of, olmoe):
    predictor = predict.from_probe(PRESETS["OLMoE-1B-7B"].in_format("int8"), probe_of, 3 * 10**9, {}, olmoe)
    most = predictor.most_slots()
    predictor.at(expert_cache_slots=most)
    with pytest.raises(MemoryPlanError, match=f"the largest number that fits is {most}"):
        predictor.at(expert_cache_slots=most + 1)
    assert predictor.curve().slots.max() <= most
    with pytest.raises(MemoryPlanError, match="no slot count fits: 500 MB are there"):
        replace(predictor, memory=500_000_000).curve()


def test_positions_cost_what_they_cost(trace_of):
    served = serve(trace_of([[[0, 1]], [[0, 1]], [[0, 1]]]), 2)
    reads = read_all(served, FixedReader(1, 0.0, 1), 4)
    costs = Costs(step_s=1.0, expert_s=0.0, position_s=0.1)
    line = timeline(served, reads, costs, 1, 1)
    assert decode_seconds(served, line, costs, first_position=10).tolist() == pytest.approx([2.0, 2.1, 2.2])


def test_exact_activations_are_predicted_with_their_own_kernel_speed(probe_of, olmoe):
    shape = PRESETS["OLMoE-1B-7B"].in_format("int8")
    rounded, exact = (
        predict.from_probe(shape, probe_of, 10**11, {"activations": kind}, olmoe).costs for kind in ("int8", "fp32")
    )
    assert exact.expert_s == pytest.approx(2 * rounded.expert_s)  # half the bytes of weights a second
