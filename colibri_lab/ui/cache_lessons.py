"""Findings about expert caches, for notebook 02 and for any trace: each function answers one question with a picture.

The counting is in `trace.experiments`; here it becomes panels and a sentence. Use them alone, or with `what_if`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import pandas as pd

from ..errors import SettingError
from ..trace import experiments, locality
from ..trace.curves import curve, hit_table
from ..trace.history import history
from ..trace.replay import replay
from ..trace.table import Trace
from .frames import Frame, Mark, Series
from .theme import policy_style
from .what_if import Finding

_ONLINE = ("lru", "fifo", "lfu", "lfu-aged", "weighted-lru", "lfru", "slru", "arc", "s3-fifo", "sieve")
_TRACE_STYLE = (("hit", ()), ("attention", (9, 2, 2, 2)), ("miss", (7, 3)), ("router", (2, 2)))


def _percent(values) -> np.ndarray:
    return 100 * np.asarray(values, np.float32)


def memory_at(trace: Trace, slots: int = 16, token: int = 150, policy: str = "lru") -> Finding:
    """Which experts are in memory when a token asks for its own: layers × experts, found or missed."""
    course = history(trace, policy, slots)
    steps = course.steps("decode")
    if not 0 <= token < len(steps):
        raise SettingError(f"token must be 0 to {len(steps) - 1}, the decoded tokens of this trace; got {token}")
    said = (
        f"Each row is a layer, each column one of its {trace.num_experts} experts, of which {slots} fit. Light: in memory. Dark: "
        "used by this token and found there. Crossed: used, and read from disk while the token waited."
    )
    frame = Frame(
        "grid", f"Experts in memory, token {token}", "expert", "layer", course.grid(int(steps[token])),
        (Series("resident", "resident"), Series("used now", "hit"), Series("missed, read now", "miss")),
        xlim=(0, trace.num_experts), ylim=(0, len(trace.layers)), rows=tuple(str(n) for n in trace.layers),
    )  # fmt: skip
    events = course.events()
    return Finding((frame,), said, events[events.step == steps[token]].reset_index(drop=True))


def what_repeats(trace: Trace, slots: int = 16) -> Finding:
    """What a cache lives on: random picks, the same tokens shuffled (popularity), the tokens as they came (and recency)."""
    made = {
        "as recorded": trace,
        "tokens shuffled": experiments.shuffled(trace),
        "random picks": experiments.uniform(trace),
    }
    rates = {}
    for name, one in made.items():
        hits, accesses = hit_table(one, "lru", phase="decode")
        rates[name] = hits.sum(0) / accesses.sum()
    at = {name: float(rate[slots]) for name, rate in rates.items()}
    most = trace.num_experts
    said = (
        f"{slots} of {most} slots are {100 * slots / most:.0f} % of the experts. Random picks hit {100 * at['random picks']:.0f} "
        f"%, this text in shuffled order {100 * at['tokens shuffled']:.0f} % (some experts are popular), in its own order "
        f"{100 * at['as recorded']:.0f} % (neighbours want the same experts)."
    )
    series = (
        Series("as recorded", "hit", (), 2.4),
        Series("tokens shuffled", "sky", (7, 3)),
        Series("random picks", "kept", (2, 3)),
    )
    marks = [
        Mark(slots, 100 * at[name], f"{100 * at[name]:.1f} %", s.color) for name, s in zip(made, series, strict=True)
    ]
    frame = Frame(
        "lines", "Hit rate of lru by what the text offers", "slots per layer", "% of accesses",
        _percent(list(rates.values())), series, xlim=(0, most), ylim=(0, 100), cursor=slots, marks=tuple(marks),
    )  # fmt: skip
    table = pd.DataFrame({"slots": np.arange(most + 1), **{name: rate for name, rate in rates.items()}})
    return Finding((frame,), said, table)


def cliff(trace: Trace, slots: int = 0) -> Finding:
    """One pool for all layers, near the size of one token; `slots` 0 shows the largest pool without any hit."""
    table = experiments.cliff(trace)
    first, one = table.attrs["first"], table.attrs["cycle"]
    slots = slots or first - 1
    top = 2 * one
    shown = table[table.slots <= top]
    here = table.hit_rate[min(slots, len(table) - 1)]
    said = (
        f"{slots} slots in one pool hit {100 * here:.1f} % of accesses; the first hit needs {first} slots, and one token asks "
        f"for {one}. Below that lru evicts every expert shortly before its next use; the same slots divided among the layers "
        f"hit {100 * table.per_layer[min(slots, len(table) - 1)]:.1f} %."
    )
    color, dash = policy_style("lru")
    frame = Frame(
        "lines", "A pool for all layers, near one token's size", "slots in all", "% of accesses",
        _percent([shown.per_layer, shown.hit_rate]), (Series("divided among the layers", "kept", (6, 3)),
        Series("one pool, lru", color, dash, 2.4)), xlim=(0, top), ylim=(0, 100), cursor=slots,
        marks=(Mark(one, text=f"one token: {one}"), Mark(slots, 100 * here, f"{100 * here:.1f} %", color)),
    )  # fmt: skip
    return Finding((frame,), said, shown)


def lookup_orders(trace: Trace, slots: int = 8) -> Finding:
    """The same policy and slots under every way in which a token's experts may meet the cache."""
    ways = {
        "atomic": {}, "serial, hits first": {"lookup": "serial-hits-first"},
        "serial, as listed": {"lookup": "serial"}, "serial, random": {"lookup": "serial", "order": "random"},
    }  # fmt: skip
    rates = {
        name: replay(trace, "lru", slots, phase="decode", **way).attrs["totals"]["hit_rate"]
        for name, way in ways.items()
    }
    lost = 100 * (rates["atomic"] - rates["serial, as listed"])
    said = (
        f"With {slots} slots per layer, taking a token's experts one after the other loses {lost:.1f} points: an expert leaves "
        "to make room for another of the same token. Serving those that are there first wins it back."
    )
    values = np.stack([_percent(list(rates.values())[::-1]), np.full(len(rates), np.nan)], axis=1).astype(np.float32)
    colors = {"atomic": "hit", "serial, hits first": "sky"}
    names = list(rates)[::-1]
    frame = Frame(
        "bars", "Hit rate of lru by lookup", "% of accesses", "", values,
        tuple(Series(name, colors.get(name, "router")) for name in names), xlim=(0, 100),
        texts=tuple(f"{100 * rates[name]:.1f} %" for name in names),
    )  # fmt: skip
    return Finding((frame,), said, pd.DataFrame({"lookup": list(rates), "hit_rate": list(rates.values())}))


