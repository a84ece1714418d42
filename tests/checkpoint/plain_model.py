"""The forward pass written down once more, as slowly and plainly as possible, from nothing but a container's arrays."""

from __future__ import annotations

import numpy as np


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def feed_forward(x, gate, up, down):
    g = x @ gate.T
    return (g * sigmoid(g) * (x @ up.T)) @ down.T


def rotate(x, rope):
    """x (tokens, heads, head_dim): pairs (j, j + dims/2) of the first `dims` numbers turn by position * theta^(-2j/dims)."""
    half = rope.dims // 2
    angle = np.arange(len(x))[:, None, None] * rope.theta ** (-2 * np.arange(half) / rope.dims)
    first, second, rest = x[..., :half], x[..., half : rope.dims], x[..., rope.dims :]
    turned = [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle), rest]
    return np.concatenate(turned, -1)


def attention(x, w, c, window):
    tokens = len(x)
    q, k, v = (x @ w[name].T + w.get(f"{name}_bias", 0) for name in "qkv")
    if c.qk_norm == "full":
        q, k = norm(q, w["q_norm"], c.rms_norm_eps), norm(k, w["k_norm"], c.rms_norm_eps)
    if c.clip_qkv is not None:
        q, k, v = (np.clip(a, -c.clip_qkv, c.clip_qkv) for a in (q, k, v))
    q, k, v = (a.reshape(tokens, -1, c.head_dim) for a in (q, k, v))
    if c.qk_norm == "head":
        q, k = norm(q, w["q_norm"], c.rms_norm_eps), norm(k, w["k_norm"], c.rms_norm_eps)
    q, k = rotate(q, c.rope), rotate(k, c.rope)
    out = np.zeros_like(q)
    for head in range(c.num_heads):
        shared = head // (c.num_heads // c.num_kv_heads)
        for i in range(tokens):
            start = 0 if window is None else max(0, i - window + 1)
            scores = k[start : i + 1, shared] @ q[i, head] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[start : i + 1, shared]
    return out.reshape(tokens, -1) @ w["o"].T + w.get("o_bias", 0)


def route(logits, bias, top_k, router):
    """One token: (expert ids ascending, weights)."""
    if router.kind == "softmax":
        scores = np.exp(logits - logits.max())
        choice = scores = scores / scores.sum()
    else:
        scores = sigmoid(logits)
        choice = scores + bias
        groups = choice.reshape(router.groups, -1)
        best = np.argsort(-np.sort(groups, 1)[:, -2:].sum(1), kind="stable")[: router.top_groups]
        masked = np.full_like(groups, -np.inf)
        masked[best] = groups[best]
        choice = masked.reshape(-1)
    ids = np.sort(np.argsort(-choice, kind="stable")[:top_k])
    weights = scores[ids]
    if router.renormalise:
        weights = weights / weights.sum()
    return ids, weights * router.scale


def forward(box, tokens):
    """(logits (tokens, vocab), {layer: [(expert ids, weights) of each token]}) in float64."""

    def arrays(file):
        return {name: tensor.array().astype(np.float64) for name, tensor in file.tensors.items()}

    c, routes = box.config, {}
    embed = box.dense("embed").tensors["embed"]
    x = embed.gather(np.array(tokens)).astype(np.float64)
    for layer in range(c.num_layers):
        w = arrays(box.dense(f"layer_{layer}"))
        x = x + attention(norm(x, w["input_norm"], c.rms_norm_eps), w, c, c.windows[layer])
        h = norm(x, w["post_norm"], c.rms_norm_eps)
        if c.ffn[layer] == "dense":
            x = x + feed_forward(h, w["gate"], w["up"], w["down"])
            continue
        r = arrays(box.router(layer))
        experts = [box.expert(layer, e) for e in range(c.num_experts)]
        routes[layer] = [route(row, r.get("correction_bias"), c.top_k, c.router) for row in h @ r["router"].T]
        y = np.zeros_like(x)
        for t, (ids, weights) in enumerate(routes[layer]):
            for e, weight in zip(ids, weights, strict=True):
                y[t] += weight * feed_forward(h[t], **experts[e])
        if c.shared != "none":
            shared = feed_forward(h, w["shared_gate"], w["shared_up"], w["shared_down"])
            y += shared * sigmoid(h @ w["shared_router"].T) if c.shared == "gated" else shared
        x = x + y
    head = embed.array() if c.tied_embeddings else box.dense("head").tensors["head"].array()
    return norm(x, box.dense("final").tensors["norm"].array(), c.rms_norm_eps) @ head.T, routes
