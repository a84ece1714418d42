"""Findings about claims, for notebook 08: the verdicts at a glance, and one claim looked into."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ..claims import FAILED, IMPLAUSIBLE, NOT, OTHER, REPRODUCED, UNTESTABLE, Cards
from ..trace.curves import curve
from ..trace.table import Trace
from .frames import Frame, Series
from .what_if import Finding

_COLORS = {
    REPRODUCED: "attention", NOT: "miss", OTHER: "sky", UNTESTABLE: "other", IMPLAUSIBLE: "router", FAILED: "ink",
}  # fmt: skip
_LINES = (("hit", ()), ("attention", (9, 2, 2, 2)), ("miss", (7, 3)), ("router", (2, 2)))


def verdicts(cards: Cards) -> Finding:
    """How many claims have each verdict."""
    counts = cards.counts()
    counts = counts[(counts > 0) | (counts.index != FAILED)][::-1]
    values = np.stack([counts.to_numpy(np.float32), np.full(len(counts), np.nan, np.float32)], 1)
    frame = Frame(
        "bars", "Verdicts on claims in print", "claims", "", values,
        tuple(Series(kind, _COLORS[kind]) for kind in counts.index), (0, float(counts.max())),
        texts=tuple(str(count) for count in counts),
    )  # fmt: skip
    said = f"Of {len(cards)} claims {counts[REPRODUCED]} were reproduced here, {counts[NOT]} were not."
    if counts.get(FAILED):
        said += f" {counts[FAILED]} experiments failed and say why on their cards."
    return Finding((frame,), said, cards.table)


def gain_over_lru(traces: Mapping[str, Trace], policy: str = "weighted-lru") -> Finding:
    """Points of hit rate that `policy` gains over lru in decode, by share of a layer's experts in memory."""
    shares, rows, lines = np.arange(5, 101, 5), [], []
    for name, trace in traces.items():
        slots = np.unique(np.clip(np.round(shares / 100 * trace.num_experts), 1, None).astype(int)).tolist()
        rates = [curve(trace, p, slots=slots, phase="decode", progress=False).set_index("slots").hit_rate for p in (policy, "lru")]  # fmt: skip
        gain = 100 * (rates[0] - rates[1])
        rows += [{"trace": name, "slots": n, "percent": 100 * n / trace.num_experts, "points": gain[n]} for n in slots]
        lines.append(np.interp(shares, 100 * gain.index / trace.num_experts, gain))
    table = pd.DataFrame(rows)
    series = [Series(name, *_LINES[i % len(_LINES)]) for i, name in enumerate(traces)]
    series += [Series("claimed of weighted-lru: 8 to 12", "kept", (2, 3), 1.5), Series("", "kept", (2, 3), 1.5)]
    values = np.array([*lines, np.full(len(shares), 8), np.full(len(shares), 12)], np.float32)
    frame = Frame(
        "lines", f"{policy} against lru", "% of a layer's experts in memory", "points of hit rate gained",
        values, tuple(series), (0, 100), (min(-6.0, float(values.min()) - 1), max(14.0, float(values.max()) + 1)),
        x=tuple(map(float, shares)),
    )  # fmt: skip
    best, worst = table.loc[table.points.idxmax()], table.loc[table.points.idxmin()]
    said = (
        f"{policy} gains at most {best.points:.1f} points ({best.trace}, {best.slots} slots) and at worst {worst.points:+.1f} "
        f"({worst.trace}, {worst.slots} slots)."
    )
    return Finding((frame,), said, table)
