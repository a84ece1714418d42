"""From a model, or a trace of one, to settings: predicted, explained, measured, written out. For notebook 07, or with `what_if`.

A `Bench` is a probed machine. It takes a model directory, the name of a published model, or a trace file of any format
that `load_trace` reads, and recommends settings for any share of the memory that all experts would need.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from .. import machine
from ..config import SETTINGS
from ..errors import ColibriError, ModelError, SettingError
from ..front import container_of, find_model, project_root
from ..trace import load_trace
from ..trace.table import Trace
from ..tune import predict, trial
from ..tune.calibrate import Calibrator, trimmed_mean
from ..tune.memory_of import memory_of
from ..tune.plan import PROMPT_TOKENS, Plan, calibrated_here, recommend
from ..tune.predict import Predictor
from ..tune.probe import Probe
from ..tune.shapes import PRESETS, Shape, find_shape
from .frames import Frame, Mark, Series
from .theme import bytes_text
from .tune_plots import SHARE_COLORS, STORAGE_STYLE
from .what_if import Finding

_PARTS = {
    "disk": "the disk",
    "page cache": "copies out of the page cache",
    "experts": "expert products",
    "dense": "attention and the other layers that are always in memory",
    "management": "managing misses",
}
DASHES = {"-": (), "--": (7, 3), "-.": (9, 2, 2, 2), ":": (2, 2)}


@dataclass
class Subject:
    """What is planned for: the model's shape, how it is predicted here, and whether it can run here (`path`)."""

    name: str
    shape: Shape
    made: Predictor
    machine: dict
    path: str | None = None
    plans: dict[int, Plan] = field(default_factory=dict, repr=False)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)  # a view and a cell may ask at once

    @property
    def all_bytes(self) -> int:
        """Memory with a slot for every expert."""
        settings = self.made.settings(expert_cache_slots=self.shape.blocks, scope="layer", storage="pread")
        return memory_of(self.shape, settings, 512)["total_bytes"]

    def memory(self, percent: int) -> int:
        return round(self.all_bytes * percent / 100)

    def plan(self, percent: int) -> Plan:
        """Settings for `percent` of `all_bytes`, page cache included. Raises `MemoryPlanError` when no slot fits."""
        with self.lock:
            if percent not in self.plans:
                one = replace(self.made, memory=self.memory(percent))
                self.plans[percent] = recommend({self.shape.formats[0]: one}, self.machine)
            return self.plans[percent]


@dataclass(eq=False)
class Bench:
    """A probed machine and what was brought to it. `format` is how experts are stored of models that are not here."""

    probe: Probe
    format: str = "int8"
    subjects: dict[tuple[str, str], Subject] = field(default_factory=dict, repr=False)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def subject(self, source: str | os.PathLike, model: str = "") -> Subject:
        """A model directory, a published model's name or a trace file; `model` names the model of a trace where its layers
        and experts do not tell. A model that is here runs for a moment, which takes some seconds the first time.

        Raises `ModelError` for a source that is none of these, `TraceError` for a file that is no trace, `SettingError`
        for a trace of an unknown model.
        """
        key = (str(source).strip(), model.strip())
        with self.lock:
            if key not in self.subjects:
                self.subjects[key] = self._read(*key)
            return self.subjects[key]

    def _read(self, source: str, model: str) -> Subject:
        trace, file = None, _file(source)
        if file is not None and file.name != "config.json":
            trace = load_trace(file)
            source = model or model_of(trace)
        shape = find_shape(source)
        path = _container(source)
        if path is not None:
            made = _ran(path, trace)
            shape = made.shape
        else:
            shape = shape.in_format(self.format)
            made = predict.from_probe(shape, self.probe, 0, {}, trace, PROMPT_TOKENS)
        shape = replace(shape, name=Path(source).name)  # a converted copy has a longer name than what it was made from
        name = shape.name if trace is None else f"{shape.name}, {file.name}"
        return Subject(name, shape, made, self.probe.machine, None if path is None else str(path))


def _file(source: str) -> Path | None:
    return next((p for p in (Path(source), project_root() / source) if p.is_file()), None)


def _container(model: str) -> Path | None:
    if model.lower() in (name.lower() for name in PRESETS) and not Path(model).is_dir():
        return None
    try:
        find_model(model)
    except ModelError:
        return None
    return container_of(model)


