"""The router: which experts a token goes to, and with what weights."""

from __future__ import annotations

import copy

import numpy as np

from .. import kernels
from ..config import RouterConfig
from ..errors import ModelError, did_you_mean
from .linear import Linear
from .workspace import Workspace

KINDS = {"softmax": 0, "topk_softmax": 1, "sigmoid_group": 2}  # RouterKind in cpp/router_core.hpp


def route(logits: np.ndarray, k: int, router: RouterConfig, bias: np.ndarray | None = None, threads: int = 1):
    """Scores to choices: logits (tokens, experts) float32 → (ids (tokens, k) uint16 in router order, weights float32).

    Ties go to the lower id. Raises `ModelError` for an unknown kind, ValueError for shapes that do not fit or NaN.
    """
    ids, weights = np.empty((len(logits), k), np.uint16), np.empty((len(logits), k), np.float32)
    return _route_into(logits, router, bias, ids, weights, threads)


def _route_into(logits, router, bias, ids, weights, threads):
    if router.kind not in KINDS:
        raise ModelError(f"router kind {router.kind!r} is unknown; {did_you_mean(router.kind, KINDS)}")
    kernels.load("router").route(
        logits, KINDS[router.kind], bias, router.groups, router.top_groups, router.renormalise, router.scale, ids, weights,
        threads,
    )  # fmt: skip
    return ids, weights


class Router:
    """Linear scores, then `route`, for one layer."""

    def __init__(self, config: RouterConfig, k: int, linear: Linear, bias: np.ndarray | None, work: Workspace, threads: int):
        self.config, self.k, self.linear, self.bias, self.work, self.threads = config, k, linear, bias, work, threads
        self.scratch = "router"

    def copy_for(self, scratch: str) -> Router:
        """The same router with scratch of its own, so that two results can be looked at together."""
        other = copy.copy(self)
        other.scratch = scratch
        return other

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (tokens, hidden) → ids (tokens, k) uint16 and weights (tokens, k) float32."""
        logits = self.linear(x, self.work.take(f"{self.scratch}_logits", (len(x), self.linear.rows)))
        ids = self.work.take(f"{self.scratch}_ids", (len(x), self.k), np.uint16)
        weights = self.work.take(f"{self.scratch}_weights", (len(x), self.k))
        return _route_into(logits, self.config, self.bias, ids, weights, self.threads)
