"""Which experts fire for which domain, from readings alone: nothing here runs the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pandas as pd

from ..engine.routers import Table
from ..trace import Trace
from .reading import Readings


def usage(readings: Readings) -> pd.DataFrame:
    """domain, layer, expert, count, share: choices by domain; `share` of the domain's choices in that layer."""
    parts = []
    for domain, group in readings.items():
        for layer in group[0].layers:
            ids = np.concatenate([reading.choose(layer.index)[0].ravel() for reading in group])
            count = np.bincount(ids, minlength=layer.experts)
            part = {"domain": domain, "layer": layer.index, "expert": np.arange(layer.experts), "count": count}
            parts.append(pd.DataFrame(part | {"share": count / count.sum()}))
    return pd.concat(parts, ignore_index=True)


def specialisation(readings: Readings, seed: int = 0) -> pd.DataFrame:
    """layer, mutual_information_bits, nmi, by_chance, owned, effective, effective_in_domain: do experts know domains?

    Domains count equally. `nmi` is 2 I(domain; expert) / (H(domain) + H(expert)); `by_chance` the same after the tokens'
    domain labels were shuffled, which a finite sample does not bring to 0. `owned` experts get over half of their use from
    one domain. `effective` is 1 / sum p^2 of the experts over all domains, `effective_in_domain` its mean inside one.
    """
    names = list(readings)
    shuffle = np.random.default_rng(seed)
    rows = []
    for at, layer in enumerate(readings[names[0]][0].layers):
        chosen = [np.concatenate([r.choose(layer.index)[0] for r in readings[name]]) for name in names]
        label = np.repeat(np.arange(len(names)), [len(ids) for ids in chosen])
        ids = np.concatenate(chosen)
        joint = _joint(label, ids, len(names), layer.experts)
        information, nmi = _information(joint)
        _, chance = _information(_joint(shuffle.permutation(label), ids, len(names), layer.experts))
        shares = joint / joint.sum(1, keepdims=True)
        owned = int((joint.max(0) > joint.sum(0) / 2).sum())
        rows.append(
            (
                layer.index,
                information,
                nmi,
                chance,
                owned,
                _effective(joint.sum(0)),
                np.mean([_effective(s) for s in shares]),
            )
        )
    columns = ["layer", "mutual_information_bits", "nmi", "by_chance", "owned", "effective", "effective_in_domain"]
    return pd.DataFrame(rows, columns=columns)


def _joint(label: np.ndarray, ids: np.ndarray, labels: int, experts: int) -> np.ndarray:
    """Joint distribution (labels, experts), every label with the same weight."""
    counts = np.bincount((label[:, None] * experts + ids).ravel(), minlength=labels * experts).reshape(labels, experts)
    return counts / counts.sum(1, keepdims=True) / labels


def _information(joint: np.ndarray) -> tuple[float, float]:
    """Mutual information of rows and columns in bits, and normalised."""
    rows, columns = _entropy(joint.sum(1)), _entropy(joint.sum(0))
    information = rows + columns - _entropy(joint.ravel())
    return information, 2 * information / (rows + columns)


def _entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def _effective(p: np.ndarray) -> float:
    return float(p.sum() ** 2 / (p**2).sum())


def balance(readings: Readings) -> pd.DataFrame:
    """layer, of, most, least, variation, effective: load of a layer's experts against the mean load of 1.

    `of` is "all domains" (equally weighted) or the name of one; `variation` is the standard deviation over the mean.
    """
    shares = usage(readings).pivot_table(index=["layer", "expert"], columns="domain", values="share", sort=False)
    shares.insert(0, "all domains", shares.mean(axis=1))
    rows = []
    for (layer, of), share in shares.stack().groupby(level=[0, 2], sort=False):
        load = share.to_numpy() / share.mean()
        rows.append((layer, of, load.max(), load.min(), load.std(), _effective(load)))
    return pd.DataFrame(rows, columns=["layer", "of", "most", "least", "variation", "effective"])


def favourites(
    readings: Readings, domain: str, n: int = 6, layers: Iterable[int] | None = None
) -> list[tuple[int, int]]:
    """(layer, expert) of the n experts that `domain` uses most, in each of `layers` (the last two if None)."""
    table = usage({domain: readings[domain]})
    wanted = sorted(table.layer.unique())[-2:] if layers is None else list(layers)
    best = (
        table[table.layer.isin(wanted)]
        .sort_values(["layer", "count"], ascending=[True, False], kind="stable")
        .groupby("layer")
        .head(n)
    )
    return [(int(layer), int(expert)) for layer, expert in zip(best.layer, best.expert, strict=True)]


def trace_of(readings: Readings) -> Trace:
    """A trace in which every domain is one text, token after token: for `trace.locality` and `trace.replay`."""
    names = list(readings)
    layers = readings[names[0]][0].layers
    tokens = [sum(len(r.token_ids) for r in readings[name]) for name in names]
    choices = [np.concatenate([r.choose(layer.index)[0] for name in names for r in readings[name]]) for layer in layers]
    header = {"num_experts": layers[0].experts, "moe_layers": [layer.index for layer in layers], "domains": names}
    header |= {"ranked": True, "engine": "colibri-lab", "capture": "routing.trace_of"}
    return Trace.from_rows(
        step=np.repeat(np.arange(sum(tokens)), len(layers)),
        layer=np.tile([layer.index for layer in layers], sum(tokens)),
        sequence=np.repeat(np.repeat(np.arange(len(names)), tokens), len(layers)),
        experts=np.stack(choices, axis=1).reshape(-1, choices[0].shape[1]),
        header=header,
    )


def frequency_table(readings: Readings, k: int | None = None) -> Table:
    """A `Table` that sends a token to the k experts it went to most often in `readings`, whatever stands around it.

    Tokens that do not occur there go to the layer's most used experts.
    """
    counts: dict[tuple, Counter] = {}
    for reading in (r for group in readings.values() for r in group):
        for layer in reading.layers:
            ids, _ = reading.choose(layer.index)
            for token, experts in zip(reading.token_ids.tolist(), ids.tolist(), strict=True):
                for key in ((layer.index, token), (layer.index, None)):
                    counts.setdefault(key, Counter()).update(experts)
    k = k or next(iter(readings.values()))[0].layers[0].k
    return Table({key: [expert for expert, _ in found.most_common(k)] for key, found in counts.items()})
