"""What the matrices of a running model read: every input handed to a function, for calibration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

Sink = Callable[["int | None", str, np.ndarray, "np.ndarray | None"], None]


class _Tap:
    """A part of the model with its input watched; all else is the part's own."""

    def __init__(self, part, seen: Callable):
        self._part, self._seen = part, seen

    def __call__(self, x, *rest):
        out = self._part(x, *rest)
        self._seen(x, out)
        return out

    def __getattr__(self, name):
        return getattr(self._part, name)


@contextlib.contextmanager
def tapped(engine, sink: Sink) -> Iterator[None]:
    """Inside the block sink(layer, site, x, ids) gets x (tokens, width) float32, valid during the call, of the sites

    "attention"      input of q, k, v            "ffn"   input of experts, shared experts, dense layers; with ids (tokens, k),
    "attention_out"  input of o                          the routed experts of each token, or None in a dense layer
                                                 "head"  input of the head; layer None
    """
    changed = []

    def put(owner, name: str, layer: int | None, site: str, routed: bool = False) -> None:
        part = getattr(owner, name)
        changed.append((owner, name, part))
        setattr(owner, name, _Tap(part, lambda x, out: sink(layer, site, x, out[0] if routed else None)))

    try:
        for layer in engine.layers:
            put(layer.attention, "q", layer.index, "attention")
            put(layer.attention, "o", layer.index, "attention_out")
            if layer.dense:
                put(layer, "dense", layer.index, "ffn")
            else:
                put(layer, "router", layer.index, "ffn", routed=True)
        put(engine, "_head", None, "head")
        yield
    finally:
        for owner, name, part in changed:
            setattr(owner, name, part)
