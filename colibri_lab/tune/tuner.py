"""`colibri tune`: search the settings that change speed and memory only, within a memory budget and a time.

The search is Optuna's: a tree-structured Parzen estimator proposes, successive halving (Jamieson and Talwalkar 2016)
stops what is slow after few tokens and lets the rest run longer. What it ends with is confirmed against the defaults by
`compare`, in turns and with a control, before it is written down.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .. import machine
from ..checkpoint.files import AtomicFile
from ..config import SETTINGS
from ..errors import ColibriError, MemoryPlanError, SettingError, StorageError
from ..units import format_size, parse_size
from . import runs, trial
from .compare import Comparison, compare
from .memory_of import memory_of
from .shapes import Shape

RUNGS = (8, 24, 72)  # decoded tokens after which a trial may be stopped
CONFIRM_SHARE = 0.4  # of the time, kept for the confirmation
POLICIES = ("lru", "weighted-lru", "lfu-aged", "slru", "arc", "s3-fifo")


@dataclass(eq=False)
class Tuned:
    """The end of a search: settings, what was tried, and the comparison with the defaults that confirms them or not.

    trials   a row per trial: its settings, tokens_per_s, tokens, state (complete, pruned, refused), reason
    """

    settings: dict[str, Any]
    confirmed: bool
    trials: pd.DataFrame
    comparison: Comparison | None
    budget: int | None
    reason: str
    record: str | None = None

    def to_json(self) -> dict:
        return {
            "settings": self.settings, "confirmed": self.confirmed, "reason": self.reason, "budget": self.budget,
            "trials": len(self.trials), "record": self.record,
            "comparison": None if self.comparison is None else self.comparison.to_json(),
        }  # fmt: skip

    def save(self, path: str | os.PathLike) -> Path:
        """Write the settings file that `colibri run --settings FILE` reads."""
        return write_settings(path, self.settings, confirmed=self.confirmed, reason=self.reason, record=self.record)

    def __str__(self) -> str:
        lines = [f"{name:<20} {value}" for name, value in self.settings.items()]
        return "\n".join([*lines, f"{len(self.trials)} trials", self.reason])


def parse_duration(text: str | float, name: str = "time") -> float:
    """Seconds from a number, or from "90s", "10m", "1.5h". Raises `SettingError`."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*", str(text))
        if not found:
            raise SettingError(f'{name} must be seconds or a text such as "10m", got {text!r}')
        value = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"]
    if not value > 0:
        raise SettingError(f"{name} must be positive, got {text!r}")
    return value


def write_settings(path: str | os.PathLike, settings: dict[str, Any], **about: Any) -> Path:
    """A settings file: JSON with an object `settings`, and whatever else is worth keeping beside it."""
    path = Path(path)
    try:
        with AtomicFile(path) as file:
            file.write(json.dumps({"settings": settings, **about}, indent=1).encode())
    except OSError as error:
        raise StorageError(f"{path}: cannot write the settings: {error}") from error
    return path


