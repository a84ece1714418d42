"""Router maths in plain numpy, one line per step: the reference that kernels and importers are checked against.

Formulas are those of Hugging Face's modelling code; see `RouterConfig` for the kinds. Among equal scores the lower
expert id wins, where torch leaves the order open.
"""

from __future__ import annotations

import numpy as np

from ..config import RouterConfig
from ..errors import SettingError


def route_numpy(logits, router: RouterConfig, top_k: int, bias=None) -> tuple[np.ndarray, np.ndarray]:
    """Experts uint16 (tokens, top_k) best first, and their weights float32 (tokens, top_k).

    `logits` is (tokens, experts) of any float type; `bias` (experts,) is the correction bias, which decides who is
    chosen and never enters the weight. Raises `SettingError` on an unknown kind, a wrong shape or a non-finite logit.
    """
    logits = np.asarray(logits, np.float32)
    if logits.ndim != 2 or not 1 <= top_k <= logits.shape[1]:
        raise SettingError(f"router: logits must be (tokens, at least top_k {top_k} experts), got shape {logits.shape}")
    if not np.isfinite(logits).all():
        token, expert = np.argwhere(~np.isfinite(logits))[0]
        raise SettingError(f"router: logit of token {token}, expert {expert} is {logits[token, expert]}")
    if bias is not None and np.shape(bias) != logits.shape[1:]:
        raise SettingError(f"router: correction bias must have shape {logits.shape[1:]}, got {np.shape(bias)}")
    if router.kind == "softmax":
        scores = _softmax(logits)
        experts = _top(scores, top_k)
        weights = np.take_along_axis(scores, experts, 1)
    elif router.kind == "topk_softmax":
        experts = _top(logits, top_k)
        weights = _softmax(np.take_along_axis(logits, experts, 1))
    elif router.kind == "sigmoid_group":
        scores = _sigmoid(logits)
        choice = scores if bias is None else scores + np.asarray(bias, np.float32)
        experts = _top(_best_groups(choice, router.groups, router.top_groups), top_k)
        weights = np.take_along_axis(scores, experts, 1)
    else:
        raise SettingError(f"router: kind must be softmax, topk_softmax or sigmoid_group, got {router.kind!r}")
    if router.renormalise and router.kind != "topk_softmax":
        # 1e-20 is DeepSeek-V3's guard against a sum of zero; it is below float32 resolution for any softmax
        weights = weights / (weights.sum(1, keepdims=True) + np.float32(1e-20))
    return experts.astype(np.uint16), (weights * np.float32(router.scale)).astype(np.float32)


def _top(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest, largest first; the stable sort makes the lower id win a tie."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def _softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(1, keepdims=True))
    return exp / exp.sum(1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)


def _best_groups(choice: np.ndarray, groups: int, kept: int) -> np.ndarray:
    """`choice` with everything outside the `kept` best groups at -inf; a group scores the sum of its two best."""
    tokens, experts = choice.shape
    if groups <= 1:
        return choice
    if experts % groups or not 1 <= kept <= groups:
        raise SettingError(f"router: {experts} experts do not split into {groups} groups of which {kept} are kept")
    grouped = choice.reshape(tokens, groups, -1)
    scores = np.sort(grouped, axis=2)[:, :, -2:].sum(2)
    allowed = np.zeros((tokens, groups), bool)
    np.put_along_axis(allowed, _top(scores, kept), True, axis=1)
    return np.where(allowed[:, :, None], grouped, -np.inf).reshape(tokens, experts).astype(np.float32)
