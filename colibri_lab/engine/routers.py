"""Routers to put in the place of the model's own: `with lab.routing(routers.TopK(k=2)): lab.generate(…)`.

A router is any callable

    router(layer: RoutedLayer, logits) → ids (tokens, k), weights (tokens, k)

`logits` is float32 (tokens, experts), valid during the call. ids are expert numbers in the order in which the experts are
added up; a row with fewer experts than the widest is filled up with `PAD`. `layer.route(logits)` is the model's own rule.
A router that has `needs_logits = False` gets None for the logits, and the router's matrix product is not computed; one
with `shared = False` leaves the shared experts out; one with a method `check` is shown the `ModelConfig` first and may
refuse. Its repr is kept with each run, as `run.settings["routing"]`.

Decisions depend on (layer, position, token) and a seed alone, so a text can be read twice, or in other pieces, with the
same result. `ExpertChoice` is the exception: there the tokens of one step compete.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from ..config import ModelConfig
from ..errors import SettingError
from ..trace.events import PAD
from .router import RoutedLayer

Choice = tuple[np.ndarray, np.ndarray]
RouterHook = Callable[[RoutedLayer, "np.ndarray | None"], Choice]
MODEL = "model"  # run.settings["routing"] of a run with the model's own router


class _Described:
    """repr from the arguments that are not the defaults."""

    def __repr__(self) -> str:
        changed = (f"{n}={v!r}" for n, v in self.__dict__.items() if v != getattr(type(self), n, None))
        return f"{type(self).__name__}({', '.join(changed)})"


class TopK(_Described):
    """The model's own rule with another k, with logits divided by `temperature`, or without some experts.

    `mask` holds (layer, expert) pairs that cannot be chosen; scores and weights of the others stay what they were.
    `shared=False` leaves the shared experts out. All defaults: the model's own router, to the bit.
    """

    k, temperature, mask, shared = None, 1.0, (), True

    def __init__(
        self, k: int | None = None, temperature: float = 1.0, mask: Iterable[tuple[int, int]] = (), shared: bool = True
    ):
        if k is not None and (not isinstance(k, (int, np.integer)) or k < 1):
            raise SettingError(f"TopK: k must be a whole number of at least 1, got {k!r}")
        if not temperature > 0 or not np.isfinite(temperature):
            raise SettingError(f"TopK: temperature must be above 0, got {temperature!r}")
        self.k, self.temperature, self.shared = k, temperature, shared
        self.mask = tuple(sorted((int(layer), int(expert)) for layer, expert in mask))

    def check(self, config: ModelConfig) -> None:
        """Raises `SettingError` for a k or an expert that this model does not have."""
        most = config.num_experts // config.router.groups * config.router.top_groups
        if (self.k or 1) > most:
            raise SettingError(f"TopK: k must be at most {most}, the experts a token may choose from, got {self.k}")
        for layer, expert in self.mask:
            if layer not in config.moe_layers or not 0 <= expert < config.num_experts:
                raise SettingError(
                    f"TopK: mask names ({layer}, {expert}); MoE layers are {config.moe_layers[0]} to "
                    f"{config.moe_layers[-1]}, experts 0 to {config.num_experts - 1}"
                )

    def __call__(self, layer: RoutedLayer, logits: np.ndarray) -> Choice:
        k = self.k or layer.k
        if self.temperature != 1:
            logits = logits / np.float32(self.temperature)
        masked = [expert for number, expert in self.mask if number == layer.index]
        if not masked:
            return layer.route(logits, k)
        bias = np.zeros(layer.experts, np.float32) if layer.bias is None else layer.bias.astype(np.float32)
        bias[masked] = -np.inf
        ids, weights = layer.route(logits, k, bias)
        if np.isin(ids, masked).any():
            raise SettingError(
                f"TopK: with {len(masked)} of {layer.experts} experts masked, layer {layer.index} has fewer than {k}"
            )
        return ids, weights


class Soft(_Described):
    """Every expert, weighted by its score: the mixture before it was made sparse (Jacobs et al. 1991)."""

    def __call__(self, layer: RoutedLayer, logits: np.ndarray) -> Choice:
        everyone = np.ones(logits.shape, bool)
        return pack(layer.weigh(layer.scores(logits), everyone), everyone)


class ExpertChoice(_Described):
    """Each expert takes the `capacity` tokens that score it highest, out of the tokens of a step (Zhou et al. 2022).

    Load is exactly equal; a token may get any number of experts, also none. `capacity=None` takes what costs as much as the
    model's top-k: tokens x k / experts, at least 1. A token's experts depend on later tokens of its step, so this is no way
    to generate text: in a step of one token every expert takes it.
    """

    capacity = None

    def __init__(self, capacity: int | None = None):
        if capacity is not None and (not isinstance(capacity, (int, np.integer)) or capacity < 1):
            raise SettingError(f"ExpertChoice: capacity must be a whole number of tokens, at least 1, got {capacity!r}")
        self.capacity = capacity

    def __call__(self, layer: RoutedLayer, logits: np.ndarray) -> Choice:
        scores = layer.scores(logits)
        capacity = self.capacity or -(-len(scores) * layer.k // layer.experts)
        best = np.argsort(-scores, axis=0, kind="stable")[:capacity]  # the tokens of each expert
        chosen = np.zeros(scores.shape, bool)
        np.put_along_axis(chosen, best, True, axis=0)
        return pack(layer.weigh(scores, chosen), chosen)


class Gumbel(_Described):
    """k experts drawn without replacement, with the probabilities softmax(logits / temperature) (Kool et al. 2019).

    The draw for a layer and position depends on `seed` alone. Weights follow the model's rule; its correction bias and
    groups play no part.
    """

    seed, temperature, k = 0, 1.0, None

    def __init__(self, seed: int = 0, temperature: float = 1.0, k: int | None = None):
        TopK(k, temperature)  # the same limits
        self.seed, self.temperature, self.k = _seed("Gumbel", seed), temperature, k

    def __call__(self, layer: RoutedLayer, logits: np.ndarray) -> Choice:
        noise = seeded_noise(self.seed, layer, "gumbel")
        order = np.argsort(-(logits / self.temperature + noise), axis=1, kind="stable")[:, : self.k or layer.k]
        chosen = np.zeros(logits.shape, bool)
        np.put_along_axis(chosen, order, True, axis=1)
        return pack(layer.weigh(layer.scores(logits), chosen), chosen)


class Noisy(_Described):
    """A faulty router: the model's own rule on logits with normal noise of standard deviation `scale` added."""

    scale, seed = None, 0

    def __init__(self, scale: float, seed: int = 0):
        if not 0 <= scale < np.inf:
            raise SettingError(f"Noisy: scale must be a number of at least 0, got {scale!r}")
        self.scale, self.seed = scale, _seed("Noisy", seed)

    def __call__(self, layer: RoutedLayer, logits: np.ndarray) -> Choice:
        return layer.route(logits + np.float32(self.scale) * seeded_noise(self.seed, layer, "standard_normal"))


