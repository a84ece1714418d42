"""Experiments on traces: the same trace with one property taken away, and counts that answer one question each.

A control that keeps everything but one property tells what that property is worth.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pandas as pd

from ..errors import SettingError, TraceError
from .bounds import cycle
from .curves import hit_table
from .history import history
from .replay import replay
from .streams import streams, window_counts
from .table import PAD, Trace


def shuffled(trace: Trace, seed: int = 0) -> Trace:
    """The decode steps in random order, each token with its own experts: popularity stays, recency goes.

    Only decode steps are kept. Raises `TraceError` when there are none.
    """
    trace = trace.select(phase="decode")
    steps = np.unique(trace.step)
    place = np.empty(len(steps), np.int64)
    place[np.random.default_rng(seed).permutation(len(steps))] = np.arange(len(steps))
    moved = place[np.searchsorted(steps, trace.step)]
    return _rows(trace, np.argsort(moved, kind="stable"), step=np.sort(moved), note="decode steps shuffled")


def uniform(trace: Trace, seed: int = 0) -> Trace:
    """As many experts per row, but drawn at random, all alike: neither popularity nor recency. Decode steps only."""
    trace = trace.select(phase="decode")
    rng = np.random.default_rng(seed)
    drawn = np.argsort(rng.random((len(trace), trace.num_experts)), axis=1)[:, : trace.k].astype(np.uint16)
    drawn[trace.experts == PAD] = PAD
    fresh = _rows(trace, np.arange(len(trace)), step=trace.step, note="experts drawn at random")
    return replace(fresh, experts=drawn)


def _rows(trace: Trace, order: np.ndarray, step: np.ndarray, note: str) -> Trace:
    """Rows of `trace` in another order, without what the recording engine measured."""
    header = copy.deepcopy(trace.header) | {"settings": None, "ranked": False}
    header["notes"] = [*header["notes"], note]
    return Trace.from_rows(
        step=step, layer=trace.layer[order], experts=trace.experts[order], row=trace.row[order],
        sequence=trace.sequence[order], phase=trace.phase[order], header=header,
    )  # fmt: skip


def cliff(trace: Trace) -> pd.DataFrame:
    """slots, hit_rate of lru in one pool for all layers, and per_layer: of as many slots divided among the layers.

    `.attrs["first"]` is the smallest pool with any hit, `.attrs["cycle"]` the blocks of one token. Counts decode.
    """
    hits, accesses = (part.sum(0) for part in hit_table(trace, "lru", scope="global", phase="decode"))
    split, _ = hit_table(trace, "lru", phase="decode")
    slots, layers = np.arange(len(hits)), len(trace.layers)
    own = split.sum(0)[np.minimum(slots // layers, split.shape[1] - 1)]
    table = pd.DataFrame({"slots": slots, "hit_rate": hits / accesses, "per_layer": own / accesses})
    table.attrs = {"first": int(np.argmax(hits > 0)), "cycle": cycle(trace)["blocks"]}
    return table


def held_out_pins(trace: Trace, slots: int) -> dict[str, float]:
    """Hit rates on the second half of the decode steps: of the set most used in the first half (`pins`), of the set most
    used in the judged half itself (`pins_hindsight`), and of lru from an empty cache."""
    trace = trace.select(phase="decode")
    half = len(np.unique(trace.step)) // 2
    if not half:
        raise TraceError("two halves need at least two decode steps")
    past, judged = trace.select(steps=slice(0, half)), trace.select(steps=slice(half, None))

    def rate(policy, fit=None):
        return replay(judged, policy, slots, fit=fit).attrs["totals"]["hit_rate"]

    return {"pins": rate("static-pin", past), "pins_hindsight": rate("static-pin"), "lru": rate("lru")}


def prefetching(
    trace: Trace, predictor: str = "same", slots: int = 16, budgets=None, bandwidth: float = 0.0
) -> pd.DataFrame:
    """What fetching ahead does at each budget, per decoded token: a row per budget, 0 first.

    waits      blocks the step had to wait for: misses and those that arrive late
    reads      blocks read, useful or not
    useful, wasted   of the blocks fetched ahead; the rest was still unused at the end
    precision  share of the guesses that were wanted
    bandwidth  blocks that the disk brings in the time of one layer step; 0: at once
    """
    tokens = len(np.unique(trace.step[trace.phase == 1]))
    budgets = range(trace.k + 1) if budgets is None else budgets
    rows = []
    for budget in budgets:
        ahead = dict(prefetch=predictor, prefetch_budget=budget, prefetch_bandwidth=bandwidth) if budget else {}
        totals = replay(trace, "lru", slots, phase="decode", **ahead).attrs["totals"]
        fates = totals.get("prefetch", {})
        useful, issued = fates.get("timely", 0) + fates.get("late", 0), fates.get("issued", 0)
        rows.append((
            budget, (totals["misses"] + fates.get("late", 0)) / tokens, (totals["misses"] + issued) / tokens,
            useful / tokens, fates.get("wasted", 0) / tokens, fates.get("late", 0) / tokens, fates.get("precision"),
        ))  # fmt: skip
    names = ["budget", "waits", "reads", "useful", "wasted", "late", "precision"]
    return pd.DataFrame(rows, columns=names).astype({"precision": float})


def unions(trace: Trace, tokens, in_a_row: bool = True, phase: str = "decode") -> pd.DataFrame:
    """tokens, distinct (experts a layer that so many tokens touch together, on average), per_token (distinct / tokens).

    Exact means: over all stretches of tokens that follow each other in a text, or over all ways to draw them from it.
    """
    used = [s.used for s in streams(trace.select(phase=phase))]
    longest = max(len(u) for u in used)
    rows = []
    for n in tokens:
        if not 1 <= n <= longest:
            raise SettingError(f"tokens must be 1 to {longest}, the longest text of this trace; got {n}")
        mean = _union_in_a_row if in_a_row else _union_apart
        distinct = np.mean([mean(u, n) for u in used if len(u) >= n])
        rows.append((n, distinct, distinct / n))
    return pd.DataFrame(rows, columns=["tokens", "distinct", "per_token"])


def _union_in_a_row(used: np.ndarray, n: int) -> float:
    return float((window_counts(used, n) > 0).sum(1).mean())


def _union_apart(used: np.ndarray, n: int) -> float:
    """Sum over experts of the chance that n of the tokens, drawn without repeats, hold one that used it."""
    total, without = len(used), len(used) - used.sum(0)
    absent = np.prod([np.maximum(without - i, 0) / (total - i) for i in range(n)], axis=0)
    return float((1 - absent).sum())


def prompt_unions(trace: Trace) -> pd.DataFrame:
    """tokens, distinct, per_token of the first n tokens of the prompts, for every n; complete layers only."""
    found = [s.used for s in streams(trace.select(phase="prefill"))]
    longest = max(len(u) for u in found)
    touched = np.mean([np.logical_or.accumulate(u, axis=0).sum(1) for u in found if len(u) == longest], axis=0)
    tokens = np.arange(1, longest + 1)
    return pd.DataFrame({"tokens": tokens, "distinct": touched, "per_token": touched / tokens})


def warm_up(trace: Trace, slots: int = 16, policy: str = "lru") -> pd.DataFrame:
    """token (from 1), misses: of every decoded token, from an empty cache. A prompt before it has warmed the cache."""
    table = history(trace, policy, slots).table("decode")
    return pd.DataFrame({"token": np.arange(1, len(table) + 1), "misses": table.misses})
