"""Findings about kernels, for notebook 05 and any machine: each function answers one question with a picture.

What takes time to measure is measured first (`format_runs`, `thread_runs`), so that a control only looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import factorial, log

import numpy as np
import pandas as pd

from ..bench import compare_with_limits
from ..errors import SettingError
from ..timing import ENOUGH
from ..workloads import workload
from .frames import Frame, Mark, Series
from .what_if import Finding

FORMATS = ("fp16", "int8", "int4-g64")


def format_runs(
    tokens: Iterable[int] = (1, 64), formats: Iterable[str] = FORMATS, threads: int = 1, rounds: int = 3
) -> pd.DataFrame:
    """Products with the same matrix in several number formats: tokens, format, bytes, us, share (of the bound), clean."""
    rows = []
    for count in tokens:
        works = [workload("gemm", format=name, tokens=count) for name in formats]
        timings, limits = compare_with_limits(works, threads, rounds)
        for name, work, timing in zip(formats, works, timings, strict=True):
            us = 1e6 * timing.median_s
            rows.append((count, name, work.bytes, us, limits.bound_s(work) / timing.median_s, timing.clean))
    return pd.DataFrame(rows, columns=["tokens", "format", "bytes", "us", "share", "clean"])


def bytes_and_time(runs: pd.DataFrame, tokens: int = 1) -> Finding:
    """Do fewer bytes take less time? `runs` of `format_runs`; bars are time, ticks are bytes, both in % of the first."""
    mine = _of(runs, "tokens", tokens)
    moved, time = (100 * mine[name] / mine[name].iloc[0] for name in ("bytes", "us"))
    said = (
        f"With {_rows(tokens)}, {mine.format.iloc[-1]} moves {moved.iloc[-1]:.0f} % of the bytes of {mine.format.iloc[0]} and "
        f"takes {time.iloc[-1]:.0f} % of its time: {_binds(moved.iloc[-1], time.iloc[-1])}.{_doubt(mine.clean)}"
    )
    frame = Frame(
        "bars", f"Time of a product with {_rows(tokens)}", f"% of {mine.format.iloc[0]}; the tick is the bytes", "",
        np.stack([time, moved], 1).astype(np.float32),
        tuple(Series(name, color) for name, color in zip(mine.format, ("kept", "sky", "hit"), strict=False)),
        xlim=(0, 1.1 * max(time.max(), moved.max())), texts=tuple(f"{us:.0f} µs" for us in mine.us),
    )  # fmt: skip
    return Finding((frame,), said, mine.reset_index(drop=True))


def _binds(moved: float, time: float) -> str:
    """What follows from bytes and time, both in % of the plain format's."""
    gained = (100 - time) / (100 - moved) if moved < 100 else 0
    if gained > 0.75:
        return "time follows the bytes, so they bind"
    return "time falls less than the bytes, since unpacking takes its share" if gained > 0.25 else "operations bind"


def thread_runs(
    counts: Iterable[int], tokens: Iterable[int] = (1, 64), format: str = "int8", rounds: int = 3
) -> pd.DataFrame:
    """The same products on more and more threads: tokens, threads, us, GB_per_s, GOP_per_s, their limits, share, clean."""
    rows = []
    for threads in counts:
        works = [workload("gemm", format=format, tokens=count) for count in tokens]
        timings, limits = compare_with_limits(works, threads, rounds)
        for count, work, timing in zip(tokens, works, timings, strict=True):
            s = timing.median_s
            rows.append((
                count, threads, 1e6 * s, 1e-9 * work.bytes / s, 1e-9 * work.operations / s, 1e-9 * limits.bytes_per_s,
                1e-9 * limits.flop_per_s, limits.bound_s(work) / s, timing.clean,
            ))  # fmt: skip
    columns = [
        "tokens",
        "threads",
        "us",
        "GB_per_s",
        "GOP_per_s",
        "limit_GB_per_s",
        "limit_GOP_per_s",
        "share",
        "clean",
    ]
    return pd.DataFrame(rows, columns=columns)


def more_threads(runs: pd.DataFrame, tokens: int = 1) -> Finding:
    """Do more threads make it faster? `runs` of `thread_runs`; the line is what this machine could do."""
    mine = _of(runs, "tokens", tokens).sort_values("threads")
    few = tokens < 16
    rate, unit = ("GB_per_s", "GB/s of weights") if few else ("GOP_per_s", "GOP/s")
    limit = mine[f"limit_{rate}"].max()
    best, one = mine.loc[mine.us.idxmin()], mine.iloc[0]
    said = (
        f"{_rows(tokens, True)}: {one[rate]:.1f} {unit} on one thread, at best {best[rate]:.1f} on {best.threads:.0f}, "
        f"{best[rate] / one[rate]:.2f} times as fast. The {'memory' if few else 'cores'} could do {limit:.0f}.{_doubt(mine.clean)}"
    )
    x = tuple(mine.threads.astype(float))
    values = np.stack([mine[rate], mine[f"limit_{rate}"]]).astype(np.float32)
    frame = Frame(
        "lines", f"{_rows(tokens, True)}, int8", "threads", unit, values,
        (Series("this product", "hit", (), 2.4), Series("limit, measured", "oracle", (5, 3), 1.5)),
        xlim=(0.5, max(x) + 0.5), ylim=(0, 1.15 * max(limit, mine[rate].max())), x=x,
        marks=tuple(Mark(t, float(y), "", "hit") for t, y in zip(x, mine[rate], strict=True)),
    )  # fmt: skip
    return Finding((frame,), said, mine.reset_index(drop=True))


