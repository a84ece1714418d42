"""Predictors for the live cache: which blocks will the next layer want?

They follow the same rules as the predictors of replay (cpp/prefetch_core.hpp), so that a recorded trace replayed with the
same predictor prefetches the same blocks. `lookahead` exists only live: it runs the next layer's router on the current
hidden state, which a trace does not hold.

    same       the blocks of the target layer's last step
    markov     the blocks y with the largest sum, over this step's blocks x, of how often y followed x
    popular    the blocks the target layer used most so far
    lookahead  the next layer's router, one layer early
"""

from __future__ import annotations

import numpy as np


class Prefetcher:
    """Learns from each step, then names up to `budget` blocks for the layer after it (the first, after the last)."""

    def __init__(self, predictor: str, layers: int, blocks: int, budget: int):
        self.predictor, self.layers, self.budget = predictor, layers, budget
        self._last: list[list[int] | None] = [None] * layers
        self._used = np.zeros((layers, blocks), np.int64)
        self._follows = np.zeros((layers, blocks, blocks), np.int64) if predictor == "markov" else None

    def after(self, layer: int, blocks: list[int]) -> tuple[int, list[int]]:
        """Step of `layer` (number among the MoE layers) used these distinct blocks: (target layer, predicted blocks)."""
        source, target = (layer - 1) % self.layers, (layer + 1) % self.layers
        if self._follows is not None and self._last[source] is not None:
            self._follows[layer][np.ix_(self._last[source], blocks)] += 1
        self._used[layer, blocks] += 1
        self._last[layer] = list(blocks)
        if self.predictor == "same":
            return target, (self._last[target] or [])[: self.budget]
        if self.predictor == "popular":
            return target, self._best(self._used[target])
        if self.predictor == "markov":
            return target, self._best(self._follows[target][blocks].sum(axis=0))
        return target, []

    def _best(self, score: np.ndarray) -> list[int]:
        order = np.argsort(-score, kind="stable")[: self.budget]
        return [int(block) for block in order if score[block] > 0]
