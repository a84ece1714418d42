#!/usr/bin/env python3
"""Reference fixtures: tiny seeded MoE checkpoints and what Hugging Face transformers computes from them.

    make_oracle.py OUT [family ...]            build OUT/<family>/ (all five families by default)
    make_oracle.py --compare DIR [family ...]  rebuild elsewhere and compare with DIR/<family>/; exit 1 on a difference
    make_oracle.py --tiny MODEL_DIR OUT        reference.json and reference.npz of the shipped model

Needs torch and transformers 5 (`pip install -e ".[oracle]"`); the fixtures themselves are read with numpy alone.
README.md beside this file describes every file and array.

A weight depends only on (family, tensor name, shape), drawn by numpy, so neither torch's generator nor the order in
which a library lists its parameters can change a checkpoint. References are float32, eager attention, eager experts,
without a KV cache: the plainest path transformers has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_tokenizer import EOS_ID, PAD_ID, write_tokenizer

SEED = 20
VOCAB, HIDDEN = 256, 64
ROWS, PROMPT_TOKENS, NEW_TOKENS = 2, 24, 16
LEAST_ROUTING_MARGIN, LEAST_GREEDY_GAP, MOST_DRAWS = 5e-4, 2e-2, 200
COMPARE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Family:
    """`settings` are transformers' config arguments; `legacy` overlays the 4.x spelling of config.json."""

    settings: dict
    router: str = "softmax"
    eos: int | list[int] = EOS_ID
    store: torch.dtype = torch.bfloat16
    shard: str = "5GB"
    mtp_layer: bool = False
    legacy: dict | None = None


def rope(theta: float, **more) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


SHARED_SETTINGS = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
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
    ),
    # q/k norm over all heads together, clipped q/k/v, weights not renormalised, float32 file
    "olmoe": Family(
        {**rope(1e4), "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.5}
        | {"norm_topk_prob": False},
        store=torch.float32,
    ),
    # sharded file, w1/w3/w2 names, a sliding window shorter than the prompt
    "mixtral": Family(
        {**rope(1e6), "intermediate_size": 56, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 24}
        | {"sliding_window": 9},
        shard="300KB",
    ),
    # gated shared expert, q/k/v biases, a dense layer by mlp_only_layers, widths that are no multiple of 4,
    # and in the 4.x spelling a sliding_window that use_sliding_window switches off
    "qwen2_moe": Family(
        {**FINE, **rope(1e6), "moe_intermediate_size": 42, "num_experts": 8, "shared_expert_intermediate_size": 70}
        | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [1], "qkv_bias": True},
        legacy={"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
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
    ),
}


# -- checkpoints ------------------------------------------------------------------------------------------------------


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
    write_json(out / "config.legacy.json", legacy)
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


# -- references -------------------------------------------------------------------------------------------------------


def load(path: Path):
    settings = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **settings).eval()


@torch.no_grad()
def forward(model, ids: torch.Tensor) -> tuple[torch.Tensor, dict, dict]:
    """Logits (rows, tokens, vocab), activations by name, and per MoE layer the router's (logits, weights, ids)."""
    seen, routes, hooks = {}, {}, []

    def keep(store, key):
        return lambda module, args, out: store.__setitem__(key, out)

    base = model.model
    hooks.append(base.embed_tokens.register_forward_hook(keep(seen, "embed")))
    hooks.append(base.norm.register_forward_hook(keep(seen, "final_norm")))
    for i, layer in enumerate(base.layers):
        hooks.append(layer.register_forward_hook(keep(seen, f"hidden_L{i}")))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(keep(routes, i)))
    logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, seen, routes