class Table:
    """Hard-coded: the token's id decides, the text around it does not (as hash layers do, Roller et al. 2021).

    `experts` maps token id, or (layer, token id), to expert ids; None in the place of the token id stands for tokens that
    are not listed. All experts of a token weigh the same. `routing.frequency_table` makes one from what a model did.
    """

    needs_logits = False

    def __init__(self, experts: Mapping):
        if not experts:
            raise SettingError("Table: experts must map token ids, or (layer, token id), to expert ids; got nothing")
        self.experts = {key: tuple(_whole("Table", ids)) for key, ids in experts.items()}

    def __repr__(self) -> str:
        return f"Table({len(self.experts)} entries)"

    def __call__(self, layer: RoutedLayer, logits: None) -> Choice:
        rows = [self._row(layer.index, int(token)) for token in layer.token_ids]
        ids = np.full((len(rows), max(1, *map(len, rows))), PAD)
        for at, row in zip(ids, rows, strict=True):
            at[: len(row)] = row
        return ids, uniform(ids, layer)

    def _row(self, layer: int, token: int) -> tuple[int, ...]:
        for key in ((layer, token), token, (layer, None), None):
            if key in self.experts:
                return self.experts[key]
        raise SettingError(
            f"Table: no entry for token {token} in layer {layer}; give one for None, which stands for all others"
        )


