"""Pictures about routing. Each takes readings or the table of the `colibri_lab.routing` function of the same name.

Each has one sentence underneath that says what it shows, made from its numbers.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap

from .. import routing
from ..engine.routers import TopK
from ..routing import Reading
from . import router_frames as frames
from .plots import Picture, draw
from .signs import columns, drawable, families
from .theme import FONT_PT, LIGHT

LINE = 118  # characters in a line of tokens
PALETTE = (
    "hit",
    "miss",
    "attention",
    "router",
    "prefetch",
    "sky",
    "head",
)  # first experts by how often they come first
_PURPLES = LinearSegmentedColormap.from_list("share", ["#FFFFFF", LIGHT["router"], "#5B1F45"])
_REDS = LinearSegmentedColormap.from_list("cost", ["#FFFFFF", LIGHT["miss"]])


def _figure(size, verdict: str = "", columns: int = 1, **grid):
    figure = Picture(size)
    axes = figure.subplots(1, columns, **grid)
    if verdict:
        _say(figure, verdict)
    return figure, axes


def _say(figure: Picture, text: str) -> None:
    """Text under the axes, broken to the width of the picture."""
    text, width = drawable(text), int(14.6 * figure.get_size_inches()[0])
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, width)]
    figure.supxlabel("\n".join(lines), fontsize=FONT_PT, x=0.01, ha="left", family=["sans-serif", *families()[1:]])


def _dress(ax, title: str, xlabel: str = "", ylabel: str = "", grid: str = "y") -> None:
    ax.set_title(title, loc="left", fontsize=FONT_PT + 1, fontweight="bold")
    ax.set_xlabel(xlabel, fontsize=FONT_PT)
    ax.set_ylabel(ylabel, fontsize=FONT_PT)
    ax.tick_params(labelsize=FONT_PT)
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(axis=grid, color=LIGHT["rule"], lw=0.7)
        ax.set_axisbelow(True)


def explorer(reading: Reading, layer: int, token: int, k: int | None = None, temperature: float = 1.0) -> Picture:
    """From logits to weights for one token at one layer: the router explorer as a static picture."""
    look = frames.Look(reading, layer, token, TopK(k, temperature))
    nats = float(reading.nats.mean()) if look.as_trained and len(reading.nats) else None
    said = frames.sentences(look, nats)
    return draw_panels(
        look,
        f"layer {layer} · k {k or look.trained_k}, temperature {temperature:.3g}",
        said if nats is not None else said[:1],
    )


def draw_panels(look: frames.Look, title: str, said: list[str]) -> Picture:
    """The four panels of a look, the text above them, sentences below."""
    fig = Picture((9.8, 6.9))
    fig.suptitle(title, x=0.01, ha="left", fontsize=10)
    grid = fig.add_gridspec(3, 2, height_ratios=(0.36, 1, 1))
    draw_tokens(fig.add_subplot(grid[0, :]), look)
    for at, frame in enumerate(frames.panels(look)):
        draw(fig.add_subplot(grid[1 + at // 2, at % 2]), frame)
    _say(fig, "\n".join(said))
    return fig


def tokens(reading: Reading, layer: int, router: TopK | None = None) -> Picture:
    """The text, each token coloured and numbered by its first expert in `layer`."""
    look = frames.Look(reading, layer, 0, router or TopK())
    same = look.same_as_before()
    leaders = look.choices[layer][0][:, 0]
    said = (
        f"Layer {layer}: {len(np.unique(leaders))} experts come first somewhere in these {len(leaders)} tokens. A token shares "
        f"{same.mean():.0%} of its experts with the one before it, all of them {same.all(1).mean():.1%} of the time."
    )
    rows = _lay_out(look)
    lines = rows[-1].row + 1
    figure, ax = _figure((9.8, 0.8 + 0.27 * lines), said)
    draw_tokens(ax, look, lines, frame=False)
    return figure


@dataclass(frozen=True)
class _Placed:
    """A token's place: line and column in characters."""

    text: str
    leader: int
    row: int
    column: float


def _lay_out(look: frames.Look) -> list[_Placed]:
    placed, row, at = [], 0, 0.0
    for piece, ids in zip(look.reading.pieces, look.choices[look.layer][0], strict=True):
        text = drawable(frames.visible(piece))
        size = columns(text) + len(str(ids[0])) + 1.4
        if at + size > LINE:
            row, at = row + 1, 0.0
        placed.append(_Placed(text, int(ids[0]), row, at))
        row, at = (row + 1, 0.0) if "\n" in piece else (row, at + size)
    return placed


