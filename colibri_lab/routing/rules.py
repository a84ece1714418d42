"""Arithmetic on one token's logits, and on a model's sizes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..config import ModelConfig, RouterConfig
from ..engine.router_reference import route_numpy


def rules(logits, k: int, bias=None, groups: int = 1, top_groups: int = 1) -> pd.DataFrame:
    """What the usual rules make of the same logits (experts,): a row per rule, `chosen` best first, weights by expert.

    With a correction bias (experts,), or with groups of experts of which `top_groups` are kept, a sigmoid rule for each is
    added. Raises `SettingError` as `route_numpy` does.
    """
    bias = None if bias is None else np.asarray(bias, np.float32)
    cases: dict[str, tuple[RouterConfig, np.ndarray | None]] = {
        "softmax, then top-k": (RouterConfig("softmax"), None),
        "softmax, top-k, renormalised": (RouterConfig("softmax", renormalise=True), None),
        "top-k, then softmax": (RouterConfig("topk_softmax"), None),
        "sigmoid, top-k, renormalised": (RouterConfig("sigmoid_group", renormalise=True), None),
    }
    if bias is not None:
        cases["sigmoid, bias chooses"] = (RouterConfig("sigmoid_group", renormalise=True), bias)
    if groups > 1:
        grouped = RouterConfig("sigmoid_group", renormalise=True, groups=groups, top_groups=top_groups)
        cases[f"sigmoid, {top_groups} of {groups} groups"] = (grouped, bias)
    rows = {}
    for name, (rule, shift) in cases.items():
        ids, weights = route_numpy(np.asarray(logits, np.float32)[None], rule, k, shift)
        rows[name] = (
            {"chosen": tuple(ids[0].tolist())}
            | dict.fromkeys(range(np.size(logits)), 0.0)
            | dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
        )
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("rule")


def parameters(config: ModelConfig) -> dict[str, int]:
    """How many weights a model has, by part; `total`, and `active`: those that one token is multiplied with.

    A token reads one row of the embedding, so that table counts as active only where it is the head as well.
    """
    c, moe = config, len(config.moe_layers)
    hidden, heads = c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    attention = 2 * c.num_heads * c.head_dim * hidden + 2 * c.num_kv_heads * c.head_dim * hidden
    attention += heads * c.qkv_bias + hidden * c.output_bias
    norms = (
        2 * hidden + {"none": 0, "head": 2 * c.head_dim, "full": (c.num_heads + c.num_kv_heads) * c.head_dim}[c.qk_norm]
    )
    expert = 3 * hidden * c.expert_intermediate_size
    shared = 3 * hidden * c.shared_intermediate_size * (c.shared != "none") + hidden * (c.shared == "gated")
    table = c.vocab_size * hidden
    parts = {
        "embedding": table,
        "attention": c.num_layers * attention,
        "norms": c.num_layers * norms + hidden,
        "dense_ffn": (c.num_layers - moe) * 3 * hidden * c.dense_intermediate_size,
        "router": moe * c.num_experts * (hidden + c.router.correction_bias),
        "shared_experts": moe * shared,
        "routed_experts": moe * c.num_experts * expert,
        "head": 0 if c.tied_embeddings else table,
    }
    total = sum(parts.values())
    idle = moe * (c.num_experts - c.top_k) * expert + (0 if c.tied_embeddings else table)
    return {**parts, "total": total, "active": total - idle}
