"""Second moments of what each matrix reads, X Xᵀ / tokens, collected while the model runs over texts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from . import layout
from .container import Container

PENDING = 1 << 18  # values of one site that wait to be multiplied together
PRIOR = 64  # tokens' worth of the whole layer's moment that every expert starts from: some experts see few tokens


class Sum:
    """X Xᵀ, summed over rows that come in a few at a time."""

    def __init__(self, width: int):
        self.total = np.zeros((width, width), np.float32)
        self.tokens = 0
        self._waiting: list[np.ndarray] = []
        self._count = 0

    def add(self, x: np.ndarray) -> bool:
        """Whether enough rows wait for `flush`."""
        self._waiting.append(np.array(x, np.float32))
        self._count += len(x)
        return self._count * len(self.total) >= PENDING

    def flush(self) -> np.ndarray:
        """Multiply what waits; returns it, (rows, width)."""
        x = np.concatenate([np.empty((0, len(self.total)), np.float32), *self._waiting])
        self.total += x.T @ x
        self.tokens += len(x)
        self._waiting, self._count = [], 0
        return x


class Moments:
    """A sink for `engine.taps.tapped`: the moments that some tensors of a container ask for.

    What the down matrices read is computed from the input of gate and up, with the container's own weights.
    """

    def __init__(self, container: Container, tensors: Iterable[tuple[str, str]]):
        """tensors: (file, tensor) of a container."""
        self.container = container
        self._sums: dict[tuple, Sum] = {}
        sites = {self.site(file, tensor) for file, tensor in tensors} - {None}
        sites |= {(layer, "ffn", *expert) for layer, kind, *expert in sites if kind == "inner"}
        self._sites = sites | {(layer, "ffn") for layer, kind, *_ in sites if kind == "ffn"}

    @staticmethod
    def bytes_per_layer(config) -> int:
        """Of an MoE layer's sums: an input and an inner moment for every expert."""
        return 4 * (config.num_experts + 1) * (config.hidden_size**2 + config.expert_intermediate_size**2)

    def __call__(self, layer: int | None, site: str, x: np.ndarray, ids: np.ndarray | None) -> None:
        self._add((layer, site), x)
        if ids is not None and any(site[:2] == (layer, "ffn") and len(site) == 3 for site in self._sites):
            for expert in np.unique(ids):
                self._add((layer, "ffn", int(expert)), x[(ids == expert).any(axis=1)])

    def finish(self) -> None:
        """Multiply all that waits."""
        for key in list(self._sums):
            self._flush(key)

    def site(self, file: str, tensor: str) -> tuple | None:
        """What a container's tensor reads: a key for `at`, the same for tensors that read the same. None: token ids."""
        expert, _, matrix = tensor.rpartition(".")
        layer = layout.layer_of(file)
        if layer is None:
            reads = matrix == "head" or self.container.config.tied_embeddings
            return (None, "head") if reads else None
        if matrix in ("q", "k", "v", "o"):
            return layer, "attention_out" if matrix == "o" else "attention"
        inner = "inner" if matrix.removeprefix("shared_") == "down" else "ffn"
        return (layer, inner, int(expert)) if expert else (layer, inner)

    def at(self, site: tuple) -> np.ndarray | None:
        """The moment (width, width) at a site; None where nothing was seen."""
        own = self._sums.get(site)
        if len(site) == 2:
            return own.total / own.tokens if own is not None and own.tokens else None
        everyone = self._all_inner(site[0]) if site[1] == "inner" else self.at(site[:2])
        if everyone is None or own is None:
            return everyone
        return (own.total + PRIOR * everyone) / (own.tokens + PRIOR)

    def of(self, file: str, tensor: str) -> np.ndarray | None:
        """The moment of what a container's tensor reads."""
        site = self.site(file, tensor)
        return None if site is None else self.at(site)

    def _all_inner(self, layer: int) -> np.ndarray | None:
        """The mean over all routed experts' inner moments."""
        sums = [s for key, s in self._sums.items() if key[:2] == (layer, "inner") and len(key) == 3]
        tokens = sum(s.tokens for s in sums)
        return sum(s.total for s in sums) / tokens if tokens else None

    def _add(self, key: tuple, x: np.ndarray) -> None:
        if len(x) and key in self._sites:
            total = self._sums.setdefault(key, Sum(x.shape[1]))
            if total.add(x):
                self._flush(key)

    def _flush(self, key: tuple) -> None:
        x = self._sums[key].flush()
        layer, inner = key[0], (key[0], "inner", *key[2:])
        if key[1] != "ffn" or inner not in self._sites or not len(x):
            return
        if len(key) == 3:
            parts = self.container.expert(layer, key[2])
            gate, up = parts["gate"], parts["up"]
        else:
            tensors = self.container.dense(f"layer_{layer}").tensors
            prefix = "" if "gate" in tensors else "shared_"
            gate, up = tensors[f"{prefix}gate"].array(), tensors[f"{prefix}up"].array()
        g = x @ gate.T
        hidden = g / (1 + np.exp(-g)) * (x @ up.T)
        total = self._sums.setdefault(inner, Sum(hidden.shape[1]))
        total.add(hidden)
        total.flush()