def draw_tokens(ax, look: frames.Look, lines: int = 3, frame: bool = True) -> None:
    """Token boxes into axes, as many lines as given around the token looked at."""
    ax.set(xlim=(0, LINE), ylim=(lines, 0))
    ax.set_axis_off()
    placed, colors = _lay_out(look), expert_colors(look)
    if frame:
        blank = r", \u…: no font here has the sign" * any(r"\u" in p.text for p in placed)
        title = f"Text, coloured and numbered by each token's first expert in layer {look.layer}{blank}"
        ax.set_title(title, loc="left", fontsize=FONT_PT)
    top = int(np.clip(placed[look.token].row - lines // 2, 0, max(placed[-1].row + 1 - lines, 0)))
    for token, place in enumerate(placed):
        if not top <= place.row < top + lines:
            continue
        edge = LIGHT["ink"] if frame and token == look.token else "none"
        box = {"boxstyle": "round,pad=0.1", "fc": _tint(colors.get(place.leader)), "ec": edge, "lw": 1.4}
        y = place.row - top + 0.5
        text = ax.text(place.column, y, place.text, family=families(), fontsize=FONT_PT, va="center", bbox=box)
        style = {"fontsize": FONT_PT, "color": "#666666", "va": "center"}
        ax.annotate(str(place.leader), (1, 0.5), xycoords=text, xytext=(1.5, -1.5), textcoords="offset points", **style)


def expert_colors(look: frames.Look) -> dict[int, str]:
    """Expert → colour name, for the experts that most often come first in this layer and text."""
    first = Counter(int(row[0]) for row in look.choices[look.layer][0])
    return {expert: color for (expert, _), color in zip(first.most_common(), PALETTE, strict=False)}


def token_window(look: frames.Look, most: int) -> tuple[int, int]:
    """(first, last) of at most `most` tokens around the one looked at."""
    count = len(look.reading.token_ids)
    first = int(np.clip(look.token - most // 2, 0, max(count - most, 0)))
    return first, min(first + most, count)


def _tint(name: str | None) -> str:
    if name is None:
        return "#F4F4F4"
    return "#" + "".join(f"{int(255 - 0.42 * (255 - int(LIGHT[name][i : i + 2], 16))):02X}" for i in (1, 3, 5))


def overlap(table: pd.DataFrame, name: str = "") -> Picture:
    """Share of a token's experts that the token before had too, by layer. `table`: `trace.locality.overlap`, distance 1."""
    near = table[table.distance == 1]
    said = f"Next-token overlap is {near.overlap.mean():.0%} on average; chance is {near.chance.mean():.1%}. The very same set comes twice running {near.same_set.mean():.1%} of the time."
    figure, ax = _figure((6.8, 3.2), said)
    _dress(ax, f"Experts kept from one token to the next{', ' * bool(name)}{name}", "layer", "% of a token's experts")
    ax.bar(near.layer, 100 * near.overlap, color=LIGHT["router"], label="shared with the token before")
    ax.plot(near.layer, 100 * near.chance, color=LIGHT["ink"], ls="--", lw=1.4, label="by chance")
    ax.set_ylim(0, 100)
    ax.set_xticks(near.layer)
    ax.legend(fontsize=FONT_PT, frameon=False)
    return figure


def specialisation(readings: routing.domains.Readings, layers: tuple[int, ...] | None = None) -> Picture:
    """Domains × experts: share of a domain's choices, experts ordered by the domain that uses them most."""
    table = routing.specialisation(readings).set_index("layer")
    use = routing.usage(readings).pivot_table(index=["layer", "domain"], columns="expert", values="share", sort=False)
    layers = layers or (int(table.index[0]), int(table.index[-1]))
    last = table.loc[layers[-1]]
    said = (
        f"Layer {layers[-1]}: {last.owned:.0f} of {use.shape[1]} experts get over half of their use from one domain; mutual information "
        f"(normalised) {last.nmi:.2f}, by chance {last.by_chance:.3f}.\nLayer {layers[0]}: {table.owned[layers[0]]:.0f} experts, "
        f"{table.nmi[layers[0]]:.2f}. Affinity is graded{', and grows with depth' * bool(last.nmi > table.nmi[layers[0]])}."
    )
    figure, axes = _figure((9.8, 2.9), said, len(layers), sharey=True, squeeze=False)
    top = 100 * max(use.loc[layer].to_numpy().max() for layer in layers)
    for ax, layer in zip(axes[0], layers, strict=True):
        share = 100 * use.loc[layer]
        order = np.lexsort((-share.max().to_numpy(), share.to_numpy().argmax(0)))
        mesh = ax.pcolormesh(share.to_numpy()[:, order], cmap=_PURPLES, vmin=0, vmax=top, edgecolors="white", lw=0.5)
        _dress(ax, f"Layer {layer}", "expert, by the domain that uses it most", grid="")
        ax.set_yticks(np.arange(len(share)) + 0.5, share.index)
        ax.set_xticks(np.arange(len(order))[::3] + 0.5, [str(share.columns[i]) for i in order[::3]])
    axes[0, 0].invert_yaxis()
    figure.colorbar(mesh, ax=axes[0], pad=0.01).set_label("% of the domain's choices", fontsize=FONT_PT)
    return figure


def divergence(table: pd.DataFrame) -> Picture:
    """Domain × domain: how different their expert use is. `table`: `trace.locality.domains`; the diagonal is the control."""
    names = list(dict.fromkeys([*table.a, *table.b]))
    grid = np.full((len(names),) * 2, np.nan)
    for row in table.itertuples():
        a, b = names.index(row.a), names.index(row.b)
        grid[a, b] = grid[b, a] = row.between
    # within is a mean over the two texts of each pair: solve for each text's own value, exact for three texts or more
    pairs = np.array([[n in (row.a, row.b) for n in names] for row in table.itertuples()], float) / 2
    np.fill_diagonal(grid, np.linalg.lstsq(pairs, table.within.to_numpy(), rcond=None)[0])
    apart, within = grid[~np.eye(len(names), dtype=bool)], np.diag(grid)
    far = table.loc[table.between.idxmax()]
    said = (
        f"Two domains differ by {apart.min():.2f} to {apart.max():.2f} bits, most {far.a} and {far.b}; the two halves of one text by "
        f"{within.min():.2f} to {within.max():.2f}.\nThe difference is real, and far from the 1 bit of disjoint experts."
    )
    figure, ax = _figure((6.2, 4.3), said)
    _matrix(ax, pd.DataFrame(grid, names, names), _PURPLES, "{:.2f}", apart.max())
    _dress(ax, "Divergence of expert use, bits (diagonal: halves of one text)", grid="")
    return figure


def masking(table: pd.DataFrame) -> Picture:
    """Change of loss by domain (columns) without the favourites of a domain (rows). `table`: `routing.masking`."""
    own, rest = np.diag(table), table.to_numpy()[~np.eye(len(table), dtype=bool)]
    worst = table.columns[int(np.argmax(own))]
    said = (
        f"Losing its own favourites costs a domain {own.min():.2f} to {own.max():.2f} nats per token ({worst} most); losing another's "
        f"costs {np.median(rest):.3f} (median), at most {rest.max():.2f}."
    )
    figure, ax = _figure((6.4, 4.3), said)
    _matrix(ax, table, _REDS, "{:+.3f}", own.max())
    _dress(ax, "Change of loss, nats per token", "loss of this domain", "without the favourites of", grid="")
    return figure


def _matrix(ax, table: pd.DataFrame, cmap, text: str, top: float) -> None:
    values = table.to_numpy()
    ax.pcolormesh(values, cmap=cmap, vmin=0, vmax=top, edgecolors="white", lw=1)
    for (row, column), value in np.ndenumerate(values):
        ink = "white" if value > 0.6 * top and cmap is _PURPLES else LIGHT["ink"]
        ax.text(column + 0.5, row + 0.5, text.format(value), ha="center", va="center", fontsize=FONT_PT, color=ink)
    ax.set_xticks(np.arange(values.shape[1]) + 0.5, table.columns)
    ax.set_yticks(np.arange(len(values)) + 0.5, table.index)
    ax.invert_yaxis()


def balance(readings: routing.domains.Readings, layer: int, of: str) -> Picture:
    """Load of a layer's experts, sorted: one domain against all of them."""
    use = routing.usage(readings).query("layer == @layer").pivot_table(index="expert", columns="domain", values="share")
    rows = routing.balance(readings).query("layer == @layer").set_index("of")
    effective = rows.effective
    said = (
        f"Layer {layer}: over all domains the {len(use)} experts work like {effective['all domains']:.1f} equally used ones; inside "
        f"{of} like {effective[of]:.1f}.\nBalance is a property of the training mixture, not of a text."
    )
    figure, ax = _figure((6.8, 3.4), said)
    _dress(ax, f"Load by expert, layer {layer}", "experts, each curve sorted by its own use", "load (1 = equal use)")
    n = np.arange(1, len(use) + 1)
    ax.bar(
        n,
        len(use) * np.sort(use[of])[::-1],
        color=LIGHT["router"],
        label=f"{of}: {effective[of]:.1f} effective experts",
    )
    ax.step(
        n, len(use) * np.sort(use.mean(axis=1))[::-1], where="mid", color=LIGHT["ink"], lw=1.8,
        label=f"all domains: {effective['all domains']:.1f}",
    )  # fmt: skip
    ax.axhline(1, color=LIGHT["ink"], lw=1, ls=":")
    ax.legend(fontsize=FONT_PT, frameon=False)
    return figure


def curve(table: pd.DataFrame, xlabel: str, trained: float | None = None) -> Picture:
    """Loss and time against a number, the index of `table` (`routing.sweep` under numeric names)."""
    best = table["mean"].idxmin()
    said = f"Least loss at {xlabel} {best:g}: {table['mean'].min():.3f} nats per token."
    if trained is not None and 2 * trained in table.index:
        own, twice = table["mean"][trained], table["mean"][2 * trained]
        said += f" As trained ({trained:g}) {own:.3f}; at {2 * trained:g} {twice:.3f}{': more is not better' * bool(twice > own)}."
    figure, (loss, time) = _figure((8.6, 3.3), said, 2)
    _dress(loss, "Loss", xlabel, "nats per token")
    loss.plot(table.index, table["mean"], color=LIGHT["router"], marker="o", lw=2, label="mean of the domains")
    _dress(time, "Time, fastest pass, prefill", xlabel, "ms per token")
    time.plot(table.index, table.ms_per_token, color=LIGHT["hit"], marker="s", lw=2)
    time.set_ylim(bottom=0)
    for ax in (loss, time):
        ax.set_xticks(table.index, [f"{x:g}" for x in table.index])
        if trained is not None:
            ax.axvline(trained, color=LIGHT["ink"], lw=1, ls=":", label="as trained")
    loss.legend(fontsize=FONT_PT, frameon=False)
    return figure


def sweep(table: pd.DataFrame, title: str = "What other routing costs") -> Picture:
    """Change of loss of each router. `table`: `routing.sweep`."""
    rows = table.iloc[::-1]
    dearest, cheapest = table.change.idxmax(), table.change[table.change.abs() > 1e-9]
    said = f"{dearest} costs most, {table.change.max():+.2f} nats per token"
    said += f"; {cheapest.idxmin()} least of the changes, {cheapest.min():+.3f}." if len(cheapest) > 1 else "."
    figure, ax = _figure((7.4, 1.3 + 0.36 * len(rows)), said)
    _dress(ax, title, "change of loss against the model's own router, nats per token", grid="x")
    ax.barh(rows.index, rows.change, color=[LIGHT["kept" if abs(c) < 1e-9 else "miss"] for c in rows.change])
    reach = max(table.change.max(), 1e-6)
    for y, (change, experts) in enumerate(zip(rows.change, rows.experts_per_token, strict=True)):
        ax.text(
            max(change, 0) + 0.01 * reach,
            y,
            f"{change:+.3f} · {experts:.3g} experts a token",
            va="center",
            fontsize=FONT_PT,
        )
    ax.set_xlim(min(0, table.change.min()), 1.45 * reach)
    return figure


def without_experts(table: pd.DataFrame) -> Picture:
    """What masked experts are worth. `table`: `routing.without_experts`."""
    wide = table.pivot(index="masked", columns="which", values=["nats", "nats_per_percent"])
    most = int(wide.index[-1])
    row = table[table.masked == most].set_index("which")
    said = (
        f"Without the {most} least used experts, {row.picks_percent['least used']:.1f} % of the choices, the loss rises by "
        f"{row.nats['least used']:.3f} nats; without {most} random ones ({row.picks_percent['random']:.1f} %) by {row.nats['random']:.3f}.\n"
        f"Per percent of choices: {row.nats_per_percent['least used']:.4f} against {row.nats_per_percent['random']:.4f}."
    )
    figure, axes = _figure((8.6, 3.4), said, 2)
    for ax, name, title in zip(
        axes, ("nats", "nats_per_percent"), ("Loss without them", "Loss per percent of choices"), strict=True
    ):
        _dress(ax, title, "experts masked, all layers", "change, nats per token")
        for which, color, mark in (("least used", "hit", "o"), ("random", "miss", "s")):
            ax.plot(wide.index, wide[name][which], color=LIGHT[color], marker=mark, lw=2, label=which)
        ax.set_xticks(wide.index)
        ax.set_ylim(bottom=min(0, wide[name].min().min()))
    axes[0].legend(fontsize=FONT_PT, frameon=False)
    return figure


def flips(table: pd.DataFrame, bins: int = 8) -> Picture:
    """How often noise changes a set of experts, by how near the choice was. `table`: `routing.flips`."""
    share = 100 * table.groupby("scale").flipped.mean()
    said = (
        "Decisions changed by noise on the logits: "
        + ", ".join(f"{s:g}: {p:.2g} %" for s, p in share.items())
        + (".\nRounding is noise of the first kind: routing is deterministic, and only near ties can turn.")
    )
    figure, (left, right) = _figure((8.6, 3.4), said, 2)
    _dress(left, "All decisions", "noise on the logits (standard deviation)", "% of decisions changed")
    left.plot(share.index, share, color=LIGHT["router"], marker="o", lw=2)
    left.set_xscale("log")
    _dress(
        right, "By margin between rank k and k + 1", "margin (score with bias), equal shares of decisions", "% changed"
    )
    shown = [s for s in share.index if share[s] > 0][-3:]
    edges = np.unique(np.quantile(table.margin, np.linspace(0, 1, bins + 1)))
    for scale, color, dash in zip(shown, ("hit", "router", "miss"), ("-", "--", ":"), strict=False):
        rows = table[table.scale == scale]
        part = rows.groupby(pd.cut(rows.margin, edges, include_lowest=True), observed=True)
        right.plot(
            part.margin.median(),
            100 * part.flipped.mean(),
            color=LIGHT[color],
            ls=dash,
            marker="o",
            ms=4,
            lw=2,
            label=f"noise {scale:g}",
        )
    right.set_xscale("log")
    right.legend(fontsize=FONT_PT, frameon=False)
    return figure


def rules(table: pd.DataFrame) -> Picture:
    """Weights that each rule gives. `table`: `routing.rules`; only experts that some rule chooses are drawn."""
    weights = table.drop(columns="chosen")
    weights = weights.loc[:, (weights > 0).any()]
    a, b = "softmax, top-k, renormalised", "top-k, then softmax"
    same = np.abs(weights.loc[a] - weights.loc[b]).max()
    other = np.abs(weights.loc[a] - weights.loc["softmax, then top-k"]).max()
    sigmoid = np.abs(weights.loc[a] - weights.loc["sigmoid, top-k, renormalised"]).max()
    said = (
        f"Softmax before or after the choice: largest difference {same:.1g} once renormalised, {other:.2f} if not (weights then sum to "
        f"{weights.loc['softmax, then top-k'].sum():.2f}).\nSigmoid differs from softmax by {sigmoid:.2f} though the experts are the same."
    )
    figure, ax = _figure((8.6, 1.6 + 0.42 * len(weights)), said)
    _dress(ax, "The same logits under the usual rules", "weight", grid="x")
    left = np.zeros(len(weights))
    for expert, color in zip(weights, (*PALETTE, *PALETTE[::-1], *PALETTE), strict=False):
        values = weights[expert].to_numpy()
        ax.barh(weights.index, values, left=left, color=_tint(color), edgecolor=LIGHT[color], lw=1.2)
        for y, (start, value) in enumerate(zip(left, values, strict=True)):
            if value > 0.035:
                ax.text(
                    start + value / 2,
                    y,
                    f"{expert}: {value:.3f}" if value > 0.12 else str(expert),
                    ha="center",
                    va="center",
                    fontsize=FONT_PT,
                )
        left += values
    ax.axvline(1, color=LIGHT["ink"], lw=1, ls=":")
    ax.set_xlim(0, 1.02)
    ax.invert_yaxis()
    return figure
