"""Pictures of traces, replays and curves. Each takes the tables that `trace.replay`, `trace.curve` and
`trace.locality` return and draws them; nothing is computed here that the tables do not hold.

Every picture names its denominator and has one sentence underneath that says what it shows, made from the numbers.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch

from .plots import Picture
from .theme import FONT_PT, LIGHT, policy_style

# Policies that theme.POLICY does not name take the next of these, in the order they appear in a picture.
_SPARE = [
    (color, dash) for dash in ((), (7, 3), (2, 2)) for color in ("attention", "router", "prefetch", "sky", "kept")
]
_ORACLES = {"belady-bypass": ("oracle", (5, 2)), "belady": ("kept", (5, 2)), "static-pin": ("kept", (1, 2))}
_FUTURE = ("belady", "belady-bypass")
_FITTED = ("static-pin", "pin+lru")  # chosen by looking at a trace, perhaps this one: no rival in a verdict
_BLUES = LinearSegmentedColormap.from_list("hits", ["#FFFFFF", LIGHT["hit"]])
_REDS = LinearSegmentedColormap.from_list("misses", ["#FFFFFF", LIGHT["miss"]])


def _axes(title: str, xlabel: str, ylabel: str, verdict: str = "", size=(6.8, 3.7)):
    figure = Picture(size)
    ax = figure.add_subplot()
    _dress(ax, title, xlabel, ylabel)
    if verdict:
        figure.supxlabel(verdict, fontsize=FONT_PT, x=0.01, ha="left")
    return figure, ax


def _dress(ax, title: str, xlabel: str, ylabel: str) -> None:
    ax.set_title(title, loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    ax.set_xlabel(xlabel, fontsize=FONT_PT)
    ax.set_ylabel(ylabel, fontsize=FONT_PT)
    ax.tick_params(labelsize=FONT_PT)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=LIGHT["rule"], lw=0.7)
    ax.set_axisbelow(True)


def _legend(ax, **kwargs) -> None:
    ax.legend(**{"fontsize": FONT_PT, "framealpha": 0.85, "handlelength": 2.8, **kwargs})


def _styles(policies) -> dict[str, dict]:
    """Colour and dash per policy: those of the theme, black and grey dashes for oracles, else the next spare."""
    default = policy_style("")
    styles, spare = {}, iter(_SPARE * 3)
    for policy in policies:
        color, dash = _ORACLES.get(policy) or policy_style(policy)
        if policy not in _ORACLES and (color, dash) == default:
            color, dash = next(spare)
        styles[policy] = {"color": LIGHT[color], "ls": (0, dash) if dash else "-", "lw": 1.8}
    return styles


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def curves(
    table: pd.DataFrame, x: str = "slots", miss: bool = False, scale: float = 1, cycle: float | None = None
) -> Picture:
    """Hit (or miss) rate against cache size, one line per policy. `table`: policy, `x`, hit_rate.

    `x` names the column of sizes: slots, fraction, multiple or bytes; `scale` divides it (1e9 for GB). `cycle` marks
    the size of one token's experts, below which a global cache that is only demand-filled hits nothing.
    """
    labels = {"slots": "slots", "fraction": "share of all experts resident", "multiple": "slots / top-k",
              "bytes": f"cache size, bytes{'' if scale == 1 else f' / {scale:g}'}"}  # fmt: skip
    figure, ax = _axes("Miss-ratio curve" if miss else "Hit rate by cache size", labels.get(x, x),
                       f"{'miss' if miss else 'hit'} rate, % of accesses", _curve_verdict(table, x))  # fmt: skip
    for policy, style in _styles(table.policy.unique()).items():
        rows = table[table.policy == policy].sort_values(x)
        rate = 1 - rows.hit_rate if miss else rows.hit_rate
        few = {"marker": "o", "ms": 4} if len(rows) < 12 else {}
        ax.plot(rows[x] / scale, 100 * rate, label=policy, **style, **few)
    if cycle is not None:
        ax.axvline(cycle / scale, color=LIGHT["ink"], lw=1, ls=":")
        ax.text(cycle / scale, 2, " one token", fontsize=FONT_PT, va="bottom")
    ax.set_ylim(0, 100)
    ax.set_xlim(left=0)
    if table.policy.nunique() > 8:
        figure.set_size_inches(8.6, max(4.4, 0.22 * table.policy.nunique() + 0.8))
        figure.legend(loc="outside right upper", fontsize=FONT_PT, frameon=False, handlelength=2.8)
    else:
        _legend(ax, loc="upper right" if miss else "lower right")
    return figure


def _curve_verdict(table: pd.DataFrame, x: str) -> str:
    """At the size where the best policy is furthest from the best oracle: who is best, and what is left to win."""
    wide = table.pivot_table(index=x, columns="policy", values="hit_rate")
    online = [name for name in wide if name not in _FUTURE + _FITTED]
    oracle = next((name for name in _FUTURE[::-1] if name in wide), None)
    if not online or oracle is None:
        return ""
    gap = wide[oracle] - wide[online].max(axis=1)
    at = gap.idxmax()
    best = wide.loc[at, online].idxmax()
    return (
        f"At {x} {at:g}, {best} hits {_percent(wide.loc[at, best])}; knowing the future would hit "
        f"{_percent(wide.loc[at, oracle])}. That is the widest gap."
    )


def gap_split(table: pd.DataFrame) -> Picture:
    """Where the misses of a policy come from, by slots. `table`: rows of `bounds.miss_split`, one per slot count."""
    parts = {"compulsory": ("first uses", "other"), "capacity": ("too few slots: the oracle misses too", "sky"),
             "policy_misses": ("the policy's choice", "miss")}  # fmt: skip
    share = table[[*parts]].div(table.accesses, axis=0)
    worst = share.policy_misses.idxmax()
    verdict = (
        f"At {table.slots[worst]:g} slots, {_percent(share.policy_misses[worst])} of accesses miss by the choice of "
        f"{table.policy[worst]}: the most that a better policy could save."
    )
    figure, ax = _axes("What the misses are made of", "slots", "misses, % of accesses", verdict)
    labels, colors = zip(*parts.values(), strict=True)
    ax.stackplot(table.slots, *(100 * share[name] for name in parts), colors=[LIGHT[color] for color in colors],
                 labels=labels, edgecolor="white", lw=0.5)  # fmt: skip
    ax.margins(x=0)
    _legend(ax)
    return figure


def layer_slots(table: pd.DataFrame) -> Picture:
    """Heat map of hit rate: layers × slots. `table`: layer, slots, hit_rate (a row per pair)."""
    wide = table.pivot_table(index="layer", columns="slots", values="hit_rate")
    worst = wide.mean(axis=1).idxmin()
    figure, ax = _axes("Hit rate by layer and slots", "slots per layer", "layer",
                       f"Layer {worst} is the hardest to cache.")  # fmt: skip
    _heat(figure, ax, 100 * wide.to_numpy(), _BLUES, "hit rate, % of accesses", (0, 100))
    _ticks(ax.set_xticks, wide.columns)
    _ticks(ax.set_yticks, wide.index)
    return figure


def _heat(figure, ax, values: np.ndarray, cmap, label: str, limits=None) -> None:
    ax.grid(False)
    low, high = limits or (None, None)
    image = ax.imshow(values, cmap=cmap, aspect="auto", interpolation="nearest", vmin=low, vmax=high)
    bar = figure.colorbar(image, ax=ax)
    bar.set_label(label, fontsize=FONT_PT)
    bar.ax.tick_params(labelsize=FONT_PT)


def _ticks(setter, labels, most: int = 16) -> None:
    step = max(1, -(-len(labels) // most))
    setter(range(0, len(labels), step), [f"{label:g}" for label in labels[::step]])


def layer_hits(table: pd.DataFrame) -> Picture:
    """Hit rate per layer as bars. `table`: layer, hit_rate, as `trace.replay` returns it."""
    mean = table.hits.sum() / table.accesses.sum() if "accesses" in table else table.hit_rate.mean()
    rows = table[table.layer != "all"]
    low, high = rows.hit_rate.min(), rows.hit_rate.max()
    verdict = f"Layers range from {_percent(low)} to {_percent(high)}; all accesses together {_percent(mean)}."
    figure, ax = _axes("Hit rate by layer", "layer", "hit rate, % of accesses", verdict)
    at = np.arange(len(rows))
    ax.bar(at, 100 * rows.hit_rate, color=LIGHT["hit"])
    ax.axhline(100 * mean, color=LIGHT["ink"], lw=1, ls="--")
    _ticks(ax.set_xticks, rows.layer.to_numpy(), 24)
    ax.set_ylim(0, 100)
    return figure


def token_layer(events: pd.DataFrame) -> Picture:
    """Tokens × layers: how many experts each event missed. `events`: step, layer, hit and perhaps prefetched, a row per
    access. White is all hits, vermilion misses; a dot marks events served in part by prefetching.
    """
    missed = events.assign(miss=1 - events.hit.astype(int)).pivot_table(
        index="layer", columns="step", values="miss", aggfunc="sum"
    )
    full = float((missed.to_numpy() == 0).mean())
    figure, ax = _axes("Misses by token and layer", "step", "layer",
                       f"{_percent(full)} of the events found all their experts.", size=(8.5, 3.7))  # fmt: skip
    _heat(figure, ax, missed.to_numpy(), _REDS, "experts missed")
    if "prefetched" in events:
        ahead = events.pivot_table(index="layer", columns="step", values="prefetched", aggfunc="sum").to_numpy() > 0
        ax.plot(*np.nonzero(ahead)[::-1], ".", color=LIGHT["prefetch"], ms=3, label="prefetched")
        _legend(ax)
    _ticks(ax.set_xticks, missed.columns)
    _ticks(ax.set_yticks, missed.index)
    return figure


def popularity(counts: np.ndarray, layers=None) -> Picture:
    """Experts by use: sorted shares per layer, coverage by the n most used, and the Lorenz curve. `counts` as
    `trace.popularity()`, (layers, experts).
    """
    share = np.sort(counts / np.maximum(counts.sum(1, keepdims=True), 1), axis=1)[:, ::-1]
    covered = np.cumsum(share, axis=1).mean(0)
    experts = counts.shape[1]
    half = int(np.argmax(covered >= 0.5)) + 1
    figure = Picture((9.6, 3.5))
    figure.supxlabel(f"Half of the assignments go to {half} of {experts} experts a layer, were they known in advance.",
                     fontsize=FONT_PT, x=0.01, ha="left")  # fmt: skip
    left, middle, right = (figure.add_subplot(1, 3, at) for at in (1, 2, 3))
    rank = np.arange(1, experts + 1)
    _dress(left, "Use by rank", "expert, most used first", "% of a layer's assignments")
    for row in share:
        left.plot(rank, 100 * row, color=LIGHT["sky"], lw=0.7, alpha=0.6)
    left.plot(rank, 100 * share.mean(0), color=LIGHT["hit"], lw=2, label="mean of layers")
    left.axhline(100 / experts, color=LIGHT["ink"], lw=1, ls=":", label="equal use")
    _legend(left)
    _dress(middle, "Coverage", "experts pinned per layer", "% of assignments covered")
    middle.plot(rank, 100 * covered, color=LIGHT["hit"], lw=2)
    middle.plot(rank, 100 * rank / experts, color=LIGHT["ink"], lw=1, ls=":")
    _dress(right, "Lorenz curve", "% of experts, least used first", "% of assignments")
    lorenz = np.concatenate([[0], np.cumsum(share[:, ::-1], axis=1).mean(0)])
    right.plot(np.linspace(0, 100, experts + 1), 100 * lorenz, color=LIGHT["hit"], lw=2)
    right.plot([0, 100], [0, 100], color=LIGHT["ink"], lw=1, ls=":")
    return figure


def reuse(table: pd.DataFrame) -> Picture:
    """Histograms of the wait until an expert is needed again. `table` as `locality.reuse`."""
    first = table.loc[table.measure == "first use", "share"].sum()
    figure = Picture((9.6, 3.5))
    figure.supxlabel(f"{_percent(first)} of assignments are first uses, which no cache can hit.",
                     fontsize=FONT_PT, x=0.01, ha="left")  # fmt: skip
    titles = {"gap_tokens": ("Gap since the last use", "tokens"),
              "distinct_experts": ("Reuse distance", "other experts of the layer used in between")}  # fmt: skip
    for at, (measure, (title, xlabel)) in enumerate(titles.items(), 1):
        rows = table[table.measure == measure]
        ax = figure.add_subplot(1, 2, at)
        _dress(ax, title, xlabel, "% of assignments")
        names = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(rows.at_least, rows.at_most, strict=True)]
        ax.bar(range(len(rows)), 100 * rows.share, color=LIGHT["hit"])
        ax.set_xticks(range(len(rows)), names, rotation=45)
    return figure


def overlap(table: pd.DataFrame) -> Picture:
    """How much of a token's experts were used 1 to 32 tokens before: by layer at distance 1, and by distance."""
    near = table[table.distance == 1]
    figure = Picture((9.6, 3.5))
    verdict = (
        f"Next-token overlap is {_percent(near.overlap.mean())}; by chance it would be {_percent(near.chance.mean())}."
    )
    figure.supxlabel(verdict, fontsize=FONT_PT, x=0.01, ha="left")
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    _dress(left, "With the token before, by layer", "layer", "% of the token's experts")
    left.bar(np.arange(len(near)), 100 * near.overlap, color=LIGHT["hit"])
    left.axhline(100 * near.chance.mean(), color=LIGHT["ink"], lw=1, ls=":", label="chance")
    _ticks(left.set_xticks, near.layer.to_numpy())
    _legend(left)
    _dress(right, "By distance, mean of layers", "tokens apart", "% of the token's experts")
    mean = table.groupby("distance")[["overlap", "chance"]].mean()
    right.plot(mean.index, 100 * mean.overlap, color=LIGHT["hit"], lw=2, marker="o", ms=3)
    right.plot(mean.index, 100 * mean.chance, color=LIGHT["ink"], lw=1, ls=":")
    right.set_ylim(bottom=0)
    return figure


