"""Pictures of number formats: what they draw and say is what the tables hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from colibri_lab.checkpoint import formats, packing
from colibri_lab.checkpoint.binfile import Tensor
from colibri_lab.errors import SettingError
from colibri_lab.ui import quality_plots as plots


@pytest.fixture
def rounded():
    w = np.random.default_rng(0).normal(size=(48, 128)).astype(np.float32)
    return w, formats.decode(formats.encode(w, "int4-g64"), "int4-g64")


def test_histograms_count_every_weight_and_say_what_is_zero(rounded):
    wanted, found = rounded
    figure = plots.weight_histogram(wanted, found, "expert 3")
    before, after = figure.axes[0].patches[: plots.BINS - 1], (found == 0).mean()
    assert sum(bar.get_height() for bar in before) == wanted.size
    assert f"{100 * after:.1f} % of the weights are exactly 0 after rounding" in figure.get_supxlabel()
    assert figure.png().startswith(b"\x89PNG")


def test_errors_are_in_units_of_the_weights_spread(rounded):
    wanted, found = rounded
    error = (found - wanted) / wanted.std()
    said = plots.error_histogram(wanted, found).get_supxlabel()
    assert f"Root mean square {np.sqrt((error**2).mean()):.3f}" in said and f"largest {np.abs(error).max():.3f}" in said


def test_heat_map_has_a_cell_for_every_expert():
    rows = [
        (layer, expert, m, 0.01 * layer + 0.001 * expert)
        for layer in (1, 2)
        for expert in range(4)
        for m in ("up", "down")
    ]
    table = pd.DataFrame(rows, columns=["layer", "expert", "matrix", "output_error"])
    table["weight_error"] = np.nan
    report = SimpleNamespace(matrices=table)
    figure = plots.error_heat_map(report, "down")
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (2, 4) and image[1, 3] == pytest.approx(0.023)
    assert "worst 0.0230, expert 3 of layer 2" in figure.get_supxlabel()
    with pytest.raises(SettingError, match="holds no output_error of expert matrices 'gate'"):
        plots.error_heat_map(report, "gate")
    with pytest.raises(SettingError, match="holds no weight_error"):
        plots.error_heat_map(report, "up", "weight_error")
    with pytest.raises(SettingError, match="column must be output_error or weight_error"):
        plots.error_heat_map(report, "up", "bytes")


@pytest.mark.parametrize("format, scales", [("int8", 32), ("int4-g64", 32 * 2), ("mxfp4", 32 * 4)])
def test_every_channel_has_its_scales(format, scales):
    w = np.random.default_rng(1).normal(size=(32, 128)).astype(np.float32)
    data, scale, zero = packing.pack(formats.encode(w, format), formats.FORMATS[format], "rows16")
    tensor = Tensor("7.up", format, w.shape, "rows16", data.view(np.uint8), scale, zero)
    figure = plots.channel_scales(tensor)
    assert f"{scales} scales in 32 channels" in figure.get_supxlabel()
    assert len(figure.axes[0].lines[0].get_ydata()) == 32
    with pytest.raises(SettingError, match="7.up is bf16, which has no scales"):
        plots.channel_scales(Tensor("7.up", "bf16", (1, 4), "rows", np.zeros(8, np.uint8)))


def test_pareto_joins_what_nothing_smaller_beats():
    table = pd.DataFrame(
        {"format": ["a", "b", "c", "d"], "bytes": [4e6, 2e6, 1e6, 3e6], "bits_per_byte": [1.5, 1.52, 1.6, 1.53]}
    ).assign(reference_bits_per_byte=1.5)
    assert plots.front(table).format.tolist() == ["c", "b", "a"]
    figure = plots.pareto(table.assign(low=1.4, high=1.7))
    assert (
        "3 of 4 formats are on the line; the best of them, a, is +0.00 % from 16 bits in 4 MB" in figure.get_supxlabel()
    )
    assert {text.get_text() for text in figure.axes[0].texts} == {"a", "b", "c", "d", "16 bits"}
