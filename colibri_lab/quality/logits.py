"""What a change of the weights does to a model's answers, on identical tokens: losses, divergence, routing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from ..distributions import divergence, log_softmax
from ..errors import ModelError
from .texts import Window

RESAMPLES = 2000


@dataclass(frozen=True)
class Comparison:
    """Of a model with its reference. `windows`: text, tokens, bytes, nll, reference_nll (nats), kl (nats, summed), a row per
    window; `layers`: layer, router_agreement, frequency_distance."""

    windows: pd.DataFrame
    layers: pd.DataFrame

    @property
    def bits_per_byte(self) -> float:
        return float(self.windows.nll.sum() / math.log(2) / self.windows.bytes.sum())

    @property
    def reference_bits_per_byte(self) -> float:
        return float(self.windows.reference_nll.sum() / math.log(2) / self.windows.bytes.sum())

    @property
    def change(self) -> float:
        """Relative change of bits per byte."""
        return float(self.windows.nll.sum() / self.windows.reference_nll.sum() - 1)

    @property
    def kl(self) -> float:
        """Mean divergence of the next-token distributions, reference from model, nats per token."""
        return float(self.windows.kl.sum() / self.windows.tokens.sum())

    @property
    def router_agreement(self) -> float:
        """Share of expert choices that both models make alike, mean over tokens and layers."""
        return float(self.layers.router_agreement.mean())

    def change_interval(self, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
        """Interval of the relative change of bits per byte: bootstrap over windows, each with both models' losses on it
        (percentiles of 2000 resamples)."""
        return bootstrap_ratio(self.windows.nll.to_numpy(), self.windows.reference_nll.to_numpy(), confidence, seed)


def bootstrap_ratio(
    nll: np.ndarray, reference: np.ndarray, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Interval of sum(nll) / sum(reference) - 1 over paired chunks. (Efron, Tibshirani: An Introduction to the Bootstrap)"""
    rng = np.random.default_rng(seed)
    ratios = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = rng.integers(0, len(nll), len(nll))
        ratios[i] = nll[drawn].sum() / reference[drawn].sum() - 1
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@contextlib.contextmanager
def watched_routes(lab) -> Iterator[dict[int, list[np.ndarray]]]:
    """Layer → the (tokens, k) expert ids of every step inside the block, each row ascending."""
    seen: dict[int, list[np.ndarray]] = {}

    def watch(layer, ids, weights, lease):
        seen.setdefault(layer, []).append(np.sort(ids, axis=1))

    lab.engine.observers.append(watch)
    try:
        yield seen
    finally:
        lab.engine.observers.remove(watch)


def _run(lab, window: Window) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Log-probabilities (tokens - 1, vocab) of what follows, and routes by layer."""
    with watched_routes(lab) as seen:
        logits = lab.logits(window.ids)
    return log_softmax(logits[:-1]), {layer: np.concatenate(parts) for layer, parts in seen.items()}


def compare(lab, reference, windows: list[Window], progress: bool = True) -> Comparison:
    """Both models on the same windows. Raises `ModelError` when their vocabularies or layers differ."""
    return compare_all([lab], reference, windows, progress)[0]


def compare_all(labs: list, reference, windows: list[Window], progress: bool = True) -> list[Comparison]:
    """Several models against one reference, which reads each window once; errors as in `compare`."""
    found = [_Tally(lab, reference) for lab in labs]
    for window in tqdm(windows, unit="window", disable=not progress):
        theirs = _run(reference, window)
        for tally in found:
            tally.add(window, _run(tally.lab, window), theirs)
    return [tally.comparison() for tally in found]


class _Tally:
    """One model's side of a comparison, window by window."""

    def __init__(self, lab, reference):
        a, b = lab.config, reference.config
        if (a.vocab_size, a.moe_layers, a.num_experts) != (b.vocab_size, b.moe_layers, b.num_experts):
            raise ModelError(
                f"{lab.path} and {reference.path} are different models: {a.vocab_size} and {b.vocab_size} tokens, "
                f"{len(a.moe_layers)} and {len(b.moe_layers)} layers of {a.num_experts} and {b.num_experts} experts"
            )
        self.lab, self.experts, self.tokens, self.rows = lab, a.num_experts, 0, []
        self.agreeing = dict.fromkeys(a.moe_layers, 0.0)
        self.counts = {layer: np.zeros((2, self.experts)) for layer in a.moe_layers}

    def add(self, window: Window, ours: tuple, theirs: tuple) -> None:
        (mine, our_routes), (other, their_routes) = ours, theirs
        target = window.ids[1:, None]
        losses = (-np.take_along_axis(log_p, target, 1).sum() for log_p in (mine, other))
        self.rows.append((window.text, len(target), window.predicted_bytes, *losses, divergence(other, mine).sum()))
        self.tokens += len(window.ids)
        for layer, counts in self.counts.items():
            a, b = our_routes[layer], their_routes[layer]
            self.agreeing[layer] += (a[:, :, None] == b[:, None, :]).sum() / a.shape[1]
            counts += [np.bincount(ids.ravel(), minlength=self.experts)[: self.experts] for ids in (a, b)]

    def comparison(self) -> Comparison:
        layers = [
            (layer, self.agreeing[layer] / self.tokens, frequency_distance(*self.counts[layer]))
            for layer in self.counts
        ]
        return Comparison(
            pd.DataFrame(self.rows, columns=["text", "tokens", "bytes", "nll", "reference_nll", "kl"]),
            pd.DataFrame(layers, columns=["layer", "router_agreement", "frequency_distance"]),
        )


def frequency_distance(counts: np.ndarray, other: np.ndarray) -> float:
    """Total variation between two selection frequencies, 0 to 1. counts (experts,): how often each was chosen."""
    return float(0.5 * np.abs(counts / counts.sum() - other / other.sum()).sum())