def sum_order(length: int = 2048, orders: int = 500, seed: int = 0) -> Finding:
    """One dot product in float32, added up in `orders` random orders: how far are the results from the exact sum?"""
    if length < 2 or orders < 2:
        raise SettingError(f"sum_order: length and orders must be at least 2, got {length} and {orders}")
    rng = np.random.default_rng(seed)
    products = (rng.normal(size=length) * rng.normal(size=length)).astype(np.float32)
    exact, size = float(products.astype(np.float64).sum()), float(np.abs(products).sum())
    results = np.array([np.cumsum(rng.permutation(products), dtype=np.float32)[-1] for _ in range(orders)])
    errors = (results.astype(np.float64) - exact) / size
    different = len(np.unique(results))
    close = int(np.isclose(results, results[0], rtol=1e-4, atol=1e-6 * size).sum())
    said = (
        f"{orders} orders of the same {length} products give {different} different sums. None is off by more than "
        f"{np.abs(errors).max():.1e} of the summed magnitudes: {close} of {orders} are close to the first, and "
        f"{int((results == results[0]).sum())} are equal to it. Different last digits are no bug."
    )
    top = max(1e-12, float(np.abs(errors).max())) * 1e7
    edges = np.linspace(-top, top, 32)
    counts, _ = np.histogram(errors * 1e7, edges)
    frame = Frame(
        "lines", f"One sum of {length} products in {orders} orders", "error, in 10⁻⁷ of the summed magnitudes", "orders",
        counts[None].astype(np.float32), (Series("", "hit", (), 2.2),), xlim=(-1.05 * top, 1.05 * top),
        ylim=(0, 1.15 * float(counts.max())), x=tuple((edges[1:] + edges[:-1]) / 2), marks=(Mark(0.0, None, "exact"),),
    )  # fmt: skip
    return Finding((frame,), said, pd.DataFrame({"sum": results, "error": errors}))


def polynomial(degree: int = 5) -> Finding:
    """The kernel's sigmoid without exp: e^x as a power of two times a Taylor polynomial of `degree`; error from -20 to 20."""
    if not 1 <= degree <= 9:
        raise SettingError(f"polynomial: degree must be 1 to 9, got {degree}")
    x = np.linspace(-20, 20, 2001)
    power = x / log(2)
    whole = np.rint(power)
    rest = (power - whole) * log(2)
    value = np.exp2(whole) * sum(rest**k / factorial(k) for k in range(degree + 1))
    error = np.abs(value / (1 + value) - 1 / (1 + np.exp(-x)))
    worst = float(error.max())
    enough = (
        "small enough for a kernel that promises 1e-4"
        if worst < 1e-4
        else "more than the 1e-4 that the kernel promises"
    )
    said = f"Degree {degree}: {degree} multiply-adds, and an error of at most {worst:.1e}, {enough}."
    shown = np.stack([np.log10(np.maximum(error, 1e-12)), np.full(len(x), -4.0)]).astype(np.float32)
    frame = Frame(
        "lines", f"Error of the sigmoid, degree {degree}", "x", "log10 of the error", shown,
        (Series(f"degree {degree}", "attention", (), 1.5), Series("promised", "miss", (5, 3), 1.5)), xlim=(-20, 20),
        ylim=(-9, 0), x=tuple(x),
    )  # fmt: skip
    return Finding((frame,), said, pd.DataFrame({"x": x, "error": error}))


def _of(runs: pd.DataFrame, column: str, value: int) -> pd.DataFrame:
    mine = runs[runs[column] == value]
    if mine.empty:
        raise SettingError(
            f"{column} {value} was not measured; known: {', '.join(map(str, sorted(runs[column].unique())))}"
        )
    return mine


def _rows(tokens: int, start: bool = False) -> str:
    text = "one row" if tokens == 1 else f"{tokens} rows"
    return text.capitalize() if start else text


def _doubt(clean: pd.Series) -> str:
    return "" if (clean >= ENOUGH).all() else " (Other work took the cores meanwhile: measure again when it is quiet.)"