def matrix(counts: pd.DataFrame, title: str, ylabel: str, xlabel: str) -> Picture:
    """Co-activation or transition counts as a heat map, as `locality.coactivation` and `locality.transitions` give."""
    values = counts.to_numpy().astype(float)
    within = ylabel == xlabel
    if within:
        np.fill_diagonal(values, np.nan)
    row, column = np.unravel_index(np.nanargmax(values), values.shape)
    verdict = f"Strongest: {row} with {column}, together on {int(values[row, column])} tokens."
    figure, ax = _axes(title, xlabel, ylabel, verdict, size=(5.6, 4.8))
    _heat(figure, ax, values, _BLUES, "tokens")
    return figure


def windows(srp: pd.DataFrame, sch: pd.DataFrame | None = None) -> Picture:
    """SRP by window length (band: the layers' range), and SCH against slots in multiples of k, a line per window."""
    figure = Picture((9.6, 3.5))
    whole = srp[srp.layer == "all"]
    first, last = whole.iloc[0], whole.iloc[-1]
    verdict = (
        f"One group of experts serves {first.window} tokens with F1 {first.srp:.2f}, {last.window} with {last.srp:.2f}."
    )
    figure.supxlabel(verdict, fontsize=FONT_PT, x=0.01, ha="left")
    left = figure.add_subplot(1, 2 if sch is not None else 1, 1)
    _dress(left, "Segment routing best performance", "window, tokens", "best F1 over windows and experts")
    layers = srp[srp.layer != "all"].groupby("window").srp
    left.fill_between(layers.min().index, layers.min(), layers.max(), color=LIGHT["resident"], label="range of layers")
    left.plot(whole.window, whole.srp, color=LIGHT["hit"], lw=2, marker="o", ms=4, label="all layers")
    left.set_xscale("log", base=2)
    left.set_xticks(whole.window, [str(w) for w in whole.window])
    left.set_ylim(0, 1)
    _legend(left)
    if sch is not None:
        right = figure.add_subplot(1, 2, 2)
        _dress(right, "Segment cache best hit rate", "slots / top-k", "hit rate, % of assignments")
        dashes = ["-", "--", "-.", ":"]
        for at, (window, rows) in enumerate(sch.groupby("window")):
            right.plot(
                rows.multiple,
                100 * rows.hit_rate,
                color=LIGHT["hit"],
                lw=1.8,
                ls=dashes[at % 4],
                label=f"sees {window} tokens",
            )
        right.set_ylim(0, 100)
        _legend(right, loc="lower right")
    return figure


