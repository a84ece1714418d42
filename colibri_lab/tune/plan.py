"""`colibri plan`: which settings for this model on that machine, and how fast it will be; measured as well when asked.

Every setting is chosen by prediction, one after the other, with the reason and the runner-up. Differences inside the
prediction's own noise are not reasons: among settings within `EQUAL` of the fastest the one with least memory wins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from .. import machine
from ..cache import policies
from ..config import SETTINGS
from ..errors import ColibriError, MemoryPlanError, SettingError
from ..trace import load_trace
from ..trace.table import Trace
from ..units import format_size, parse_size
from . import predict, probe, runs, trial
from .calibrate import calibrate
from .fingerprint import machine_facts
from .predict import Prediction, Predictor
from .shapes import Shape, find_shape
from .storage_model import Rates

EQUAL = 0.01  # of tokens/s: closer than this counts as the same
PROMPT_TOKENS = 32
POLICIES = ("lru", "weighted-lru", "lfu-aged", "slru", "arc", "s3-fifo")


@dataclass(frozen=True)
class Choice:
    """One setting: its value and why; the runner-up with its predicted tokens/s, None where there was no other."""

    setting: str
    value: Any
    reason: str
    tokens_per_s: float
    runner_up: Any = None
    runner_up_tokens_per_s: float | None = None


@dataclass(eq=False)
class Plan:
    """Recommended settings and what they should do. `measured` holds the facts of a real run, with --measure."""

    shape: Shape
    machine: dict
    memory: int
    predicted: Prediction
    choices: list[Choice]
    curves: pd.DataFrame  # storage, slots, tokens_per_s, …
    slots_per_layer: list[int] | None = None
    measured: dict | None = None
    record: str | None = None
    notes: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # settings that were not to be chosen

    @property
    def settings(self) -> dict[str, Any]:
        """The recommended settings that `cl.open` and `colibri run` accept."""
        return {**self.given, **{c.setting: c.value for c in self.choices if c.setting in SETTINGS}}

    def to_json(self) -> dict:
        return {
            "model": self.shape.name, "formats": list(self.shape.formats), "machine": self.machine, "memory": self.memory,
            "settings": self.settings, "predicted": self.predicted.to_json(), "measured": self.measured,
            "choices": [choice.__dict__ for choice in self.choices], "slots_per_layer": self.slots_per_layer,
            "curves": self.curves.to_dict("records"), "record": self.record, "notes": self.notes,
        }  # fmt: skip

    def table(self) -> pd.DataFrame:
        """setting, value, tokens_per_s, runner_up, its tokens_per_s, reason."""
        return pd.DataFrame([choice.__dict__ for choice in self.choices])

    def __str__(self) -> str:
        lines = [
            str(self.shape),
            f"{format_size(self.memory)} of memory for it and the page cache; {self.machine['cpu']}",
            "",
        ]
        for c in self.choices:
            other = "" if c.runner_up is None else f"; next {c.runner_up}, {c.runner_up_tokens_per_s:.3g} tokens/s"
            lines.append(f"{c.setting:<20} {c.value!s:<12} {c.reason}{other}")
        lines += ["", f"predicted: {self.predicted}"]
        if self.measured:
            shown = {key: value for key, value in self.measured.items() if value is not None}
            lines.append(
                f"measured:  decode {_told(shown, 'tokens_per_s')} tokens/s, prefill {_told(shown, 'prefill_tokens_per_s')} "
                f"tokens/s, first token after {_told(shown, 'ttft_s')} s; hit rate {shown.get('hit_rate', 0):.1%}; memory "
                f"{format_size(shown['total_bytes'])}; n = {shown['n']}"
            )
        lines += [f"note: {each}" for each in [*self.predicted.assumptions, *self.notes]]
        return "\n".join(lines)


def _told(facts: dict, name: str) -> str:
    return f"{facts[name]:.3g}" if name in facts else "not measured"


def plan(
    model: str | os.PathLike | Shape,
    trace: Trace | str | os.PathLike | None = None,
    *,
    memory: int | str | None = None,
    disk: float | str | None = None,
    machine_file: str | os.PathLike | None = None,
    formats: Sequence[str] | None = None,
    policies_: str | Sequence[str] | None = None,
    threads: int | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    prompt: str = trial.PROMPT,
    measure: bool = False,
    measure_tokens: int = 64,
    record: bool | None = None,
    progress: bool = True,
    **settings,
) -> Plan:
    """Recommend settings for a model and predict what they do.

        colibri_lab.plan("colibri-tiny", measure=True)
        colibri_lab.plan("Qwen3-30B-A3B", memory="16 GiB", disk="3 GB/s", formats=["int8"])

    model         a container or checkpoint; or the name of a shape (`shapes.PRESETS`), which need not be on any disk
    trace         its routing; a container without one is run for a moment, which records it; a shape is assumed to route
                  as recorded models do, within a wide band
    memory        bytes that the process and the page cache may fill; default what is free here
    disk          bytes per second of cold reads, in place of the probe's
    machine_file  a probe made on another machine, to plan for that one
    formats       number formats to choose among; default the model's own
    policies_     to choose among; default six, or all that fit in "all"
    measure       run the recommendation, and keep prediction and measurement in one run record
    settings      of scope "open": these are taken as they are and not chosen

    Raises `SettingError`, `ModelError` for an unknown model, `MemoryPlanError` when nothing fits.
    """
    shape = find_shape(model)
    trace = load_trace(trace) if isinstance(trace, (str, os.PathLike)) else trace
    for name in settings:
        if name not in SETTINGS or SETTINGS[name].scope != "open":
            raise SettingError(f"plan: {name!r} is not a setting of scope open; {trial.did_you_mean(name, SETTINGS)}")
    if threads is not None:
        settings["threads"] = threads
    path = _container(model, shape) if machine_file is None else None
    if measure and path is None:
        raise SettingError(f"measure: {shape.name} is not a model on this machine; plan without it")
    room = parse_size(memory, "memory") if memory is not None else None
    notes: list[str] = []
    if path is not None and disk is None and formats is None:
        facts, made = calibrated_here(path, trace, room, settings, prompt, prompt_tokens, notes)
    else:
        facts, made = _from_probe(shape, trace, room, settings, prompt_tokens, machine_file, disk, formats, progress)
    result = recommend(made, facts, policies_)
    result.notes += notes
    if measure:
        _measure(result, path, prompt, measure_tokens)
    if record or (record is None and measure):
        kept = runs.save(
            "plan", requested={"model": str(model), "memory": memory, "disk": disk, **settings}, effective=result.predicted.settings,
            facts=_facts(result), tables={"curves": result.curves, "choices": result.table().astype(str),
                                         "steps": result.predicted.steps},
            model=path, trace=trace, notes=[*result.predicted.assumptions, *result.notes],
            predicted=result.predicted.to_json(), measured=result.measured,
        )  # fmt: skip
        result.record = kept.id
    return result


def _container(model, shape: Shape):
    """The container that a checkpoint was or can be converted to, when the model is one that is here."""
    from ..front import container_of, find_model

    if shape.path is not None:
        return shape.path
    if isinstance(model, Shape):
        return None
    try:
        find_model(model)
        return container_of(model)
    except ColibriError:
        return None


def _from_probe(
    shape: Shape, trace, room, settings: dict, prompt_tokens: int, machine_file, disk, formats, progress: bool
):
    """(machine, predictors by number format) for a model that does not run here, from a probe."""
    if machine_file is not None:
        found = probe.Probe.load(machine_file, here=False)
    else:
        found = probe.stored() or probe.probe(seconds=10, progress=progress)
    rates = None if disk is None else Rates.constant(disk, 0.1)
    made: dict[str, Predictor] = {}
    room = room or found.available_bytes
    for name in formats or [shape.formats[0]]:
        like = next(iter(made.values()), None)
        one = shape.in_format(name)
        made[name] = predict.from_probe(one, found, room, dict(settings), trace, prompt_tokens, rates, like)
    return found.machine, made


def calibrated_here(path, trace, room, settings: dict, prompt: str, prompt_tokens: int, notes: list[str]):
    """(machine, predictors by number format) for a model that is here: a calibration for each way of reading. What was left
    out is added to `notes`."""
    import colibri_lab as cl

    kinds = [settings["storage"]] if "storage" in settings else ["pread", "direct"]
    lab = cl.open(path, **{**settings, "expert_cache_slots": None, "storage": kinds[0]})
    room = room or machine.memory()[1]
    shape = Shape.of_container(lab.container)
    made: Predictor | None = None
    for kind in kinds:
        lab.configure(storage=kind)
        if kind == "direct" and lab.engine.cache.storage != "direct":
            notes.append("storage direct is refused by this file system and was left out")
            continue
        lab.warmup()
        one = predict.calibrated(
            shape, calibrate(lab, prompt, memory=room // 2), room, dict(settings), trace, prompt_tokens
        )
        if made is None:
            made = one
        else:  # one set of costs, so that only reading differs between ways of reading
            made.reads |= one.reads
            made.factor |= one.factor
            made.misses |= one.misses
    return machine_facts(), {shape.formats[0]: made}


# ---- choosing


def recommend(predictors: dict[str, Predictor], machine_: dict, policies_: str | Sequence[str] | None = None) -> Plan:
    """Choose every setting that the predictors leave open. `predictors`: one for each number format to choose among."""
    if not predictors:
        raise SettingError("plan: no number format to choose among")
    tables, best = [], {}
    problem: MemoryPlanError | None = None
    for format, one in predictors.items():
        fixed = {name: one.base[name] for name in ("scope", "storage", "expert_cache_slots") if name in one.base}
        for storage in [fixed["storage"]] if "storage" in fixed else list(one.reads) if one.reads else ["pread"]:
            if storage == "mmap" and "storage" not in fixed:
                continue
            for scope in [fixed["scope"]] if "scope" in fixed else ("layer", "global"):
                slots = [fixed["expert_cache_slots"]] if "expert_cache_slots" in fixed else None
                try:
                    table = one.curve(slots, storage=storage, scope=scope)
                except MemoryPlanError as error:
                    problem = error
                    continue
                tables.append(table.assign(format=format, storage=storage, scope=scope))
                best[format, storage, scope] = _cheapest(table)
    if not best:
        raise problem or SettingError("plan: nothing to choose among")
    curves = pd.concat(tables, ignore_index=True)
    ranked = sorted(best.items(), key=lambda item: -item[1].tokens_per_s)
    top_speed = ranked[0][1].tokens_per_s
    # Prefer the own pool of each layer, and reading through the page cache, unless something else is really faster.
    close = [item for item in ranked if item[1].tokens_per_s >= top_speed * (1 - EQUAL)]
    (format, storage, scope), row = min(
        close, key=lambda item: (item[0][2] != "layer", item[0][1] != "pread", item[1].total_bytes)
    )
    one = predictors[format]
    mine = curves[(curves.format == format) & (curves.storage == storage) & (curves.scope == scope)]
    choices = [_slots_choice(one, mine, row)]
    choices.append(_between("scope", scope, best, 2, (format, storage, scope), _scope_reason))
    choices.append(_between("storage", storage, best, 1, (format, storage, scope), _storage_reason))
    settings = {"expert_cache_slots": int(row.slots), "storage": storage, "scope": scope}
    choices.append(_policy_choice(one, settings, policies_))
    settings["policy"] = choices[-1].value
    choices.append(_threads_choice(one, machine_, float(row.tokens_per_s)))
    settings["threads"] = choices[-1].value
    choices.append(_between("format", format, best, 0, (format, storage, scope), _format_reason))
    split, reason = _per_layer(one, settings)
    return Plan(one.shape, machine_, one.memory, one.at(**settings), [*choices, *reason], curves, split, given=one.base)


def _cheapest(table: pd.DataFrame) -> pd.Series:
    """The row with the fewest slots among those as fast as the fastest."""
    fast = table[table.tokens_per_s >= table.tokens_per_s.max() * (1 - EQUAL)]
    return fast.sort_values("slots").iloc[0]


def _slots_choice(one: Predictor, table: pd.DataFrame, row: pd.Series) -> Choice:
    others = table[table.slots != row.slots].sort_values("tokens_per_s", ascending=False)
    fastest = table.loc[table.tokens_per_s.idxmax()]
    every = one.shape.blocks * (len(one.shape.moe_layers) if table.scope.iloc[0] == "global" else 1)
    if len(table) == 1:
        reason = "as given" if "expert_cache_slots" in one.base else "all that fits"
    elif row.slots == table.slots.max():
        reason = "every expert has a slot" if row.slots >= every else "speed still rises where memory ends"
    elif fastest.slots == row.slots:
        reason = "more slots take memory from the page cache and slow down"
    else:
        reason = f"{int(fastest.slots)} slots would gain less than {EQUAL:.0%}"
    reason += f"; hit rate {row.hit_rate:.1%}, {format_size(row.total_bytes)}"
    second = others.iloc[0] if len(others) else None
    return Choice("expert_cache_slots", int(row.slots), reason, float(row.tokens_per_s),
                  None if second is None else int(second.slots), None if second is None else float(second.tokens_per_s))  # fmt: skip


def _between(setting: str, value, best: dict, axis: int, key: tuple, reason) -> Choice:
    """A choice among values on one axis of `best`, each at its own best slot count."""
    own = float(best[key].tokens_per_s)
    others = {k[axis]: float(row.tokens_per_s) for k, row in best.items()
              if k[axis] != value and all(k[i] == key[i] for i in range(3) if i != axis)}  # fmt: skip
    if not others:
        return Choice(
            setting,
            value,
            "the only one there is" if setting == "format" else "as given, or the only one possible",
            own,
        )
    second = max(others, key=others.get)
    return Choice(setting, value, reason(value, own, others[second]), own, second, others[second])


def _gain(own: float, other: float) -> str:
    return "no slower" if own <= other * (1 + EQUAL) else f"{own / other - 1:.0%} faster"


def _scope_reason(value, own: float, other: float) -> str:
    if value == "layer":
        return f"{_gain(own, other)}, and no layer can push another's experts out"
    return f"{_gain(own, other)}: layers that need more experts take them from those that need fewer"


def _storage_reason(value, own: float, other: float) -> str:
    if value == "direct":
        return f"{_gain(own, other)}: misses come from the disk either way, and the page cache stays out of it"
    return f"{_gain(own, other)}: memory that slots leave free keeps experts in the page cache"


def _format_reason(value, own: float, other: float) -> str:
    return f"{_gain(own, other)}; number formats change the text, check with colibri quality"


def _policy_choice(one: Predictor, settings: dict, wanted) -> Choice:
    if "policy" in one.base:
        return Choice("policy", one.base["policy"], "as given", float(one.at(**settings).tokens_per_s.value))
    names = policies.parse(wanted) if wanted is not None else list(POLICIES)
    gates = all(trace.weights is not None for trace in one.traces)
    names = [name for name in names if callable(name) or not policies.policy(name).oracle]
    names = [name for name in names if gates or "gates" not in policies.policy(name).needs]
    found = {name: one.at(**settings, policy=name) for name in names}
    speed = {name: found[name].tokens_per_s.value for name in names}
    ranked = sorted(speed, key=lambda name: -speed[name])
    value = ranked[0]
    if "lru" in speed and speed["lru"] >= speed[value] * (1 - EQUAL):
        value = "lru"
    others = [name for name in ranked if name != value]
    hit = found[value].hit_rate
    if not others:
        return Choice("policy", value, f"the only one asked for; hit rate {hit:.1%}", speed[value])
    usual = "lru" if "lru" in others else others[0]
    gain = (
        f"nothing is more than {EQUAL:.0%} faster"
        if value == "lru"
        else f"{_gain(speed[value], speed[usual])} than {usual}"
    )
    reason = f"{gain}; hit rate {hit:.1%} against {found[usual].hit_rate:.1%}"
    return Choice("policy", value, reason, speed[value], others[0], speed[others[0]])


def _threads_choice(one: Predictor, machine_: dict, speed: float) -> Choice:
    cores = machine_["physical_cores"]
    if "threads" in one.base:
        reason = (
            "as given"
            if one.base["threads"] <= cores
            else f"as given; more than the {cores} physical cores is usually slower"
        )
        return Choice("threads", one.base["threads"], reason, speed)
    return Choice("threads", cores, f"the {cores} physical cores; logical cores share their arithmetic units", speed)


def _per_layer(one: Predictor, settings: dict) -> tuple[list[int] | None, list[Choice]]:
    """The best unequal split of the same slots, judged on the half of the trace it was not fitted to. It needs a policy
    with a one-pass curve: lru stands in for those without."""
    from ..trace.bounds import allocate

    name = "slots per layer"
    speed = float(one.at(**settings).tokens_per_s.value)
    if settings["scope"] != "layer":
        return None, [Choice(name, "shared", "all layers share one pool", speed)]
    try:
        table, found = allocate(one.traces[0], settings["expert_cache_slots"], "lru", block_size=one.shape.block_size)
    except ColibriError as error:
        return None, [Choice(name, "equal", f"no other split could be tried: {error}", speed)]
    saving = found["saving_held_out"]
    if saving is None or saving <= 0:
        reason = "an unequal split, fitted to half of the trace under lru, saves nothing on the other half"
        return None, [Choice(name, "equal", reason, speed)]
    reason = (
        f"the engine gives every layer the same; an unequal split would read {saving:.1%} fewer bytes on the half of the trace "
        "it was not fitted to, under lru"
    )
    return [int(n) for n in table.slots], [Choice(name, "equal", reason, speed)]


# ---- measuring


def _measure(result: Plan, path, prompt: str, tokens: int) -> None:
    """Run the recommendation three times from a cold cache; medians and spread beside the prediction."""
    import colibri_lab as cl

    lab = cl.open(path, **result.settings)
    lab.warmup()
    rows = [
        trial.run_once(lab, prompt, {"max_tokens": tokens, "temperature": 1.0, "seed": 1, "stop_at_eos": False})
        for _ in range(3)
    ]
    middle = sorted(rows, key=lambda row: row["tokens_per_s"])[1]
    speeds = [row["tokens_per_s"] for row in rows]
    result.measured = {**middle, "tokens_per_s_low": min(speeds), "tokens_per_s_high": max(speeds), "n": len(rows)}


def _facts(result: Plan) -> dict:
    facts = {
        "tokens_per_s": result.predicted.tokens_per_s.value, "tokens_per_s_low": result.predicted.tokens_per_s.low,
        "tokens_per_s_high": result.predicted.tokens_per_s.high, "hit_rate": result.predicted.hit_rate,
        "total_bytes": result.predicted.memory["total_bytes"], "bottleneck": result.predicted.bottleneck,
    }  # fmt: skip
    if result.measured:
        facts |= {f"measured_{name}": result.measured[name] for name in ("tokens_per_s", "hit_rate", "total_bytes")}
    return facts
