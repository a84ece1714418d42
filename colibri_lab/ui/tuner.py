"""What the cache tuner knows: traces by name, the reader's choice, the numbers that follow, and what to say about them.

No widgets and no drawing. Every number comes from `trace.replay`, `trace.curve` and `trace.history`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ..cache.policies import POLICIES
from ..errors import SettingError, TraceError
from ..trace.bounds import cycle
from ..trace.curves import one_pass
from ..trace.history import History, history
from ..trace.source import contract_of
from ..trace.table import Trace
from .theme import bytes_text

CONTRACT = ("scope", "lookup", "admission", "phase")
ORACLES = ("belady-bypass", "belady")
AT_ONCE = 8  # sizes replayed between two looks at whether the answer is still wanted
WORTH = 0.01  # a gain below one point is not called one
GB_PER_S = 1e9  # the disk in "at 1 GB/s"


@dataclass(frozen=True)
class Choice:
    """What the controls say. `slots` are per layer under scope layer, in all under scope global."""

    trace: str
    slots: int
    policy: str = "lru"
    scope: str = "layer"
    lookup: str = "atomic"
    admission: str = "forced"
    phase: str = "decode"

    @property
    def contract(self) -> dict[str, str]:
        """As keyword arguments of `trace.replay`."""
        return {name: getattr(self, name) for name in CONTRACT}

    @property
    def bound(self) -> dict[str, str]:
        """The contract of the oracles: atomic lookup, the only one under which they bound every policy."""
        return self.contract | {"lookup": "atomic", "admission": "forced"}

    @property
    def label(self) -> str:
        """`16 slots, lru` and what differs from the defaults."""
        parts = [f"{self.slots} slot{'s' * (self.slots != 1)}", self.policy]
        parts += [self.lookup] if self.lookup != "atomic" else []
        parts += ["bypass"] if self.admission != "forced" else []
        parts += ["one pool"] if self.scope == "global" else []
        return ", ".join(parts)


@dataclass(eq=False)
class Subject:
    """One trace with what the view needs to know of it. `path` is None for a trace that is not in a file."""

    name: str
    trace: Trace
    path: str | None = None

    def __post_init__(self):
        self.trace.require("rows", what="cache_tuner")
        self.curves: dict = {}  # (policy, contract) -> DataFrame; grows while sizes are replayed
        self.cycle = cycle(self.trace)
        self.layers, self.experts = len(self.trace.layers), self.trace.num_experts
        code = {"prefill": 0, "decode": 1}
        self.phases = [name for name, number in code.items() if (self.trace.phase == number).any()][::-1]
        self.phases += ["all"] if len(self.phases) == 2 else []
        place = np.unique(np.stack([self.trace.phase, self.trace.step, self.trace.row]), axis=1)[0]
        self.tokens = {name: int((place == code[name]).sum()) if name in code else len(place) for name in self.phases}
        sizes = self.trace.expert_bytes
        self.expert_bytes = None if sizes is None else float(sizes.mean())

    def most(self, scope: str) -> int:
        """The most slots that can be used."""
        return self.experts * (self.layers if scope == "global" else 1)

    def pools(self, scope: str) -> int:
        return 1 if scope == "global" else self.layers

    def policies(self) -> list[str]:
        """The policies that this trace can feed."""
        lacks = self.trace.lacks()
        return [name for name, p in POLICIES.items() if not any(need in lacks for need in p.needs)]

    @property
    def about(self) -> str:
        """`OLMoE · 16 layers × 64 experts, top-8 · 299 decode tokens`."""
        tokens = " + ".join(f"{self.tokens[name]} {name}" for name in self.phases if name != "all")
        k = self.trace.header["top_k"] or self.trace.k
        return f"{self.name} · {self.layers} layers × {self.experts} experts, top-{k} · {tokens} tokens"

    def memory(self, slots: int, scope: str) -> str:
        """`16 slots × 16 layers = 1.61 GB`, or that the trace does not say."""
        shown = f"{slots} slots" + (" in all" if scope == "global" else f" × {self.layers} layers")
        share = f"{100 * slots / self.most(scope):.3g} % of all"
        if self.expert_bytes is None:
            return f"{shown}, {share}; for bytes give expert_bytes="
        return f"{shown} = {bytes_text(slots * self.pools(scope) * self.expert_bytes)}, {share}"


def subjects(given, expert_bytes: int | None = None) -> dict[str, Subject]:
    """Traces by name from a trace, a file, a recorder, a run, or a dict of them.

    `expert_bytes` is used where the trace does not tell. Raises `TraceError` for what holds no order, `SettingError` for
    what holds no routing.
    """
    named = given if isinstance(given, dict) else {None: given}
    if not named:
        raise SettingError("cache_tuner: the dict of traces is empty; expected name -> trace")
    found = {}
    for name, source in named.items():
        trace, path = _trace_of(source)
        if trace.header["expert_bytes"] is None and expert_bytes is not None:
            trace = replace(
                trace, header=trace.header | {"expert_bytes": dict.fromkeys(trace.layers, int(expert_bytes))}
            )
        name = name or Path(path or trace.header["model"] or trace.header["engine"] or "trace").stem
        found[name] = Subject(name, trace, path)
    return found


def _trace_of(source) -> tuple[Trace, str | None]:
    if isinstance(source, Trace):
        return source, None
    if isinstance(source, (str, Path)):
        from ..trace import load_trace

        return load_trace(source), str(source)
    if isinstance(getattr(source, "trace", None), Trace):
        return source.trace, None
    if isinstance(getattr(source, "events", None), pd.DataFrame):
        return trace_of_run(source), None
    raise SettingError(
        f"cache_tuner takes a trace, a trace file, a recorder (`with lab.record() as rec:`), a run, or a dict of them; "
        f"got {type(source).__name__}"
    )


def trace_of_run(run) -> Trace:
    """The routing of a `Run` made with log_level debug: one row per event, the union over its tokens.

    Raises `SettingError` when the run kept no events.
    """
    if not len(run.events):
        raise SettingError(
            "this run kept no routing: generate inside `with lab.record() as rec:` and give rec, or open the model with "
            'log_level="debug"'
        )
    rows = [
        (step, layer, e.expert.to_numpy()) for (step, layer), e in run.events.groupby(["step", "layer"], sort=False)
    ]
    passes = np.cumsum([0] + [b[1] <= a[1] for a, b in zip(rows, rows[1:], strict=False)])
    experts = np.full((len(rows), max(len(ids) for *_, ids in rows)), 65535, np.uint16)
    for row, (*_, ids) in zip(experts, rows, strict=True):
        row[: len(ids)] = ids
    phase = [0 if run.steps[at].phase == "prefill" else 1 for at in passes]
    header = {
        "model": run.settings.get("model"), "engine": "colibri-lab", "union": True, "settings": run.settings,
        "num_experts": int(run.events.expert.max()) + 1, "capture": "run.events",
        "notes": ["num_experts is the largest id seen plus one"],
    }  # fmt: skip
    return Trace.from_rows(
        step=passes, layer=[layer for _, layer, _ in rows], experts=experts, phase=phase, header=header
    )


@dataclass(eq=False)
class Outcome:
    """What a choice leads to. `totals` are those of `trace.replay`; `misses` by cause sum to the choice's misses.

    `history` and `advice` come later than the rest, None until then.
    """

    choice: Choice
    subject: Subject
    totals: dict
    misses: dict[str, int]
    oracle: float | None  # hit rate of the bypass oracle
    measured: float | None  # hit rate of the engine that recorded the trace, where it ran with this very choice
    history: History | None = field(default=None, repr=False)
    advice: str | None = None

    @property
    def hit_rate(self) -> float:
        return self.totals["hit_rate"]

    @property
    def tokens(self) -> int:
        return self.subject.tokens[self.choice.phase]

    @property
    def misses_per_token(self) -> float:
        return self.totals["misses"] / self.tokens

    @property
    def bytes_per_token(self) -> float | None:
        loaded = self.totals["bytes_loaded"]
        return None if loaded is None else loaded / self.tokens

    def row(self) -> dict:
        """One row for a table; None where the trace does not tell."""
        choice = {
            "trace": self.choice.trace,
            "slots": self.choice.slots,
            "policy": self.choice.policy,
        } | self.choice.contract
        rates = {name: self.totals[name] for name in ("accesses", "hits", "misses", "hit_rate", "full_event_hit_rate")}
        causes = {f"misses_{name.replace(' ', '_')}": count for name, count in self.misses.items()}
        per_token = {"misses_per_token": self.misses_per_token, "bytes_per_token": self.bytes_per_token}
        return {**choice, **rates, "oracle_hit_rate": self.oracle, **per_token, **causes}


def outcome(subject: Subject, choice: Choice) -> Outcome:
    """The numbers of a choice: five replays at most. Raises `SettingError` and `TraceError` as `trace.replay`."""

    def total(policy: str, settings: dict) -> dict:
        return subject.trace.replay(policy, choice.slots, **settings).attrs["totals"]

    own = total(choice.policy, choice.contract)
    if not own["accesses"]:
        raise TraceError(f"{subject.name} has no accesses in phase {choice.phase}; choose one of {subject.phases}")
    bypass, forced = (total(name, choice.bound) for name in ORACLES)
    atomic = own if choice.lookup == "atomic" else total(choice.policy, choice.contract | {"lookup": "atomic"})
    may_drop = own["admission"] != "forced"
    least = bypass if may_drop else forced
    misses = {
        "first uses": own["compulsory"],
        "too few slots": bypass["misses"] - own["compulsory"],
        "forced admission": 0 if may_drop else forced["misses"] - bypass["misses"],
        "choice of victim": atomic["misses"] - least["misses"],
        "lookup order": own["misses"] - atomic["misses"],
    }
    return Outcome(choice, subject, own, misses, bypass["hit_rate"], _measured(subject.trace, choice))


def _measured(trace: Trace, choice: Choice) -> float | None:
    """What the recording engine itself hit while decoding, when it is this one and ran with these settings."""
    ran = trace.header["settings"] or {}
    same = {"expert_cache_slots": choice.slots, "policy": choice.policy} | {
        name: getattr(choice, name) for name in ("scope", "lookup", "admission")
    }
    if (
        trace.resident is None
        or choice.phase != "decode"
        or any(ran.get(name) != value for name, value in same.items())
    ):
        return None
    return float(trace.resident[trace.phase == 1].mean())


def follow(found: Outcome, stale: Callable[[], bool]) -> History:
    """The outcome's course, step by step. Raises `Overtaken` when `stale()`."""
    c = found.choice
    settings = {name: value for name, value in c.contract.items() if name != "phase"}
    return history(found.subject.trace, c.policy, c.slots, stale=stale, **settings)


