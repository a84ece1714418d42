"""`colibri compare`: is B faster than A? Runs in turn, in both orders, with a control that compares A with itself.

A machine drifts, warms up and serves others, so two numbers from different minutes say little. Here A and B take turns;
half of the pairs run B first; and between them as many pairs are A against A. A winner is named only when both orders
agree, when chance is an unlikely explanation, and when the control, judged by the same rule, names none.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from ..config import SETTINGS
from ..errors import SettingError
from . import page_cache, runs, trial

LEAST = 3  # samples of a side
CHANCE = 0.01  # of naming a winner where there is none
EXACT = 16  # pairs up to which every assignment of signs is tried
DRAWS = 20_000  # of signs, beyond that
CACHE_POINTS = 0.05  # share of the page cache by which two runs count as having begun alike


def percentiles(values) -> dict[str, float | int]:
    """n, then p50, p90, p99 and p99.9 as far as there are samples for them: 10, 100 and 1,000 at least."""
    values = np.asarray(values, float)
    found: dict[str, float | int] = {"n": len(values)}
    for name, share, least in (("p50", 50, 1), ("p90", 90, 10), ("p99", 99, 100), ("p99.9", 99.9, 1000)):
        if len(values) >= least:
            found[name] = float(np.percentile(values, share))
    return found


@dataclass(eq=False)
class Comparison:
    """Samples and verdict. `ratio` is the median of b / a over pairs; above 1, B is faster where more is better.

    samples    a row per run: side (a, b, control), order (forward, reverse), control, pair, value
    winner     "a", "b" or None
    reason     why, in a sentence
    confounds  differences beside the varied settings; where there are any no winner is named
    """

    a: dict
    b: dict
    metric: str
    samples: pd.DataFrame
    ratio: float
    low: float
    high: float
    chance: float
    control_ratio: float
    control_chance: float
    winner: str | None
    reason: str
    confounds: list[str] = field(default_factory=list)
    record: str | None = None

    def table(self) -> pd.DataFrame:
        """side, n, median, low, high (10 and 90 % of the samples), a row per side."""
        rows = []
        for side, group in self.samples.groupby("side"):
            low, mid, high = np.quantile(group.value, [0.1, 0.5, 0.9])
            rows.append({"side": side, "n": len(group), "median": mid, "low": low, "high": high})
        return pd.DataFrame(rows)

    def to_json(self) -> dict:
        data = {k: v for k, v in self.__dict__.items() if k != "samples"}
        return {**data, "sides": self.table().to_dict("records"), "n": len(self.samples)}

    def __str__(self) -> str:
        table = self.table()
        lines = [f"A {_told(self.a)}", f"B {_told(self.b)}", f"{self.metric}, from a cold expert cache"]
        lines += [
            f"  {row.side:<8} median {row['median']:.4g} ({row.low:.4g} to {row.high:.4g}), n = {row.n}"
            for _, row in table.iterrows()
        ]
        lines.append(f"B / A {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}); A / A {self.control_ratio:.3f}")
        lines += [f"confounded: {each}" for each in self.confounds]
        return "\n".join([*lines, self.reason])


def _told(settings: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"


def judge(
    run_a: Callable[[], float],
    run_b: Callable[[], float],
    *,
    n: int = 5,
    more_is_better: bool = True,
    progress: bool = False,
) -> tuple[pd.DataFrame, dict]:
    """Run A B, B A, A A' and A' A in turn, n rounds: the samples and the verdict on them.

    Each call runs its side once and returns the metric, positive. Returns a DataFrame (side, order, control, pair, value)
    and a dict with ratio, low, high, chance, control_ratio, control_chance, winner, reason.
    """
    if n < LEAST:
        raise SettingError(f"n must be at least {LEAST} samples a side and order, got {n}")
    rows = []
    # The four kinds of pairs take turns, so that a drift meets all of them.
    kinds = [(control, order) for control in (False, True) for order in ("forward", "reverse")]
    rounds = list(itertools.product(range(n), kinds))
    for pair, (control, order) in tqdm(rounds, "compare", unit=" pair", disable=not progress):
        sides = [("a", run_a), ("control", run_a) if control else ("b", run_b)]
        for side, run in sides if order == "forward" else reversed(sides):
            value = float(run())
            if not value > 0:
                raise SettingError(f"compare: side {side} measured {value!r}; expected a positive number")
            rows.append({"side": side, "order": order, "control": control, "pair": pair, "value": value})
    samples = pd.DataFrame(rows)
    return samples, verdict(samples, more_is_better)


def verdict(samples: pd.DataFrame, more_is_better: bool = True) -> dict:
    """The verdict on samples as `judge` takes them."""
    logs, (sign, chance, reason) = _decided(samples[~samples.control], "b")
    control, (control_sign, control_chance, _) = _decided(samples[samples.control], "control")
    low, high = _interval(logs)
    winner = None
    if sign and control_sign:
        reason = f"No winner: A against itself differs as well, x {np.exp(np.median(control)):.3f}."
    elif sign:
        winner = "b" if (sign > 0) == more_is_better else "a"
        reason = (
            f"{winner.upper()} wins: B / A {np.exp(np.median(logs)):.3f} in n = {len(logs)} pairs, both orders agree, chance "
            f"{chance:.2g}, and A against itself shows no difference."
        )
    return {
        "ratio": float(np.exp(np.median(logs))), "low": low, "high": high, "chance": chance,
        "control_ratio": float(np.exp(np.median(control))), "control_chance": control_chance, "winner": winner,
        "reason": reason,
    }  # fmt: skip


def _decided(samples: pd.DataFrame, other: str) -> tuple[np.ndarray, tuple[int, float, str]]:
    """Logarithms of other / a over pairs; and the sign of the difference, 0 when none can be told, with chance and reason."""
    by_order = {}
    for order, mine in samples.groupby("order"):
        wide = mine.pivot(index="pair", columns="side", values="value")
        by_order[order] = np.log(wide[other] / wide["a"]).to_numpy()
    logs = np.r_[by_order["forward"], by_order["reverse"]]
    chance, n = sign_flip_chance(logs), len(logs)
    forward, reverse = (float(np.median(by_order[order])) for order in ("forward", "reverse"))
    if 2.0 ** (1 - n) >= CHANCE:
        return logs, (
            0,
            chance,
            f"No winner: {n} pairs cannot tell a difference from chance at {CHANCE:.0%}; take a larger n.",
        )
    if chance >= CHANCE:
        return logs, (
            0,
            chance,
            f"No winner: chance alone gives such a difference in {chance:.1%} of cases (n = {n} pairs).",
        )
    if not np.sign(forward) == np.sign(reverse) == np.sign(np.median(logs)) != 0:
        reason = f"No winner: the order decides, x {np.exp(forward):.3f} with A first and x {np.exp(reverse):.3f} with B first."
        return logs, (0, chance, reason)
    return logs, (int(np.sign(forward)), chance, "")


def sign_flip_chance(logs: np.ndarray) -> float:
    """Chance of a mean at least as far from 0 when each pair's sign were a coin's (Fisher's randomisation test, two-sided).
    Exact up to 16 pairs, else of seeded draws."""
    logs = np.asarray(logs, float)
    if not logs.any():
        return 1.0
    if len(logs) <= EXACT:
        signs = np.array(list(itertools.product((1, -1), repeat=len(logs))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), (DRAWS, len(logs)))
    means = np.abs(signs @ logs)
    own = abs(logs.sum()) * (1 - 1e-12)
    if len(logs) <= EXACT:
        return float((means >= own).mean())
    return float((1 + (means >= own).sum()) / (1 + DRAWS))


def _interval(logs: np.ndarray) -> tuple[float, float]:
    """90 % interval of the median ratio, by seeded resampling of pairs."""
    draws = np.random.default_rng(0).choice(logs, (2000, len(logs)))
    low, high = np.exp(np.quantile(np.median(draws, axis=1), [0.05, 0.95]))
    return float(low), float(high)


def compare(
    model: str | os.PathLike,
    a: dict[str, Any],
    b: dict[str, Any],
    *,
    n: int = 5,
    metric: str = "tokens_per_s",
    prompt: str = trial.PROMPT,
    max_tokens: int = 64,
    warmup: int = 1,
    record: bool = True,
    progress: bool = True,
) -> Comparison:
    """Compare two sets of settings on one model. Each side stays open, and every run starts from a cold expert cache.

        colibri_lab.compare("colibri-tiny", {"expert_cache_slots": 8}, {"expert_cache_slots": 16})

    n        pairs in each order, for A and B and for the control: 8 n runs in all
    metric   tokens_per_s, prefill_tokens_per_s (more is better), or ttft_s (less is)
    warmup   short generations by either side first, which do not count
    Text is greedy unless `a` and `b` say otherwise, so that both sides compute the same tokens. Raises `SettingError`.
    """
    import colibri_lab as cl

    better = {"tokens_per_s": True, "prefill_tokens_per_s": True, "ttft_s": False}
    if metric not in better:
        raise SettingError(f"metric cannot be {metric!r}; known: {', '.join(better)}")
    fixed = {"max_tokens": max_tokens, "temperature": 0.0, "stop_at_eos": False}
    sides = {}
    for name, settings in (("a", a), ("b", b)):
        given, generate = trial.split(settings)
        sides[name] = (cl.open(model, **given), {**fixed, **generate})
    path = sides["a"][0].path
    files = runs.expert_files(path)
    seen: dict[str, list] = {"a": [], "b": []}

    def runner(name: str) -> Callable[[], float]:
        lab, generate = sides[name]

        def run() -> float:
            share = page_cache.share(files)
            row = trial.run_once(lab, prompt, generate)
            seen[name].append({**row, "page_cache": share})
            if row[metric] is None:
                raise SettingError(f"compare: {metric} was not measured; give more max_tokens")
            return row[metric]

        return run

    for lab, _ in sides.values():
        lab.warmup(warmup)
    if warmup:  # the first run with this prompt fills the page cache for all that follow
        for name in sides:
            runner(name)()
            seen[name].clear()
    samples, found = judge(runner("a"), runner("b"), n=n, more_is_better=better[metric], progress=progress)
    effective = {name: {**lab.settings, **generate} for name, (lab, generate) in sides.items()}
    varied = {key for key in effective["a"] if a.get(key) != b.get(key)}
    confounds = _confounds(effective, varied, seen)
    if confounds and found["winner"]:
        found |= {"winner": None, "reason": f"No winner: confounded, {'; '.join(confounds)}."}
    result = Comparison(a, b, metric, samples, **found, confounds=confounds)
    if record:
        kept = runs.save(
            "compare", requested={"a": a, "b": b, "n": n, "metric": metric, "prompt": prompt, "max_tokens": max_tokens},
            effective=effective, facts={k: v for k, v in found.items()}, tables={"samples": samples}, model=path,
            page_cache_before=seen["a"][0]["page_cache"], page_cache_after=page_cache.share(files), notes=confounds,
        )  # fmt: skip
        result.record = kept.id
    return result


def _confounds(effective: dict, varied: set, seen: dict) -> list[str]:
    """What differed between the sides' runs beside the varied settings."""
    found = []
    for key in sorted(set(effective["a"]) | set(effective["b"])):
        mine, other = effective["a"].get(key), effective["b"].get(key)
        if key not in varied and mine != other:
            found.append(f"{key} {mine} and {other}")
    tokens = {name: {row["tokens_hash"] for row in rows} for name, rows in seen.items()}
    allowed = any(key in SETTINGS and SETTINGS[key].changes_tokens for key in varied)
    if tokens["a"] != tokens["b"] and not allowed:
        found.append("the two sides generated different tokens, so their work differs")
    shares = {name: [row["page_cache"] for row in rows if row["page_cache"] is not None] for name, rows in seen.items()}
    if all(shares.values()):
        mine, other = (float(np.median(shares[name])) for name in ("a", "b"))
        if abs(mine - other) > CACHE_POINTS:
            found.append(f"the page cache held {mine:.0%} of the experts before A and {other:.0%} before B")
    return found


def differences(a: runs.Record, b: runs.Record, varied: tuple[str, ...] | list[str] = ()) -> list[str]:
    """In what two stored runs differ beside the `varied` settings: settings, versions, machine, model, trace, page cache.

    Two runs that differ in anything here are confounded: the varied setting need not be why their numbers differ.
    """
    found = []
    for part in ("versions", "machine"):
        found += _different(part, a.manifest[part], b.manifest[part])
    ours, theirs = ({**r.manifest["settings"]["requested"], **r.manifest["settings"]["effective"]} for r in (a, b))
    found += _different("setting", ours, theirs, set(varied))
    for part in ("model", "trace"):
        hashes = [(r.manifest[part] or {}).get("hash") for r in (a, b)]
        if hashes[0] != hashes[1]:
            names = [(r.manifest[part] or {}).get("name") for r in (a, b)]
            found.append(
                f"{part}: {names[0]} and {names[1]}" if names[0] != names[1] else f"{part} {names[0]}: other contents"
            )
    for key in ("git_commit", "prompt"):
        if a.manifest.get(key) != b.manifest.get(key):
            found.append(f"{key}: {a.manifest.get(key)!r} and {b.manifest.get(key)!r}")
    before = [r.manifest["page_cache"]["before"] for r in (a, b)]
    if None in before:
        found.append(
            "page cache before the run: not recorded" if before[0] == before[1] else "page cache: recorded for one only"
        )
    elif abs(before[0] - before[1]) > CACHE_POINTS:
        found.append(f"page cache before the run: {before[0]:.0%} and {before[1]:.0%} of the experts")
    history = [r.manifest.get("history") for r in (a, b)]
    if history[0] != history[1]:
        found.append(f"history: {history[0]!r} and {history[1]!r}")
    return found


def _different(what: str, a: dict, b: dict, without: set = frozenset()) -> list[str]:
    names = sorted((set(a) | set(b)) - without)
    return [f"{what} {name}: {a.get(name)!r} and {b.get(name)!r}" for name in names if a.get(name) != b.get(name)]


def compare_records(a: str, b: str, varied: tuple[str, ...] | list[str] | None = None) -> dict:
    """Two stored runs side by side. Without turns and control no winner is ever named; `confounds` says what else differs.

    varied   settings that were meant to differ; by default those that were asked for and do
    """
    records = runs.load(a), runs.load(b)
    asked = [record.manifest["settings"]["requested"] for record in records]
    if varied is None:
        varied = [name for name in sorted(set(asked[0]) | set(asked[1])) if asked[0].get(name) != asked[1].get(name)]
    confounds = differences(*records, varied)
    if len(varied) > 1:
        confounds.insert(0, f"{len(varied)} settings vary at once: {', '.join(varied)}")
    return {
        "a": records[0].id, "b": records[1].id, "varied": list(varied), "confounds": confounds,
        "facts": {name: [record.facts.get(name) for record in records] for name in records[0].facts},
        "n": [1, 1], "winner": None,
        "reason": "No winner: stored runs have no turns and no control. Run `colibri compare` with a model.",
    }  # fmt: skip
