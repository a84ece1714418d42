"""Findings of notebooks 02 and 06: what the sentences say is what was counted, and known figures come out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

import colibri_lab as cl
from colibri_lab.errors import SettingError, TraceError
from colibri_lab.trace import load_trace
from colibri_lab.trace.formats.tables import read_metrics
from colibri_lab.ui import cache_lessons, profile_lessons
from colibri_lab.ui.what_if import Finding

TRACES = Path(__file__).resolve().parents[2] / "data/traces"


@pytest.fixture(scope="module")
def olmoe():
    return load_trace(TRACES / "warp_olmoe_1b7b_299.jsonl")


@pytest.fixture(scope="module")
def qwen():
    return load_trace(TRACES / "bigmoe_qwen.route.csv")


@pytest.fixture(scope="module")
def times(qwen):
    return profile_lessons.decode_times(qwen, TRACES / "bigmoe_qwen.metrics.csv")


@pytest.fixture(scope="module")
def lab():
    return cl.open("data/colibri-tiny", expert_cache_slots=8, threads=1)


def well_drawn(finding: Finding) -> None:
    """Every panel has JSON for the browser and a picture whose axes name their units, at 9 points or more."""
    for frame in finding.frames:
        json.dumps(frame.spec(), allow_nan=False)
        assert frame.xlabel and frame.values.dtype == np.float32
    texts = [t for t in finding.png().findobj(Text) if t.get_text().strip()]
    assert min(t.get_fontsize() for t in texts) >= 9


def test_memory_at(olmoe):
    found = cache_lessons.memory_at(olmoe, 16, 150)
    state = found.frames[0].values[0]
    assert ((state > 0).sum(axis=1) == 16).all() and (state == 3).sum() == (~found.table.hit).sum() > 0
    assert len(found.table) == 128 and "16 fit" in found.said
    well_drawn(found)
    with pytest.raises(SettingError, match="token must be 0 to 298"):
        cache_lessons.memory_at(olmoe, 16, 299)


def test_what_repeats(olmoe):
    found = cache_lessons.what_repeats(olmoe, 16)
    assert "Random picks hit 25 %" in found.said and "in its own order 60 %" in found.said
    assert found.table["as recorded"][16] == olmoe.replay("lru", 16).attrs["totals"]["hit_rate"]
    well_drawn(found)


def test_cliff(olmoe):
    found = cache_lessons.cliff(olmoe)
    assert found.said.startswith(
        "120 slots in one pool hit 0.0 % of accesses; the first hit needs 121 slots, and one token asks for 128"
    )
    assert "128 slots in one pool hit 43.4 %" in cache_lessons.cliff(olmoe, 128).said
    well_drawn(found)


def test_lookup_orders(olmoe):
    found = cache_lessons.lookup_orders(olmoe, 8)
    rates = dict(found.table.itertuples(index=False))
    assert rates["atomic"] == rates["serial, hits first"] == pytest.approx(0.4337, abs=5e-5)
    assert rates["serial, as listed"] == pytest.approx(0.3193, abs=5e-5) and "loses 11.4 points" in found.said
    well_drawn(found)


def test_six_lines_show_the_trap():
    table = cache_lessons.six_lines()
    assert table.atomic.tolist() == table["serial-hits-first"].tolist() == [0, 1, 1, 1, 1, 1]
    assert table.serial.tolist() == [0] * 6


def test_policies(olmoe):
    found = cache_lessons.policies(olmoe, 16)
    rates = dict(found.table.itertuples(index=False))
    assert rates["oracle, keeps all"] == pytest.approx(0.7234, abs=5e-4) and rates["lru"] == pytest.approx(
        0.5968, abs=5e-5
    )
    assert all(rate <= rates["oracle, may drop"] for rate in rates.values())
    assert "Pins chosen on the first half hit 46 % of the second, lru 63 %" in found.said
    at_k = dict(cache_lessons.policies(olmoe, 8).table.itertuples(index=False))
    assert at_k["lru"] == at_k["oracle, keeps all"] == at_k["lfru"]  # what stays is the token itself
    well_drawn(found)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "waits for 111.5 → 99.9 blocks and reads 111.5 → 135.0; 57 % of what is fetched ahead is wasted."),
        ({"bandwidth": 4}, "111.5 → 114.9 blocks and reads 111.5 → 135.0; 57 % of what is fetched ahead is wasted, so it hurts."),
        ({"predictor": "same", "budget": 6}, "38 % of its guesses right: nothing is fetched, since what it names is in the cache already"),
        ({"budget": 0}, "without it a token waits for 111.5 blocks"),
    ],
)  # fmt: skip
def test_prefetch(qwen, settings, says):
    found = cache_lessons.prefetch(qwen, **settings)
    assert says in found.said
    well_drawn(found)


def test_side_by_side(olmoe, qwen):
    found = cache_lessons.side_by_side({"OLMoE": olmoe, "Qwen3": qwen}, 25)
    assert found.table.slots.tolist() == [16, 32]
    assert found.table.lru[1] == qwen.replay("lru", 32, phase="decode").attrs["totals"]["hit_rate"]
    assert found.table.overlap.tolist() == pytest.approx([0.4352, 0.3795], abs=5e-5)
    assert "Qwen3 hits 82 %, OLMoE 60 %" in found.said
    well_drawn(found)


def test_a_miss_costs_a_millisecond_once_compute_is_taken_off(times):
    rows = pd.read_csv(TRACES / "bigmoe_qwen.route.csv", comment="#").query("phase == 1")
    assert times.misses.tolist() == (rows.residency == 0).groupby(rows.step).sum().tolist()
    found = profile_lessons.misses_and_time(times)
    start, slope, r = profile_lessons.line(times.misses[10:], times.wait_ms[10:])
    assert (start, slope, r) == pytest.approx((7.25, 0.984, 0.9976), abs=5e-3)
    assert "misses fall 4.7 times, but time only 1.8 times" in found.said and "7.2 ms + 0.98 ms per miss" in found.said
    well_drawn(found)
    with pytest.raises(SettingError, match="skip 125 leaves 3 of 128 tokens"):
        profile_lessons.misses_and_time(times, 125)


def test_times_and_routing_must_belong_together(qwen):
    metrics = read_metrics(TRACES / "bigmoe_qwen.metrics.csv")
    with pytest.raises(TraceError, match="128 decode steps, the metrics have 100 rows"):
        profile_lessons.decode_times(qwen, metrics[:100])
    with pytest.raises(TraceError, match="misses as the engine had them needs residency"):
        profile_lessons.decode_times(load_trace(TRACES / "warp_olmoe_1b7b_299.jsonl"), metrics)


def test_line_finds_the_line():
    assert profile_lessons.line([0, 1, 2], [1, 3, 5]) == pytest.approx((1, 2, 1))


def test_more_slots_can_be_slower(lab):
    before = dict(lab.settings)
    runs = profile_lessons.squeeze_runs(
        lab, "def read_lines(path):", "17.7 MB", (4, 8, 20), progress=False, max_tokens=40, seed=1
    )
    assert runs.hit_rate.is_monotonic_increasing
    assert runs.disk_ms[1] > runs.disk_ms[0] > runs.disk_ms[2]
    assert (runs.slot_bytes + runs.page_cache_bytes == 17_700_000).all()
    assert lab.settings == before
    found = profile_lessons.squeeze(runs)
    assert found.said.startswith("4 → 8 slots raise the hit rate") and "at 20 slots" in found.said
    well_drawn(found)
    with pytest.raises(SettingError, match="20 slots take 17.7 MB, the memory is 10 MB"):
        profile_lessons.squeeze_runs(lab, "x", "10 MB", (20,), progress=False)
    assert lab.settings == before


def test_prompt(qwen):
    found = profile_lessons.prompt(qwen, 28)
    assert (
        "28 prompt tokens together touch 57 of 128 experts a layer, 2.0 each; a decoded token asks for 6" in found.said
    )
    well_drawn(found)
    with pytest.raises(SettingError, match="tokens must be 1 to 28"):
        profile_lessons.prompt(qwen, 29)


def test_batch(olmoe):
    found = profile_lessons.batch(olmoe, 8)
    assert found.said.startswith("8 tokens of different places touch 34 of 64 experts a layer, 4.3 each instead of 8;")
    assert "4 in a row touch 19, 2.4 times what one needs" in profile_lessons.batch(olmoe, 4).said
    well_drawn(found)


def test_warm_up(olmoe):
    found = profile_lessons.warm_up(olmoe, 16)
    assert "the first token misses 128 times. After a warm-up of 8 tokens the next 24 miss 58 times each" in found.said
    well_drawn(found)


def test_live_tables_start_cold_and_leave_no_trace(lab):
    before = dict(lab.settings)
    warm = profile_lessons.warm_up_live(lab, "def read_lines(path):", runs=(0, 2), seed=1)
    assert (
        warm.warm_up_runs.tolist() == [0, 2]
        and warm.prompt_misses[1] < warm.prompt_misses[0]
        and (warm.ttft_ms > 0).all()
    )
    lengths = profile_lessons.prompt_live(
        lab, "def read_lines(path):\n    return open(path).read()\n" * 4, (1, 32), seed=1
    )
    assert lengths.prompt_tokens[0] < lengths.prompt_tokens[1]
    assert lengths.reads_per_prompt_token[0] == 24 > lengths.reads_per_prompt_token[1]
    table = cache_lessons.live_prefetch(
        lab, "def f(x):", ("none", "same", "markov"), ("100 MB/s",), 2, max_tokens=12, seed=1
    )
    none, same, markov = table.itertuples()
    assert none.bytes_read == same.bytes_read < markov.bytes_read and (table.wait_ms > 0).all()
    assert lab.settings == before and isinstance(table, pd.DataFrame)