def regime(found: dict) -> Picture:
    """Histogram of r = experts of an event / slots, from `bounds.regime`. Above 1 an event alone does not fit."""
    bins = found["histogram"]
    verdict = (
        f"{_percent(found['share_above_1'])} of the events want more experts than the {found['slots']} slots; "
        f"mean r is {found['mean']:.2f}."
    )
    figure, ax = _axes("Regime: experts asked for / slots", "r of an event", "% of events", verdict)
    ax.bar(bins["from"], 100 * bins.events / found["events"], width=bins["to"] - bins["from"], align="edge",
           color=LIGHT["hit"], edgecolor="white", lw=0.5)  # fmt: skip
    ax.axvline(1, color=LIGHT["ink"], lw=1, ls=":")
    return figure


def over_time(hits: np.ndarray, accesses: np.ndarray, window: int = 16, warm_up: int = 0, baseline=None) -> Picture:
    """Hit rate over steps in windows of `window` steps, the warm-up shaded; `baseline`, (hits, accesses), in grey."""

    def rolling(pair):
        sums = [pd.Series(np.asarray(p, float)).rolling(window, min_periods=1).sum() for p in pair]
        return 100 * sums[0] / sums[1].where(sums[1] > 0)

    line = rolling((hits, accesses))
    settled = np.asarray(hits)[warm_up:].sum() / max(np.asarray(accesses)[warm_up:].sum(), 1)
    figure, ax = _axes("Hit rate over time", "step", f"hit rate, % of accesses, {window}-step mean",
                       f"After {warm_up} steps of warm-up the hit rate is {_percent(settled)}.", (8, 3.5))  # fmt: skip
    if baseline is not None:
        ax.plot(rolling(baseline), color=LIGHT["kept"], lw=1.5, ls="--", label="kept")
    ax.plot(line, color=LIGHT["hit"], lw=1.8, label="this run")
    if warm_up:
        ax.axvspan(0, warm_up, color=LIGHT["absent"], label="warm-up")
    ax.set_ylim(0, 100)
    _legend(ax, loc="lower right")
    return figure