def curve_parts(subject: Subject, policy: str, contract: dict, stale: Callable[[], bool]):
    """Compute the hit rate of `policy` at all sizes into `subject.curves`, yielding (done, all) as sizes arrive.

    Policies without a one-pass curve are replayed a few sizes at a time, spread sizes first; ends early when stale.
    """
    key = (policy, *contract.values())
    most = subject.most(contract["scope"])
    if one_pass(policy, contract_of(contract)):
        if key not in subject.curves:
            subject.curves[key] = subject.trace.curve(policy, progress=False, **contract)
        yield most, most
        return
    wanted = np.unique(np.linspace(1, most, min(most, 64)).round()).astype(int)
    order = np.concatenate([wanted[::8], *(wanted[at::8] for at in (4, 2, 6, 1, 3, 5, 7))]).tolist()
    have = set(subject.curves[key].slots) if key in subject.curves else set()
    left = [size for size in order if size not in have]
    for at in range(0, len(left), AT_ONCE):
        if stale():
            return
        part = subject.trace.curve(policy, slots=left[at : at + AT_ONCE], progress=False, **contract)
        kept = [subject.curves[key]] if key in subject.curves else []
        subject.curves[key] = pd.concat([*kept, part]).sort_values("slots", ignore_index=True)
        yield len(subject.curves[key]), len(wanted)