def policies(trace: Trace, slots: int = 16) -> Finding:
    """How much a cleverer victim can win: online policies, pins chosen on the first half, and both oracles."""
    rates = {name: replay(trace, name, slots, phase="decode").attrs["totals"]["hit_rate"] for name in _ONLINE}
    bounds = {
        name: replay(trace, name, slots, phase="decode").attrs["totals"]["hit_rate"]
        for name in ("belady", "belady-bypass")
    }
    halves = experiments.held_out_pins(trace, slots)
    best = max(rates, key=rates.get)
    said = (
        f"{slots} slots: lru hits {100 * rates['lru']:.1f} %, the best of {len(rates)} online policies ({best}) "
        f"{100 * rates[best]:.1f} %, knowing the future and keeping every miss {100 * bounds['belady']:.1f} %, free to drop it "
        f"{100 * bounds['belady-bypass']:.1f} %. Pins chosen on the first half hit {100 * halves['pins']:.0f} % of the second, "
        f"lru {100 * halves['lru']:.0f} %."
    )
    order = sorted(rates, key=rates.get)
    rows = [("pins of 1st half, on 2nd", halves["pins"], "kept"), ("lru, on 2nd half", halves["lru"], "sky")]
    rows += [(name, rates[name], "hit" if name == "lru" else "attention") for name in order]
    rows += [("oracle, keeps all", bounds["belady"], "other"), ("oracle, may drop", bounds["belady-bypass"], "oracle")]
    names, values, colors = zip(*rows, strict=True)
    frame = Frame(
        "bars", "Hit rate by policy", "% of accesses", "",
        np.stack([_percent(values), np.full(len(rows), np.nan)], axis=1).astype(np.float32),
        tuple(Series(name, color) for name, color in zip(names, colors, strict=True)), xlim=(0, 100),
        texts=tuple(f"{100 * v:.1f} %" for v in values),
    )  # fmt: skip
    return Finding((frame,), said, pd.DataFrame({"policy": names, "hit_rate": values}))


