"""What other routing costs: the model reads the same texts again, with another router."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from .. import distributions
from ..config import ModelConfig
from ..engine.router import RoutedLayer
from ..engine.routers import PAD, Choice, RouterHook, TopK, decide, seeded_noise
from .domains import favourites, usage
from .reading import Reading, Readings, token_nats


def losses(lab, readings: Readings, router: RouterHook | None = None) -> pd.Series:
    """Nats per token by domain while `router` (the model's own if None) decides."""
    if router is None:
        return pd.Series({domain: _mean(r.nats for r in group) for domain, group in readings.items()}, name="nats")
    found = {
        domain: _mean(token_nats(x, r.token_ids) for r, x in parts) for domain, parts in _run(lab, readings, router)
    }
    return pd.Series(found, name="nats")


def _run(lab, readings: Readings, router: RouterHook | None):
    """(domain, [(reading, logits float32 (tokens, vocab))]) while `router` decides."""
    with lab.routing(router):
        return [(domain, [(r, lab.logits(r.token_ids)) for r in group]) for domain, group in readings.items()]


def _mean(parts: Iterable[np.ndarray]) -> float:
    return float(np.concatenate(list(parts)).mean())


def sweep(lab, routers: Mapping[str, RouterHook | None], readings: Readings, passes: int = 1) -> pd.DataFrame:
    """A row per router: nats by domain, their `mean`, `change` against the model's own router, and what it cost.

    `experts_per_token` counts choices per token and layer; `ms_per_token` is wall time of the fastest of `passes` over all
    texts, taken in turns.
    """
    base, rows = losses(lab, readings).mean(), {}
    for _ in range(passes):
        for name, router in routers.items():
            counted, start = _Counted(router), time.perf_counter()
            nats = losses(lab, readings, counted)
            ms = 1e3 * (time.perf_counter() - start) / counted.decisions * len(lab.config.moe_layers)
            ms = min(ms, rows[name]["ms_per_token"]) if name in rows else ms
            cost = {"experts_per_token": counted.choices / counted.decisions, "ms_per_token": ms}
            rows[name] = {"router": name, **nats, "mean": nats.mean(), "change": nats.mean() - base, **cost}
    return pd.DataFrame(list(rows.values())).set_index("router")


class _Counted:
    """A router that counts what another one chooses."""

    def __init__(self, router: RouterHook | None):
        self.router = router or TopK()
        self.needs_logits, self.shared = (getattr(self.router, name, True) for name in ("needs_logits", "shared"))
        self.decisions = self.choices = 0

    def check(self, config: ModelConfig) -> None:
        getattr(self.router, "check", lambda config: None)(config)

    def __call__(self, layer: RoutedLayer, logits: np.ndarray | None) -> Choice:
        ids, weights = decide(self.router, layer, logits)
        self.decisions, self.choices = self.decisions + len(ids), self.choices + int((ids != PAD).sum())
        return ids, weights


def masking(lab, counted: Readings, tested: Readings, n: int = 6, layers: Iterable[int] | None = None) -> pd.DataFrame:
    """Change of nats per token in each domain (columns) when one domain's favourite experts (rows) cannot be chosen.

    `favourites` are picked on `counted`, losses are those of `tested`; `split` makes the two.
    """
    base = losses(lab, tested)
    masks = {domain: TopK(mask=favourites(counted, domain, n, layers)) for domain in counted}
    return pd.DataFrame({domain: losses(lab, tested, router) - base for domain, router in masks.items()}).T


def without_experts(lab, counted: Readings, tested: Readings, masked=(12, 48), seed: int = 0) -> pd.DataFrame:
    """which, masked, picks_percent, nats, nats_per_percent: what are the least used experts worth, and random ones?

    `masked` experts, counted over all layers, cannot be chosen. `picks_percent` is the share of the choices in `tested` that
    would have gone to them, `nats` the change of loss per token, mean over domains. Use is counted in `counted`.
    """
    k, layers = lab.config.top_k, len(lab.config.moe_layers)
    use = usage(counted).groupby(["layer", "expert"])["share"].mean()
    picks = usage(tested).groupby(["layer", "expert"])["share"].mean()
    random = use.sample(frac=1, random_state=seed)
    base, rows = losses(lab, tested).mean(), []
    for which, order in (("least used", use.sort_values(kind="stable")), ("random", random)):
        spare = order[order.groupby(level="layer").cumcount() < lab.config.num_experts - k]  # k stay in each layer
        for count in masked:
            gone = spare.index[:count]
            nats = losses(lab, tested, TopK(mask=gone)).mean() - base
            percent = 100 * picks[gone].sum() / layers
            rows.append((which, len(gone), percent, nats, nats / percent if percent else np.nan))
    return pd.DataFrame(rows, columns=["which", "masked", "picks_percent", "nats", "nats_per_percent"])


def divergence(lab, readings: Readings, router: RouterHook) -> pd.Series:
    """By domain: mean KL divergence, nats per token, from the model's next-token distribution to that with `router`."""
    own, other = (dict(_run(lab, readings, r)) for r in (None, router))

    def mean(domain: str) -> float:
        pairs = zip(own[domain], other[domain], strict=True)
        logs = ((distributions.log_softmax(p), distributions.log_softmax(q)) for (_, p), (_, q) in pairs)
        return _mean(distributions.divergence(p, q) for p, q in logs)

    return pd.Series({domain: mean(domain) for domain in readings}, name="kl_nats")


def flips(reading: Reading, scales: Iterable[float] = (1e-7, 1e-5, 1e-3, 1e-2, 1e-1), seed: int = 0) -> pd.DataFrame:
    """scale, layer, token, margin, flipped: does noise of that standard deviation on the logits change a set of experts?

    `margin` is how far the k-th choice is ahead of the next one, in the units in which experts are compared (score, with
    the correction bias). Each decision is taken alone, on the inputs that the undisturbed model gives it.
    """
    rows = []
    for at, layer in enumerate(reading.layers):
        logits = reading.logits[at]
        own = np.sort(layer.route(logits)[0], axis=1)
        noise = seeded_noise(seed, layer, "standard_normal")
        part = {"layer": layer.index, "token": np.arange(len(logits)), "margin": margins(layer, logits)}
        for scale in scales:
            other = np.sort(layer.route(logits + np.float32(scale) * noise)[0], axis=1)
            rows.append(pd.DataFrame({"scale": scale, **part, "flipped": (own != other).any(axis=1)}))
    return pd.concat(rows, ignore_index=True)


def margins(layer: RoutedLayer, logits: np.ndarray) -> np.ndarray:
    """float32 (tokens,): the k-th best minus the next, in the units in which experts are compared; groups do not count."""
    choice = logits if layer.rules.kind == "topk_softmax" else layer.scores(logits)
    if layer.bias is not None:
        choice = choice + layer.bias
    best = -np.sort(-choice, axis=1)
    return best[:, layer.k - 1] - best[:, layer.k] if layer.k < layer.experts else np.full(len(logits), np.inf)


def bias_in_weight(layer: RoutedLayer, logits: np.ndarray) -> Choice:
    """A mistake to look at: the correction bias, meant for choosing only, goes into the weight as well."""
    ids, _ = layer.route(logits)
    scores = layer.scores(logits) + (0 if layer.bias is None else layer.bias)
    weights = np.take_along_axis(scores, ids.astype(int), 1)
    return ids, weights / weights.sum(1, keepdims=True) * layer.rules.scale
