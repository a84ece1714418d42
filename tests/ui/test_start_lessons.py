"""First looks: parts of a model, experts met so far; against arithmetic and a slow count."""

from __future__ import annotations

import pytest

import colibri_lab as cl
from colibri_lab.errors import SettingError
from colibri_lab.front import project_root
from colibri_lab.trace.table import DECODE
from colibri_lab.tune.shapes import find_shape
from colibri_lab.ui import start_lessons as lessons


def test_mixtral_is_not_eight_models():
    found = lessons.parts("Mixtral-8x7B")
    assert found.table.total.sum() / 1e9 == pytest.approx(46.7, abs=0.05)  # as published
    assert found.table.active.sum() / 1e9 == pytest.approx(12.7, abs=0.1)  # 12.9 with the embedding
    assert "46.7 billion" in found.said and "8 whole models" in found.said


@pytest.mark.parametrize("model", ["colibri-tiny", "GLM-4.5-Air", "DeepSeek-V3"])
def test_parts_sum_to_the_shape(model):
    table, shape = lessons.part_table(find_shape(model)), find_shape(model)
    assert table.total.sum() == shape.total_params and table.active.sum() == shape.active_params
    assert (table.active <= table.total).all()


def test_experts_met_are_those_of_a_plain_count():
    trace = cl.load_trace(project_root() / "data/traces/warp_olmoe_1b7b_299.jsonl")
    found = lessons.touched(trace, tokens=40)
    steps = sorted(set(trace.step[trace.phase == DECODE].tolist()))[:40]
    met = {layer: set() for layer in trace.layers}
    for step, layer, experts in zip(trace.step, trace.layer, trace.experts, strict=True):
        if step in steps:
            met[int(layer)] |= set(experts.tolist())
    mean = sum(map(len, met.values())) / len(met)
    assert found.frames[0].marks[0].y == found.table.experts[39] == pytest.approx(mean)
    assert found.table.experts.is_monotonic_increasing and found.table.experts[0] == 8
    assert "after all 299 of them 61" in found.said
    with pytest.raises(SettingError, match="1 to 299"):
        lessons.touched(trace, tokens=300)
