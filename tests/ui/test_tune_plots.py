"""Pictures of plans, probes and comparisons: they draw what the tables hold and say it in a sentence."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from colibri_lab.errors import SettingError
from colibri_lab.tune.compare import Comparison, judge
from colibri_lab.tune.predict import CLASSES, Band
from colibri_lab.ui import tune_plots


@pytest.fixture
def plan():
    slots = np.array([8, 16, 32])
    curves = pd.DataFrame(
        {"slots": slots, "tokens_per_s": slots / 4, "low": slots / 5, "high": slots / 3, "storage": "pread", "scope": "layer",
         "format": "int8"}
    )  # fmt: skip
    other = curves.assign(storage="direct", tokens_per_s=slots / 8)
    predicted = SimpleNamespace(
        settings={"expert_cache_slots": 16, "scope": "layer"}, tokens_per_s=Band(4.0, 3.2, 5.3), bottleneck="disk",
        memory={"total_bytes": 2_000_000_000}, shares=dict.fromkeys(CLASSES, 0.2),
    )  # fmt: skip
    shape = SimpleNamespace(name="OLMoE-1B-7B", formats=("int8", "bf16"))
    return SimpleNamespace(curves=pd.concat([curves, other]), predicted=predicted, measured=None, shape=shape)


def texts(figure) -> str:
    found = [text.get_text() for legend in [*figure.legends, *(ax.get_legend() for ax in figure.axes)] if legend
             for text in legend.get_texts()]  # fmt: skip
    return " | ".join([figure.get_supxlabel(), *(ax.get_title(loc="left") for ax in figure.axes), *found])


def test_speed_over_slots_shows_bands_choice_and_stars(plan):
    plan.measured = {"tokens_per_s": 4.2}
    figure = tune_plots.slots(plan, pd.DataFrame({"slots": [8], "tokens_per_s": [2.1]}))
    said = texts(figure)
    assert "16 slots take 2 GB and give 4 tokens/s (3.2 to 5.3); a faster disk or more memory would help most." in said
    assert "recommended" in said and "measured, 2 setting(s)" in said
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["pread, band holds 9 of 10 runs"].get_ydata().tolist() == [2, 4, 8]
    assert figure.png()[:4] == b"\x89PNG"


def test_shares_sum_to_the_whole_bar(plan):
    figure = tune_plots.shares(plan.predicted)
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == pytest.approx(100)
    assert "page cache 20%" in texts(figure)


def test_predicted_beside_measured_names_the_worst_error():
    table = pd.DataFrame(
        {"slots": [8, 16], "predicted": [2.2, 4.0], "low": [2, 3], "high": [3, 5], "measured": [2.0, 4.0]}
    )
    assert "predicted within 10.0% of measured at worst, 5.0% in the median" in texts(tune_plots.beside(table))
    with pytest.raises(SettingError, match="nothing to draw"):
        tune_plots.beside(table[:0])


def test_disk_rates_by_size_and_depth():
    rows = [{"block_bytes": size, "depth": depth, "how": "direct", "bytes_per_s": 1e9 * depth, "low": 9e8, "high": 1.1e9, "n": 3}
            for size in (1 << 16, 1 << 20) for depth in (1, 2)]  # fmt: skip
    figure = tune_plots.disk(SimpleNamespace(table=lambda name: pd.DataFrame(rows)))
    assert "Best 2.00 GB/s, 2 reads" in texts(figure) and "1 under way" in texts(figure)
    with pytest.raises(SettingError, match="no disk rates"):
        tune_plots.disk(SimpleNamespace(table=lambda name: pd.DataFrame()))


def test_every_run_of_a_comparison_is_a_dot():
    samples, found = judge(lambda: 1.0, lambda: 1.0, n=3)
    figure = tune_plots.comparison(Comparison({}, {}, "tokens_per_s", samples, **found))
    dots = sum(len(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "o")
    assert dots == len(samples)
    assert "No winner" in texts(figure)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [
        "A, n = 12",
        "B, n = 6",
        "A again, n = 6",
    ]
