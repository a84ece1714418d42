"""Mixed precision: rules, functions, and containers whose experts differ in format."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from plain_model import forward

import colibri_lab as cl
from colibri_lab.checkpoint import packing
from colibri_lab.checkpoint.container import Container
from colibri_lab.checkpoint.convert import convert
from colibri_lab.checkpoint.families import read_config
from colibri_lab.checkpoint.formats import FORMATS
from colibri_lab.checkpoint.plan_formats import find_rule, hot_cold
from colibri_lab.checkpoint.validate import validate
from colibri_lab.errors import SettingError

pytestmark = pytest.mark.filterwarnings("ignore:.*without router calibration")

TOKENS = np.arange(20, 44)
RULES = {
    "rules": [
        {"format": "int4"},
        {"layers": [1], "experts": [0, 3], "format": "int8"},
        {"matrices": ["down"], "format": "int8-g32-sym"},
        {"part": "dense", "matrices": ["q", "shared_up"], "format": "int4-g32"},
        {"layers": [2], "experts": [5], "matrices": ["gate"], "format": "fp16"},
    ]
}


def equals_plain_model(directory):
    """The engine's logits are those of a plain forward pass over the container's dequantised arrays."""
    wanted, _ = forward(Container.open(directory, allow_fp32=True), TOKENS)
    found = cl.open(directory, expert_cache_slots=3, allow_fp32=True, activations="fp32").logits(TOKENS)
    assert np.abs(found - wanted).max() < 2e-4


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "fp32"])
def test_engine_computes_what_the_container_stores(format, converted):
    equals_plain_model(converted("glm4_moe", quantize=format, tensors="all"))


def test_later_rules_win_and_what_no_rule_names_keeps_its_format(oracle):
    decide = find_rule(RULES, read_config(oracle / "glm4_moe"))
    assert decide(1, 1, "gate") == "int4-g64" and decide(1, 3, "up") == "int8" and decide(2, 3, "up") == "int4-g64"
    assert decide(1, 3, "down") == "int8-g32-sym" and decide(2, 5, "gate") == "fp16"
    assert decide(1, None, "q") == "int4-g32" and decide(1, None, "k") is None and decide(None, None, "embed") is None


def test_a_plan_is_followed_by_file_by_function_and_in_blocks(oracle, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(RULES))
    convert(oracle / "glm4_moe", tmp_path / "file", plan=path, verify=True, progress=False)
    rule = find_rule(RULES, read_config(oracle / "glm4_moe"))
    convert(oracle / "glm4_moe", tmp_path / "function", plan=rule, expert_block_size=3, progress=False)
    for name in ("file", "function"):
        box = Container.open(tmp_path / name)
        assert box.info["formats"] == {"expert": "mixed", "dense": "mixed", "float": "fp32"}
        assert validate(tmp_path / name) == []
        for layer in box.config.moe_layers:
            for block in range(box.blocks):
                for tensor in box.block(layer, block).tensors.values():
                    expert, matrix = tensor.name.split(".")
                    assert tensor.format == rule(layer, int(expert), matrix)
        assert box.dense("layer_1").tensors["q"].format == "int4-g32"
        assert box.dense("layer_1").tensors["k"].format == "bf16"
        equals_plain_model(tmp_path / name)


def test_slots_are_priced_by_the_largest_block(oracle, tmp_path):
    """One expert in bf16 among int4 ones: every slot must be able to hold it."""
    plan = {"rules": [{"format": "int4-g32"}, {"layers": [2], "experts": [4], "format": "bf16"}]}
    convert(oracle / "glm4_moe", tmp_path / "out", plan=plan, progress=False)
    box = Container.open(tmp_path / "out")
    config = box.config
    width, hidden = config.expert_intermediate_size, config.hidden_size
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    largest = sum(sum(packing.part_sizes(shape, "bf16", "rows16")) for shape in shapes)
    assert box.slot_bytes == -(-largest // 4096) * 4096
    assert box.block_layout(2, 4).payload_bytes > 3 * box.block_layout(2, 3).payload_bytes
    assert cl.open(tmp_path / "out").slot_bytes == box.slot_bytes


def test_experts_keep_their_scales_when_they_are_permuted(
    oracle, checkpoint, tmp_path, read_safetensors, write_safetensors
):
    """Experts renamed in the checkpoint: each one's bytes, scales and factor move with it."""
    values, order = read_safetensors(checkpoint), [3, 0, 5, 1, 7, 2, 6, 4]
    moved = {}
    for name, array in values.items():
        parts = name.split(".experts.")
        if len(parts) == 2:
            expert, rest = parts[1].split(".", 1)
            name = f"{parts[0]}.experts.{order[int(expert)]}.{rest}"
            array = array * np.float32(10.0 ** int(expert))  # so that every expert has scales of its own
        moved[name] = ("F32", array)
    original = {}
    for name, array in values.items():
        scale = 10.0 ** int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else 1
        original[name] = ("F32", array * np.float32(scale))
    plain = shutil.copytree(checkpoint, tmp_path / "plain")
    write_safetensors(plain / "model.safetensors", original)
    write_safetensors(checkpoint / "model.safetensors", moved)
    for source in ("plain", "checkpoint"):
        convert(tmp_path / source, tmp_path / f"{source}.out", quantize="int4", progress=False)
    a, b = (Container.open(tmp_path / f"{source}.out") for source in ("plain", "checkpoint"))
    for layer in a.config.moe_layers:
        for expert in range(8):
            one, two = a.block(layer, expert).tensors, b.block(layer, order[expert]).tensors
            for part in ("gate", "up", "down"):
                x, y = one[f"{expert}.{part}"], two[f"{order[expert]}.{part}"]
                assert x.factor == y.factor and np.array_equal(x.data, y.data)
                assert np.array_equal(x.scale, y.scale) and np.array_equal(x.zero, y.zero)