class Precomputed:
    """Experts decided elsewhere: `ids` maps the layer number to (positions, k) expert ids, one row per token of the text.

    `weights` alike, float32; without them all experts of a token weigh the same, and a warning says so. A row may be filled
    up with PAD. `Precomputed.of` takes the table of `lab.routes` or a trace.
    """

    needs_logits = False

    def __init__(self, ids: Mapping[int, np.ndarray], weights: Mapping[int, np.ndarray] | None = None):
        if not ids:
            raise SettingError("Precomputed: ids must map layer numbers to (positions, k) expert ids; got nothing")
        self.ids = {int(layer): _id_array(f"Precomputed: layer {layer}", rows) for layer, rows in ids.items()}
        self.weights = None
        if weights is None:
            warnings.warn("Precomputed: ids without weights: all experts of a token weigh the same", stacklevel=2)
            return
        self.weights = {int(layer): np.asarray(rows, np.float32) for layer, rows in weights.items()}
        for layer, rows in self.ids.items():
            found = self.weights[layer].shape if layer in self.weights else None
            if found != rows.shape:
                raise SettingError(
                    f"Precomputed: weights of layer {layer} must have the shape of its ids, {rows.shape}; got {found}"
                )

    @classmethod
    def of(cls, routes, weights: bool = True) -> Precomputed:
        """From the table of `lab.routes(token_ids)`, or from a trace of one text; `weights=False` keeps the ids only."""
        if isinstance(routes, pd.DataFrame):
            parts = {layer: _square(rows) for layer, rows in routes.groupby("layer")}
            ids, gates = ({layer: part[at] for layer, part in parts.items()} for at in (0, 1))
            return cls(ids, gates if weights else None)
        texts = np.unique(routes.sequence)
        if len(texts) != 1:
            raise SettingError(
                f"Precomputed: a trace of one text is needed, this one has {len(texts)}; use trace.select(sequence=…)"
            )
        keep = weights and routes.weights is not None
        of_layer = {layer: routes.layer == layer for layer in routes.layers}
        return cls(
            {layer: routes.experts[rows] for layer, rows in of_layer.items()},
            {layer: routes.weights[rows] for layer, rows in of_layer.items()} if keep else None,
        )

    def check(self, config: ModelConfig) -> None:
        """Raises `SettingError` when a layer of the model has no ids."""
        missing = [layer for layer in config.moe_layers if layer not in self.ids]
        if missing:
            raise SettingError(
                f"Precomputed: no ids for layer {missing[0]}; ids are there for layers {sorted(self.ids)}"
            )

    def __repr__(self) -> str:
        positions = min(map(len, self.ids.values()))
        return f"Precomputed({len(self.ids)} layers, {positions} positions{', equal weights' * (self.weights is None)})"

    def __call__(self, layer: RoutedLayer, logits: None) -> Choice:
        rows = self.ids[layer.index]
        first, last = layer.position, layer.position + len(layer.token_ids)
        if last > len(rows):
            raise SettingError(
                f"Precomputed: no ids for position {last - 1} of layer {layer.index}; they end at {len(rows) - 1}"
            )
        ids = rows[first:last]
        return ids, uniform(ids, layer) if self.weights is None else self.weights[layer.index][first:last]