@lru_cache(maxsize=256)  # a moved slider asks for the same budgets again
def _fetched_ahead(trace: Trace, predictor: str, slots: int, budget: int, bandwidth: int) -> pd.DataFrame:
    return experiments.prefetching(trace, predictor, slots, [budget], bandwidth)


def prefetch(trace: Trace, predictor: str = "markov", slots: int = 16, budget: int = 4, bandwidth: int = 0) -> Finding:
    """Fetching ahead: how many waits it saves and how many blocks it reads for that, at every budget.

    `bandwidth` is the blocks the disk brings during one layer step, 0 for at once.
    """
    budgets = sorted({*range(0, trace.k + 1), budget})
    table = pd.concat([_fetched_ahead(trace, predictor, slots, each, bandwidth) for each in budgets], ignore_index=True)
    none, here = table.iloc[0], table[table.budget == budget].iloc[0]
    if budget == 0:
        effect = f"without it a token waits for {none.waits:.1f} blocks"
    elif here.useful + here.wasted < 0.05 * none.waits:
        effect = "nothing is fetched, since what it names is in the cache already"
    else:
        effect = (
            f"a token waits for {none.waits:.1f} → {here.waits:.1f} blocks and reads {none.reads:.1f} → {here.reads:.1f}; "
            f"{100 * here.wasted / (here.useful + here.wasted):.0f} % of what is fetched ahead is wasted"
        )
        effect += ", so it hurts" if here.waits > none.waits else ""
    right = "" if budget == 0 else f", {100 * here.precision:.0f} % of its guesses right"
    said = f"Predictor {predictor}, {budget} guesses a layer{right}: {effect}."
    lines = Frame(
        "lines", "Waits and reads", "blocks guessed per layer (budget)", "blocks per token",
        table[["waits", "reads"]].to_numpy(np.float32).T, (Series("waited for", "miss"), Series("read", "prefetch", (7, 3))),
        xlim=(0, budgets[-1]), ylim=(0, float(np.ceil(1.15 * table.reads.max() / 10) * 10)), x=tuple(map(float, budgets)),
        cursor=budget,
    )  # fmt: skip
    fates = {"useful": (here.useful - here.late, "hit"), "late": (here.late, "router"), "wasted": (here.wasted, "miss")}
    top = max(v for v, _ in fates.values())
    bars = Frame(
        "bars", "What became of the blocks fetched ahead", "blocks per token", "",
        np.array([[v, np.nan] for v, _ in fates.values()], np.float32),
        tuple(Series(name, color) for name, (_, color) in fates.items()), xlim=(0, max(1.0, float(np.ceil(1.1 * top)))),
        texts=tuple(f"{v:.1f}" for v, _ in fates.values()),
    )  # fmt: skip
    return Finding((lines, bars), said, table)


