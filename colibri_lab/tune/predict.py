"""How fast will it be? Misses from replaying a trace, seconds from what this machine measured, a band around both.

`Predictor` holds what does not change between settings: the model's shape, the routing, the costs, the disk, the memory.
`Predictor.at(slots=16)` is one `Prediction`, `Predictor.curve()` a table over slots. With storage that uses the page cache
the curve may have a maximum: every slot is memory that the page cache no longer has.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from .. import machine
from ..config import resolve
from ..engine.settings import effective
from ..engine.sizes import blocks
from ..errors import MemoryPlanError, SettingError
from ..trace.table import DECODE, PREFILL, Trace
from ..units import format_size, parse_size
from . import assumed
from .calibrate import Calibration, estimate, serve_settings, wave_of
from .memory_of import memory_of
from .reads import reader_for
from .served import Served, serve
from .shapes import Shape
from .storage_model import Rates
from .timeline import Costs, Timeline, decode_seconds, prefill_seconds, prompt_tokens, read_all, timeline

BAND = 1.645  # of a normal distribution: 90 % lie inside
WINDOWS = 8  # pieces of a trace whose speeds are compared
CLASSES = ("disk", "page cache", "experts", "dense", "management")


@dataclass(frozen=True)
class Band:
    """A number with the bounds that 9 of 10 runs are expected to keep; None where it cannot be predicted."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return "not predicted" if self.value is None else f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a run with these settings should do. Rates in tokens per second, sizes in bytes, times in seconds.

    hit_rate, bytes_per_token, device_bytes_per_token   of decode
    shares       of decode time: disk, page cache (copies out of it), experts, dense, management; sums to 1
    bottleneck   the largest of them
    memory       bytes by part; page_cache_bytes is what the rest of the memory leaves the page cache
    steps        a row per decode step: step, misses, bytes_read, device_bytes, seconds
    """

    settings: dict
    tokens_per_s: Band
    prefill_tokens_per_s: Band
    ttft_s: Band
    hit_rate: float | None
    misses_per_token: float
    bytes_per_token: float
    device_bytes_per_token: float
    memory: dict[str, int]
    page_cache_bytes: int
    page_cache_share: float | None
    shares: dict[str, float]
    bottleneck: str
    assumptions: list[str]
    steps: pd.DataFrame = field(repr=False)

    def to_json(self) -> dict:
        """JSON-able: `tokens_per_s` and its like as plain numbers, with `_low` and `_high` beside them."""
        data = {k: v for k, v in self.__dict__.items() if k not in ("steps", "settings")}
        flat: dict[str, Any] = {}
        for name, value in data.items():
            if isinstance(value, Band):
                flat |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            else:
                flat[name] = value
        return {**flat, "settings": self.settings}

    def __str__(self) -> str:
        m = self.memory
        return (
            f"decode {self.tokens_per_s} tokens/s, prefill {self.prefill_tokens_per_s} tokens/s, first token after "
            f"{self.ttft_s} s; hit rate {_percent(self.hit_rate)}, {self.misses_per_token:.3g} misses and "
            f"{format_size(self.bytes_per_token)} a token, {format_size(self.device_bytes_per_token)} of them from the disk; "
            f"memory {format_size(m['total_bytes'])}; bottleneck {self.bottleneck} ({self.shares[self.bottleneck]:.0%})"
        )


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


@dataclass(eq=False)
class Predictor:
    """Everything about a prediction but the settings. Make it with `predictor(...)`.

    traces      the routing to replay; further ones bound it from below and above when it is assumed
    reads       {storage: (device, page cache) rates}
    factor      {storage: how much longer reads take while the engine computes}
    misses      {storage: (miss_s, wait_s)} where they are not those of `costs`
    memory      bytes that the process and the page cache may fill together
    warm        whether the page cache starts full of the model
    """

    shape: Shape
    traces: list[Trace]
    costs: Costs
    reads: dict[str, tuple[Rates | None, Rates | None]]
    factor: dict[str, float]
    memory: int
    base: dict[str, Any]
    warm: bool = True
    assumptions: list[str] = field(default_factory=list)
    misses: dict[str, tuple[float, float]] = field(default_factory=dict)
    _served: dict = field(default_factory=dict, repr=False)

    def settings(self, **settings) -> dict[str, Any]:
        """Effective settings: defaults, what the predictor was made with, what is given here."""
        given = resolve({**self.base, **settings}, "open")
        shape, given["memory"] = self.shape, None
        if shape.facts is not None:
            f = shape.facts
            return effective(given, f.config, f.slot_bytes, f.blocks_per_layer, f.max_seq_len)
        scale = len(shape.moe_layers) if given["scope"] == "global" else 1
        slots = given["expert_cache_slots"]
        if slots is None:
            slots = 4 * shape.top_k * scale
        elif isinstance(slots, str):
            each = blocks(shape.block_bytes) * (1 if given["scope"] == "global" else len(shape.moe_layers))
            slots = max(1, parse_size(slots, "expert_cache_slots") // each)
        given["expert_cache_slots"] = min(slots, shape.blocks * scale)
        given["threads"] = given["threads"] or machine.cores()[0]
        given["max_seq_len"] = given["max_seq_len"] or 4096
        return given

    def at(self, *, prompt_tokens: int | None = None, **settings) -> Prediction:
        """Predict one run. `settings` are those of scope "open"; raises `SettingError` for impossible ones and
        `MemoryPlanError` when the plan does not fit the memory."""
        s = self.settings(**settings)
        seq = self._context()
        memory = memory_of(self.shape, s, seq)
        left = self.memory - memory["total_bytes"]
        if left < 0:
            raise MemoryPlanError(
                f"{s['expert_cache_slots']} slots need {format_size(memory['total_bytes'])} in all, "
                f"{format_size(self.memory)} are there; the largest number that fits is {self.most_slots(**settings)}"
            )
        runs = [self._run(trace, s, left) for trace in self.traces]
        return self._prediction(runs, s, memory, left, prompt_tokens)

    def curve(self, slots: list[int] | None = None, **settings) -> pd.DataFrame:
        """A row per slot count that fits the memory: slots, tokens_per_s, low, high, hit_rate, bytes_per_token,
        device_bytes_per_token, total_bytes, page_cache_bytes, bottleneck, and `best` on the fastest."""
        rows = []
        for count in slots or self.slot_counts(**settings):
            try:
                found = self.at(**{**settings, "expert_cache_slots": count})
            except MemoryPlanError:
                continue
            speed = found.tokens_per_s
            rows.append(
                {
                    "slots": found.settings["expert_cache_slots"], "tokens_per_s": speed.value, "low": speed.low,
                    "high": speed.high, "hit_rate": found.hit_rate, "bytes_per_token": found.bytes_per_token,
                    "device_bytes_per_token": found.device_bytes_per_token, "total_bytes": found.memory["total_bytes"],
                    "page_cache_bytes": found.page_cache_bytes, "bottleneck": found.bottleneck,
                }
            )  # fmt: skip
        if not rows:
            raise MemoryPlanError(
                f"no slot count fits: {format_size(self.memory)} are there, and one slot"
                f"{'' if settings.get('scope') == 'global' else ' per layer'} already needs "
                f"{format_size(self._needs(1, **settings))}"
            )
        table = pd.DataFrame(rows)
        table["best"] = table.tokens_per_s == table.tokens_per_s.max()
        return table

    def slot_counts(self, **settings) -> list[int]:
        """Slot counts worth looking at: from one token's experts to all, closer together where few."""
        scope = settings.get("scope", self.base.get("scope", "layer"))
        scale = len(self.shape.moe_layers) if scope == "global" else 1
        per_token, most = self.shape.top_k * scale, self.shape.blocks * scale
        wanted = {round(per_token * factor) for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 24, 32)}
        return sorted({*(count for count in wanted if count < most), most, min(per_token, most)})

    def most_slots(self, **settings) -> int:
        """The largest slot count whose plan fits the memory; 0 when none does."""
        scope = settings.get("scope", self.base.get("scope", "layer"))
        low, high = 0, self.shape.blocks * (len(self.shape.moe_layers) if scope == "global" else 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._needs(middle, **settings) <= self.memory else (low, middle - 1)
        return low

    def _needs(self, slots: int, **settings) -> int:
        s = self.settings(**{**settings, "expert_cache_slots": slots})
        return memory_of(self.shape, s, self._context())["total_bytes"]

    def _context(self) -> int:
        trace = self.traces[0]
        per_layer = np.bincount(trace.layer) if len(trace) else np.zeros(1)
        return int(per_layer.max())

    def _serve(self, trace: Trace, s: dict) -> Served:
        wanted = serve_settings(s, self.shape)
        key = (id(trace), tuple(str(value) for value in wanted.values()))
        if key not in self._served:
            self._served[key] = serve(trace, **wanted)
        return self._served[key]

    def _run(self, trace: Trace, s: dict, left: int):
        served = self._serve(trace, s)
        storage = s["storage"]
        reads = self.reads.get(storage) or self.reads.get("pread") or (None, None)
        reader = reader_for(s, self.shape, reads, left, self.factor.get(storage, 1.0), self.warm)
        return served, read_all(served, reader, wave_of(s, self.shape)), reader.spread

    def _prediction(self, runs, s: dict, memory: dict, left: int, prompt: int | None) -> Prediction:
        served, reads, read_spread = runs[0]
        lanes, layers = s["loader_threads"], len(self.shape.moe_layers)
        miss_s, wait_s = self.misses.get(s["storage"], (self.costs.miss_s, self.costs.wait_s))
        costs = replace(self.costs, miss_s=miss_s, wait_s=wait_s)
        line = timeline(served, reads, costs, lanes, layers)
        first = prompt_tokens(served)
        seconds = decode_seconds(served, line, costs, first)
        if not len(seconds):
            raise SettingError("the trace has no decode steps to predict from")
        speed = len(seconds) / seconds.sum()

        rates, prompts = [speed], [prefill_seconds(served, line, costs)]
        for other, its_reads, _ in runs[1:]:
            its = timeline(other, its_reads, costs, lanes, layers)
            steps = decode_seconds(other, its, costs, first)
            rates.append(len(steps) / steps.sum())
            prompts.append(prefill_seconds(other, its, costs))
        slower, faster = [_scaled(sign, read_spread, reads, costs, served, lanes, layers, first) for sign in (1, -1)]
        relative = np.hypot(max(slower[0] / seconds.sum() - 1, 1 - faster[0] / seconds.sum()), _windows(seconds))
        tokens = Band(speed, min(rates) / (1 + relative), max(rates) * (1 + relative))

        ttft = prompt_speed = Band(None, None, None)
        if first:
            share = (prompt or first) / first
            wait = prompts[0] * share
            loose = max(slower[1] / prompts[0] - 1, 1 - faster[1] / prompts[0])
            ttft = Band(wait, min(prompts) * share / (1 + loose), max(prompts) * share * (1 + loose))
            prompt_speed = Band(*((prompt or first) / seconds_ for seconds_ in (wait, ttft.high, ttft.low)))

        decode = served.phase == DECODE
        count = len(seconds)
        misses, moved = served.per_step(served.misses + served.ahead), served.per_step(reads.device_bytes)
        parts = {
            "disk": float(line.wait_device_s[decode].sum()),
            "page cache": float(line.wait_cache_s[decode].sum()),
            "experts": float(line.compute_s[decode].sum()),
            "management": float(line.manage_s[decode].sum()),
        }
        parts["dense"] = float(seconds.sum()) - sum(parts.values())
        shares = {name: parts[name] / float(seconds.sum()) for name in CLASSES}
        size = self.shape.block_bytes
        uses_cache = s["storage"] in ("pread", "mmap")
        steps = pd.DataFrame(
            {"step": served.steps(), "misses": misses.astype(int), "bytes_read": (misses * size).astype(np.int64),
             "device_bytes": moved.astype(np.int64), "seconds": seconds}
        )  # fmt: skip
        return Prediction(
            s, tokens, prompt_speed, ttft, served.hit_rate(DECODE), float(misses.sum() / count),
            float(misses.sum() * size / count), float(moved.sum() / count), memory, left if uses_cache else 0,
            min(1.0, left / self.shape.experts_bytes) if uses_cache else None, shares,
            max(shares, key=shares.get), self.assumptions, steps,
        )  # fmt: skip


def _scaled(sign: int, read_spread: float, reads, costs: Costs, served: Served, lanes: int, layers: int, first: int):
    """(decode, prefill) seconds with reading and computing slower (sign 1) or faster (-1) by their spreads."""
    reading = 1 + sign * min(read_spread, 0.9)
    work = 1 + sign * min(costs.spread, 0.9)
    names = [name for name in asdict(costs) if name.endswith("_s")]
    costs = replace(costs, **{name: getattr(costs, name) * work for name in names})
    reads = replace(reads, early_s=reads.early_s * reading, late_s=reads.late_s * reading)
    line: Timeline = timeline(served, reads, costs, lanes, layers)
    return decode_seconds(served, line, costs, first).sum(), prefill_seconds(served, line, costs)


def _windows(seconds: np.ndarray) -> float:
    """How much speed differs along the trace: half-width of the band of its windows' means, relative to the mean's error."""
    if len(seconds) < 2 * WINDOWS:
        return float(BAND * seconds.std() / seconds.mean() / np.sqrt(max(1, len(seconds))))
    means = np.array([part.mean() for part in np.array_split(seconds, WINDOWS)])
    return float(BAND * means.std(ddof=1) / means.mean() / np.sqrt(WINDOWS))


def with_prompt(trace: Trace, tokens: int) -> Trace:
    """A decode-only trace whose first `tokens` tokens are read as one prompt. Their routing is the model's own, whatever
    the phase it was recorded in."""
    if (trace.phase == PREFILL).any() or tokens < 1:
        return trace
    steps = np.unique(trace.step)
    if len(steps) <= tokens:
        raise SettingError(f"the trace has {len(steps)} tokens; a prompt of {tokens} leaves none to decode")
    prompt = trace.step < steps[tokens]
    order = np.r_[
        np.flatnonzero(prompt)[np.lexsort((trace.step[prompt], trace.layer[prompt]))], np.flatnonzero(~prompt)
    ]
    step = np.where(prompt, steps[0], trace.step)[order]
    columns = {name: None if getattr(trace, name) is None else getattr(trace, name)[order]
               for name in ("layer", "sequence", "experts", "token_id", "weights")}  # fmt: skip
    return Trace.from_rows(step=step, phase=np.where(prompt, PREFILL, DECODE)[order], header=trace.header, **columns)


def routing_of(shape: Shape, trace: Trace | None, prompt: int, seed: int = 0) -> tuple[list[Trace], list[str]]:
    """Traces to replay, the likely one first, and what had to be assumed."""
    known = {
        "layers": list(shape.moe_layers),
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "prompt_tokens": prompt,
    }
    if trace is None:
        cases = (assumed.TYPICAL, assumed.EVEN, assumed.CLUSTERED)
        traces = [assumed.routing(**known, zipf=zipf, keep=keep, seed=seed) for zipf, keep in cases]
        return traces, [f"no trace: {assumed.WORDS[assumed.TYPICAL]}; the band reaches from {assumed.WORDS[assumed.EVEN]} "
                        f"to {assumed.WORDS[assumed.CLUSTERED]}"]  # fmt: skip
    if len(trace.layers) != len(shape.moe_layers) or trace.num_experts != shape.num_experts:
        raise SettingError(
            f"the trace has {len(trace.layers)} MoE layers x {trace.num_experts} experts, {shape.name} has "
            f"{len(shape.moe_layers)} x {shape.num_experts}: it was recorded from another model"
        )
    if trace.counts is not None and not len(trace):
        top_k = trace.header["top_k"] or shape.top_k
        known["top_k"] = top_k
        traces = [assumed.routing(**known, counts=trace.counts, keep=keep, seed=seed)
                  for keep in (assumed.COUNTS_KEEP, 0.0, 1.5 * assumed.COUNTS_KEEP)]  # fmt: skip
        return traces, ["counts only: experts are drawn by their counts, with the stickiness of recorded traces; the band "
                        "reaches from none to more than any recorded here"]  # fmt: skip
    said = []
    if trace.k != shape.top_k:
        said.append(f"the trace has {trace.k} experts a token, the model's own top-k is {shape.top_k}")
    if not (trace.phase == PREFILL).any() and prompt and len(np.unique(trace.step)) > 2 * prompt:
        trace = with_prompt(trace, prompt)
        said.append(f"the trace has no prompt: its first {prompt} tokens are read as one")
    return [trace], said


def calibrated(
    shape: Shape, found: Calibration, memory: int, base: dict, trace: Trace | None = None, prompt: int = 0
) -> Predictor:
    """A predictor from a calibration run; without a trace the calibration run's own routing is replayed."""
    traces, said = routing_of(shape, found.trace if trace is None else trace, prompt)
    if trace is None:
        said.append(f"routing of the calibration run, {found.steps} tokens")
    storage = found.settings["storage"]
    return Predictor(shape, traces, found.costs, {storage: found.reads}, {storage: found.read_factor}, memory, base,
                     assumptions=said, misses={storage: (found.costs.miss_s, found.costs.wait_s)})  # fmt: skip


def from_probe(
    shape: Shape,
    probe,
    memory: int,
    base: dict,
    trace: Trace | None = None,
    prompt: int = 32,
    disk: Rates | None = None,
    like: Predictor | None = None,
) -> Predictor:
    """A predictor for a model that has not run: costs from kernel speeds, rates from the probe or as given.

    `like` is a predictor of the same model in another number format, whose replays are used again.
    """
    traces, said = (like.traces, like.assumptions[:-1]) if like else routing_of(shape, trace, prompt)
    device = disk or Rates.of_rows([row for row in probe.disk if row["how"] != "cached"] or probe.disk, "probe")
    cached = Rates.of_rows([{**row, "block_bytes": 1} for row in probe.page_cache], "probe")
    if device is None:
        raise SettingError("the probe has no disk rates; run `colibri probe --path DIR` or give --disk")
    costs = estimate(shape, probe, base.get("threads"), base.get("activations"))
    said = [*said, f"costs from {costs.source}; no run of this model has confirmed them"]
    return Predictor(
        shape, traces, costs, {"pread": (device, cached or device), "mmap": (device, cached or device), "direct": (device, None)},
        {}, memory, base, assumptions=said, _served=like._served if like else {},
    )  # fmt: skip