def by_expert_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ids ascending and the weights that belong to them: torch.topk leaves the order of near ties open."""
    ids, order = torch.sort(ids, dim=-1)
    return ids.numpy().astype(np.int32), torch.gather(weights.float(), -1, order).numpy()


def route(kind: str, config, logits: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, float]:
    """The router again, in numpy float64: ids ascending (n, k), weights, and how close the nearest other choice was."""
    k = config.num_experts_per_tok
    if kind == "softmax":
        score = np.exp(logits - logits.max(-1, keepdims=True))
        score /= score.sum(-1, keepdims=True)
        choice, margin = score, np.inf
    else:
        score = 1 / (1 + np.exp(-logits))
        choice = score + bias
        groups = choice.reshape(len(choice), config.n_group, -1)
        strength = np.sort(groups, -1)[..., -2:].sum(-1)
        ranked = np.sort(strength, -1)[:, ::-1]
        margin = (ranked[:, config.topk_group - 1] - ranked[:, config.topk_group]).min()
        kept = strength >= ranked[:, [config.topk_group - 1]]
        choice = np.where(kept[..., None], groups, -np.inf).reshape(choice.shape)
    order = np.argsort(-choice, -1, kind="stable")
    ids = np.sort(order[:, :k], -1)
    edge = np.take_along_axis(choice, order[:, k - 1 : k + 1], -1)
    weights = np.take_along_axis(score, ids, -1)
    if getattr(config, "norm_topk_prob", True):  # mixtral has no such switch and always renormalises
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * getattr(config, "routed_scaling_factor", 1.0)
    return ids, weights, float(min(margin, (edge[:, 0] - edge[:, 1]).min()))


def routing_margin(model, kind: str, routes: dict) -> float:
    """Smallest margin over layers and tokens; raises AssertionError where numpy and transformers route differently."""
    margins = []
    for i, (logits, weights, ids) in routes.items():
        bias = getattr(model.model.layers[i].mlp.gate, "e_score_correction_bias", None)
        want_ids, want_weights, margin = route(
            kind, model.config, logits.double().numpy(), None if bias is None else bias.double().numpy()
        )
        margins.append(margin)
        if margin < 1e-5:  # a tie: both answers are right
            continue
        got_ids, got_weights = by_expert_id(weights, ids)
        assert np.array_equal(want_ids, got_ids), f"layer {i}: the numpy router chooses other experts"
        assert np.abs(want_weights - got_weights).max() < 1e-5, f"layer {i}: the numpy router weighs otherwise"
    return min(margins)


@torch.no_grad()
def greedy(model, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, np.ndarray]:
    """Greedy continuation (rows, new) by full recomputation, and best minus second logit at each step."""
    gaps, length = [], ids.shape[1]
    for _ in range(new):
        top = model(input_ids=ids, use_cache=False).logits[:, -1].topk(2, -1)
        gaps.append((top.values[:, 0] - top.values[:, 1]).numpy())
        ids = torch.cat([ids, top.indices[:, :1]], 1)
    return ids[:, length:], np.stack(gaps, 1)


def clear_prompt(name: str, model) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, float, int]:
    """Prompts redrawn until no routing or greedy decision, in prompt or continuation, hangs on a near tie."""
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    kind = FAMILIES[name].router
    for drawn in range(1, MOST_DRAWS + 1):
        ids = torch.from_numpy(rng.integers(EOS_ID + 1, VOCAB, (ROWS, PROMPT_TOKENS)))
        if routing_margin(model, kind, forward(model, ids)[2]) < LEAST_ROUTING_MARGIN:
            continue
        more, gaps = greedy(model, ids, NEW_TOKENS)
        margin = routing_margin(model, kind, forward(model, torch.cat([ids, more], 1))[2])
        if (
            margin >= LEAST_ROUTING_MARGIN
            and gaps.min() >= LEAST_GREEDY_GAP
            and not np.isin(more, [EOS_ID, PAD_ID]).any()
        ):
            return ids, more, gaps, margin, drawn
    raise SystemExit(f"{name}: no prompt without near ties in {MOST_DRAWS} draws; change SEED")


def versions() -> dict:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}


def build(name: str, out: Path) -> dict:
    """Everything of one family in directory `out`; returns the row of facts that also goes into `meta`."""
    if out.exists():
        if not (out / "reference.npz").exists():
            raise SystemExit(f"{out} exists and is no fixture directory (no reference.npz); move it away first")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    write_checkpoint(name, out)
    model = load(out)
    ids, more, gaps, margin, draws = clear_prompt(name, model)
    logits, seen, routes = forward(model, ids)
    ref = {"input_ids": ids.numpy(), "logits": logits.numpy(), "greedy": more.numpy(), "greedy_gap": gaps}
    ref |= {key: value.numpy() for key, value in seen.items()}
    for i, (scores, weights, chosen) in routes.items():
        idx, w = by_expert_id(weights, chosen)
        for key, value in (("idx", idx), ("w", w), ("logits", scores.float().numpy())):
            ref[f"router_{key}_L{i}"] = value.reshape(*ids.shape, -1)
    check_other_spellings(name, out, ids, logits)
    check_cached(model, ids, more)
    noise = float((forward(model.double(), ids)[0] - logits).abs().max())
    meta = {"family": name, "seed": SEED, **versions(), "router": FAMILIES[name].router, "moe_layers": sorted(routes)}
    meta |= {"float64_noise": noise, "routing_margin": margin, "greedy_gap": float(gaps.min()), "prompt_draws": draws}
    np.savez_compressed(out / "reference.npz", **ref, meta=np.array(json.dumps(meta)))
    return meta | {
        "logits_std": float(logits.std()),
        "bytes": sum(f.stat().st_size for f in out.rglob("*") if f.is_file()),
    }


@torch.no_grad()
def check_other_spellings(name: str, out: Path, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """The 4.x config.json, and published/ where there is one, must load to the very same logits."""
    with tempfile.TemporaryDirectory() as scratch:
        legacy = Path(scratch, "legacy")
        shutil.copytree(out, legacy, ignore=shutil.ignore_patterns("published"))
        shutil.move(legacy / "config.legacy.json", legacy / "config.json")
        for path in [legacy] + [out / "published"] * FAMILIES[name].mtp_layer:
            other = load(path)(input_ids=ids, use_cache=False).logits
            assert torch.equal(other, logits), f"{name}: {path.name} config or files give other logits"


@torch.no_grad()
def check_cached(model, ids: torch.Tensor, more: torch.Tensor) -> None:
    """transformers' own generate(), with its KV cache, must continue the prompt the same way."""
    settings = {"max_new_tokens": more.shape[1], "do_sample": False, "eos_token_id": None, "pad_token_id": PAD_ID}
    model.generation_config.eos_token_id = None
    full = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(full[:, ids.shape[1] :], more), "cached and recomputed greedy continuations differ"


