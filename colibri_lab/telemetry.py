"""The one recorder: every number that a plot, the CLI or a table shows about a run comes from here.

A run is a sequence of steps (one prefill chunk or one decoded token). Inside a step, time belongs to exactly one stage
at any moment: entering a stage pauses the one around it, and what no stage claims is `other`. Stages therefore sum to
wall time by construction. Waiting for an expert (`expert_load_wait`) is wall time; how long the loader threads were
busy (`load_service_us`) is counted separately, since it overlaps compute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pandas as pd

STAGES = (
    "tokenize",
    "embed",
    "attention",
    "router",
    "expert_load_wait",
    "expert_compute",
    "shared_expert",
    "head",
    "sample",
    "other",
)
PHASES = ("prefill", "decode")


@dataclass
class Step:
    """One prefill chunk or one decoded token, as the live plots eat it. Times in seconds, sizes in bytes."""

    index: int
    phase: str
    tokens: int  # rows that went through the model in this step
    token: int | None = None  # id sampled from this step's logits, None while the prompt is still being read
    text: str = ""  # text that became printable with this token
    stages: dict[str, float] = field(default_factory=dict)  # stage -> seconds, exclusive, sums to wall_s
    calls: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    hits: int = 0  # distinct (layer, block) requests found resident, fetched on demand earlier
    prefetch_hits: int = 0  # requests found because they were fetched ahead, on time or still under way
    misses: int = 0  # requests that had to be read
    bytes_loaded: int = 0
    load_service_s: float | None = None  # summed over loader threads; None when the storage cannot tell
    device_bytes: int | None = None  # of bytes_loaded, not from the page cache; None when the system does not tell
    hit_rate: float | None = None  # hits / all requests of this step, prefetch not credited; None without requests
    running_hit_rate: float | None = None  # the same over all decode steps so far (prefill while there are none)


class Recorder:
    """Exclusive stage clock plus the list of steps. One per run; entered and left from one thread only.

    Other threads may read `steps` at any time: a step is appended once, complete.
    """

    def __init__(self, clock=time.perf_counter_ns):
        self._clock = clock
        self._stack: list[str] = []
        self._ns: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._mark = self._start = 0
        self._phase = PHASES[0]
        self._hits = dict.fromkeys(PHASES, 0)
        self._asked = dict.fromkeys(PHASES, 0)
        self.steps: list[Step] = []

    def begin(self, phase: str) -> None:
        """Start a step. Time before the first stage, and between stages, is `other`."""
        self._phase = phase
        self._ns, self._calls = {}, {}
        self._stack = ["other"]
        self._start = self._mark = self._clock()

    def stage(self, name: str) -> _Stage:
        """`with recorder.stage("router"): …` charges the time inside to `router`, minus the stages entered within."""
        return _Stage(self, name)

    def end(self, **facts) -> Step:
        """Close the step, append it and return it. `facts` are `Step` fields (tokens, hits, misses, …)."""
        self._charge()
        step = Step(
            index=len(self.steps),
            phase=self._phase,
            stages={name: ns / 1e9 for name, ns in self._ns.items()},
            calls=self._calls,
            wall_s=(self._mark - self._start) / 1e9,
            **facts,
        )
        asked = step.hits + step.prefetch_hits + step.misses
        self._hits[step.phase] += step.hits
        self._asked[step.phase] += asked
        step.hit_rate = step.hits / asked if asked else None
        if self._asked[step.phase]:
            step.running_hit_rate = self._hits[step.phase] / self._asked[step.phase]
        self.steps.append(step)
        return step

    def _charge(self) -> None:
        now = self._clock()
        top = self._stack[-1]
        self._ns[top] = self._ns.get(top, 0) + now - self._mark
        self._mark = now


class _Stage:
    __slots__ = ("recorder", "name")

    def __init__(self, recorder: Recorder, name: str):
        self.recorder, self.name = recorder, name

    def __enter__(self):
        self.recorder._charge()
        self.recorder._stack.append(self.name)
        self.recorder._calls[self.name] = self.recorder._calls.get(self.name, 0) + 1

    def __exit__(self, *_):
        self.recorder._charge()
        self.recorder._stack.pop()


def stage_table(steps: list[Step]) -> pd.DataFrame:
    """stage, phase, calls, seconds, share (of its phase's wall time): one row per stage and phase that occurred."""
    rows = []
    for phase in PHASES:
        mine = [s for s in steps if s.phase == phase]
        wall = sum(s.wall_s for s in mine)
        for stage in STAGES:
            seconds = sum(s.stages.get(stage, 0.0) for s in mine)
            calls = sum(s.calls.get(stage, 0) for s in mine)
            if calls or seconds:
                rows.append((stage, phase, calls, seconds, seconds / wall if wall else 0.0))
    return pd.DataFrame(rows, columns=["stage", "phase", "calls", "seconds", "share"])


def step_table(steps: list[Step]) -> pd.DataFrame:
    """One row per step: its facts, then one `<stage>_ms` column per stage. Null means not measured, never zero."""
    rows = [
        {
            "step": s.index,
            "phase": s.phase,
            "tokens": s.tokens,
            "token": s.token,
            "text": s.text,
            "wall_ms": s.wall_s * 1e3,
            "hits": s.hits,
            "prefetch_hits": s.prefetch_hits,
            "misses": s.misses,
            "hit_rate": s.hit_rate,
            "running_hit_rate": s.running_hit_rate,
            "bytes_loaded": s.bytes_loaded,
            "device_bytes": s.device_bytes,
            "load_service_ms": None if s.load_service_s is None else s.load_service_s * 1e3,
            **{f"{stage}_ms": s.stages.get(stage, 0.0) * 1e3 for stage in STAGES},
        }
        for s in steps
    ]
    return pd.DataFrame(rows)