def domains(table: pd.DataFrame) -> Picture:
    """Divergence between texts against that between halves of one text. `table` as `locality.domains`."""
    names = list(dict.fromkeys([*table.a, *table.b]))
    values = np.full((len(names), len(names)), np.nan)
    for pair in table.itertuples():
        a, b = names.index(pair.a), names.index(pair.b)
        values[a, b] = values[b, a] = pair.between
    top = table.loc[table.ratio.idxmax()]
    verdict = f"{top.a} and {top.b} differ {top.ratio:.1f} times as much as two halves of one text."
    figure, ax = _axes("Do domains use different experts?", "", "", verdict, size=(6.2, 4.6))
    _heat(figure, ax, values, _BLUES, f"divergence, bits (halves of one text: {table.within.mean():.2f})", (0, None))
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "white" if value > 0.6 * np.nanmax(values) else "black"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=FONT_PT, color=ink)
    ax.set_xticks(range(len(names)), names, rotation=30, ha="right")
    ax.set_yticks(range(len(names)), names)
    return figure


def prefetch(table: pd.DataFrame) -> Picture:
    """Recall against precision of guesses about the next layer, a line per predictor over budgets. `table` as
    `locality.predictability`.
    """
    mean = table.groupby(["predictor", "budget"], as_index=False)[["recall", "precision"]].mean()
    smallest = mean[mean.budget == mean.budget.min()].set_index("predictor")
    best = smallest.recall.idxmax()
    verdict = (
        f"At a budget of {mean.budget.min()} blocks, '{best}' names {_percent(smallest.recall[best])} of the next "
        "layer's experts."
    )
    figure, ax = _axes("Guessing the next layer's experts", "recall, % of the experts used", "precision, % of guesses",
                       verdict)  # fmt: skip
    marks = {"transition": "o", "last token": "s", "popularity": "^", "chance": "x"}
    for (name, rows), style in zip(mean.groupby("predictor"), _SPARE, strict=False):
        ax.plot(100 * rows.recall, 100 * rows.precision, color=LIGHT[style[0]], marker=marks.get(name, "d"), label=name)
        for row in rows.itertuples():
            ax.annotate(f" {row.budget}", (100 * row.recall, 100 * row.precision), fontsize=FONT_PT)
    ax.set(xlim=(0, 100), ylim=(0, 100))
    _legend(ax)
    return figure