def read_settings(path: str | os.PathLike) -> dict[str, Any]:
    """The settings of a file that `write_settings` wrote, or of a plain JSON object of settings; checked.

    Raises `StorageError` for a file that cannot be read, `SettingError` naming the file and the setting.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: not a settings file: {error}") from error
    settings = data.get("settings", data) if isinstance(data, dict) else None
    if not isinstance(settings, dict):
        raise SettingError(f"{path}: expected a JSON object of settings, found {str(data)[:60]}")
    try:
        trial.split(settings)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None
    return settings


def safe_settings() -> list[str]:
    """Settings of scope "open" that change speed and memory but never a token."""
    return [name for name, s in SETTINGS.items() if s.scope == "open" and not s.changes_tokens]


def tune(
    model: str | os.PathLike,
    *,
    budget: int | str | None = None,
    time_s: float | str = "10m",
    settings: dict[str, Any] | None = None,
    knobs: Sequence[str] | None = None,
    prompt: str = trial.PROMPT,
    seed: int = 0,
    trials: int | None = None,
    confirm: int = 5,
    record: bool = True,
    progress: bool = True,
) -> Tuned:
    """Search for the fastest decode of a model within `budget` bytes of memory, for about `time_s` seconds.

    settings  taken as they are; may include settings of scope "generate"
    knobs     what may vary; default slots, scope, policy, storage, loader_threads, threads, prefetch
    trials    most trials, beside the time
    confirm   pairs of the confirming comparison, in each order

    Raises `SettingError` for a knob that changes tokens, `MemoryPlanError` when not even the smallest cache fits.
    """
    import optuna

    import colibri_lab as cl

    limit = time.perf_counter() + parse_duration(time_s) * (1 - CONFIRM_SHARE)
    given, generate = trial.split(dict(settings or {}))
    generate = {"temperature": 0.0, "stop_at_eos": False, **generate}
    lab = cl.open(model, **given)
    shape = Shape.of_container(lab.container)
    room = parse_size(budget, "budget") if budget is not None else machine.memory()[1]
    space = _space(shape, given, knobs)
    context = min(lab.settings["max_seq_len"], RUNGS[-1] + 64)
    _refuse_hopeless(lab, shape, room, context)
    rows: list[dict] = []

    def objective(one) -> float:
        chosen = {name: _suggest(one, name, values) for name, values in space.items()}
        chosen = _scaled_slots(chosen, lab, shape)
        row = {**chosen, "tokens_per_s": None, "tokens": 0, "state": "refused", "reason": None}
        rows.append(row)
        try:
            lab.configure(**{**given, **chosen})
            need = memory_of(shape, lab.settings, context)["total_bytes"]
            if need > room:
                row["reason"] = f"needs {format_size(need)} of {format_size(room)}"
                raise optuna.TrialPruned()
            lab.warmup()
            for rung, tokens in enumerate(RUNGS):
                speed = trial.run_once(lab, prompt, {**generate, "max_tokens": tokens + 1})["tokens_per_s"]
                row |= {"tokens_per_s": speed, "tokens": tokens, "state": "pruned"}
                one.report(speed, rung)
                if rung < len(RUNGS) - 1 and one.should_prune():
                    raise optuna.TrialPruned()
        except ColibriError as error:
            row |= {"state": "refused", "reason": str(error)}
            raise optuna.TrialPruned() from None
        row["state"] = "complete"
        return speed

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )
    for start in _starts(space, shape):
        study.enqueue_trial(start, skip_if_exists=True)
    left = limit - time.perf_counter()
    study.optimize(objective, timeout=max(1.0, left), n_trials=trials, show_progress_bar=progress)
    table = pd.DataFrame(rows)
    complete = table[table.state == "complete"]
    if complete.empty:
        raise SettingError(f"tune: no trial was completed in {time_s}; give more time or fewer knobs")
    best = complete.loc[complete.tokens_per_s.astype(float).idxmax()]
    chosen = {name: _plain(best[name]) for name in space}
    tuned = {
        **given,
        **chosen,
        **{name: value for name, value in (settings or {}).items() if SETTINGS[name].scope == "generate"},
    }
    start = {**given, **_fitting_defaults(lab, shape, given, room, context)}
    result = _confirmed(lab.path, start, {**given, **chosen}, tuned, table, room, prompt, confirm, generate, progress)
    if record:
        kept = runs.save(
            "tune", requested={"budget": room, "time_s": str(time_s), "seed": seed, "knobs": list(space), **given},
            effective=result.settings, facts={"trials": len(table), "confirmed": result.confirmed, "reason": result.reason},
            tables={"trials": table.astype({"reason": object})}, model=lab.path,
            comparison=None if result.comparison is None else result.comparison.to_json(),
        )  # fmt: skip
        result.record = kept.id
    return result


def _space(shape: Shape, given: dict, knobs: Sequence[str] | None) -> dict[str, list]:
    """Knob → values. Slots are in multiples of one token's experts here, so that one scale serves both scopes."""
    cores = machine.cores()[0]
    blocks = shape.blocks / shape.top_k
    space: dict[str, list] = {
        "expert_cache_slots": sorted({*(m for m in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32) if m < blocks), blocks}),
        "scope": ["layer", "global"],
        "policy": list(POLICIES),
        "storage": ["pread", "direct", "mmap"],
        "loader_threads": [1, 2, 4],
        "threads": sorted({max(1, cores // 2), cores}),
        "prefetch": ["none", "same", "lookahead"],
    }
    for name in knobs or ():
        if name not in safe_settings():
            why = "it changes tokens" if name in SETTINGS else trial.did_you_mean(name, space)
            raise SettingError(f"tune cannot vary {name!r}: {why}")
        if name not in space:
            if not SETTINGS[name].choices:
                raise SettingError(f"tune does not know which values of {name!r} to try; it varies {', '.join(space)}")
            space[name] = [value for value in SETTINGS[name].choices if value is not None]
    wanted = knobs or list(space)
    return {name: values for name, values in space.items() if name in wanted and name not in given and len(values) > 1}


def _suggest(one, name: str, values: list):
    return one.suggest_categorical(name, values)


def _scaled_slots(chosen: dict, lab, shape: Shape) -> dict:
    if "expert_cache_slots" not in chosen:
        return chosen
    scope = chosen.get("scope", lab.settings["scope"])
    scale = len(shape.moe_layers) if scope == "global" else 1
    slots = max(1, round(chosen["expert_cache_slots"] * shape.top_k * scale))
    return {**chosen, "expert_cache_slots": min(slots, shape.blocks * scale)}


def _starts(space: dict[str, list], shape: Shape) -> list[dict]:
    """Where the search begins: the defaults, then the same with the most and with few slots."""
    usual = {"scope": "layer", "policy": "lru", "storage": "pread", "loader_threads": 2, "prefetch": "none"}
    base = {name: usual.get(name, values[-1]) for name, values in space.items()}
    if "expert_cache_slots" not in space:
        return [base]
    slots = space["expert_cache_slots"]
    return [
        {**base, "expert_cache_slots": value} for value in (min(slots, key=lambda m: abs(m - 4)), slots[-1], slots[0])
    ]


def _refuse_hopeless(lab, shape: Shape, room: int, context: int) -> None:
    need = memory_of(shape, {**lab.settings, "expert_cache_slots": 1, "scope": "layer"}, context)["total_bytes"]
    if need > room:
        raise MemoryPlanError(
            f"tune: {format_size(room)} do not hold {shape.name} with one slot per layer, which needs {format_size(need)}"
        )


def _fitting_defaults(lab, shape: Shape, given: dict, room: int, context: int) -> dict:
    """The default slots, or the most that fit: what the winner is confirmed against."""
    if "expert_cache_slots" in given:
        return {}
    scale = len(shape.moe_layers) if given.get("scope") == "global" else 1
    slots = min(4 * shape.top_k * scale, shape.blocks * scale)
    settings = {**lab.settings, "scope": given.get("scope", "layer")}
    while slots > 1 and memory_of(shape, {**settings, "expert_cache_slots": slots}, context)["total_bytes"] > room:
        slots -= 1
    return {"expert_cache_slots": slots}


def _confirmed(path, start, winner, tuned, table, room, prompt, pairs, generate, progress) -> Tuned:
    """Compare with the defaults; what does not win is not recommended."""
    defaults = {name: SETTINGS[name].default for name in winner}
    same = all(winner[name] == start.get(name, defaults[name]) for name in winner)
    if same:
        return Tuned(tuned, True, table, None, room, "The defaults were the fastest of all that was tried.")
    tokens = {**generate, "max_tokens": RUNGS[1]}
    found = compare(
        path, {**start, **tokens}, {**winner, **tokens}, n=pairs, prompt=prompt, record=False, progress=progress
    )
    if found.winner == "b":
        return Tuned(tuned, True, table, found, room, f"Confirmed against the defaults: {found.reason}")
    keep = {**start, **{name: value for name, value in tuned.items() if SETTINGS[name].scope == "generate"}}
    reason = f"Not confirmed, so the defaults stay: {found.reason}"
    return Tuned(keep, False, table, found, room, reason)


def _plain(value):
    return value.item() if isinstance(value, np.generic) else value
