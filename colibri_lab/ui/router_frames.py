"""One token at one layer, from logits to weights: the panels of the router explorer and the sentences under them.

Everything is worked out from a `Reading`: what the routers saw when the unchanged model read the text. Another k or
temperature is tried on each layer alone, with the input that the unchanged model gave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from ..engine.routers import PAD, Choice, TopK
from ..routing import Reading, margins
from .frames import Frame, Series

CHOSEN, OTHERS = Series("chosen", "router"), Series("", "other")
TRAINED = Series("as trained", "ink", (3, 3))
BIASED = Series("score + bias", "ink", (3, 3))
NAMED = 8  # most chosen experts that carry their number: more would overlap
WORDS = (
    "not chosen",
    "chosen for the token before only",
    "chosen, as for the token before",
    "chosen, new for this token",
)


@dataclass(frozen=True, eq=False)
class Look:
    """`token` of `reading` at `layer` (model layer number), as `router` decides."""

    reading: Reading
    layer: int
    token: int
    router: TopK

    @cached_property
    def choices(self) -> dict[int, Choice]:
        """Layer → ids and weights of every token."""
        return {layer.index: self.reading.choose(layer.index, self.router) for layer in self.reading.layers}

    @property
    def ids(self) -> list[int]:
        """Best first."""
        return [int(i) for i in self.choices[self.layer][0][self.token] if i != PAD]

    @property
    def weights(self) -> list[float]:
        return self.choices[self.layer][1][self.token, : len(self.ids)].tolist()

    @cached_property
    def logits(self) -> np.ndarray:
        """float32 (experts,), divided by the temperature."""
        return self.reading.logits_of(self.layer)[self.token] / np.float32(self.router.temperature)

    @property
    def compared(self) -> np.ndarray:
        """float32 (experts,): what the choice looks at, scores with the correction bias."""
        bias = self.reading.layer(self.layer).bias
        return self.scores if bias is None else self.scores + bias

    @property
    def scores(self) -> np.ndarray:
        return self.reading.layer(self.layer).scores(self.logits[None])[0]

    @property
    def as_trained(self) -> bool:
        return (self.router.k or self.trained_k) == self.trained_k and self.router.temperature == 1

    @property
    def trained_k(self) -> int:
        return self.reading.layers[0].k

    def moved(self, layer: int, token: int) -> Look:
        """The same choices, looked at elsewhere."""
        look = Look(self.reading, layer, token, self.router)
        look.__dict__["choices"] = self.choices
        return look

    def same_as_before(self, layer: int | None = None) -> np.ndarray:
        """bool (tokens - 1, k): chosen by a token from the second on, and by the one before it as well."""
        ids = self.choices[self.layer if layer is None else layer][0]
        return (ids[1:, :, None] == ids[:-1, None, :]).any(2)

    def table(self) -> pd.DataFrame:
        """expert, logit, score, compared, rank (0 is best), weight: every expert, for this token and layer."""
        count = len(self.logits)
        rank, weight = np.full(count, np.nan), np.zeros(count)
        rank[self.ids], weight[self.ids] = np.arange(len(self.ids)), self.weights
        columns = {
            "logit": self.logits,
            "score": self.scores,
            "compared": self.compared,
            "rank": rank,
            "weight": weight,
        }
        return pd.DataFrame({"expert": np.arange(count), **columns}).astype({"rank": "Int64"})


def _columns(look: Look, title: str, ylabel: str, heights, ticks, ylim, series, **more) -> Frame:
    count = len(look.logits)
    which, texts = np.ones(count), [""] * count
    which[look.ids] = 0
    if len(look.ids) <= NAMED:
        for expert in look.ids:
            texts[expert] = str(expert)
    values = np.stack([heights, which, np.full(count, np.nan) if ticks is None else ticks]).astype(np.float32)
    shown = values[[0, 2]][np.isfinite(values[[0, 2]])]
    low, high = min(ylim[0], shown.min(initial=0)), max(ylim[1], shown.max(initial=0))
    return Frame(
        "columns", title, "expert", ylabel, values, (CHOSEN, OTHERS, *series), xlim=(-0.6, count - 0.4), ylim=(low, 1.12 * high),
        texts=tuple(texts), **more,
    )  # fmt: skip


def logits(look: Look) -> Frame:
    """Step 1: a number per expert, the router's matrix times the token's hidden state."""
    t, every = look.router.temperature, look.reading.logits
    raw = None if t == 1 else look.logits * np.float32(t)
    title = "1. Logits" if t == 1 else f"1. Logits / {t:.3g}"
    limits = (float(every.min()), float(every.max()))
    return _columns(look, title, "logit", look.logits, raw, limits, () if raw is None else (TRAINED,))


def scores(look: Look) -> Frame:
    """Step 2: scores in 0-1; the best k are chosen, by score plus correction bias where there is one."""
    layer = look.reading.layer(look.layer)
    kind = "sigmoid" if layer.rules.kind == "sigmoid_group" else "softmax"
    ticks = None if layer.bias is None else look.compared
    ids, k = look.ids, len(look.ids)
    return _columns(
        look, f"2. Scores: {kind}, best {k}", "score", look.scores, ticks, (0.0, 1.0),
        () if ticks is None else (BIASED,), level=float(look.compared[ids].min()),
    )  # fmt: skip


def weights(look: Look) -> Frame:
    """Step 3: what each chosen expert's output is multiplied with."""
    layer = look.reading.layer(look.layer)
    heights = np.zeros(layer.experts, np.float32)
    heights[look.ids] = look.weights
    kept = None
    if not look.as_trained:
        kept = np.full(layer.experts, np.nan, np.float32)
        own, gates = layer.route(look.reading.logits_of(look.layer)[look.token][None])
        kept[own[0]] = gates[0]
    title, limits = f"3. Weights, sum {heights.sum():.3g}", (0.0, 0.6 * layer.rules.scale)
    return _columns(look, title, "weight", heights, kept, limits, () if kept is None else (TRAINED,))


