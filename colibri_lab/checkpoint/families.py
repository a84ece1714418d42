"""What differs between MoE families: the spelling of settings and the names of tensors. Adding one is a table entry.

A family's `defaults` are the defaults of its Hugging Face configuration class: published files leave such fields out.
Both spellings are read, that of transformers 5 (`rope_parameters`) and that of 4.x (`rope_theta`, `rope_scaling`).
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..config import ModelConfig, RopeConfig, RouterConfig
from ..errors import ModelError
from .files import read_object

ALIASES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
}

_BASE = dict(
    hidden_act="silu", tie_word_embeddings=False, head_dim=None, num_key_value_heads=None, attention_bias=False,
    rope_theta=1e4, partial_rotary_factor=1.0, sliding_window=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip

_NULLABLE = dict(
    head_dim=int, num_key_value_heads=int, sliding_window=int, clip_qkv=float, mlp_only_layers=list, layer_types=list,
    bos_token_id=int, eos_token_id=(int, list),
)  # fmt: skip

_ATTENTION = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **{p: f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkvo"},
    **{f"{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"},
}
_DENSE_FFN = {p: f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
_EXPERTS = {p: f"mlp.experts.{{e}}.{p}_proj.weight" for p in ("gate", "up", "down")}


def _shared(prefix: str) -> dict[str, str]:
    return {f"shared_{p}": f"{prefix}.{p}_proj.weight" for p in ("gate", "up", "down")}


@dataclass(frozen=True)
class Family:
    """One family. `switches(c)` gives the `ModelConfig` fields that are its own from `c`, its fields by canonical name.

    `names` maps our tensor names to Hugging Face names inside `model.layers.{i}.`; `experts` does so for one expert
    ({e} is its number).
    """

    architecture: str
    defaults: dict
    switches: Callable[[dict], dict]
    names: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=lambda: _EXPERTS)
    partial_rotary: bool = False


def _sparse_step(c: dict) -> tuple[str, ...]:
    """qwen: a layer is dense when listed in mlp_only_layers or off the decoder_sparse_step beat."""
    only, step = c["mlp_only_layers"] or (), c["decoder_sparse_step"]
    if step < 1:
        raise ModelError(f"decoder_sparse_step: expected at least 1, found {step}")
    return tuple("dense" if i in only or (i + 1) % step else "moe" for i in range(c["num_hidden_layers"]))


def _same_window(c: dict) -> tuple[int | None, ...]:
    used = c.get("use_sliding_window", True)
    return (c["sliding_window"] if used else None,) * c["num_hidden_layers"]


def _typed_windows(c: dict) -> tuple[int | None, ...]:
    """qwen2_moe: `layer_types` says which layers slide; unless given, every other one below max_window_layers."""
    count = c["num_hidden_layers"]
    types = c["layer_types"]
    if types is None:
        sliding = [c["use_sliding_window"] and i % 2 == 0 and i < c["max_window_layers"] for i in range(count)]
    else:
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown or len(types) != count:
            raise ModelError(f"layer_types: expected {count} of sliding_attention or full_attention, found {types}")
        sliding = [kind == "sliding_attention" and c["use_sliding_window"] for kind in types]
    return tuple(c["sliding_window"] if slides else None for slides in sliding)


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        dict(
            vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
            num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6, use_sliding_window=False,
            sliding_window=4096, decoder_sparse_step=1, moe_intermediate_size=768, num_experts_per_tok=8,
            num_experts=128, norm_topk_prob=False, mlp_only_layers=None,
        ),
        lambda c: dict(
            ffn=_sparse_step(c), windows=_same_window(c), qk_norm="head", qkv_bias=c["attention_bias"],
            output_bias=c["attention_bias"], expert_intermediate_size=c["moe_intermediate_size"],
            router=RouterConfig("softmax", renormalise=c["norm_topk_prob"]),
        ),
        names={"router": "mlp.gate.weight"},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        dict(
            vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
            max_position_embeddings=4096, rms_norm_eps=1e-5, eos_token_id=50279, clip_qkv=None, num_experts_per_tok=8,
            num_experts=64, norm_topk_prob=False,
        ),
        lambda c: dict(
            ffn=("moe",) * c["num_hidden_layers"], windows=(None,) * c["num_hidden_layers"], qk_norm="full",
            qkv_bias=c["attention_bias"], output_bias=c["attention_bias"], clip_qkv=c["clip_qkv"],
            expert_intermediate_size=c["intermediate_size"],
            router=RouterConfig("softmax", renormalise=c["norm_topk_prob"]),
        ),
        names={"router": "mlp.gate.weight"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        dict(
            vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
            num_experts_per_tok=2, num_experts=8, rope_theta=1e6, sliding_window=None,
        ),
        lambda c: dict(
            ffn=("moe",) * c["num_hidden_layers"], windows=_same_window(c),
            expert_intermediate_size=c["intermediate_size"], router=RouterConfig("softmax", renormalise=True),
        ),
        names={"router": "block_sparse_moe.gate.weight"},
        experts={p: f"block_sparse_moe.experts.{{e}}.{w}.weight" for p, w in dict(gate="w1", up="w3", down="w2").items()},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        dict(
            vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
            num_key_value_heads=16, max_position_embeddings=32768, rms_norm_eps=1e-6, use_sliding_window=False,
            sliding_window=4096, max_window_layers=28, layer_types=None, decoder_sparse_step=1, mlp_only_layers=None,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts_per_tok=4, num_experts=60,
            norm_topk_prob=False, qkv_bias=True,
        ),
        lambda c: dict(
            ffn=_sparse_step(c), windows=_typed_windows(c), qkv_bias=c["qkv_bias"], shared="gated",
            shared_intermediate_size=c["shared_expert_intermediate_size"],
            expert_intermediate_size=c["moe_intermediate_size"],
            router=RouterConfig("softmax", renormalise=c["norm_topk_prob"]),
        ),
        names={
            "router": "mlp.gate.weight",
            **_shared("mlp.shared_expert"),
            "shared_router": "mlp.shared_expert_gate.weight",
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        dict(
            vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96,
            num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5,
            moe_intermediate_size=1408, num_experts_per_tok=8, num_experts=128, n_shared_experts=1, n_group=1,
            topk_group=1, routed_scaling_factor=1.0, first_k_dense_replace=1, norm_topk_prob=True, use_qk_norm=False,
        ),
        lambda c: dict(
            ffn=tuple("dense" if i < c["first_k_dense_replace"] else "moe" for i in range(c["num_hidden_layers"])),
            windows=(None,) * c["num_hidden_layers"], qk_norm="head" if c["use_qk_norm"] else "none",
            qkv_bias=c["attention_bias"], expert_intermediate_size=c["moe_intermediate_size"],
            shared="plain" if c["n_shared_experts"] else "none",
            shared_intermediate_size=c["moe_intermediate_size"] * c["n_shared_experts"],
            router=RouterConfig(
                "sigmoid_group", renormalise=c["norm_topk_prob"], scale=c["routed_scaling_factor"],
                groups=c["n_group"], top_groups=c["topk_group"], correction_bias=True,
            ),
        ),
        names={
            "router": "mlp.gate.weight",
            "correction_bias": "mlp.gate.e_score_correction_bias",
            **_shared("mlp.shared_experts"),
        },
        partial_rotary=True,
    ),
}  # fmt: skip


def read_config(hf_dir: str | os.PathLike, name: str = "config.json") -> ModelConfig:
    """The settings of a Hugging Face checkpoint directory; `name` is its config file.

    End-of-text ids come from generation_config.json where it gives them, else from the config. Raises `ModelError`
    naming the file and the field for an unsupported architecture and for settings this version cannot compute.
    """
    path = Path(hf_dir) / name
    raw = read_object(path, ModelError, "expected a Hugging Face checkpoint directory")
    try:
        generation_path = path.with_name("generation_config.json")
        generation = read_object(generation_path, ModelError) if generation_path.exists() else {}
        return _config(raw, generation)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _config(raw: dict, generation: dict) -> ModelConfig:
    name, family = _find_family(raw)
    c = _canonical(raw, {**_BASE, **family.defaults})
    _refuse(raw, c, family)
    heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
    if heads < 1 or not 1 <= layers <= 10_000:
        raise ModelError(f"impossible: {heads} attention heads, {layers} layers")
    head_dim = c["head_dim"] or c["hidden_size"] // heads
    own = family.switches(c)
    config = ModelConfig(
        family=name,
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=c["num_key_value_heads"] or heads,
        head_dim=head_dim,
        num_experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        dense_intermediate_size=c["intermediate_size"] if "dense" in own["ffn"] else 0,
        rope=_rope(raw, c, head_dim),
        rms_norm_eps=float(c["rms_norm_eps"]),
        tied_embeddings=c["tie_word_embeddings"],
        max_position_embeddings=c["max_position_embeddings"],
        bos_token_id=generation.get("bos_token_id", c["bos_token_id"]),
        eos_token_ids=_eos(generation.get("eos_token_id"), c),
        **own,
    )
    check_config(config)
    return config


def _refuse(raw: dict, c: dict, family: Family) -> None:
    """Settings that would change the results and that this version does not compute."""
    if c["hidden_act"] not in ("silu", "swish"):
        raise ModelError(f"hidden_act: this version computes silu experts only, found {c['hidden_act']!r}")
    quantised = raw.get("quantization_config")
    if quantised and not _readable(quantised):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"quantization_config: the weights are already quantised ({method}), which this version reads as fp8 with "
            "weight_block_size [rows, columns] and as mxfp4 only; convert from the bf16 or fp16 checkpoint"
        )
    if c["sliding_window"] is not None and "sliding_window" not in family.defaults:
        raise ModelError(
            f"sliding_window: {family.architecture} has none in this version, found {c['sliding_window']!r}"
        )


def _readable(quantised) -> bool:
    """Whether `Source` reads weights of this quantization_config."""
    if not isinstance(quantised, dict):
        return False
    block = quantised.get("weight_block_size")
    sized = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    return quantised.get("quant_method") == "mxfp4" or (quantised.get("quant_method") == "fp8" and sized)


def _find_family(raw: dict) -> tuple[str, Family]:
    """By architecture name; by model_type where the file names no architecture."""
    found = raw.get("architectures") or []
    for name, family in FAMILIES.items():
        if family.architecture in found or (not found and raw.get("model_type") == name):
            return name, family
    supported = ", ".join(f"{family.architecture} ({name})" for name, family in FAMILIES.items())
    what = " ".join(found) or raw.get("model_type") or "no architecture at all"
    raise ModelError(f"unsupported architecture {what}; supported: {supported}")


def _canonical(raw: dict, defaults: dict) -> dict:
    """Every field the family knows: the file's value under any of its aliases, else the class default."""
    c = {}
    for key, default in defaults.items():
        spelled = next((alias for alias in ALIASES.get(key, (key,)) if alias in raw), None)
        value = default if spelled is None else raw[spelled]
        nullable = key in _NULLABLE
        kind = _NULLABLE.get(key) or type(default)
        if value is None and nullable:
            c[key] = None
            continue
        good = isinstance(value, (int, float) if kind is float else kind)
        if not good or (isinstance(value, bool) and kind is not bool):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ModelError(f"{spelled}: expected {wanted}{' or null' if nullable else ''}, found {value!r}")
        c[key] = value
    return c


