"""What a monitor keeps of one run, and what it says about it.

`MonitorRun` answers to the same names as the run of `Lab.generate` (`steps`, `table`, `stages`, `text`, `settings`, …)
and adds the residency after every step. `verdict` and `comparison` are sentences made from its numbers alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ..config import SETTINGS
from ..telemetry import Step, stage_table, step_table
from .frames import USED, Decode, decode_of, label_of
from .theme import STAGE_GROUPS, bytes_text


@dataclass(frozen=True)
class Job:
    """What to run: the prompt, the cache settings and the settings of scope "generate"."""

    prompt: str
    slots: int
    policy: str
    generate: dict = field(hash=False)

    def at_most(self, tokens: int | None) -> Job:
        """The same with no more than `tokens` to generate; itself for None."""
        if tokens is None:
            return self
        return replace(self, generate=self.generate | {"max_tokens": min(tokens, self.generate["max_tokens"])})


@dataclass(eq=False)
class MonitorRun:
    """One run as the monitor saw it; grows while it runs, appended to by one thread.

    `residency` holds one uint8 (MoE layers, experts) array per step, `layers` the layer number of each of its rows.
    `stop_reason` is None while running, then "length", "eos" or "interrupted".
    """

    job: Job
    settings: dict
    layers: Sequence[int] = ()
    top_k: int = 1
    steps: list[Step] = field(default_factory=list)
    residency: list[np.ndarray] = field(default_factory=list)
    text: str = ""
    ttft_s: float | None = None
    stop_reason: str | None = None
    _decode: tuple[int, Decode] = field(default_factory=lambda: (0, decode_of([])), repr=False)

    def add(self, step: Step, residency: np.ndarray) -> None:
        """Take one step of `Lab.stream` and the residency right after it."""
        self.residency.append(np.array(residency, np.uint8))
        self.text += step.text
        if self.ttft_s is None and step.token is not None:
            self.ttft_s = sum(s.wall_s for s in self.steps) + step.wall_s
        self.steps.append(step)  # last: whoever sees the step also sees what belongs to it

    def first(self, tokens: int) -> MonitorRun:
        """The run as it was after `tokens` sampled tokens; itself when it has no more."""
        ends = [i for i, step in enumerate(self.steps) if step.token is not None][:tokens]
        if not ends or len(ends) == len(self.tokens):
            return self
        cut = MonitorRun(self.job.at_most(tokens), self.settings, self.layers, self.top_k, ttft_s=self.ttft_s)
        cut.steps, cut.residency = self.steps[: ends[-1] + 1], self.residency[: ends[-1] + 1]
        cut.text, cut.stop_reason = "".join(step.text for step in cut.steps), "length"
        return cut

    @property
    def label(self) -> str:
        return label_of(self, "run")

    @property
    def prompt(self) -> str:
        return self.job.prompt

    @property
    def tokens(self) -> list[int]:
        """Ids of the sampled tokens."""
        return [s.token for s in self.steps if s.token is not None]

    @property
    def table(self) -> pd.DataFrame:
        return step_table(self.steps)

    @property
    def stages(self) -> pd.DataFrame:
        return stage_table(self.steps)

    @property
    def wall_s(self) -> float:
        """Time inside the engine's steps."""
        return sum(s.wall_s for s in self.steps)

    @property
    def decode(self) -> Decode:
        """The decode steps as arrays; made again only when there are more."""
        count, decode = self._decode
        if count != len(self.steps):
            count = len(self.steps)
            decode = decode_of(self.steps[:count])
            self._decode = count, decode
        return decode

    def token_at(self, step: int) -> int | None:
        """Which decoded token step number `step` is, from 0; None while it reads the prompt."""
        past = [s.phase for s in self.steps[: step + 1]]
        return past.count("decode") - 1 if past[-1:] == ["decode"] else None

    @property
    def hit_rate(self) -> float | None:
        """Hits of all decode accesses, 0-1; None before the first."""
        return self.decode.hit_rate

    @property
    def misses_per_token(self) -> float | None:
        """Expert blocks read per decoded token."""
        d = self.decode
        return float(d.misses.mean()) if len(d) else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        d = self.decode
        return 1e3 * len(d) / d.wall_ms.sum() if len(d) and d.wall_ms.sum() > 0 else None

    def new_experts_per_token(self) -> float | None:
        """At least so many experts per decoded token were met for the first time: misses that no cache avoids.

        The residency shows only what stayed in memory, so experts that passed through while the prompt was read are
        taken off. None before the first decoded token.
        """
        if not len(self.decode):
            return None
        seen, new, unseen = np.zeros(self.residency[0].shape, bool), 0, 0
        for step, now in zip(self.steps, self.residency, strict=False):
            if step.phase == "decode":
                new += int(((now == USED) & ~seen).sum())
            else:
                unseen += max(0, step.hits + step.misses - int((now == USED).sum()))
            seen |= now > 0
        return max(0, new - unseen) / len(self.decode)


def summary_row(run: MonitorRun) -> dict:
    """One row for a table of runs; None where nothing was measured."""
    d = run.decode
    count = max(len(d), 1)
    return {
        "run": run.label,
        "slots": run.settings.get("expert_cache_slots"),
        "policy": run.settings.get("policy"),
        "seed": run.job.generate.get("seed"),
        "tokens": len(run.tokens),
        "stop_reason": run.stop_reason,
        "hit_rate": d.hit_rate,
        "misses_per_token": run.misses_per_token,
        "bytes_per_token": d.bytes_loaded.sum() / count if len(d) else None,
        "ms_per_token": d.wall_ms.sum() / count if len(d) else None,
        "wait_ms_per_token": d.wait_ms.sum() / count if len(d) else None,
        "tokens_per_s": run.decode_tokens_per_s,
        "ttft_ms": None if run.ttft_s is None else 1e3 * run.ttft_s,
    }


