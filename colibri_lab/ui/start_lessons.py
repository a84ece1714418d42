"""Findings for a first look at mixtures of experts: what is repeated, and how soon a text has met every expert."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..errors import SettingError
from ..trace.table import DECODE, Trace
from ..tune.shapes import Shape, find_shape
from .frames import Frame, Mark, Series
from .what_if import Finding

_COLORS = {
    "embedding": "other", "head": "head", "attention": "attention", "dense layers": "router", "shared experts": "shared",
    "routers": "miss", "routed experts": "hit",
}  # fmt: skip


def part_table(shape: Shape) -> pd.DataFrame:
    """Weights by part, indexed by part: total, and active, those that one token is multiplied with. Norms are left out."""
    moe, dense = len(shape.moe_layers), shape.layers - len(shape.moe_layers)
    ffn = 3 * shape.hidden
    rows = {
        "embedding": (0 if shape.tied else shape.vocab * shape.hidden, 0),
        "head": (shape.vocab * shape.hidden,) * 2,
        "attention": (shape.layers * shape.attention_params,) * 2,
        "dense layers": (dense * ffn * shape.dense_width,) * 2,
        "shared experts": (moe * ffn * shape.shared_width,) * 2,
        "routers": (moe * shape.hidden * shape.num_experts,) * 2,
        "routed experts": (moe * shape.num_experts * shape.expert_params, moe * shape.top_k * shape.expert_params),
    }
    table = pd.DataFrame(rows, index=["total", "active"]).T
    return table[table.total > 0]


def parts(model: str = "Mixtral-8x7B") -> Finding:
    """Weights of a model by part, as a bar, and those that a token is multiplied with, as a tick."""
    shape = find_shape(model)
    table = part_table(shape)
    total, active = table.total.sum(), table.active.sum()
    unit, scale = ("billion", 1e9) if total >= 1e9 else ("million", 1e6)
    values = table.to_numpy(np.float32)[::-1] / np.float32(scale)
    alone = total - shape.num_experts * len(shape.moe_layers) * shape.expert_params
    one = alone + len(shape.moe_layers) * shape.expert_params
    frame = Frame(
        "bars", f"{model}: weights by part", f"{unit} weights; the tick is what a token uses", "", values,
        tuple(Series(part, _COLORS[part]) for part in table.index[::-1]), (0, 1.25 * float(values.max())),
        texts=tuple(f"{row[0]:.3g}, active {row[1]:.3g}" for row in values),
    )  # fmt: skip
    said = (
        f"{model} has {total / scale:.3g} {unit} weights, and a token is multiplied with {active / scale:.3g} of them. "
        f"{shape.num_experts} whole models with one expert each would have {shape.num_experts * one / scale:.3g}: only the experts "
        "repeat, attention and embeddings are there once."
    )
    return Finding((frame,), said, table)


def touched(trace: Trace, tokens: int = 32) -> Finding:
    """Different experts per layer that a text has used after each of its decoded tokens; `tokens` is the one pointed at."""
    steps = np.unique(trace.step[trace.phase == DECODE])
    if not 1 <= tokens <= len(steps):
        raise SettingError(f"tokens must be 1 to {len(steps)}, the decoded tokens of this trace; got {tokens}")
    met = np.zeros((len(trace.layers), trace.num_experts), bool)
    row_of = {layer: row for row, layer in enumerate(trace.layers)}
    curve, at = [], 0
    chosen = trace.phase == DECODE
    for step, layer, experts in zip(trace.step[chosen], trace.layer[chosen], trace.experts[chosen], strict=True):
        if step != steps[at]:
            curve.append(met.sum(1).mean())
            at += 1
        met[row_of[int(layer)], experts[experts < trace.num_experts]] = True
    curve.append(met.sum(1).mean())
    k = trace.header["top_k"] or trace.k
    frame = Frame(
        "lines", "Experts met so far", "decoded tokens", "different experts per layer",
        np.array([curve, np.full(len(curve), k), np.full(len(curve), trace.num_experts)], np.float32),
        (Series("used at least once", "hit"), Series("work for one token", "attention", (7, 3)),
         Series("all there are", "oracle", (2, 2))),
        (0, len(curve)), (0, 1.08 * trace.num_experts), x=tuple(map(float, range(1, len(curve) + 1))),
        marks=(Mark(tokens, curve[tokens - 1], f"{curve[tokens - 1]:.1f}"),),
    )  # fmt: skip
    said = (
        f"One token uses {k} of {trace.num_experts} experts in a layer; after {tokens} tokens {curve[tokens - 1]:.1f} have been used, "
        f"after all {len(curve)} of them {curve[-1]:.0f}. Any expert can be next."
    )
    return Finding((frame,), said, pd.DataFrame({"token": np.arange(1, len(curve) + 1), "experts": curve}))
