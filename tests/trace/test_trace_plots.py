"""Every picture draws from its table, fits its words in, and says the number that its table holds."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

from colibri_lab.trace import load_trace
from colibri_lab.trace import locality as loc
from colibri_lab.trace.bounds import regime
from colibri_lab.trace.formats.tables import read_metrics
from colibri_lab.trace.windows import sch
from colibri_lab.ui import trace_plots as plots

SLOTS = np.arange(1, 65)
RATES = {"lru": 0.6, "sieve": 0.58, "weighted-lru": 0.62, "belady": 0.4, "belady-bypass": 0.3}
CURVES = pd.concat(
    pd.DataFrame({"policy": name, "slots": SLOTS, "hit_rate": (SLOTS / 64) ** power}) for name, power in RATES.items()
)


def drawn(figure):
    """The picture's sentence, after checking that nothing warned, that it is a PNG and that text is 9 pt or more."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert figure.png().startswith(b"\x89PNG")
    for ax in figure.axes:
        texts = [*ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label, *ax.texts]
        assert all(text.get_fontsize() >= 9 for text in texts)
    return figure.get_supxlabel()


@pytest.fixture(scope="module")
def olmoe(traces):
    return load_trace(traces / "warp_olmoe_1b7b_299.jsonl").select(layers=range(6))


@pytest.fixture(scope="module")
def report(olmoe):
    return loc.locality(olmoe)


def test_curves_name_the_widest_gap():
    figure = plots.curves(CURVES, cycle=8)
    gap = (SLOTS / 64) ** 0.3 - (SLOTS / 64) ** 0.58
    assert drawn(figure).startswith(f"At slots {SLOTS[gap.argmax()]}, sieve hits")
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["lru"].get_color() == "#0072B2"
    assert lines["belady-bypass"].is_dashed() and lines["belady"].is_dashed()
    styles = {(line.get_color(), line.get_linestyle(), line._dash_pattern[1] is None) for line in lines.values()}
    assert len(styles) >= 4, "policies differ in colour or dash"
    drawn(plots.curves(CURVES, miss=True))
    drawn(plots.curves(CURVES[CURVES.policy == "lru"].assign(bytes=SLOTS * 5e8), x="bytes", scale=1e9))


def test_all_policies_at_once_stay_apart():
    table = pd.concat(pd.DataFrame({"policy": f"p{i}", "slots": SLOTS, "hit_rate": SLOTS / 64}) for i in range(21))
    assert drawn(plots.curves(table)) == ""


def test_sizes_and_speed(traces):
    split = {
        "policy": "lru",
        "slots": SLOTS,
        "accesses": 100,
        "compulsory": 2,
        "capacity": 40,
        "policy_misses": 64 - SLOTS,
    }
    assert drawn(plots.gap_split(pd.DataFrame(split))).startswith(
        "At 1 slots, 63.0 % of accesses miss by the choice of lru"
    )
    pairs = pd.DataFrame(
        [(layer, s, s / (s + layer + 1)) for layer in range(4) for s in SLOTS], columns=["layer", "slots", "hit_rate"]
    )
    assert drawn(plots.layer_slots(pairs)) == "Layer 3 is the hardest to cache."
    layers = pd.DataFrame({"layer": range(4), "hits": [10, 20, 30, 40], "accesses": [100, 100, 100, 100]})
    layers["hit_rate"] = layers.hits / layers.accesses
    assert drawn(plots.layer_hits(layers)) == "Layers range from 10.0 % to 40.0 %; all accesses together 25.0 %."
    predicted = pd.DataFrame({"slots": SLOTS, "tokens_per_s": 10 - (SLOTS - 30) ** 2 / 200, "low": 1, "high": 11})
    measured = pd.DataFrame({"slots": [8, 16], "tokens_per_s": [7, 9]})
    assert drawn(plots.speed(predicted, measured)) == "Predicted best: 30 slots, 10 tokens/s."
    table = CURVES.assign(bytes_per_token=(1 - CURVES.hit_rate) * 1e9)
    assert drawn(plots.bytes_per_token(table, budget=5e8)) == "The disk keeps up from 20 slots."
    assert "At no size" in drawn(plots.bytes_per_token(table[table.slots < 9], budget=1e8))
    assert "slots," in drawn(plots.marginal_gain(CURVES[CURVES.policy == "lru"], slot_bytes=1e8))
    metrics = read_metrics(traces / "bigmoe_qwen.metrics.csv")
    assert drawn(plots.latency(metrics.wall_ms, metrics.wall_ms * 2)).startswith(
        f"Median {metrics.wall_ms.median():.3g} ms"
    )
    reroute = pd.DataFrame({"name": ["a", "b"], "hit_rate": [0.6, 0.7], "agreement": [1, 0.9]})
    assert drawn(plots.agreement(reroute)).startswith("2 of 2 settings")


def test_locality_pictures(olmoe, report):
    assert "of 64 experts a layer" in drawn(plots.popularity(olmoe.popularity()))
    assert "are first uses" in drawn(plots.reuse(report["reuse"]))
    overlap = report["overlap"].query("distance == 1").overlap.mean()
    assert f"{100 * overlap:.1f} %" in drawn(plots.overlap(report["overlap"]))
    counts = loc.coactivation(olmoe, 2)
    values = counts.to_numpy() - np.diag(np.diag(counts))
    assert f"together on {values.max()} tokens" in drawn(plots.matrix(counts, "together", "expert", "expert"))
    drawn(plots.matrix(loc.transitions(olmoe, 2), "onward", "expert in layer 2", "expert in layer 3"))
    drawn(plots.windows(report["srp"]))
    drawn(plots.windows(report["srp"], sch(olmoe, 4)))
    recall = report["predictability"].query("budget == 8").groupby("predictor").recall.mean()
    expected = f"'{recall.idxmax()}' names {100 * recall.max():.1f} %"
    assert expected in drawn(plots.prefetch(report["predictability"]))


def test_time_and_token_pictures(traces):
    trace = load_trace(traces / "bigmoe_qwen.route.csv").select(phase="decode", layers=range(12))
    events = trace.events()
    table = pd.DataFrame({
        "step": np.repeat(events.step, events.widths), "layer": np.repeat(events.layer, events.widths),
        "hit": events.resident, "prefetched": 0,
    })  # fmt: skip
    full = table.groupby(["step", "layer"]).hit.min().mean()
    assert drawn(plots.token_layer(table)) == f"{100 * full:.1f} % of the events found all their experts."
    by_step = table.groupby("step").hit.agg(["sum", "count"]).to_numpy().T
    settled = by_step[0][10:].sum() / by_step[1][10:].sum()
    assert f"is {100 * settled:.1f} %" in drawn(plots.over_time(*by_step, window=8, warm_up=10, baseline=by_step))
    assert "100.0 % of the events want more experts than the 4 slots; mean r is 1.50" in drawn(
        plots.regime(regime(trace, 4))
    )


def test_domain_picture():
    rows = [
        ("code", "verse", 0.4, 0.2, 2.0, 0.3),
        ("code", "german", 0.5, 0.2, 2.5, 0.2),
        ("verse", "german", 0.3, 0.2, 1.5, 0.4),
    ]
    table = pd.DataFrame(rows, columns=["a", "b", "between", "within", "ratio", "shared_top"])
    assert drawn(plots.domains(table)) == "code and german differ 2.5 times as much as two halves of one text."
