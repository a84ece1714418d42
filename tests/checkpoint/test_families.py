from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from colibri_lab.checkpoint import families, layout
from colibri_lab.checkpoint.families import FAMILIES, check_config, read_config
from colibri_lab.config import ModelConfig
from colibri_lab.errors import ModelError

# What transformers 5.24.0 gives for a configuration object of each family made without arguments.
CLASS_DEFAULTS = json.loads(Path(__file__).with_name("class_defaults.json").read_text())

ODD_HEADS = {"glm4_moe": {"head_dim": 128}}  # without it 4096 hidden and 96 heads rotate 21 dimensions, which cannot be

# Published configs as they stand on their model pages (fields that do not matter here left out), with the parameter
# counts given there.
PUBLISHED = {
    "Qwen3-30B-A3B": (
        30_532_122_624,
        dict(
            architectures=["Qwen3MoeForCausalLM"], attention_bias=False, decoder_sparse_step=1, eos_token_id=151645,
            head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960,
            max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
            num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
            num_key_value_heads=4, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0, sliding_window=None,
            tie_word_embeddings=False, torch_dtype="bfloat16", use_sliding_window=False, vocab_size=151936,
        ),
    ),
    "Mixtral-8x7B-v0.1": (
        46_702_792_704,
        dict(
            architectures=["MixtralForCausalLM"], hidden_act="silu", hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
            num_key_value_heads=8, num_local_experts=8, rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None,
            tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=32000,
        ),
    ),
    "OLMoE-1B-7B-0924": (
        6_919_161_856,
        dict(
            architectures=["OlmoeForCausalLM"], attention_bias=False, clip_qkv=None, eos_token_id=50279,
            hidden_act="silu", hidden_size=2048, intermediate_size=1024, max_position_embeddings=4096,
            norm_topk_prob=False, num_attention_heads=16, num_experts=64, num_experts_per_tok=8, num_hidden_layers=16,
            num_key_value_heads=16, rope_theta=10000.0, tie_word_embeddings=False, vocab_size=50304,
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        dict(
            architectures=["Qwen2MoeForCausalLM"], decoder_sparse_step=1, eos_token_id=151643, hidden_act="silu",
            hidden_size=2048, intermediate_size=5632, max_position_embeddings=8192, max_window_layers=21,
            moe_intermediate_size=1408, norm_topk_prob=False, num_attention_heads=16, num_experts=60,
            num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=16, rms_norm_eps=1e-6,
            rope_theta=1000000.0, shared_expert_intermediate_size=5632, sliding_window=32768,
            tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
        ),
    ),
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """read(config fields, generation fields) → ModelConfig."""

    def from_fields(fields: dict, generation: dict | None = None) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(tmp_path)

    return from_fields


@pytest.fixture
def glm(oracle):
    """Fields of the tiny glm4_moe checkpoint, in today's spelling."""
    return json.loads((oracle / "glm4_moe/config.json").read_text())


def test_both_spellings_of_the_settings_give_the_same_model(family, oracle):
    assert read_config(oracle / family) == read_config(oracle / family, "config.legacy.json")


def test_absent_fields_take_the_defaults_of_the_configuration_class(family, read):
    everything_spelled_out = CLASS_DEFAULTS[family] | ODD_HEADS.get(family, {})
    only_the_name = {"architectures": everything_spelled_out["architectures"]} | ODD_HEADS.get(family, {})
    assert read(only_the_name) == read(everything_spelled_out)


def test_defaults_that_are_easily_taken_for_the_published_values(read):
    qwen3 = read({"architectures": ["Qwen3MoeForCausalLM"]})
    assert not qwen3.router.renormalise and qwen3.rope.theta == 1e4
    mixtral = read({"architectures": ["MixtralForCausalLM"]})
    assert mixtral.rope.theta == 1e6 and mixtral.router.renormalise and mixtral.head_dim == 128
    glm = read({"architectures": ["Glm4MoeForCausalLM"], "head_dim": 128})
    assert glm.rope.dims == 64 and glm.qk_norm == "none" and glm.router.renormalise


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_hold_the_published_number_of_parameters(name, read):
    parameters, fields = PUBLISHED[name]
    config = read(fields)
    files = layout.container_files(config, expert_block_size := 1)
    assert sum(math.prod(spec.shape) for specs in files.values() for spec in specs.values()) == parameters
    assert sum("/expert_" in file for file in files) == len(config.moe_layers) * config.num_experts // expert_block_size
    assert config.windows == (None,) * config.num_layers


def test_dense_layers_of_qwen_follow_the_beat_and_the_list(read):
    fields = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6, "decoder_sparse_step": 2}
    assert read({**fields, "mlp_only_layers": [3]}).moe_layers == (1, 5)


def test_windows_of_qwen2_follow_layer_types_or_every_other_layer(read):
    fields = dict(architectures=["Qwen2MoeForCausalLM"], num_hidden_layers=4, use_sliding_window=True, sliding_window=7)
    assert read({**fields, "max_window_layers": 3}).windows == (7, None, 7, None)
    assert read({**fields, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}).windows == (None,) * 3 + (7,)
    assert read({**fields, "use_sliding_window": False}).windows == (None,) * 4


def test_generation_config_decides_how_texts_end(read, glm):
    assert read({**glm, "eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert read({**glm, "eos_token_id": 3}, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert read({**glm, "eos_token_id": 3}, {"temperature": 1.0}).eos_token_ids == (3,)


def test_an_end_of_text_id_outside_the_vocabulary_is_left_out_with_a_warning(read, glm):
    with pytest.warns(UserWarning, match=r"\[256\] lie outside the vocabulary of 256"):
        assert read({**glm, "eos_token_id": [2, 256]}).eos_token_ids == (2,)


def test_unsupported_architecture_is_refused_by_name_with_those_supported(read):
    with pytest.raises(ModelError, match="GptOssForCausalLM") as refusal:
        read({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"})
    assert all(
        family.architecture in str(refusal.value) and name in str(refusal.value) for name, family in FAMILIES.items()
    )
    with pytest.raises(ModelError, match="Qwen3MoeForSequenceClassification"):
        read({"architectures": ["Qwen3MoeForSequenceClassification"], "model_type": "qwen3_moe"})


REFUSED = {
    "yarn": dict(rope_parameters=dict(rope_type="yarn", factor=4.0)),
    "longrope": dict(rope_parameters=None, rope_scaling=dict(type="longrope")),
    "one rotary embedding": dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
    "partial_rotary_factor: expected a number above 0": dict(rope_parameters=dict(partial_rotary_factor=0)),
    "rotary dimensions": dict(rope_parameters=dict(partial_rotary_factor=0.3)),
    "hidden_act": dict(hidden_act="gelu"),
    r"already quantised \(fp8\)": dict(quantization_config=dict(quant_method="fp8")),
    "sliding_window": dict(sliding_window=64),
    "5 attention heads cannot share 2": dict(num_attention_heads=5),
    "num_hidden_layers: expected int, found '3'": dict(num_hidden_layers="3"),
    "norm_topk_prob: expected bool, found None": dict(norm_topk_prob=None),
    "top-k 9 exceeds the 8 experts": dict(num_experts_per_tok=9),
    "8 experts in 3 groups": dict(n_group=3),
    "impossible: 0 attention heads": dict(num_attention_heads=0),
    "no layer routes to experts": dict(first_k_dense_replace=3),
    "eos_token_id": dict(eos_token_id=["a"]),
    "hidden_size: expected at least 1": dict(hidden_size=0, head_dim=8),
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_cannot_be_computed_is_refused_by_the_name_of_the_setting(match, read, glm):
    with pytest.raises(ModelError, match=match) as refusal:
        read({**glm, **REFUSED[match]}, {})
    assert "config.json" in str(refusal.value)


def test_partial_rotation_is_refused_where_the_family_rotates_whole_heads(read):
    with pytest.raises(ModelError, match="rotates whole heads"):
        read({"architectures": ["MixtralForCausalLM"], "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_config_that_is_no_object_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="config.json"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        read_config(tmp_path / "nowhere")


def test_a_model_config_survives_json(family, oracle):
    config = read_config(oracle / family)
    back = ModelConfig.from_json(json.loads(json.dumps(config.to_json())))
    check_config(back)
    assert back == config


def test_a_family_is_one_table_entry(oracle, tmp_path, monkeypatch):
    """A family of new names that computes as qwen3_moe does: an entry suffices to read its settings and tensors."""
    shutil.copytree(oracle / "qwen3_moe", tmp_path / "new")
    fields = json.loads((oracle / "qwen3_moe/config.json").read_text()) | {"architectures": ["NewForCausalLM"]}
    (tmp_path / "new/config.json").write_text(json.dumps(fields))
    qwen3 = FAMILIES["qwen3_moe"]
    entry = families.Family("NewForCausalLM", qwen3.defaults, qwen3.switches, {"router": "mlp.new_gate.weight"})
    monkeypatch.setitem(FAMILIES, "new", entry)
    config = read_config(tmp_path / "new")
    assert config.family == "new"
    assert families.tensor_names(config, 1)["router"] == "model.layers.1.mlp.new_gate.weight"