def verdict(run: MonitorRun) -> str:
    """One sentence: what this setting costs, how far the bound is, which single change would help most."""
    d = run.decode
    if not len(d):
        return "Nothing was decoded, so there is nothing to judge: ask for more tokens."
    slots, scope = run.settings.get("expert_cache_slots"), run.settings.get("scope", "layer")
    need = run.top_k * (len(run.layers) if scope == "global" else 1)
    where = "in all" if scope == "global" else "per layer"
    if slots is not None and slots < need:
        return (
            f"{run.label}: below one token's working set ({need} {where}), so no policy can help; "
            f"at least {need} slots are needed before anything can be kept."
        )
    wall, wait, misses = d.wall_ms.mean(), d.wait_ms.mean(), d.misses.mean()
    if not misses:
        return f"{run.label}: every access hits, so more slots would only cost memory; {_largest(d)}."
    start = f"{run.label}: {misses:.1f} misses per token cost {wait:.2g} of {wall:.2g} ms"
    new = run.new_experts_per_token()
    if new is not None and new >= 0.8 * misses:
        return (
            f"{start}; {100 * new / misses:.0f} % of them met their expert for the first time, which no cache avoids."
        )
    if wait >= 0.1 * wall:
        bound = 1e3 / (wall - wait) if wall > wait else float("inf")
        return f"{start}; more slots help most: {1e3 / wall:.0f} tokens/s now, {bound:.0f} if nothing waited."
    return f"{start}, so more slots gain little; {_largest(d)}."


def _largest(d: Decode) -> str:
    share = d.share_percent
    i = int(np.argmax(share))
    return f"{STAGE_GROUPS[i][0]} takes most, {share[i]:.0f} %"


def comparison(run: MonitorRun, kept: MonitorRun | None) -> str:
    """One sentence against the kept run, empty without one: misses, speed, and whether the tokens agree."""
    if kept is None or kept is run or not len(run.decode) or not len(kept.decode):
        return ""
    before, after = (float(np.median(r.decode.wall_ms)) for r in (kept, run))
    misses = f"{kept.misses_per_token:.1f} → {run.misses_per_token:.1f} misses"
    text = f"From kept {kept.label}: {misses}, median {before:.2g} → {after:.2g} ms per token (n = 1 each)"
    same = run.prompt == kept.prompt and run.job.generate == kept.job.generate
    if not same:
        return text + "; prompt or sampling differ."
    count = min(len(run.tokens), len(kept.tokens))
    agree = run.tokens[:count] == kept.tokens[:count]
    return text + (f"; all {count} tokens equal." if agree else "; the tokens differ, which a cache must not do.")


def speed_text(run: MonitorRun, runs: Sequence[MonitorRun]) -> str:
    """Decode speed with its n and spread over runs of the same job; "–" before the first decoded token."""
    now = run.decode_tokens_per_s
    if now is None:
        return "–"
    same = [r.decode_tokens_per_s for r in runs if r.job == run.job and r.settings == run.settings and r is not run]
    speeds = [s for s in same if s is not None] + [now]
    if len(speeds) == 1:
        return f"{now:.0f} tokens/s (n = 1)"
    spread = 100 * (max(speeds) - min(speeds)) / np.mean(speeds)
    return f"{np.median(speeds):.0f} tokens/s (n = {len(speeds)}, spread {spread:.0f} %)"


def code_of(lab, job: Job, settings: dict) -> str:
    """The run as a command line and as Python; a model converted from a checkpoint goes by its name."""
    path = Path(lab.path)
    model = lab.name if path.parent.name == "containers" else str(path)
    return f"{cli_line(model, job, settings)}\n\n{python_lines(model, job, settings)}"


def cli_line(model: str, job: Job, settings: dict) -> str:
    """The run as one `colibri run` command."""
    words = ["colibri", "run", "--model", str(model), "--prompt", job.prompt]
    for name, value in _given(job, settings).items():
        flag = SETTINGS[name].flag
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def python_lines(model: str, job: Job, settings: dict) -> str:
    """The run as Python."""
    given = _given(job, settings)
    opened = "".join(f", {k}={v!r}" for k, v in given.items() if SETTINGS[k].scope == "open")
    asked = "".join(f", {k}={v!r}" for k, v in given.items() if SETTINGS[k].scope == "generate")
    return f"lab = cl.open({str(model)!r}{opened})\nrun = lab.generate({job.prompt!r}{asked})"


def _given(job: Job, settings: dict) -> dict:
    """Settings worth spelling out: the cache, and all that is not the default; machine choices stay automatic."""
    values = settings | {"expert_cache_slots": job.slots, "policy": job.policy} | job.generate
    always = {"expert_cache_slots", "policy", "max_tokens", "temperature", "top_p", "seed"}
    return {
        name: values[name]
        for name, s in SETTINGS.items()
        if name in values and (name in always or (s.default is not None and values[name] != s.default))
    }


def memory_text(slots: int, slot_bytes: int, moe_layers: int, scope: str) -> str:
    """`16 slots × 6 layers = 10.6 MB`."""
    layers = 1 if scope == "global" else moe_layers
    shown = f"{slots} slots" + (" in all" if scope == "global" else f" × {layers} layers")
    return f"{shown} = {bytes_text(slots * layers * slot_bytes)}"
