"""Two measures over windows of tokens: SRP (do few experts serve a stretch of text?) and SCH (what a cache that sees
the next m tokens would hit). Definitions follow the code of the local-routing-consistency study (arXiv 2505.16056),
but for one point: its SCH keeps every expert that was just asked for, ours may drop it.
"""

from __future__ import annotations

import heapq

import numpy as np
import pandas as pd
from tqdm import tqdm

from ..errors import TraceError
from .streams import last_use, streams, window_counts
from .table import Trace

SRP_WINDOWS = (4, 16, 64, 256)
SAMPLE_TOKENS = 512


def _samples(trace: Trace, sample_tokens: int):
    """(layer, sample number, used) with texts cut into samples of at most `sample_tokens` tokens."""
    number: dict[tuple[int, int], int] = {}
    for stream in streams(trace):
        for at in range(0, len(stream), sample_tokens):
            sample = number.setdefault((stream.sequence, at), len(number))
            yield stream.layer, sample, stream.used[at : at + sample_tokens]


def srp(trace: Trace, windows=SRP_WINDOWS, sample_tokens: int = SAMPLE_TOKENS, bootstrap: int = 1000, seed: int = 0):
    """layer, window, srp, low, high, group_size, threshold, windows, samples: segment routing best performance.

    In every sliding window of m tokens a fixed set of experts, those used by at least h tokens, is compared with what
    the tokens used: matches is the sum of their counts, predictions m times their number, actual the sum of all counts;
    F1 = 2 matches / (predictions + actual), pooled over windows and experts, and SRP is the best F1 over h.
    `group_size` is predictions / actual there: the set's size in multiples of the active experts. `low` and `high` are
    the basic 95 % bootstrap interval over samples, NaN with fewer than two. Row layer "all" pools layers.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for window in windows:
        histograms: dict[int | str, dict[int, np.ndarray]] = {}
        for layer, sample, used in _samples(trace, sample_tokens):
            if len(used) < window:
                continue
            histogram = np.bincount(window_counts(used, window).reshape(-1), minlength=window + 1)
            for name in (layer, "all"):
                mine = histograms.setdefault(name, {})
                mine[sample] = mine.get(sample, 0) + histogram
        for layer, mine in histograms.items():
            table = np.stack(list(mine.values())).astype(np.float64)  # (samples, window + 1)
            f1, group = _f1(table.sum(0), window)
            best = int(np.argmax(f1))
            low = high = None
            if len(table) > 1:
                draws = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=bootstrap)
                scores = np.array([_f1(weights @ table, window)[0].max() for weights in draws])
                low, high = 2 * f1[best] - np.quantile(scores, [0.975, 0.025])
            rows.append((layer, window, f1[best], low, high, group[best], best, int(table.sum()) // trace.num_experts,
                         len(table)))  # fmt: skip
    names = ["layer", "window", "srp", "low", "high", "group_size", "threshold", "windows", "samples"]
    table = pd.DataFrame(rows, columns=names).astype({"low": float, "high": float})
    return table.sort_values("window", kind="stable", ignore_index=True)


def _f1(histogram: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """F1 and predictions / actual per threshold 0 to `window`; `histogram[c]` is how many (window, expert) count c."""
    count = np.arange(window + 1)
    matches = np.cumsum((histogram * count)[::-1])[::-1]
    predictions = window * np.cumsum(histogram[::-1])[::-1]
    actual = matches[0]
    return 2 * matches / np.maximum(predictions + actual, 1), predictions / max(actual, 1)


def sch(
    trace: Trace,
    window: int,
    sample_tokens: int = SAMPLE_TOKENS,
    free_first_use: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """window, slots, multiple, hit_rate: segment cache best hit rate at every slot count, layers and samples pooled.

    An oracle ranks experts by their uses in the next `window` tokens, then by recency (lower id last), and after every
    event keeps the best C of what it held and what was asked for. Events are atomic. Since the kept sets are nested,
    one stack serves all C. Not Belady: it is a future LFU. `multiple` is slots / k. `free_first_use` copies the study's
    convention that a first use is a hit while fewer than C distinct experts were seen.
    """
    if window < 1:
        raise TraceError(f"SCH window must be at least 1 token, got {window}")
    experts = trace.num_experts
    hits_at = np.zeros(experts + 1, np.int64)  # [p]: accesses that need at least p + 1 slots; last: misses
    total = 0
    for _, _, used in tqdm(list(_samples(trace, sample_tokens)), desc="SCH", unit="stream", disable=not progress):
        total += int(used.sum())
        hits_at += _stack_depths(used, window, free_first_use)
    slots = np.arange(1, experts + 1)
    rates = np.cumsum(hits_at[:-1]) / total
    k = trace.header["top_k"] or trace.k
    return pd.DataFrame({"window": window, "slots": slots, "multiple": slots / k, "hit_rate": rates})


def _stack_depths(used: np.ndarray, window: int, free_first_use: bool) -> np.ndarray:
    tokens, experts = used.shape
    total = np.zeros((tokens + 1, experts), np.int64)
    np.cumsum(used, axis=0, out=total[1:])
    ahead = np.minimum(np.arange(tokens) + 1 + window, tokens)
    future = total[ahead] - total[1:]  # uses in the `window` tokens after t
    # one number orders all: future uses, then last use, then the lower id; id is recovered as rank % experts
    last = last_use(used)[1:].astype(np.int64) + 1
    rank = (future * (tokens + 2) + last) * experts + np.arange(experts - 1, -1, -1)
    depths = np.zeros(experts + 1, np.int64)
    stack: list[int] = []
    for t in range(tokens):
        asked = np.flatnonzero(used[t]).tolist()
        place = {expert: at for at, expert in enumerate(stack)}
        seen = len(stack)
        for expert in asked:
            if expert in place:
                depths[place[expert]] += 1
            elif free_first_use:
                depths[seen] += 1
                seen += 1
            else:
                depths[experts] += 1
        now = rank[t]
        pool = [-int(now[expert]) for expert in asked]
        heapq.heapify(pool)
        members = set(asked)
        kept = [heapq.heappop(pool) if e in members else heapq.heappushpop(pool, -int(now[e])) for e in stack]
        kept += sorted(pool)
        stack = [experts - 1 - (-value % experts) for value in kept]
    return depths
