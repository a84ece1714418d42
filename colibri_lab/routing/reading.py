"""Texts as the model's routers saw them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..engine.router import RoutedLayer
from ..engine.routers import Choice, RouterHook, TopK, decide
from ..errors import ModelError, SettingError

Texts = Mapping[str, "list[str]"]


@dataclass(frozen=True, eq=False)
class Reading:
    """One text as the model read it: each router's logits, and the loss of each token given those before it."""

    text: str
    token_ids: np.ndarray  # int64 (tokens,)
    pieces: tuple[str, ...]  # the text that became complete with each token; "" inside a character of several tokens
    layers: tuple[RoutedLayer, ...]  # MoE layers, ascending
    logits: np.ndarray = field(repr=False)  # float32 (layers, tokens, experts)
    nats: np.ndarray = field(repr=False)  # float64 (tokens - 1,)

    def layer(self, index: int) -> RoutedLayer:
        """By model layer number. Raises `SettingError` for one that does not route."""
        return self.layers[self._at(index)]

    def logits_of(self, layer: int) -> np.ndarray:
        """float32 (tokens, experts)."""
        return self.logits[self._at(layer)]

    def choose(self, layer: int, router: RouterHook | None = None) -> Choice:
        """What `router` (the model's own if None) makes of this layer's logits: ids uint16, weights float32."""
        at = self._at(layer)
        return decide(router or TopK(), self.layers[at], self.logits[at])

    def _at(self, index: int) -> int:
        numbers = [layer.index for layer in self.layers]
        if index not in numbers:
            raise SettingError(f"layer {index} does not route; those that do are {numbers[0]} to {numbers[-1]}")
        return numbers.index(index)


Readings = Mapping[str, "list[Reading]"]


def texts(name: str = "texts") -> dict[str, list[str]]:
    """Domain → texts that come with the project: "texts" (a few hundred tokens each) or "prompts" (short beginnings)."""
    from ..front import project_root

    path = project_root() / "data" / f"{name}.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}; domain texts come with a checkout of the project, or give your own"
        ) from None
    return {domain: [entry["text"] for entry in entries] for domain, entries in found.items()}


def read(lab, text: str) -> Reading:
    """Let `lab` read `text` with the model's own routers. Raises `SettingError` for a text without tokens."""
    ids = np.array(lab.tokenizer.encode(text), np.int64)
    if not len(ids):
        raise SettingError("text is empty: expected at least one token, found none")
    heard: dict[int, list] = {}

    def listen(layer, logits):
        heard.setdefault(layer.index, []).append((layer, logits.copy()))
        return layer.route(logits)

    with lab.routing(listen):
        nats = token_nats(lab.logits(ids), ids)
    stream = lab.tokenizer.stream()
    layers = [dataclasses.replace(parts[0][0], token_ids=ids, position=0) for parts in heard.values()]
    logits = np.stack([np.concatenate([part for _, part in parts]) for parts in heard.values()])
    return Reading(text, ids, tuple(stream.add(int(i)) for i in ids), tuple(layers), logits, nats)


def read_domains(lab, domains: Texts | None = None) -> dict[str, list[Reading]]:
    """`read` of every text of every domain (`texts()` if None)."""
    return {domain: [read(lab, text) for text in group] for domain, group in (domains or texts()).items()}


def split(readings: Readings) -> tuple[dict[str, list[Reading]], dict[str, list[Reading]]]:
    """The first text of each domain, and the others: to choose experts on one part and to judge the choice on the other."""
    return {d: group[:1] for d, group in readings.items()}, {d: group[1:] for d, group in readings.items()}


def token_nats(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """-log p of each token but the first, float64 (tokens - 1,)."""
    x = logits[:-1].astype(np.float64)
    top = x.max(1, keepdims=True)
    return np.log(np.exp(x - top).sum(1)) + top[:, 0] - x[np.arange(len(x)), ids[1:]]
