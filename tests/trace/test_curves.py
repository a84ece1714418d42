"""Curves in one pass are the replays at every size, to the last count."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import SettingError, TraceError
from colibri_lab.trace import Trace, load_trace
from colibri_lab.trace.curves import curve, hit_table, one_pass
from colibri_lab.trace.source import contract_of

COUNTS = ["accesses", "hits", "misses", "events", "full_events", "loads"]
ONE_PASS = ["lru", "lfu", "belady", "belady-bypass", "static-pin"]


@pytest.fixture(scope="module")
def olmoe(traces) -> Trace:
    return load_trace(traces / "warp_olmoe_1b7b_299.jsonl")


@pytest.fixture(scope="module")
def qwen(traces) -> Trace:
    return load_trace(traces / "bigmoe_qwen.route.csv")


@st.composite
def small_traces(draw):
    """Several layers, prefill steps of several tokens, two sequences."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, experts, k = draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(1, 2))
    rows = []
    for step in range(draw(st.integers(2, 20))):
        tokens = int(rng.integers(1, 4)) if rng.random() < 0.2 else 1
        for layer in range(layers):
            for _ in range(tokens):
                chosen = np.argsort(rng.random(experts) * np.arange(1, experts + 1))[:k]
                rows.append((step, layer, step // 10, int(tokens == 1), chosen))
    step, layer, sequence, phase, chosen = zip(*rows, strict=True)
    header = {"num_experts": experts, "ranked": True, "moe_layers": range(layers)}
    header["expert_bytes"] = {layer: 100 + layer for layer in range(layers)}
    return Trace.from_rows(
        step=step, layer=layer, sequence=sequence, phase=phase, experts=np.array(chosen), header=header
    )


@pytest.mark.parametrize("policy", ONE_PASS)
@settings(max_examples=30)
@given(data=st.data(), trace=small_traces())
def test_one_pass_is_one_replay_per_size(policy, data, trace):
    """Counts of every kind, per layer, at all sizes from 1 slot up, whatever the contract."""
    contract = {
        "scope": data.draw(st.sampled_from(("layer", "global"))),
        "lookup": data.draw(st.sampled_from(("atomic", "serial"))),
        "order": data.draw(st.sampled_from(("rank", "id", "random"))),
        "admission": data.draw(st.sampled_from(("forced", "bypass"))),
        "reset": data.draw(st.sampled_from(("never", "per-sequence"))),
        "count": data.draw(st.sampled_from(("union", "logical"))),
        "warmup_steps": data.draw(st.integers(0, 1)),
        "seed": 3,
    }
    table = curve(trace, policy, by="layer", progress=False, **contract)
    most = trace.num_experts * (len(trace.layers) if contract["scope"] == "global" else 1)
    assert table["one_pass"].all() and table["slots"].max() == most
    for slots, part in table.groupby("slots"):
        wanted = trace.replay(policy=policy, slots=int(slots), **contract)
        for name in [*COUNTS, "bytes_loaded"]:
            assert part[name].tolist() == wanted[name].tolist(), (slots, name)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_one_pass_on_real_traces(olmoe, qwen, scope):
    sizes = {"layer": [1, 5, 8, 9, 16, 33, 64], "global": [1, 100, 127, 128, 129, 400, 1024]}[scope]
    for trace in (olmoe, qwen):
        table = curve(trace, ONE_PASS, sizes, scope=scope, progress=False)
        for row in table.itertuples():
            totals = trace.replay(policy=row.policy, slots=row.slots, scope=scope).attrs["totals"]
            assert (row.hits, row.full_events, row.bytes_loaded) == (
                totals["hits"],
                round(totals["full_event_hit_rate"] * totals["events"]),
                totals["bytes_loaded"],
            )


def test_curves_of_nested_policies_never_fall(olmoe):
    table = curve(olmoe, ["lru", "lfu", "belady", "belady-bypass", "static-pin"], progress=False)
    for policy, part in table.groupby("policy"):
        assert part["slots"].tolist() == list(range(1, 65))
        assert (np.diff(part["hits"]) >= 0).all(), policy
    last = table[table["slots"] == 64].set_index("policy")["misses"]
    assert set(last.drop("static-pin")) == {974} and last["static-pin"] == 0  # it was loaded before the start


def test_other_policies_are_replayed_at_each_size(olmoe):
    table = curve(olmoe, "s3-fifo,lru", [8, 16], progress=False, params={"s3-fifo": {"small": 0.3}})
    other = table[table["policy"] == "s3-fifo"]
    assert other["one_pass"].tolist() == [False, False]
    assert other["hits"].tolist() == [
        olmoe.replay(policy="s3-fifo", slots=s, params={"small": 0.3}).attrs["totals"]["hits"] for s in (8, 16)
    ]
    assert table[table["policy"] == "lru"]["one_pass"].all()


def test_all_policies_and_a_python_one(olmoe):
    class Fifo:
        """fifo in Python"""

        def __init__(self, slots):
            self.order = []

        def insert(self, layer, block, now, weight):
            self.order.append((layer, block))

        def evict(self, layer, block):
            self.order.remove((layer, block))

        def victim(self, candidates):
            return min(candidates, key=self.order.index)

    short = olmoe.select(steps=slice(0, 20))
    table = curve(short, "all", [8, 16], progress=False)
    assert table["policy"].nunique() == 22
    assert table.attrs["notes"] == ["gate-weighted left out: gate weights were not recorded"]
    mine = curve(short, [Fifo], [8, 16], progress=False)
    theirs = table[table["policy"] == "fifo"]
    assert mine["hits"].tolist() == theirs["hits"].tolist()
    assert mine["policy"].tolist() == ["Fifo", "Fifo"]


def test_large_pools_are_sampled(qwen):
    """48 x 128 blocks: one-pass policies at every count, others at 64 counts."""
    table = curve(qwen, ["lru", "fifo"], scope="global", progress=False)
    assert (table["policy"] == "lru").sum() == 6144
    fifo = table[table["policy"] == "fifo"]["slots"].tolist()
    assert len(fifo) == 64 and fifo[0] == 1 and fifo[-1] == 6144


def test_sizes_in_bytes(qwen):
    table = curve(qwen, "lru,clock", ["1000 MiB", "4000 MiB"], scope="global", progress=False)
    wanted = [qwen.replay(policy=p, slots=s, scope="global").attrs["totals"]["hits"]
              for p in ("lru", "clock") for s in ("1000 MiB", "4000 MiB")]  # fmt: skip
    assert table["hits"].tolist() == wanted
    assert not table["one_pass"].any()


def test_phases_of_a_curve_add_up(qwen):
    parts = {p: curve(qwen, "lru", [16, 32], phase=p, progress=False) for p in ("all", "prefill", "decode")}
    for name in COUNTS:
        assert (parts["all"][name] == parts["prefill"][name] + parts["decode"][name]).all(), name


def test_curve_with_prefetch(olmoe):
    table = curve(olmoe, "lru", [16], prefetch="same", prefetch_budget=8, progress=False)
    totals = olmoe.replay(slots=16, prefetch="same", prefetch_budget=8).attrs["totals"]
    row = table.iloc[0]
    assert not row["one_pass"]
    assert (row["hits"], row["misses"], row["prefetch_timely"]) == (
        totals["hits"], totals["misses"], totals["prefetch"]["timely"],
    )  # fmt: skip


def test_hit_table(olmoe):
    hits, accesses = hit_table(olmoe, "lru")
    assert hits.shape == (16, 65) and (hits[:, 0] == 0).all()
    assert hits[:, 16].tolist() == olmoe.replay(slots=16)["hits"].tolist()
    assert (accesses == 299 * 8).all()


def test_one_pass_is_known_by_contract():
    assert one_pass("lru", contract_of({})) and one_pass("lfu", contract_of({"lookup": "serial"}))
    assert not one_pass("lru", contract_of({"lookup": "serial-hits-first"}))
    assert not one_pass("lru", contract_of({"prefetch": "same", "prefetch_budget": 2}))
    assert not one_pass("fifo", contract_of({}))


def test_refusals(olmoe):
    with pytest.raises(SettingError, match="unknown policy 'lur'"):
        curve(olmoe, "lru,lur", progress=False)
    with pytest.raises(SettingError, match="by must be policy or layer, got 'token'"):
        curve(olmoe, "lru", by="token", progress=False)
    with pytest.raises(SettingError, match="params for 'fifo', which is not among"):
        curve(olmoe, "lru", params={"fifo": {}}, progress=False)
    with pytest.raises(SettingError, match="no one-pass curve under this contract"):
        hit_table(olmoe, "arc")
    with pytest.raises(TraceError, match="gate-weighted needs gates"):
        curve(olmoe, "gate-weighted", [8], progress=False)


def test_a_curve_can_be_saved(olmoe, tmp_path):
    table = curve(olmoe, "lru", [8, 16], progress=False)
    table.to_parquet(tmp_path / "curve.parquet")
    assert pd.read_parquet(tmp_path / "curve.parquet")["hits"].tolist() == table["hits"].tolist()
