"""Next-token distributions: from logits to log-probabilities, and how far one is from another."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence from `reference` to `other`, both log-probabilities (…, n), in nats: float64 (…).

    Never below 0, which rounding might make of two equal distributions.
    """
    return np.maximum((np.exp(reference) * (reference - other)).sum(axis=-1, dtype=np.float64), 0.0)