def model_of(trace: Trace) -> str:
    """The model whose MoE layers and experts a trace has: the shipped one, or one of `PRESETS`. Raises `SettingError`."""
    size = (len(trace.layers), trace.num_experts)
    if size == (6, 32):
        return "colibri-tiny"
    found = [name for name, s in PRESETS.items() if (len(s.moe_layers), s.num_experts) == size]
    if not found:
        raise SettingError(
            f"the trace has {size[0]} MoE layers of {size[1]} experts, like no model known by name; give model=, the "
            f"directory of its model or one of {', '.join(PRESETS)}"
        )
    return found[0]


def _ran(path: str | Path, trace: Trace | None, **settings) -> Predictor:
    """Predictor of a model that is here, from calibration runs with these settings."""
    _, made = calibrated_here(path, trace, None, settings, trial.PROMPT, PROMPT_TOKENS, [])
    return next(iter(made.values()))


# ---- questions


def budget(bench: Bench, source: str = "data/colibri-tiny", model: str = "", percent: int = 50) -> Finding:
    """Predicted speed over slots within a memory budget, and where the time of a token goes with the settings that are
    recommended. `percent` is of the memory that all experts would take."""
    subject = bench.subject(source, model)
    plan, whole = subject.plan(percent), subject.plan(100)
    p, chosen = plan.predicted, plan.predicted.settings
    curves = plan.curves[plan.curves.scope == chosen["scope"]]
    x = sorted(curves.slots.unique())
    lines, series = [], []
    for storage, rows in curves.groupby("storage"):
        color, dash = STORAGE_STYLE[storage]
        rows = rows.set_index("slots").reindex(x)
        lines += [rows.tokens_per_s, rows.low, rows.high]
        series += [Series(f"{storage}, dotted: 9 of 10 runs", color, DASHES[dash])]
        series += [Series("", color, (1, 3), 1.0, 0.7)] * 2
    top = 1.08 * max(whole.curves.high.max(), curves.high.max())
    most = subject.shape.blocks * (len(subject.shape.moe_layers) if chosen["scope"] == "global" else 1)
    point = Mark(chosen["expert_cache_slots"], p.tokens_per_s.value, "recommended")
    speed = Frame(
        "lines", f"{subject.shape.name}, {bytes_text(plan.memory)}: predicted speed",
        "slots" + (" per layer" if chosen["scope"] == "layer" else " in all"), "decode, tokens/s",
        np.array(lines, np.float32), tuple(series), (0, most), (0, top), x=tuple(map(float, x)), marks=(point,),
    )  # fmt: skip
    shares = 100 * np.array(list(p.shares.values()), np.float32)
    time = Frame(
        "bars", "Where a token's time would go", "% of decode time", "",
        np.stack([shares, np.full(len(shares), np.nan, np.float32)], 1),
        tuple(Series(name, SHARE_COLORS[name]) for name in p.shares), (0, 100),
        texts=tuple(f"{share:.0f} %" for share in shares),
    )  # fmt: skip
    return Finding((speed, time), _said(plan, percent), reasons(plan))


def _said(plan: Plan, percent: int) -> str:
    speed, chosen = plan.predicted.tokens_per_s, {c.setting: c for c in plan.choices}
    slots, policy = chosen["expert_cache_slots"], chosen["policy"]
    where = "in all" if chosen["scope"].value == "global" else "per layer"
    return (
        f"{bytes_text(plan.memory)}, {percent} % of what all experts would need: {slots.value} slots {where}, "
        f"{policy.value}, {chosen['storage'].value} give {speed.value:.3g} tokens/s ({speed.low:.3g} to {speed.high:.3g}). "
        f"Hit rate {plan.predicted.hit_rate:.0%}. Policy: {policy.reason}. Most of the time goes to {_PARTS[plan.predicted.bottleneck]}."
    )


def reasons(plan: Plan) -> pd.DataFrame:
    """What was chosen and why, indexed by setting: value, reason, tokens_per_s, runner_up and its tokens/s."""
    table = plan.table().set_index("setting")[
        ["value", "reason", "tokens_per_s", "runner_up", "runner_up_tokens_per_s"]
    ]
    return table.round(2).astype(object).where(table.notna(), "–")