def speed(predicted: pd.DataFrame, measured: pd.DataFrame | None = None) -> Picture:
    """Tokens per second against slots: predicted with its band, measured as stars. `predicted`: slots, tokens_per_s,
    low, high; `measured`: slots, tokens_per_s.
    """
    best = predicted.loc[predicted.tokens_per_s.idxmax()]
    figure, ax = _axes("Speed by cache size", "slots", "tokens per second, decode",
                       f"Predicted best: {best.slots:g} slots, {best.tokens_per_s:.3g} tokens/s.")  # fmt: skip
    if {"low", "high"} <= set(predicted):
        ax.fill_between(predicted.slots, predicted.low, predicted.high, color=LIGHT["resident"], label="predicted band")
    ax.plot(predicted.slots, predicted.tokens_per_s, color=LIGHT["hit"], lw=2, label="predicted")
    if measured is not None and len(measured):
        ax.plot(measured.slots, measured.tokens_per_s, "*", color=LIGHT["miss"], ms=11, label="measured")
    ax.set_ylim(bottom=0)
    _legend(ax)
    return figure


def latency(milliseconds, baseline=None) -> Picture:
    """Latency per token by percentile: how slow the slowest tokens are."""
    levels = np.array([0, 10, 25, 50, 75, 90, 95, 99, 100])
    values = np.percentile(np.asarray(milliseconds, float), levels)
    figure, ax = _axes("Latency by percentile", "percentile of tokens", "ms per token",
                       f"Median {values[3]:.3g} ms, 99th percentile {values[7]:.3g} ms.")  # fmt: skip
    if baseline is not None:
        ax.plot(range(len(levels)), np.percentile(np.asarray(baseline, float), levels), color=LIGHT["kept"], ls="--",
                marker="s", ms=4, label="kept")  # fmt: skip
    ax.plot(range(len(levels)), values, color=LIGHT["hit"], lw=2, marker="o", ms=4, label="this run")
    ax.set_xticks(range(len(levels)), [str(level) for level in levels])
    ax.set_ylim(bottom=0)
    _legend(ax)
    return figure