def pack(weights: np.ndarray, chosen: np.ndarray) -> Choice:
    """(tokens, experts) weights and bool choices → ids, largest weight first, and weights, as wide as need be."""
    width = max(1, int(chosen.sum(1).max()))
    order = np.argsort(np.where(chosen, -weights, np.inf), axis=1, kind="stable")[:, :width]
    kept = np.take_along_axis(chosen, order, 1)
    return np.where(kept, order, PAD).astype(np.uint16), np.where(kept, np.take_along_axis(weights, order, 1), 0)


def uniform(ids: np.ndarray, layer: RoutedLayer) -> np.ndarray:
    """Equal weights for the experts of each token, summing to what the model's weights sum to (scale)."""
    used = ids != PAD
    return (used * np.float32(layer.rules.scale) / np.maximum(used.sum(1, keepdims=True), 1)).astype(np.float32)


def seeded_noise(seed: int, layer: RoutedLayer, kind: str) -> np.ndarray:
    """float32 (tokens, experts) of a distribution of numpy's Generator, a function of seed, layer and position alone."""
    places = range(layer.position, layer.position + len(layer.token_ids))
    rows = [getattr(np.random.default_rng((seed, layer.index, place)), kind)(size=layer.experts) for place in places]
    return np.array(rows, np.float32)


def decide(router: RouterHook, layer: RoutedLayer, logits: np.ndarray | None) -> Choice:
    """What `router` chose, checked: ids uint16 and weights float32, (tokens, k) both. Raises `SettingError` naming it."""
    name, tokens = describe(router), len(layer.token_ids)
    choice = router(layer, logits)
    try:
        ids, weights = choice
        ids, weights = np.asarray(ids), np.ascontiguousarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise SettingError(f"router {name} in layer {layer.index}: expected (ids, weights) back; {error}") from error
    if ids.ndim != 2 or len(ids) != tokens or not ids.shape[1] or weights.shape != ids.shape:
        raise SettingError(
            f"router {name} in layer {layer.index}: ids and weights must both be ({tokens} tokens, k), got {ids.shape} "
            f"and {weights.shape}"
        )
    ids = _id_array(f"router {name} in layer {layer.index}", ids, layer.experts)
    used = ids != PAD
    if not np.isfinite(weights[used]).all():
        raise SettingError(f"router {name} in layer {layer.index}: weights must be finite, found {weights[used].min()}")
    in_order = np.sort(ids, axis=1)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != PAD)).any():
        raise SettingError(f"router {name} in layer {layer.index}: a token was given the same expert twice")
    return ids, weights


def chosen_only(ids: np.ndarray, weights: np.ndarray) -> Choice:
    """Both flat, without PAD."""
    used = ids != PAD
    return ids[used], weights[used]


def describe(router: RouterHook | None) -> str:
    """How run.settings names a router."""
    if router is None:
        return MODEL
    return getattr(router, "__name__", None) or repr(router)


def _id_array(what: str, ids, experts: int = PAD) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu" or ids.ndim != 2:
        raise SettingError(
            f"{what}: expert ids must be whole numbers of shape (tokens, k), got {ids.dtype} {ids.shape}"
        )
    wrong = (ids != PAD) & ((ids < 0) | (ids >= experts))
    if wrong.any():
        raise SettingError(f"{what}: expert ids must be 0 to {experts - 1}, or {PAD} for none; got {ids[wrong][0]}")
    return np.ascontiguousarray(ids, np.uint16)


def _whole(what: str, ids) -> list[int]:
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        raise SettingError(f"{what}: expert ids must be lists of whole numbers, got {ids!r}") from None


def _seed(what: str, seed) -> int:
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SettingError(f"{what}: seed must be a whole number of at least 0, got {seed!r}")
    return int(seed)


def _square(rows: pd.DataFrame) -> Choice:
    """A layer's rows of `lab.routes` → ids and weights (tokens, widest)."""
    shape = rows.token.max() + 1, rows["rank"].max() + 1
    ids, weights = np.full(shape, PAD, np.uint16), np.zeros(shape, np.float32)
    ids[rows.token, rows["rank"]], weights[rows.token, rows["rank"]] = rows.expert, rows.weight
    return ids, weights