def what_memory_buys(
    bench: Bench, source: str = "data/colibri-tiny", percents: Sequence[int] = range(30, 101, 10)
) -> Finding:
    """Predicted speed of the recommended settings at every budget."""
    subject = bench.subject(source)
    rows = []
    for percent in percents:
        try:
            plan = subject.plan(percent)
        except ColibriError:  # too little for a single slot: the curve begins later
            continue
        speed = plan.predicted.tokens_per_s
        rows.append({
            "percent": percent, "memory_MB": plan.memory / 1e6, "slots": plan.predicted.settings["expert_cache_slots"],
            "scope": plan.predicted.settings["scope"],
            "storage": plan.predicted.settings["storage"], "policy": plan.predicted.settings["policy"],
            "tokens_per_s": speed.value, "low": speed.low, "high": speed.high,
        })  # fmt: skip
    if not rows:
        raise SettingError(f"{subject.name}: no budget of {list(percents)} % holds one slot per layer; ask for more")
    table = pd.DataFrame(rows)
    series = (Series("predicted, dotted: 9 of 10 runs", "hit"), *[Series("", "hit", (1, 3), 1.0, 0.7)] * 2)
    frame = Frame(
        "lines", f"{subject.shape.name}: what memory buys", "memory, MB", "decode, tokens/s",
        table[["tokens_per_s", "low", "high"]].to_numpy(np.float32).T, series,
        (0, 1.02 * table.memory_MB.max()), (0, 1.08 * table.high.max()), x=tuple(table.memory_MB),
        marks=tuple(Mark(row.memory_MB, row.tokens_per_s) for row in table.itertuples()),
    )  # fmt: skip
    half = table.tokens_per_s.max() / 2
    enough = table[table.tokens_per_s >= half].iloc[0]
    said = (
        f"With everything in memory {table.tokens_per_s.iloc[-1]:.3g} tokens/s; half of the best needs "
        f"{enough.memory_MB:.3g} MB, {enough.percent} % of all, or less."
    )
    return Finding((frame,), said, table)


def predicted_and_measured(
    subject: Subject, slots: Sequence[int] = (4, 8, 16, 32), storage: str = "pread", tokens: int = 48, rounds: int = 5
) -> pd.DataFrame:
    """Predicted speed beside that of real runs, a row per slot count, for `tune_plots.beside`.

    The model is calibrated anew, in turns with the runs, so that prediction and measurement meet the same machine. Columns
    storage, slots, predicted, low, high, measured (tokens by the mean time of a run), n. Raises `SettingError` for a model
    that cannot run here.
    """
    import colibri_lab as cl

    if subject.path is None:
        raise SettingError(f"{subject.name} is not a model on this machine, so nothing can be measured")
    lab = cl.open(subject.path, storage=storage)
    calibrator = Calibrator(lab, trial.PROMPT, tokens)
    generate = {"max_tokens": tokens + 1, "temperature": 1.0, "seed": 1, "stop_at_eos": False}
    token_s: dict[int, list[float]] = {count: [] for count in slots}
    for number in range(rounds):
        calibrator.round(0.2)
        for count in slots if number % 2 else reversed(slots):
            lab.configure(expert_cache_slots=count)
            trial.run_once(lab, trial.PROMPT, generate)  # touches the memory that the next run takes
            token_s[count].append(1 / trial.run_once(lab, trial.PROMPT, generate)["tokens_per_s"])
    one = predict.calibrated(subject.shape, calibrator.result(), machine.memory()[1], {"storage": storage})
    rows = []
    for count in slots:
        found = one.at(expert_cache_slots=count).tokens_per_s
        rows.append({"storage": storage, "slots": count, "predicted": found.value, "low": found.low, "high": found.high,
                     "measured": 1 / float(trimmed_mean(token_s[count])), "n": rounds})  # fmt: skip
    return pd.DataFrame(rows)


def command(model: str, settings: dict, prompt: str = "def read_lines(path):") -> str:
    """A `colibri run` line with these settings. Raises `SettingError` for an unknown one."""
    words = ["colibri", "run", "--model", str(model)]
    for name, value in trial.split(settings)[0].items():
        flag = SETTINGS[name].flag
        words += [flag if value else flag.replace("--", "--no-", 1)] if isinstance(value, bool) else [flag, str(value)]
    return shlex.join([*words, "--prompt", prompt])
