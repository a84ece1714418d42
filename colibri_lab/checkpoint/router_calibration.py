"""Router calibration: quantised weights shift what the routers read, and with it which experts they pick.

For every MoE layer one number per expert is added to the router's logits, so that the experts are chosen as often as by the
16-bit model on the same texts. Found by repeated small steps towards the log-ratio of the frequencies; a quarter of the
texts decides how far to go, so that the correction helps on texts it was not made from, and is left out where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from ..engine.router import route
from . import router_calib

STEPS, RATE = 60, 0.2
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the correction, the best of which is kept
MOST_LOGITS = 64 * 10**6  # float32 numbers held at once


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """One layer, on the quarter of texts that decides: agreement (share of choices as in 16 bits) and frequency distance
    (total variation) without and with the correction."""

    layer: int
    bias: np.ndarray
    agreement: float
    agreement_before: float
    distance: float
    distance_before: float


def calibrate_router(lab, reference, windows: list, progress: bool = True) -> list[LayerCalibration]:
    """Write `router_calib.bin` of the quantised container that `lab` has open, by the 16-bit `reference`.

    windows: of `quality.texts`. Returns what was gained, layer by layer.
    """
    every = max(1, len(windows) * 256 * lab.config.num_experts * len(lab.config.moe_layers) // MOST_LOGITS)
    chosen = windows[::every]
    logits, wanted, decides = _observe(lab, reference, chosen, progress)
    found = []
    for index, layer in enumerate(lab.config.moe_layers):
        router = lab.engine.layers[layer].router
        choose = _chooser(router)
        found.append(_fit(layer, logits[index], wanted[index], decides, choose))
    router_calib.write(lab.path, {each.layer: each.bias for each in found})
    return found


def _observe(lab, reference, windows: list, progress: bool):
    """Router logits of the quantised model, choices of the 16-bit one, and which tokens are to decide."""
    from ..engine.taps import tapped

    layers = lab.config.moe_layers
    logits, wanted, decides = [[] for _ in layers], [[] for _ in layers], []

    def ours(layer, site, x, ids):
        if ids is not None:
            linear = lab.engine.layers[layer].router.linear
            logits[layers.index(layer)].append(linear(x))

    def theirs(layer, site, x, ids):
        if ids is not None:
            wanted[layers.index(layer)].append(np.sort(ids, axis=1))

    for number, window in enumerate(tqdm(windows, desc="routers", unit="window", disable=not progress)):
        with tapped(lab.engine, ours):
            lab.logits(window.ids)
        with tapped(reference.engine, theirs):
            reference.logits(window.ids)
        decides.append(np.full(len(window.ids), number % 4 == 3 or len(windows) == 1))
    return [np.concatenate(rows) for rows in logits], [np.concatenate(rows) for rows in wanted], np.concatenate(decides)


def _chooser(router):
    """Function from logits to the ids of a layer's own rule, (tokens, k) ascending."""

    def choose(logits: np.ndarray) -> np.ndarray:
        return np.sort(route(np.ascontiguousarray(logits, np.float32), router.k, router.config, router.bias)[0], axis=1)

    return choose


def _fit(layer: int, logits: np.ndarray, wanted: np.ndarray, decides: np.ndarray, choose) -> LayerCalibration:
    experts = logits.shape[1]
    fitting = ~decides if (~decides).any() else decides
    target = _frequencies(wanted[fitting], experts)
    bias = np.zeros(experts)
    for _ in range(STEPS):
        now = _frequencies(choose(logits[fitting] + bias), experts)
        bias += RATE * np.log((target + 1e-4) / (now + 1e-4))
        bias -= bias.mean()
    target = _frequencies(wanted[decides], experts)

    def judged(share: float) -> tuple[float, float]:
        ids = choose(logits[decides] + share * bias)
        same = (ids[:, :, None] == wanted[decides][:, None, :]).sum() / ids.size
        return float(same), float(0.5 * np.abs(_frequencies(ids, experts) - target).sum())

    outcomes = {share: judged(share) for share in SHARES}
    before = outcomes[0.0]
    good = [share for share in SHARES if outcomes[share][0] >= before[0] and outcomes[share][1] <= before[1]]
    share = min(good, key=lambda s: outcomes[s][1])
    agreement, distance = outcomes[share]
    return LayerCalibration(layer, (share * bias).astype(np.float32), agreement, before[0], distance, before[1])


def _frequencies(ids: np.ndarray, experts: int) -> np.ndarray:
    return np.bincount(ids.ravel(), minlength=experts) / max(ids.size, 1)
