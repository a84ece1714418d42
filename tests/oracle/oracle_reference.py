"""What transformers computes: logits, activations, routing, greedy continuations, and how near a tie each choice was.

Float32, eager attention, eager experts, no KV cache: the plainest path transformers has.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


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
        margin = np.inf
        if config.topk_group < config.n_group:
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
