"""The traces in data/: each loads, says what it is, and the one recorded here replays to what its engine found."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import colibri_lab as cl

TRACES = Path(__file__).parents[2] / "data" / "traces"


def test_the_recorded_trace_has_six_texts_and_replays_to_its_own_residency():
    trace = cl.load_trace(TRACES / "colibri_tiny_six_domains.parquet")
    assert trace.header["domains"] == ["code", "verse", "dictionary", "english", "german", "chinese"]
    assert np.unique(trace.sequence).tolist() == [0, 1, 2, 3, 4, 5]
    s = trace.header["settings"]
    table = trace.replay(policy=s["policy"], slots=s["expert_cache_slots"], scope=s["scope"], lookup=s["lookup"])
    assert table.bytes_loaded.sum() == trace.bytes.sum()
    assert table.misses.sum() == (trace.bytes > 0).sum()


def test_domains_use_different_experts_more_in_deep_layers():
    """The model card: mutual information of domain and expert grows from layer to layer, most in the last."""
    trace = cl.load_trace(TRACES / "colibri_tiny_six_domains.parquet")
    sets = {}
    for layer in (1, 6):
        counts = np.zeros((6, 32))
        mine = trace.layer == layer
        np.add.at(counts, (np.repeat(trace.sequence[mine], 4), trace.experts[mine].ravel()), 1)
        shares = counts / counts.sum(1, keepdims=True)
        mean = shares.mean(0)
        used = shares > 0
        sets[layer] = (
            shares
            * np.log2(
                np.divide(shares, mean, where=mean > 0, out=np.ones_like(shares)), where=used, out=np.zeros_like(shares)
            )
        ).sum() / 6
    assert sets[6] > 3 * sets[1]


def test_each_foreign_trace_loads_by_its_content():
    for name, experts in (("warp_olmoe_1b7b_299.jsonl", 64), ("bigmoe_qwen.route.csv", 128), ("mce_toy_events.csv", 4)):
        assert cl.load_trace(TRACES / name).header["num_experts"] == experts