def test_hot_experts_are_those_chosen_most():
    plan = hot_cold(np.array([[5, 1, 5, 2], [0, 0, 0, 9]]), (3, 7), hot="int8", cold="int4-g32", hot_share=0.5)
    assert plan["rules"][0] == {"format": "int4-g32"}
    assert plan["rules"][1:] == [
        {"layers": [3], "experts": [0, 2], "format": "int8"},
        {"layers": [7], "experts": [0, 3], "format": "int8"},
    ]
    with pytest.raises(SettingError, match="hot_share must be within 0 and 1, got 1.5"):
        hot_cold(np.zeros((1, 4)), (3,), hot_share=1.5)


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"rules": [{"format": "int5"}]}, r"plan: rule 0: quantize cannot be 'int5'"),
        ({"rules": [{"format": "fp32"}]}, r"rule 0: format 'fp32' cannot be planned"),
        ({"rules": [{"layers": [1]}]}, "rule 0: a format is missing"),
        ({"rules": [{"format": "int8"}, {"layer": [1], "format": "int8"}]}, "rule 1: unknown key 'layer'; did you mean 'layers'"),
        ({"rules": [{"layers": [0], "format": "int8"}]}, r"layers must be a list out of 1 to 2, found \[0\]"),
        ({"rules": [{"experts": [8], "format": "int8"}]}, r"experts must be a list out of 0 to 7, found \[8\]"),
        ({"rules": [{"experts": 3, "format": "int8"}]}, "experts must be a list out of 0 to 7, found 3"),
        ({"rules": [{"matrices": ["q"], "format": "int8"}]}, r"matrices must be a list out of gate, up, down, found \['q'\]"),
        ({"rules": [{"part": "all", "format": "int8"}]}, "part must be experts or dense, found 'all'"),
        ({"rules": [{"part": "dense", "experts": [1], "format": "int8"}]}, "part dense has no experts"),
        ({"rules": {}}, "expected an object with a list rules"),
        ({"rules": [], "more": 1}, "found keys rules, more"),
        ({"rules": ["int8"]}, "rule 0: expected an object, found 'int8'"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_followed_name_the_rule(plan, message, oracle, tmp_path):
    with pytest.raises(SettingError, match=message):
        convert(oracle / "glm4_moe", tmp_path / "out", plan=plan, progress=False)
    assert not (tmp_path / "out").exists()


def test_a_plan_file_that_is_missing_or_of_a_function_gone_wrong(oracle, tmp_path):
    with pytest.raises(SettingError, match="nowhere.json: no such file"):
        convert(oracle / "glm4_moe", tmp_path / "out", plan=tmp_path / "nowhere.json", progress=False)
    with pytest.raises(SettingError, match="quantize cannot be 'int3'"):
        convert(oracle / "glm4_moe", tmp_path / "out", plan=lambda layer, expert, matrix: "int3", progress=False)
