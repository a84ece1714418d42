"""One set of settings, tried: a real run of a model, or a replay of a trace. What sweeps, comparisons and the tuner call."""

from __future__ import annotations

import os
from typing import Any

from ..config import SETTINGS
from ..errors import SettingError, did_you_mean

PROMPT = "def read_lines(path):\n    "
REPLAY = ("slots", "policy", "scope", "lookup", "order", "seed", "admission", "reset", "phase", "count", "warmup_steps",
          "block_size", "prefetch", "prefetch_budget", "prefetch_lead", "prefetch_bandwidth")  # fmt: skip


def split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings of scope open, of scope generate), checked. Raises `SettingError` on an unknown name or bad value."""
    parts: tuple[dict, dict] = ({}, {})
    for name, value in settings.items():
        if name not in SETTINGS:
            raise SettingError(f"unknown setting {name!r}; {did_you_mean(name, SETTINGS)}")
        parts[SETTINGS[name].scope == "generate"][name] = SETTINGS[name].check(value)
    return parts


def run_once(lab, prompt: str, generate: dict[str, Any]) -> dict[str, Any]:
    """Generate from a cold expert cache: the numbers of the run, as a row."""
    lab.reset_cache()
    run = lab.generate(prompt, **generate)
    return facts_of(run, lab)


def facts_of(run, lab) -> dict[str, Any]:
    """The numbers of a finished run: rates in tokens per second, times in seconds, sizes in bytes, of decode where both
    phases have one."""
    decode = [step for step in run.steps if step.phase == "decode"]
    told = [step.device_bytes for step in decode]
    count = len(decode) or 1
    return {
        "tokens_per_s": run.decode_tokens_per_s,
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "ttft_s": run.ttft_s,
        "hit_rate": run.hit_rate,
        "misses_per_token": sum(step.misses for step in decode) / count,
        "bytes_per_token": sum(step.bytes_loaded for step in decode) / count,
        "device_bytes_per_token": None if None in told else sum(told) / count,
        "total_bytes": lab.memory()["total_bytes"],
        "tokens": len(run.tokens),
        "tokens_hash": hash(tuple(run.tokens)) & 0xFFFFFFFF,
    }


def run_settings(
    model: str | os.PathLike, prompt: str, settings: dict[str, Any], repeats: int = 1, warmup: int = 1
) -> dict:
    """Open the model with these settings, run it `repeats` times, close it: medians by fact, and `n`."""
    import colibri_lab as cl

    given, generate = split(settings)
    lab = cl.open(model, **given)
    lab.warmup(warmup)
    rows = [run_once(lab, prompt, generate) for _ in range(repeats)]
    return {**{name: _median([row[name] for row in rows]) for name in rows[0]}, "n": repeats}


def _median(values: list) -> Any:
    if any(value is None for value in values):
        return None
    return sorted(values)[len(values) // 2]


def replay_settings(trace, settings: dict[str, Any]) -> dict:
    """Replay a trace (or the path of one) under these settings: the totals of `trace.replay`, as a row."""
    from ..trace import load_trace

    for name in settings:
        if name not in REPLAY:
            raise SettingError(f"unknown replay setting {name!r}; {did_you_mean(name, REPLAY)}")
    trace = load_trace(trace) if isinstance(trace, (str, os.PathLike)) else trace
    totals = trace.replay(**settings).attrs["totals"]
    names = (
        "accesses",
        "hits",
        "misses",
        "hit_rate",
        "full_event_hit_rate",
        "events",
        "evictions",
        "loads",
        "bytes_loaded",
    )
    return {name: totals[name] for name in names}
