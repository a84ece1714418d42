"""The five tiny checkpoints: their settings, their seeded weights, their files.

A weight depends only on (family, tensor name, shape) and is drawn by numpy, so neither torch's generator nor the order
in which a library lists its parameters can change a checkpoint.
"""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from oracle_tokenizer import EOS_ID, PAD_ID, write_tokenizer

SEED = 20
VOCAB, HIDDEN = 256, 64


@dataclass(frozen=True)
class Family:
    """`settings` are transformers' config arguments.

    config.legacy.json is overlaid with `legacy` and leaves out the fields `absent`, whose class defaults say the same.
    """

    settings: dict
    router: str = "softmax"
    eos: int | list[int] = EOS_ID
    store: torch.dtype = torch.bfloat16
    shard: str = "5GB"
    mtp_layer: bool = False
    legacy: dict | None = None
    absent: tuple[str, ...] = ()


def rope(theta: float, **more) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


SHARED_SETTINGS = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,  # far above the usual 1e-6 and 1e-5, so that an engine with its own value is found out
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
FINE = {"intermediate_size": 96, "num_experts_per_tok": 3}

# Each family carries the cases a loader or an engine gets wrong first.
FAMILIES = {
    # heads wider than hidden/heads, tied embeddings, dense layers by decoder_sparse_step, several eos ids
    "qwen3_moe": Family(
        {**FINE, **rope(1e6), "moe_intermediate_size": 48, "num_experts": 8, "head_dim": 24, "norm_topk_prob": True}
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [], "tie_word_embeddings": True},
        eos=[EOS_ID, PAD_ID],
        absent=("mlp_only_layers", "use_sliding_window", "sliding_window", "max_window_layers", "attention_bias"),
    ),
    # q/k norm over all heads together, clipped q/k/v, weights not renormalised, float32 file
    "olmoe": Family(
        {**rope(1e4), "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.5}
        | {"norm_topk_prob": False},
        store=torch.float32,
        absent=("norm_topk_prob", "rope_theta", "rope_scaling", "attention_bias"),
    ),
    # sharded file, w1/w3/w2 names, a sliding window shorter than the prompt
    "mixtral": Family(
        {**rope(1e6), "intermediate_size": 56, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 24}
        | {"sliding_window": 9},
        shard="300KB",
        absent=("rope_theta", "hidden_act", "tie_word_embeddings"),
    ),
    # gated shared expert, q/k/v biases, a dense layer by mlp_only_layers, widths that are no multiple of 4,
    # and in the 4.x spelling a sliding_window that use_sliding_window switches off
    "qwen2_moe": Family(
        {**FINE, **rope(1e6), "moe_intermediate_size": 42, "num_experts": 8, "shared_expert_intermediate_size": 70}
        | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [1], "qkv_bias": True},
        legacy={"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        absent=("norm_topk_prob", "qkv_bias", "decoder_sparse_step"),
    ),
    # sigmoid router with correction bias and groups, half of each head rotates, dense first layer, q/k/v biases;
    # published/ also holds the multi-token-prediction layer that inference must skip
    "glm4_moe": Family(
        {**rope(1e6, partial_rotary_factor=0.5), "intermediate_size": 68, "num_experts_per_tok": 3, "head_dim": 24}
        | {"moe_intermediate_size": 18, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
        | {"use_qk_norm": True, "attention_bias": True},
        router="sigmoid_group",
        mtp_layer=True,
        absent=("partial_rotary_factor", "norm_topk_prob"),
    ),
}


def draw(family: str, name: str, shape: tuple[int, ...], tied: bool) -> torch.Tensor:
    """Seeded weight with bfloat16 values, wide enough that norms, biases, clips and routing all change the logits."""
    rng = np.random.default_rng([SEED, zlib.crc32(f"{family}/{name}".encode())])
    x = rng.standard_normal(shape)
    if "norm" in name:
        x = 1 + 0.2 * x
    elif name.endswith("e_score_correction_bias"):
        x *= 0.15
    elif name.endswith(".bias"):
        x *= 0.2
    elif name.endswith(".gate.weight"):
        x *= 2 / HIDDEN**0.5
    elif "embed_tokens" in name:
        x *= 2.5 / HIDDEN**0.5 if tied else 1.0
    elif "lm_head" in name or "shared_head.head" in name:
        x *= 2.5 / HIDDEN**0.5
    else:
        x *= 1.2 / shape[-1] ** 0.5
    return torch.from_numpy(x).to(torch.bfloat16)


def stored(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Published files keep the router's correction bias in float32 whatever the rest is."""
    return weight.to(torch.float32 if name.endswith("e_score_correction_bias") else dtype).contiguous()


def write_checkpoint(name: str, out: Path) -> None:
    """config.json, config.legacy.json, model*.safetensors, generation_config.json and tokenizer files in `out`."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(name, **(SHARED_SETTINGS | family.settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(family.store)
    model.config.dtype = family.store
    model.save_pretrained(out, max_shard_size=family.shard)
    write_json(out / "generation_config.json", {"eos_token_id": family.eos, "pad_token_id": PAD_ID})
    for file in sorted(out.glob("*.safetensors")):
        names = {key: tuple(tensor.shape) for key, tensor in load_file(file).items()}
        drawn = {key: draw(name, key, shape, config.tie_word_embeddings) for key, shape in names.items()}
        save_file({k: stored(k, w, family.store) for k, w in drawn.items()}, file, metadata={"format": "pt"})
    legacy = legacy_config(read_json(out / "config.json")) | (family.legacy or {})
    write_json(out / "config.legacy.json", {k: v for k, v in legacy.items() if k not in family.absent})
    write_tokenizer(out)
    if family.mtp_layer:
        write_published(name, out, out / "published", legacy)


def legacy_config(config: dict) -> dict:
    """config.json as files published before transformers 5 spell it."""
    old = {
        k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "layer_types", "transformers_version")
    }
    rotary = config["rope_parameters"]
    old["rope_theta"], old["rope_scaling"] = rotary["rope_theta"], None
    if "partial_rotary_factor" in rotary:
        old["partial_rotary_factor"] = rotary["partial_rotary_factor"]
    old["torch_dtype"] = config["dtype"]
    return dict(sorted(old.items()))


def write_published(name: str, source: Path, out: Path, legacy: dict) -> None:
    """The same model with one multi-token-prediction layer behind the last, the way the GLM-4.5 files carry it."""
    out.mkdir()
    tensors = load_file(source / "model.safetensors")
    layers = legacy["num_hidden_layers"]
    last, extra = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    shapes = {extra + k[len(last) :]: tuple(w.shape) for k, w in tensors.items() if k.startswith(last)}
    shapes |= {extra + f"{norm}.weight": (HIDDEN,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {extra + f"{table}.weight": (VOCAB, HIDDEN) for table in ("embed_tokens", "shared_head.head")}
    shapes[extra + "eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    tensors |= {k: stored(k, draw(name, k, shape, False), torch.bfloat16) for k, shape in shapes.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", legacy | {"num_nextn_predict_layers": 1})
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, out / file)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, data) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
