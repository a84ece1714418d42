"""How cacheable a trace is: overlap, reuse, working set, popularity, what goes with what, what predicts what.

Every measure is per layer over the tokens of one text in order; tables name what their rates are divided by.
`locality` gathers them. SRP and SCH, which look at windows of tokens, are in `windows`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..errors import TraceError
from .streams import Stream, last_use, streams, window_counts
from .table import DECODE, Trace
from .windows import SRP_WINDOWS, sch, srp

DISTANCES = tuple(range(1, 33))
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def locality(trace: Trace, phase: str | None = None, sch_windows=(), bootstrap: int = 1000, seed: int = 0) -> dict:
    """All measures of one trace: numbers and DataFrames by name, see each function.

    `phase` is "decode", "prefill" or "all"; left out, decode where there is any. `sch_windows` are token counts for the
    SCH curves, which take seconds each. For a counts-only trace the order-free part is returned and the rest is None.
    """
    if trace.header["counts_only"]:
        return {"what": describe(trace, "all"), "popularity": popularity(trace), "coverage": coverage(trace)} | {
            name: None for name in ("summary", "overlap", "reuse", "working_set", "touched", "coactivation",
                                    "transitions", "predictability", "srp", "sch", "domains")}  # fmt: skip
    if phase is None:
        phase = "decode" if (trace.phase == DECODE).any() else "all"
    part = trace.select(phase=phase)
    found = {
        "what": describe(part, phase),
        "overlap": overlap(part),
        "reuse": reuse(part),
        "working_set": working_set(part),
        "touched": touched(part),
        "popularity": popularity(part),
        "coverage": coverage(part),
        "coactivation": strongest(part, within=True),
        "transitions": strongest(part, within=False) if len(part.layers) > 1 else None,
        "predictability": predictability(part),
        "srp": srp(part, SRP_WINDOWS, bootstrap=bootstrap, seed=seed),
        "sch": pd.concat([sch(part, window) for window in sch_windows], ignore_index=True) if sch_windows else None,
        "domains": domains(part) if part.header["domains"] else None,
    }
    return {"summary": summary(found), **found}


def describe(trace: Trace, phase: str) -> dict:
    """What was measured, and what the rates in the tables are divided by."""
    report = trace.report()
    return {
        "model": report["model"],
        "phase": phase,
        "layers": report["layers"],
        "num_experts": report["num_experts"],
        "top_k": report["top_k"],
        "tokens": sum(report["steps_by_phase"].values()) if report["granularity"] != "per token" else _tokens(trace),
        "assignments": report["assignments"],
        "sequences": report["sequences"],
        "granularity": report["granularity"],
        "denominators": {
            "overlap": "experts of the later token, per layer; mean over pairs of tokens of one text",
            "pooled": "all experts of all later tokens together",
            "reuse": "assignments (tokens x k); first uses are a class of their own",
            "working_set": "distinct experts per layer in a window of tokens",
            "popularity": "assignments of the layer",
            "recall": "experts that the next layer did use, on tokens the predictor was not fitted on",
            "precision": "experts predicted",
            "srp": "2 matches / (predictions + actual) over all sliding windows",
            "sch": "assignments; first uses are misses",
        },
    }


def _tokens(trace: Trace) -> int:
    if trace.header["counts_only"]:
        return 0
    return int(max(np.sum(trace.layer == layer) for layer in trace.layers))


def summary(found: dict) -> dict:
    """The headline numbers, each a mean over layers unless its name says otherwise."""
    near = found["overlap"].query("distance == 1")
    pop = found["popularity"].query("layer != 'all'")
    reuse_ = found["reuse"]
    first = reuse_.loc[reuse_.measure.eq("first use"), "share"]
    short = reuse_[reuse_.measure.eq("gap_tokens") & (reuse_.at_most <= 4)]
    chosen = {
        "next_token_overlap": near.overlap.mean() if len(near) else None,
        "same_set_as_last_token": near.same_set.mean() if len(near) else None,
        "overlap_by_chance": near.chance.mean() if len(near) else None,
        "distinct_experts": found["touched"]["mean"].iloc[-1],
        "effective_experts": pop.effective.mean(),
        "first_use_share_of_assignments": first.sum(),
        "reused_within_4_tokens_share_of_assignments": short.share.sum(),
    }
    return {name: None if value is None else float(value) for name, value in chosen.items()}


def overlap(trace: Trace, distances=DISTANCES) -> pd.DataFrame:
    """layer, distance, overlap, pooled, same_set, chance, pairs: how much of a token's set was in that of `distance`
    tokens before.

    `overlap` is the mean of |E_t & E_(t-d)| / |E_t|, `pooled` the sum of the intersections over the sum of the sets,
    `same_set` the share of pairs with equal sets, `chance` the overlap of two uniform random sets of these sizes.
    """
    rows = []
    for layer, group in _by_layer(trace):
        for distance in distances:
            pairs = [(s.used[distance:], s.used[:-distance]) for s in group if len(s) > distance]
            if not pairs:
                continue
            now, before = (np.concatenate(side) for side in zip(*pairs, strict=True))
            common, width, other = (now & before).sum(1), now.sum(1), before.sum(1)
            same = (common == width) & (width == other)
            means = (common / width).mean(), common.sum() / width.sum(), same.mean(), (other / trace.num_experts).mean()
            rows.append((layer, distance, *means, len(now)))
    return pd.DataFrame(rows, columns=["layer", "distance", "overlap", "pooled", "same_set", "chance", "pairs"])


def _by_layer(trace: Trace):
    grouped: dict[int, list[Stream]] = {}
    for stream in streams(trace):
        grouped.setdefault(stream.layer, []).append(stream)
    return grouped.items()


def reuse(trace: Trace) -> pd.DataFrame:
    """measure, at_least, at_most, count, share: how long until an expert is needed again, pooled over layers.

    `gap_tokens` counts tokens since the last use (1 = the token before), `distinct_experts` the other experts used
    strictly in between; both in bins of powers of two. `first use` is what no history could have held.
    """
    gaps, distinct, first = [], [], 0
    for stream in streams(trace):
        before = last_use(stream.used)
        token, expert = np.nonzero(stream.used)
        previous = before[token, expert]
        again = previous >= 0
        first += int((~again).sum())
        token, previous = token[again], previous[again]
        gaps.append(token - previous)
        for at in range(0, len(token), 4096):  # (4096, experts) at a time
            part = slice(at, at + 4096)
            distinct.append((before[token[part]] > previous[part, None]).sum(1))
    total = first + sum(map(len, gaps))
    rows = [("first use", None, None, first, first / total)]
    for name, values in (("gap_tokens", gaps), ("distinct_experts", distinct)):
        values = np.concatenate(values) if values else np.empty(0, int)
        low, high = (0, 0) if name == "distinct_experts" else (1, 1)
        while len(values) and low <= values.max():
            count = int(((values >= low) & (values <= high)).sum())
            rows.append((name, low, high, count, count / total))
            low, high = high + 1, max(2 * high, 1)
    table = pd.DataFrame(rows, columns=["measure", "at_least", "at_most", "count", "share"])
    return table.astype({"at_least": "Int64", "at_most": "Int64"})


def working_set(trace: Trace, windows=WINDOWS) -> pd.DataFrame:
    """layer, window, mean, largest, per_token: distinct experts in sliding windows of `window` tokens.

    `per_token` is mean / window: what a batch or a draft of that many consecutive tokens has to load per token.
    """
    rows = []
    for layer, group in _by_layer(trace):
        for window in windows:
            sizes = [(window_counts(s.used, window) > 0).sum(1) for s in group if len(s) >= window]
            if sizes:
                sizes = np.concatenate(sizes)
                rows.append((layer, window, sizes.mean(), int(sizes.max()), sizes.mean() / window))
    return pd.DataFrame(rows, columns=["layer", "window", "mean", "largest", "per_token"])


def touched(trace: Trace) -> pd.DataFrame:
    """tokens, mean, least, most: distinct experts used so far in each text, over layers and texts that long."""
    curves = [np.cumsum((last_use(s.used)[:-1] < 0) & s.used, axis=0).astype(bool).sum(1) for s in streams(trace)]
    length = max(map(len, curves))
    table = np.full((len(curves), length), np.nan)
    for at, curve in enumerate(curves):
        table[at, : len(curve)] = curve
    stats = np.nanmean(table, 0), np.nanmin(table, 0), np.nanmax(table, 0)
    return pd.DataFrame(dict(zip(("tokens", "mean", "least", "most"), (np.arange(1, length + 1), *stats), strict=True)))


def popularity(trace: Trace) -> pd.DataFrame:
    """layer, used, top_1, top_10, top_30, gini, effective, entropy, assignments; the last row, "all", pools layers.

    `top_p` is the share of assignments that the most used p % of experts take (rounded up to one expert), `gini` 0 for
    equal use, `effective` 1 / sum p^2 (equal use of that many experts is as concentrated), `entropy` of 1 at equal use.
    """
    counts = trace.popularity()
    pooled = counts.reshape(1, -1)
    rows = []
    for layer, row in [*zip(trace.layers, counts, strict=True), ("all", pooled[0])]:
        total = row.sum()
        if not total:
            continue
        share = np.sort(row)[::-1] / total
        n = len(share)
        tops = [share[: int(np.ceil(n * percent / 100))].sum() for percent in (1, 10, 30)]
        gini = 1 - 2 * (np.cumsum(share[::-1]).sum() - 0.5) / n
        used = share[share > 0]
        entropy = -(used * np.log(used)).sum() / np.log(n) if n > 1 else 1.0
        rows.append((layer, len(used), *tops, gini, 1 / (share**2).sum(), entropy, int(total)))
    names = ["layer", "used", "top_1", "top_10", "top_30", "gini", "effective", "entropy", "assignments"]
    return pd.DataFrame(rows, columns=names)


def coverage(trace: Trace) -> pd.DataFrame:
    """experts, share, held_out: share of assignments that the n most used experts of each layer take together.

    `held_out` picks those experts on the first half of the steps and counts on the second: a static set chosen in
    advance. It is None for counts.
    """
    counts = trace.popularity()
    covered = np.cumsum(np.sort(counts, axis=1)[:, ::-1], axis=1).sum(0) / counts.sum()
    held_out = np.full(len(covered), np.nan)
    halves = _halves(trace)
    if halves:
        fit, test = halves
        order = np.argsort(-fit.popularity(), axis=1, kind="stable")
        seen = test.popularity()
        held_out = np.cumsum(np.take_along_axis(seen, order, 1), axis=1).sum(0) / seen.sum()
    return pd.DataFrame({"experts": np.arange(1, len(covered) + 1), "share": covered, "held_out": held_out})


def _halves(trace: Trace) -> tuple[Trace, Trace] | None:
    """The first and the second half of the steps, or None when there is one step or no order."""
    if trace.header["counts_only"]:
        return None
    middle = len(np.unique(trace.step)) // 2
    return (trace.select(steps=slice(middle)), trace.select(steps=slice(middle, None))) if middle else None


def coactivation(trace: Trace, layer: int) -> pd.DataFrame:
    """(experts, experts) counts of tokens that used both in this layer; the diagonal is how often each was used."""
    used = np.concatenate([s.used for s in _by(trace, layer)])
    return pd.DataFrame(_together(used, used))


def transitions(trace: Trace, layer: int) -> pd.DataFrame:
    """(experts, experts) counts of tokens that used the row in `layer` and the column in the next routing layer."""
    return pd.DataFrame(_together(*_next_layer(trace, layer)))


def _together(now: np.ndarray, then: np.ndarray) -> np.ndarray:
    """int64 (experts, experts): tokens that used the row in `now` and the column in `then`."""
    return np.rint(now.T.astype(np.float32) @ then.astype(np.float32)).astype(np.int64)


def _by(trace: Trace, layer: int) -> list[Stream]:
    if layer not in trace.layers:
        raise TraceError(f"layer {layer} is not in the trace; its layers are {trace.layers}")
    return list(streams(trace, [layer]))


def _next_layer(trace: Trace, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """bool (tokens, experts) in `layer` and in the next routing layer, for the tokens both have, text after text."""
    after = trace.layers[trace.layers.index(layer) + 1 :] if layer in trace.layers else []
    if not after:
        raise TraceError(f"layer {layer} has no routing layer after it; the trace's layers are {trace.layers}")
    later = {s.sequence: s for s in _by(trace, after[0])}
    now, then = [], []
    for text in _by(trace, layer):
        if text.sequence in later:
            other = later[text.sequence]
            _, first, second = np.intersect1d(text.key, other.key, return_indices=True)
            now.append(text.used[first])
            then.append(other.used[second])
    nothing = np.empty((0, trace.num_experts), bool)
    return np.concatenate([nothing, *now]), np.concatenate([nothing, *then])


def strongest(trace: Trace, within: bool, top: int = 5) -> pd.DataFrame:
    """layer, a, b, together, lift: the pairs furthest above independence, in one layer or in two that follow.

    `lift` is P(a, b) / (P(a) P(b)); pairs seen on fewer than 2 % of the tokens (or 5) are left out.
    """
    rows = []
    for layer in trace.layers if within else trace.layers[:-1]:
        if within:
            now = then = np.concatenate([s.used for s in _by(trace, layer)])
        else:
            now, then = _next_layer(trace, layer)
        tokens, together = len(now), _together(now, then)
        expected = np.outer(now.sum(0), then.sum(0)) / max(tokens, 1)
        if within:
            together = np.triu(together, 1)
        enough = together >= max(5, 0.02 * tokens)
        lift = np.where(enough, together / np.maximum(expected, 1e-12), 0)
        for flat in np.argsort(-lift, axis=None, kind="stable")[:top]:
            a, b = np.unravel_index(flat, lift.shape)
            if lift[a, b] > 0:
                rows.append((layer, int(a), int(b), int(together[a, b]), lift[a, b]))
    return pd.DataFrame(rows, columns=["layer", "a", "b", "together", "lift"])


def predictability(trace: Trace) -> pd.DataFrame | None:
    """layer, predictor, budget, recall, precision, fitted_on, tested_on: can the next layer's experts be guessed?

    Predictors see layer l of a token and name `budget` (k and 2 k) experts of the next routing layer: `transition` sums
    P(next | expert) over the token's experts, `last token` repeats the token before, `popularity` names the most used,
    `chance` guesses. Fitted on the first half of the tokens, judged on the second. None when there is too little.
    """
    k = trace.header["top_k"]
    budgets = [b for b in (k, 2 * k) if b <= trace.num_experts]
    rows = []
    for layer in trace.layers[:-1]:
        now, then = _next_layer(trace, layer)
        middle = len(now) // 2
        if middle < 2:
            continue
        past = then[:middle].sum(0) + 0.0
        together = _together(now[:middle], then[:middle])
        seen = np.maximum(now[:middle].sum(0), 1)[:, None]
        actual = then[middle:]
        tie = past / (past.sum() + 1)  # popularity orders what a predictor leaves equal
        scores = {
            "transition": now[middle:].astype(float) @ (together / seen) + 1e-6 * tie,
            "last token": then[middle - 1 : -1] + tie,
            "popularity": np.tile(past, (len(actual), 1)),
        }
        for budget in budgets:
            for name, score in scores.items():
                guess = np.argsort(-score, axis=1, kind="stable")[:, :budget]
                right = np.take_along_axis(actual, guess, 1).sum()
                rows.append((layer, name, budget, right / actual.sum(), right / guess.size, middle, len(actual)))
            share = budget / trace.num_experts
            rows.append((layer, "chance", budget, share, actual.sum() / actual.size, middle, len(actual)))
    names = ["layer", "predictor", "budget", "recall", "precision", "fitted_on", "tested_on"]
    return pd.DataFrame(rows, columns=names) if rows else None


def domains(trace: Trace) -> pd.DataFrame:
    """a, b, between, within, ratio, shared_top: do texts use different experts, beyond chance?

    `between` is the Jensen-Shannon divergence (bits, mean over layers) of halves of the two texts, `within` that of the
    two halves of each text: the control, since small samples of one source differ too. `shared_top` is the share of
    the most used tenth of the experts that both texts have in common. Needs header["domains"].
    """
    names = trace.header["domains"]
    if not names:
        raise TraceError("domains needs header['domains'], the name of each sequence number; this trace has none")
    halves, tops = {}, {}
    for sequence in np.unique(trace.sequence):
        text = trace.select(sequence=int(sequence))
        parts = _halves(text)
        if parts:
            halves[int(sequence)] = [
                part.popularity() / np.maximum(part.popularity().sum(1, keepdims=True), 1) for part in parts
            ]
            n = max(1, trace.num_experts // 10)
            tops[int(sequence)] = np.argsort(-text.popularity(), axis=1, kind="stable")[:, :n]
    rows = []
    for a in halves:
        for b in (b for b in halves if b > a):
            between = np.mean([_divergence(x, y) for x in halves[a] for y in halves[b]])
            within = np.mean([_divergence(*halves[a]), _divergence(*halves[b])])
            shared = np.mean([len(np.intersect1d(x, y)) / len(x) for x, y in zip(tops[a], tops[b], strict=True)])
            rows.append((names[a], names[b], between, within, between / within if within else np.nan, shared))
    return pd.DataFrame(rows, columns=["a", "b", "between", "within", "ratio", "shared_top"])


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Jensen-Shannon, bits, mean over layers, of distributions (layers, experts)."""
    middle = (p + q) / 2

    def relative(x):
        return np.where(x > 0, x * np.log2(np.where(x > 0, x, 1) / np.where(middle > 0, middle, 1)), 0).sum(1)

    return float(((relative(p) + relative(q)) / 2).mean())