def _rope(raw: dict, c: dict, head_dim: int) -> RopeConfig:
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"rope_parameters: expected one rotary embedding for all layers, found {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ModelError(f"rope type {kind!r} is not supported by this version; supported: default")
    theta = given.get("rope_theta", c["rope_theta"])
    fraction = given.get("partial_rotary_factor", c["partial_rotary_factor"])
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", fraction)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(f"{name}: expected a number above 0, found {value!r}")
    if fraction != 1 and not _find_family(raw)[1].partial_rotary:
        raise ModelError(f"partial_rotary_factor: this family rotates whole heads, found {fraction!r}")
    return RopeConfig(theta=float(theta), dims=int(head_dim * fraction))


def _eos(generation_eos, c: dict) -> tuple[int, ...]:
    ids = c["eos_token_id"] if generation_eos is None else generation_eos
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ModelError(f"eos_token_id: expected a token id or a list of them, found {ids!r}")
    outside = [i for i in ids if not 0 <= i < c["vocab_size"]]
    if outside:
        warnings.warn(
            f"end-of-text ids {outside} lie outside the vocabulary of {c['vocab_size']}: left out", stacklevel=4
        )
    return tuple(i for i in ids if i not in outside)


_CHOICES = {
    "qk_norm": ("none", "head", "full"),
    "shared": ("none", "plain", "gated"),
    "router.kind": ("softmax", "topk_softmax", "sigmoid_group"),
    "rope.style": ("half",),
}


