"""The router: which experts a token goes to, and with what weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..config import RouterConfig
from ..errors import ModelError, did_you_mean
from .linear import Linear
from .sizes import matmul_scratch

KINDS = {"softmax": 0, "topk_softmax": 1, "sigmoid_group": 2}  # RouterKind in cpp/router_core.hpp


def route(logits: np.ndarray, k: int, router: RouterConfig, bias: np.ndarray | None = None, threads: int = 1):
    """Scores to choices: logits (tokens, experts) float32 → (ids (tokens, k) uint16 in router order, weights float32).

    Ties go to the lower id. Raises `ModelError` for an unknown kind, ValueError for shapes that do not fit or NaN.
    """
    ids, weights = np.empty((len(logits), k), np.uint16), np.empty((len(logits), k), np.float32)
    return _route_into(logits, router, bias, ids, weights, threads)


def _route_into(logits, router, bias, ids, weights, threads, load=kernels.load):
    if router.kind not in KINDS:
        raise ModelError(f"router kind {router.kind!r} is unknown; {did_you_mean(router.kind, KINDS)}")
    load("router").route(
        logits, KINDS[router.kind], bias, router.groups, router.top_groups, router.renormalise, router.scale, ids, weights,
        threads,
    )  # fmt: skip
    return ids, weights


@dataclass(frozen=True, eq=False)
class RoutedLayer:
    """One layer's routing rule, and the tokens that a decision is about: what a router of `routers.py` is told."""

    index: int  # model layer number
    experts: int
    k: int  # experts per token, as the model was trained
    rules: RouterConfig
    bias: np.ndarray | None  # float32 (experts,) correction bias
    token_ids: np.ndarray  # int64 (tokens,)
    position: int = 0  # of the first token in its text

    def route(self, logits: np.ndarray, k: int | None = None, bias: np.ndarray | None = None):
        """The model's own rule on these logits: (ids (tokens, k) uint16, weights (tokens, k) float32).

        `bias` replaces the correction bias; -inf makes an expert unchoosable.
        """
        return route(
            np.ascontiguousarray(logits, np.float32), k or self.k, self.rules, self.bias if bias is None else bias
        )

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """float32 (tokens, experts) in 0-1: softmax or sigmoid of the logits, before any choice, bias or scale."""
        if self.rules.kind == "sigmoid_group":
            return (0.5 + 0.5 * np.tanh(0.5 * logits)).astype(np.float32)
        power = np.exp(logits - logits.max(1, keepdims=True))
        return (power / power.sum(1, keepdims=True)).astype(np.float32)

    def weigh(self, scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """float32 (tokens, experts): the model's weights if `chosen`, bool of that shape, were its choice; else 0."""
        weights = np.where(chosen, scores, np.float32(0))
        if self.rules.renormalise or self.rules.kind == "topk_softmax":
            weights = weights / (weights.sum(1, keepdims=True) + np.float32(1e-20))
        return (weights * np.float32(self.rules.scale)).astype(np.float32)


class Router:
    """Linear scores, then `route`, for one layer."""

    def __init__(
        self,
        index: int,
        config: RouterConfig,
        k: int,
        linear: Linear,
        bias: np.ndarray | None,
        threads: int,
        load=kernels.load,
    ):
        self.index, self.config, self.k, self.linear, self.bias, self.threads = index, config, k, linear, bias, threads
        self._load = load

    def logits(self, x: np.ndarray, arena) -> np.ndarray:
        """x (tokens, hidden) → (tokens, experts) float32 in the arena."""
        room = arena.take((matmul_scratch(len(x), self.linear.cols),), np.uint8)
        return self.linear(x, arena.take((len(x), self.linear.rows), np.float32), room)

    def __call__(self, x: np.ndarray, arena) -> tuple[np.ndarray, np.ndarray]:
        """x (tokens, hidden) → ids (tokens, k) uint16 and weights (tokens, k) float32, in the arena."""
        logits = self.logits(x, arena)
        ids = arena.take((len(x), self.k), np.uint16)
        weights = arena.take((len(x), self.k), np.float32)
        return _route_into(logits, self.config, self.bias, ids, weights, self.threads, self._load)

    def seen(self, token_ids: np.ndarray, position: int) -> RoutedLayer:
        """What another router is told about this layer and these tokens."""
        return RoutedLayer(self.index, self.linear.rows, self.k, self.config, self.bias, token_ids, position)
