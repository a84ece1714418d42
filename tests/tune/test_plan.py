"""Plans: sizes of published models, choices with their reasons, prediction beside measurement."""

from __future__ import annotations

import json

import pytest

import colibri_lab as cl
from colibri_lab import cli
from colibri_lab.errors import MemoryPlanError, ModelError, SettingError
from colibri_lab.tune import probe, runs
from colibri_lab.tune.plan import plan
from colibri_lab.tune.shapes import PRESETS, Shape, find_shape


# Weights in all and per token, as their publishers count them (Mixtral: 46.7 and 12.9; DeepSeek-V3: 671 and 37; GLM-5: 744
# and 40; …), in billions.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("OLMoE-1B-7B", 6.9, 1.3), ("Mixtral-8x7B", 46.7, 12.9), ("Qwen3-30B-A3B", 30.5, 3.3), ("GLM-4.5-Air", 106, 12),
        ("gpt-oss-20b", 20.9, 3.6), ("gpt-oss-120b", 116.8, 5.1), ("DeepSeek-V3", 671, 37), ("GLM-5", 744, 40),
    ],
)  # fmt: skip
def test_presets_have_the_published_sizes(name, total, active):
    shape = PRESETS[name]
    assert shape.total_params == pytest.approx(total * 1e9, rel=0.01)
    assert shape.active_params == pytest.approx(active * 1e9, rel=0.12)  # with or without the embedding table
    assert find_shape(name.lower()) is shape


def test_a_shape_from_a_checkpoint_and_from_its_container_agree(tiny):
    here, there = find_shape("colibri-tiny"), find_shape(tiny)
    assert (here.total_params, here.moe_layers, here.kv_elements) == (
        there.total_params,
        there.moe_layers,
        there.kv_elements,
    )
    assert here.block_bytes == there.block_bytes == cl.open(tiny).slot_bytes
    with pytest.raises(ModelError, match="shapes known by name: OLMoE-1B-7B"):
        find_shape("qwen3-31b")
    with pytest.raises(SettingError, match="unknown number format 'int5'"):
        PRESETS["OLMoE-1B-7B"].in_format("int5")


@pytest.fixture
def known_machine(probe_of, monkeypatch):
    monkeypatch.setattr(probe, "stored", lambda: probe_of)


def test_a_model_that_is_nowhere_gets_a_whole_plan(known_machine):
    found = plan("OLMoE-1B-7B", memory="4 GiB", disk="1 GB/s", formats=["bf16", "int8"])
    values = {choice.setting: choice for choice in found.choices}
    assert set(values) == {"expert_cache_slots", "scope", "storage", "policy", "threads", "format", "slots per layer"}
    assert all(choice.reason for choice in found.choices)
    assert values["format"].value == "int8" and values["format"].runner_up == "bf16"
    assert values["storage"].runner_up in ("pread", "direct")
    assert found.predicted.memory["total_bytes"] <= 4 * 2**30
    assert found.settings["expert_cache_slots"] == found.predicted.settings["expert_cache_slots"]
    data = json.loads(json.dumps(cli.plain(found.to_json())))
    predicted = data["predicted"]
    assert predicted["tokens_per_s_low"] < predicted["tokens_per_s"] < predicted["tokens_per_s_high"]
    assert data["measured"] is None
    assert {"ttft_s", "bytes_per_token", "bottleneck", "memory"} <= set(predicted)
    assert "no trace" in str(found)


def test_what_is_given_is_kept(known_machine):
    found = plan(
        "OLMoE-1B-7B",
        memory="4 GiB",
        formats=["int8"],
        expert_cache_slots=12,
        scope="layer",
        storage="direct",
        policy="arc",
        loader_threads=4,
    )
    assert found.settings == {
        "expert_cache_slots": 12,
        "scope": "layer",
        "storage": "direct",
        "policy": "arc",
        "threads": 2,
        "loader_threads": 4,
    }
    with pytest.raises(SettingError, match="'temperature' is not a setting of scope open"):
        plan("OLMoE-1B-7B", temperature=1.0)


def test_a_plan_that_cannot_fit_says_what_one_slot_needs(known_machine):
    with pytest.raises(MemoryPlanError, match="no slot count fits: 1.07 GB are there"):
        plan("Mixtral-8x7B", memory="1 GiB")


def test_a_machine_that_is_not_this_one(probe_of, tmp_path):
    other = probe_of.save(tmp_path / "other.json")
    data = json.loads(other.read_text())
    data["machine"] |= {"fingerprint": "f" * 16, "cpu": "Another CPU", "physical_cores": 8}
    other.write_text(json.dumps(data))
    found = plan("colibri-tiny", machine_file=other, memory="1 GiB")
    assert found.machine["cpu"] == "Another CPU" and found.settings["threads"] == 8
    with pytest.raises(SettingError, match="not a model on this machine"):
        plan("colibri-tiny", machine_file=other, measure=True)


def test_a_model_that_is_here_is_predicted_measured_and_kept(tiny):
    found = plan(tiny, measure=True, measure_tokens=16, policies_=["lru", "arc"])
    assert found.measured["n"] == 3 and found.measured["tokens_per_s"] > 0
    kept = runs.load(found.record)
    assert kept.manifest["predicted"]["tokens_per_s"] == pytest.approx(found.predicted.tokens_per_s.value)
    assert kept.manifest["measured"]["tokens_per_s"] == found.measured["tokens_per_s"]
    assert set(kept.table("choices").setting) >= {"expert_cache_slots", "policy"}
    assert runs.runs("plan").measured_tokens_per_s.tolist() == [found.measured["tokens_per_s"]]
    cl.open(tiny, **found.settings)


def test_the_command_prints_json_and_writes_a_settings_file(tiny, tmp_path, capsys):
    out = tmp_path / "s.json"
    args = ["plan", "--model", str(tiny), "--memory", "100 MB", "--policies", "lru", "--out", str(out), "--json",
            "--plot", str(tmp_path / "curve.png")]  # fmt: skip
    assert cli.main(args) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["predicted"]["tokens_per_s"] > 0 and data["measured"] is None
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert (
        cli.main(
            ["run", "--model", str(tiny), "--settings", str(out), "--prompt", "def", "--max-tokens", "3", "--json"]
        )
        == 0
    )
    ran = json.loads(capsys.readouterr().out)
    assert ran["settings"]["expert_cache_slots"] == data["settings"]["expert_cache_slots"]
    assert cli.main(["plan", "--model", str(tiny), "--memory-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] > 0


def test_in_format_forgets_exact_bytes(tiny):
    shape = find_shape(tiny).in_format("int8")
    assert isinstance(shape, Shape) and shape.path is None
    assert shape.block_bytes < find_shape(tiny).block_bytes