def side_by_side(traces: Mapping[str, Trace], share: int = 25) -> Finding:
    """Hit rate of lru against the share of experts in memory, and how much of it is due to neighbouring tokens.

    `share` is in percent of the experts of a layer.
    """
    grid = np.linspace(0, 100, 101)
    lines, rows = [], []
    for name, trace in traces.items():
        table = curve(trace, "lru,belady-bypass", phase="decode", progress=False)
        rates = {p: part.set_index("slots").hit_rate for p, part in table.groupby("policy")}
        at = 100 * rates["lru"].index / trace.num_experts
        lines.append(np.interp(grid, [0, *at], [0, *(100 * rates["lru"])]))
        near = locality.overlap(trace.select(phase="decode"), distances=(1,))
        slots = max(1, round(share / 100 * trace.num_experts))
        sizes = trace.expert_bytes
        misses = (1 - rates["lru"][slots]) * len(trace.layers) * (trace.header["top_k"] or trace.k)
        rows.append((
            name, len(trace.layers), trace.num_experts, trace.header["top_k"] or trace.k, near.overlap.mean(), near.chance.mean(),
            slots, rates["lru"][slots], rates["belady-bypass"][slots], misses, None if sizes is None else misses * sizes.mean(),
        ))  # fmt: skip
    names = [
        "trace",
        "layers",
        "experts",
        "top_k",
        "overlap",
        "chance",
        "slots",
        "lru",
        "oracle",
        "misses_per_token",
        "bytes_per_token",
    ]
    found = pd.DataFrame(rows, columns=names)
    best, worst = found.loc[found.lru.idxmax()], found.loc[found.lru.idxmin()]
    said = (
        f"With {share} % of the experts in memory {best.trace} hits {100 * best.lru:.0f} %, {worst.trace} {100 * worst.lru:.0f} %: "
        f"a token shares {100 * best.overlap:.0f} % of its experts with the one before it there, {100 * worst.overlap:.0f} % here "
        f"(chance: {100 * best.chance:.0f} and {100 * worst.chance:.0f} %)."
    )
    series = tuple(Series(n, *_TRACE_STYLE[i % 4], 2.2) for i, n in enumerate(traces))
    marks = tuple(
        Mark(share, 100 * r.lru, f"{100 * r.lru:.0f} %", s.color)
        for r, s in zip(found.itertuples(), series, strict=True)
    )
    frame = Frame(
        "lines", "Hit rate of lru by model", "% of a layer's experts in memory", "% of accesses",
        np.array(lines, np.float32), series, xlim=(0, 100), ylim=(0, 100), cursor=share, marks=marks,
    )  # fmt: skip
    return Finding((frame,), said, found)


def six_lines() -> pd.DataFrame:
    """Six tokens of one layer, two experts each, through two slots: hits of each line under three lookups (lru)."""
    sets = [(4, 7), (2, 4), (7, 2), (4, 7), (2, 4), (7, 2)]
    header = {"num_experts": 8, "ranked": True}
    trace = Trace.from_rows(step=range(len(sets)), layer=[0] * len(sets), experts=sets, header=header)
    columns = {}
    for lookup in ("atomic", "serial-hits-first", "serial"):
        course = history(trace, "lru", 2, lookup=lookup).table()
        columns[lookup] = course.hits.to_numpy()
    return pd.DataFrame({"wants": [f"{{{a}, {b}}}" for a, b in sets], **columns})


def live_prefetch(
    lab,
    prompt: str,
    predictors=("none", "markov", "lookahead"),
    disks=("2 GB/s", "200 MB/s"),
    repeats: int = 3,
    **generate,
) -> pd.DataFrame:
    """Fetching ahead in an open model with a modelled disk: disk, prefetch, wait_ms, bytes_read, per decoded token.

    Every run starts cold. The wait on a modelled disk is the shorter the longer the machine computes meanwhile, so of each
    token that repeat counts which computed it fastest. The settings of `lab` are put back.
    """
    before = {name: lab.settings[name] for name in ("prefetch", "storage", "disk_bandwidth")}
    rows = []
    try:
        for disk in disks:
            for predictor in predictors:
                lab.configure(prefetch=predictor, storage="modelled", disk_bandwidth=disk)
                waits, works = np.array([_wait_and_work(lab, prompt, generate) for _ in range(repeats)]).transpose(
                    1, 0, 2
                )
                least = np.take_along_axis(waits, works.argmin(0)[None], 0)[0]
                read = np.mean([s.bytes_loaded for s in lab.last_run.steps if s.phase == "decode"])
                rows.append((disk, predictor, 1e3 * least.mean(), read))
    finally:
        lab.configure(**before)
    return pd.DataFrame(rows, columns=["disk", "prefetch", "wait_ms", "bytes_read"])


def _wait_and_work(lab, prompt: str, generate: dict) -> tuple[list[float], list[float]]:
    """Seconds of every decoded token of a run from a cold cache: waiting for experts, and all the rest."""
    lab.reset_cache()
    steps = [s for s in lab.stream(prompt, **generate) if s.phase == "decode"]
    waits = [s.stages.get("expert_load_wait", 0.0) for s in steps]
    return waits, [s.wall_s - wait for s, wait in zip(steps, waits, strict=True)]