def picks(look: Look) -> Frame:
    """Layers × experts for this token, and which of them served the token before as well."""
    layers = [layer.index for layer in look.reading.layers]
    experts = len(look.logits)
    state, weight = np.zeros((len(layers), experts)), np.full((len(layers), experts), np.nan)
    for row, layer in enumerate(layers):
        ids, gates = look.choices[layer]
        now = ids[look.token]
        before = ids[look.token - 1] if look.token else np.empty(0, ids.dtype)
        state[row, before] = 1
        state[row, now] = np.where(np.isin(now, before), 2, 3)
        weight[row, now] = gates[look.token]
    new, all_ = int((state == 3).sum()), int((state >= 2).sum())
    return Frame(
        "grid",
        "4. This token in all layers",
        "expert",
        "layer",
        np.stack([state, weight, weight]).astype(np.float32),
        (Series("token before", "resident"), Series("both", "hit"), Series("this token only", "miss")),
        xlim=(0, experts),
        ylim=(0, len(layers)),
        rows=tuple(f"{'▸' * (layer == look.layer)}{layer}" for layer in layers),
        words=WORDS,
        note=f"{all_ - new} of {all_} also for the token before" if look.token else "",
    )


def panels(look: Look) -> tuple[Frame, Frame, Frame, Frame]:
    """The four panels in the order in which they are read."""
    return logits(look), scores(look), weights(look), picks(look)


def blank(config, why: str) -> tuple[Frame, Frame, Frame, Frame]:
    """The four panels with nothing in them but the reason."""
    count = config.num_experts
    flat = np.stack([np.zeros(count), np.ones(count), np.full(count, np.nan)]).astype(np.float32)
    columns = [
        Frame("columns", title, "expert", ylabel, flat, (CHOSEN, OTHERS), (-0.6, count - 0.4), (0, 1), empty=why)
        for title, ylabel in (("1. Logits", "logit"), ("2. Scores", "score"), ("3. Weights", "weight"))
    ]
    layers = config.moe_layers
    grid = Frame(
        "grid", "4. This token in all layers", "expert", "layer", np.zeros((3, len(layers), count), np.float32),
        xlim=(0, count), ylim=(0, len(layers)), rows=tuple(map(str, layers)), words=WORDS, empty=why,
    )  # fmt: skip
    return (*columns, grid)


def sentences(look: Look, nats: float | None) -> list[str]:
    """What the view says: who takes this token, how near the choice was, and what this k and temperature cost.

    `nats` is the loss of the text at this k and temperature, None while it is not measured.
    """
    reading, ids = look.reading, look.ids
    layer, trained = reading.layer(look.layer), float(reading.nats.mean()) if len(reading.nats) else None
    shares = [w / sum(look.weights) for w in look.weights]
    spread = f"{max(shares):.0%} to {min(shares):.0%}" if len(ids) > 1 else "all of it"
    who = f"Layer {look.layer} sends token {look.token}, {quoted(reading.pieces[look.token])}, to {named(ids)}, by weight {spread}."
    ahead = np.sort(look.compared)[::-1]
    if len(ids) < layer.experts and layer.rules.groups == 1:
        margin = ahead[len(ids) - 1] - ahead[len(ids)]
        others = np.median(margins(layer, reading.logits_of(look.layer)))
        who += f" The next best missed by {margin:.2g} (median {others:.2g} as trained)."
    overlap = look.same_as_before().mean() if len(reading.token_ids) > 1 else None
    chance = len(ids) / layer.experts
    again = (
        ""
        if overlap is None
        else f"In this text a token shares {overlap:.0%} of its experts with the one before it; chance is {chance:.1%}. "
    )
    what = f"k = {len(ids)}" + (f", temperature {look.router.temperature:.3g}" if look.router.temperature != 1 else "")
    if trained is None:
        cost = "A loss needs at least two tokens."
    elif look.as_trained:
        cost = f"As trained ({what}) this text costs {trained:.3f} nats per token."
    elif nats is None:
        cost = f"With {what} the loss is being measured; as trained it is {trained:.3f} nats per token."
    else:
        more, by = nats - trained, len(ids) / look.trained_k
        cost = f"With {what} this text costs {nats:.3f} nats per token, {abs(more):.3f} {'more' if more >= 0 else 'less'} than as trained"
        cost += f", for {by:.3g} x the expert work." if by != 1 else "."
    return [who, again + cost]


def named(ids: list[int]) -> str:
    if len(ids) > NAMED:
        return f"{len(ids)} experts"
    numbers = [str(i) for i in ids]
    return f"expert {numbers[0]}" if len(ids) == 1 else f"experts {', '.join(numbers[:-1])} and {numbers[-1]}"


def quoted(piece: str) -> str:
    """A token's text, visible even where it is blank or half a character."""
    return f"“{visible(piece)}”"


def visible(piece: str) -> str:
    """A token's text with marks for what is blank, and a dot for part of a character."""
    if piece.strip():
        return piece.replace("\n", "⏎")
    marks = piece.replace("\n", "⏎").replace("\t", "→").replace(" ", "␣")
    return f"{marks[:3]}…" if len(marks) > 4 else marks or "·"
