"""Routing that is assumed, for a model of which only counts, or nothing, was recorded.

Each layer ranks its experts by a seeded permutation, popularity falls as rank to the power -`zipf`, and experts of the
token before are preferred by `keep`: a token takes the top k of log(popularity) + keep x (used by the token before) +
Gumbel noise, which without `keep` is drawing k distinct experts by popularity. Counts take popularity's place.
"""

from __future__ import annotations

import numpy as np

from ..errors import SettingError
from ..trace.table import DECODE, PREFILL, Trace

# (zipf, keep): what the two recorded models that ship with the project look like, and what bounds them on either side.
TYPICAL = (1.2, 0.4)
EVEN = (0.0, 0.0)  # no expert preferred, no memory: the worst there can be for a cache
CLUSTERED = (1.6, 0.6)
COUNTS_KEEP = 1.2  # with counts of a whole text, which are flatter than any stretch of it
WORDS = {
    TYPICAL: "routing assumed as skewed and as sticky as in recorded Qwen3-30B-A3B and OLMoE-1B-7B traces",
    EVEN: "even routing without memory",
    CLUSTERED: "routing more clustered than in any recorded trace here",
}


def routing(
    layers: int | list[int],
    num_experts: int,
    top_k: int,
    *,
    tokens: int = 160,
    prompt_tokens: int = 32,
    zipf: float = TYPICAL[0],
    keep: float = TYPICAL[1],
    counts: np.ndarray | None = None,
    seed: int = 0,
    **header,
) -> Trace:
    """A made-up trace: a prompt in one step, then `tokens` decoded tokens.

    layers  number of MoE layers, or their model layer numbers
    counts  (layers, experts) uses per expert, in place of `zipf`; they do not tell whether uses were clustered in time
    """
    numbers = list(range(layers)) if isinstance(layers, int) else list(layers)
    if not 1 <= top_k <= num_experts or tokens < 1 or prompt_tokens < 0:
        raise SettingError(
            f"assumed routing needs 1 <= top_k <= experts and at least one token, got top-{top_k} of {num_experts}, "
            f"{tokens} tokens after {prompt_tokens}"
        )
    rng = np.random.default_rng(seed)
    if counts is None:
        ranks = np.argsort(rng.random((len(numbers), num_experts)), axis=1) + 1
        weight = -zipf * np.log(ranks)
    else:
        counts = np.asarray(counts, float)
        if counts.shape != (len(numbers), num_experts):
            raise SettingError(f"counts must be ({len(numbers)}, {num_experts}), got {counts.shape}")
        weight = np.log(np.maximum(counts, 0.5))
    total = prompt_tokens + tokens
    experts = np.empty((total, len(numbers), top_k), np.uint16)
    before = np.zeros((len(numbers), num_experts))
    for token in range(total):
        score = weight + keep * before + rng.gumbel(size=weight.shape)
        chosen = np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]
        order = np.argsort(-np.take_along_axis(score, chosen, 1), axis=1)
        experts[token] = np.take_along_axis(chosen, order, 1)
        before[:] = 0
        np.put_along_axis(before, experts[token].astype(np.int64), 1, 1)
    prompt = experts[:prompt_tokens].transpose(1, 0, 2).reshape(-1, top_k)  # a prompt runs layer by layer
    answer = experts[prompt_tokens:].reshape(-1, top_k)
    steps = np.r_[np.zeros(len(prompt)), 1 + np.repeat(np.arange(tokens), len(numbers))].astype(int)
    layer = np.r_[np.repeat(numbers, prompt_tokens), np.tile(numbers, tokens)].astype(int)
    head = {"num_experts": num_experts, "top_k": top_k, "moe_layers": numbers, "ranked": True, "seed": seed,
            "capture": "assumed routing, not recorded", **header}  # fmt: skip
    phase = np.r_[np.full(len(prompt), PREFILL), np.full(len(answer), DECODE)]
    return Trace.from_rows(step=steps, layer=layer, experts=np.r_[prompt, answer], phase=phase, header=head)