def check_config(config: ModelConfig) -> None:
    """Raises `ModelError` for contradictions that would otherwise surface deep inside the engine."""
    c, router = config, config.router
    sizes = ["vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k",
             "expert_intermediate_size", "max_position_embeddings"]  # fmt: skip
    sizes += ["dense_intermediate_size"] if "dense" in c.ffn else []
    sizes += ["shared_intermediate_size"] if c.shared != "none" else []
    for name in sizes:
        if getattr(c, name) < 1:
            raise ModelError(f"{name}: expected at least 1, found {getattr(c, name)}")
    for name, choices in _CHOICES.items():
        value = operator.attrgetter(name)(c)
        if value not in choices:
            raise ModelError(f"{name}: expected one of {', '.join(choices)}, found {value!r}")
    good_windows = all(w is None or (type(w) is int and w > 0) for w in c.windows)
    for name, good in (("ffn", set(c.ffn) <= {"moe", "dense"}), ("windows", good_windows)):
        if not good or len(getattr(c, name)) != c.num_layers:
            raise ModelError(
                f"{name}: expected one valid entry for each of {c.num_layers} layers, found {getattr(c, name)}"
            )
    if not c.moe_layers:
        raise ModelError("no layer routes to experts; this is a dense model")
    if c.num_heads % c.num_kv_heads:
        raise ModelError(f"{c.num_heads} attention heads cannot share {c.num_kv_heads} key/value heads evenly")
    if c.top_k > c.num_experts:
        raise ModelError(f"top-k {c.top_k} exceeds the {c.num_experts} experts")
    if router.groups < 1 or c.num_experts % router.groups or not 1 <= router.top_groups <= router.groups:
        raise ModelError(
            f"{c.num_experts} experts in {router.groups} groups, best {router.top_groups} kept: impossible"
        )
    size = c.num_experts // router.groups
    if router.groups > 1 and (size < 2 or size * router.top_groups < c.top_k):
        raise ModelError(f"top-k {c.top_k} from the best {router.top_groups} groups of {size} experts: impossible")
    if c.rope.dims % 2 or not 0 < c.rope.dims <= c.head_dim:
        raise ModelError(f"rotary dimensions: expected an even number up to {c.head_dim}, found {c.rope.dims}")


def default_fields(family: str) -> dict:
    """Every config.json field that is read of this family, in canonical names, with its default."""
    return {**_BASE, **FAMILIES[family].defaults}


def tensor_names(config: ModelConfig, layer: int | None = None) -> dict[str, str]:
    """Our tensor name → Hugging Face name: of the whole model's tensors, or of one layer's (experts aside)."""
    if layer is None:
        return {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    own = FAMILIES[config.family].names if config.ffn[layer] == "moe" else _DENSE_FFN
    return {ours: f"model.layers.{layer}.{theirs}" for ours, theirs in {**_ATTENTION, **own}.items()}


def expert_names(config: ModelConfig, layer: int, expert: int) -> dict[str, str]:
    """ "gate", "up" and "down" of one expert → Hugging Face name."""
    names = FAMILIES[config.family].experts
    return {ours: f"model.layers.{layer}.{theirs.format(e=expert)}" for ours, theirs in names.items()}


def is_mtp(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to next-token-prediction layers behind the model proper, which are not used."""
    parts = name.split(".")
    if parts[0] == "mtp":
        return True
    return name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) >= config.num_layers