def rates(subject: Subject, policy: str, contract: dict) -> np.ndarray:
    """Percent hit at 0, 1, … slots, straight lines between sizes that were replayed, NaN outside them or without any."""
    table = subject.curves.get((policy, *contract.values()))
    at = np.arange(subject.most(contract["scope"]) + 1)
    if table is None:
        return np.full(len(at), np.nan)
    return np.interp(at, table.slots, 100 * table.hit_rate, left=np.nan, right=np.nan)


def advise(found: Outcome) -> str:
    """The single change that helps most, free ones first, then half as many slots again. A few dozen replays."""
    c, subject = found.choice, found.subject
    need = working_set(subject, c.scope)
    if c.slots < need:
        rate = subject.trace.replay(c.policy, need, **c.contract).attrs["totals"]["hit_rate"]
        return f"What would help: {need} slots ({100 * (rate - found.hit_rate):+.1f} points)."
    options: dict[str, Choice] = {}
    for name in subject.policies():
        if name != c.policy and not POLICIES[name].oracle and "pins" not in POLICIES[name].needs:
            options[f"policy {name}"] = replace(c, policy=name)
    options |= {"lookup atomic": replace(c, lookup="atomic"), "admission bypass": replace(c, admission="bypass")}
    if c.scope == "layer":
        options["one pool for all layers"] = replace(c, scope="global", slots=c.slots * subject.layers)
    elif c.slots >= subject.layers:
        options["slots of its own for each layer"] = replace(c, scope="layer", slots=c.slots // subject.layers)
    more = min(c.slots + max(1, c.slots // 2), subject.most(c.scope))

    def gain(other: Choice) -> float:
        totals = subject.trace.replay(other.policy, other.slots, **other.contract).attrs["totals"]
        return totals["hit_rate"] - found.hit_rate

    gains = {name: gain(other) for name, other in options.items() if other != c}
    best = max(gains, key=gains.get)
    said = [f"{best} (+{100 * gains[best]:.1f} points, no more memory)"] if gains[best] >= WORTH else []
    if more > c.slots:
        won, extra = 100 * gain(replace(c, slots=more)), (more - c.slots) * subject.pools(c.scope)
        cost = f"{extra} slots" if subject.expert_bytes is None else bytes_text(extra * subject.expert_bytes)
        said.append(f"{more} slots ({won:+.1f} points for {cost} more)")
    return f"What would help: {', or '.join(said)}." if said else "No other setting helps."


def working_set(subject: Subject, scope: str) -> int:
    """Slots, counted as the scope counts them, that hold the experts of one token."""
    return subject.cycle["blocks" if scope == "global" else "blocks_per_layer"]


def verdict(found: Outcome) -> str:
    """What the choice costs, how far the bound is and why; a choice below one token's working set is called that."""
    c, need = found.choice, working_set(found.subject, found.choice.scope)
    cost = f"{c.label}: {100 * found.hit_rate:.1f} % of accesses hit, {found.misses_per_token:.1f} misses per token"
    loaded = found.bytes_per_token
    if loaded is not None:
        cost += f" = {bytes_text(loaded)}, {_seconds(loaded / GB_PER_S)} of reading at 1 GB/s"
    if c.slots < need:
        why = "every expert leaves before its next use" if c.scope == "global" else "part of every step streams through"
        where = "in all" if c.scope == "global" else "per layer"
        return f"{cost}. That is below one token's working set ({need} {where}): {why}; use at least {need}."
    gap = 100 * (found.oracle - found.hit_rate)
    causes = {
        n: found.misses[n] for n in ("forced admission", "choice of victim", "lookup order") if found.misses[n] > 0
    }
    if gap < 0.05 or not causes:
        return f"{cost}. No policy could do better with these slots."
    main = max(causes, key=causes.get)
    share = 100 * causes[main] / sum(causes.values())
    return (
        f"{cost}. A policy that knew the future would hit {gap:.1f} points more; {share:.0f} % of that gap is {main}."
    )


def comparison(found: Outcome, kept: Outcome | None) -> str:
    """One sentence against the kept choice; empty without one."""
    if kept is None or kept.choice == found.choice:
        return ""
    points = 100 * (found.hit_rate - kept.hit_rate)
    other = f"{kept.choice.trace}, " if kept.choice.trace != found.choice.trace else ""
    return (
        f"Kept {other}{kept.choice.label}: {100 * kept.hit_rate:.1f} %, {kept.misses_per_token:.1f} misses per token; "
        f"now {points:+.1f} points, {found.misses_per_token / kept.misses_per_token:.2f} × its misses."
        if kept.misses_per_token
        else f"Kept {other}{kept.choice.label} has no misses."
    )


def _seconds(s: float) -> str:
    return f"{s:.2g} s" if s >= 1 else f"{1e3 * s:.3g} ms"


def cli_line(subject: Subject, choice: Choice) -> str:
    """The choice as one `colibri replay` command."""
    words = [
        "colibri",
        "replay",
        subject.path or "trace.parquet",
        "--policy",
        choice.policy,
        "--slots",
        str(choice.slots),
    ]
    for name, value in choice.contract.items():
        words += [f"--{name}", value]
    return shlex.join(words)


def python_lines(subject: Subject, choice: Choice) -> str:
    """The choice as Python: the replay, and the model opened with it."""
    settings = "".join(f", {name}={value!r}" for name, value in choice.contract.items())
    live = "".join(f", {n}={getattr(choice, n)!r}" for n in ("policy", "scope", "lookup", "admission"))
    load = "" if subject.path else 'trace.save("trace.parquet")\n'
    load += f"trace = cl.load_trace({subject.path or 'trace.parquet'!r})"
    replayed = f"trace.replay({choice.policy!r}, {choice.slots}{settings})"
    if POLICIES[choice.policy].oracle:
        live += ", future=trace"
    model = subject.trace.header["model"] if subject.trace.header["engine"] == "colibri-lab" else None
    opened = f"lab = cl.open({model or 'MODEL'!r}, expert_cache_slots={choice.slots}{live})"
    return f"{load}\n{replayed}\n{opened}"
