"""From logits to the next token."""

from __future__ import annotations

import numpy as np


class Sampler:
    """Temperature and nucleus (top-p) sampling, Holtzman et al. 2020. Temperature 0, or top-p near 0, is greedy.

    The same seed, settings and logits give the same tokens.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0):
        self.temperature, self.top_p = temperature, top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray, room: np.ndarray | None = None) -> int:
        """logits (vocab,) float32 → token id. Among equals the lowest id wins. `room` (vocab,) float64 is overwritten."""
        if self.temperature == 0.0:
            return int(np.argmax(logits))
        p = np.divide(logits, self.temperature, out=room, dtype=np.float64)
        p -= p.max()
        np.exp(p, out=p)
        p /= p.sum()
        # A token below an even share of the mass outside the nucleus cannot be in it: most need no sorting.
        likely = np.flatnonzero(p >= (1 - self.top_p) / len(p))
        order = likely[np.argsort(-p[likely], kind="stable")]
        mass = np.cumsum(p[order])
        kept = order[
            : int(np.searchsorted(mass, self.top_p)) + 1
        ]  # the first token that reaches top_p is the last kept
        return int(kept[np.searchsorted(np.cumsum(p[kept]), self._random.random() * p[kept].sum(), side="right")])