# -- comparison -------------------------------------------------------------------------------------------------------


def differences(want: Path, got: Path) -> list[str]:
    """Named differences between a committed fixture directory and a rebuilt one."""
    files = [{str(f.relative_to(d)) for f in d.rglob("*") if f.is_file()} for d in (want, got)]
    found = [
        f"{name}: only in {'committed' if name in files[0] else 'rebuilt'}" for name in sorted(files[0] ^ files[1])
    ]
    for name in sorted(files[0] & files[1]):
        a, b = want / name, got / name
        if name.endswith(".json"):
            pair = [{k: v for k, v in read_json(f).items() if k != "transformers_version"} for f in (a, b)]
            found += [
                f"{name}: {k!r} differs"
                for k in sorted(pair[0].keys() | pair[1].keys())
                if pair[0].get(k) != pair[1].get(k)
            ]
        elif name.endswith(".safetensors"):
            found += tensor_differences(name, load_file(a), load_file(b))
        else:
            with np.load(a) as x, np.load(b) as y:
                found += array_differences(name, dict(x), dict(y))
    return found


def tensor_differences(file: str, a: dict, b: dict) -> list[str]:
    found = [f"{file}: tensor {k} is on one side only" for k in sorted(a.keys() ^ b.keys())]
    for k in sorted(a.keys() & b.keys()):
        if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k]):
            found.append(
                f"{file}: tensor {k} differs ({a[k].dtype} {tuple(a[k].shape)}, {b[k].dtype} {tuple(b[k].shape)})"
            )
    return found


def array_differences(file: str, a: dict, b: dict) -> list[str]:
    found = [f"{file}: array {k} is on one side only" for k in sorted(a.keys() ^ b.keys())]
    for k in sorted((a.keys() & b.keys()) - {"meta"}):
        if a[k].shape != b[k].shape or a[k].dtype != b[k].dtype:
            found.append(f"{file}: array {k} is {a[k].dtype} {a[k].shape}, rebuilt {b[k].dtype} {b[k].shape}")
        elif a[k].dtype.kind == "f":
            worst = float(np.abs(a[k] - b[k]).max())
            if not worst <= COMPARE_TOLERANCE:
                found.append(f"{file}: array {k} differs by {worst:.1e}, allowed {COMPARE_TOLERANCE:.0e}")
        elif not np.array_equal(a[k], b[k]):
            found.append(f"{file}: array {k} differs at {np.argwhere(a[k] != b[k])[0].tolist()}")
    return found


def compare(root: Path, families: list[str]) -> int:
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in families:
            if not (root / name / "reference.npz").exists():
                found.append(f"{name}: {root / name / 'reference.npz'} is missing")
                continue
            build(name, Path(scratch, name))
            here = [f"{name}: {line}" for line in differences(root / name, Path(scratch, name))]
            print(f"{name}: {f'{len(here)} differences' if here else 'same'}", flush=True)
            found += here
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


# -- the shipped model ------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="rebuild and compare with the fixtures in OUT")
    parser.add_argument("--tiny", type=Path, metavar="MODEL_DIR", help="write the references of this model instead")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("family", nargs="*", help=f"of {', '.join(FAMILIES)}; default all")
    args = parser.parse_args(argv)
    families = args.family or list(FAMILIES)
    if unknown := [name for name in families if name not in FAMILIES]:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if args.tiny:
        from tiny_reference import write_tiny

        return write_tiny(args.tiny, args.out)
    if args.compare:
        return compare(args.out, families)
    print(f"{'family':10} {'bytes':>9} {'logits std':>10} {'f64 noise':>9} {'margin':>8} {'gap':>8} {'draws':>5}")
    for name in families:
        row = build(name, args.out / name)
        print(
            f"{name:10} {row['bytes']:9,} {row['logits_std']:10.2f} {row['float64_noise']:9.1e} "
            f"{row['routing_margin']:8.1e} {row['greedy_gap']:8.1e} {row['prompt_draws']:5}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