def bytes_per_token(table: pd.DataFrame, budget: float | None = None) -> Picture:
    """Bytes read per token against slots, a line per policy; `budget` is what the disk gives per token's time.
    `table`: policy, slots, bytes_per_token.
    """
    verdict = ""
    if budget is not None:
        online = table[~table.policy.isin(_FUTURE)]
        fit = online[online.bytes_per_token <= budget].slots
        verdict = (
            f"The disk keeps up from {fit.min():g} slots." if len(fit) else "At no size shown does the disk keep up."
        )
    figure, ax = _axes("Bytes read per token", "slots", "MB per token (10^6 bytes)", verdict)
    for policy, style in _styles(table.policy.unique()).items():
        rows = table[table.policy == policy].sort_values("slots")
        ax.plot(rows.slots, rows.bytes_per_token / 1e6, label=policy, **style)
    if budget is not None:
        ax.axhline(budget / 1e6, color=LIGHT["ink"], lw=1, ls=":", label="disk budget")
    ax.set_ylim(bottom=0)
    _legend(ax)
    return figure


def agreement(table: pd.DataFrame) -> Picture:
    """Hit rate bought by changing the routing. `table`: name, hit_rate, agreement (share of choices unchanged)."""
    best = table[(table.hit_rate > table.hit_rate.shift(fill_value=-1)).to_numpy()]
    figure, ax = _axes("Hits against faithfulness", "choices as the router made them, %", "hit rate, % of accesses",
                       f"{len(best)} of {len(table)} settings raise the hit rate over the one before.")  # fmt: skip
    ax.plot(100 * table.agreement, 100 * table.hit_rate, color=LIGHT["kept"], lw=1)
    ax.plot(100 * table.agreement, 100 * table.hit_rate, "o", color=LIGHT["hit"])
    for row in table.itertuples():
        ax.annotate(f" {row.name}", (100 * row.agreement, 100 * row.hit_rate), fontsize=FONT_PT)
    return figure


def marginal_gain(table: pd.DataFrame, slot_bytes: float) -> Picture:
    """Points of hit rate per further GB, with the knee of the curve. `table`: slots, hit_rate of one policy;
    `slot_bytes` is the size of one more slot in every layer.
    """
    table = table.sort_values("slots")
    size = table.slots.to_numpy() * slot_bytes / 1e9
    rate = 100 * table.hit_rate.to_numpy()
    gain = np.diff(rate) / np.diff(size)
    # the knee: furthest above the straight line from the first to the last point
    line = rate[0] + (rate[-1] - rate[0]) * (size - size[0]) / (size[-1] - size[0])
    knee = int(np.argmax(rate - line))
    verdict = f"The knee is at {table.slots.iloc[knee]:g} slots, {size[knee]:.3g} GB, {rate[knee]:.1f} % hits."
    figure, ax = _axes("What one more GB buys", "cache size, GB (10^9 bytes)", "points of hit rate per GB", verdict)
    ax.step(size[1:], gain, where="pre", color=LIGHT["hit"], lw=1.8)
    ax.axvline(size[knee], color=LIGHT["ink"], lw=1, ls=":", label="knee")
    ax.set_ylim(bottom=0)
    _legend(ax, handles=[Patch(color=LIGHT["hit"], label="gain"), *ax.get_legend_handles_labels()[0]])
    return figure
