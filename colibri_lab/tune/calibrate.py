"""Costs of the engine's work: from one short run, which tells its stages apart, or from a probe when there is no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import machine
from ..checkpoint.formats import FORMATS
from ..config import SETTINGS
from ..errors import SettingError
from ..telemetry import Step
from ..trace.table import Trace
from . import page_cache
from .reads import measure_reads, reader_for
from .runs import expert_files
from .served import PREFILL, Served, serve
from .shapes import Shape
from .storage_model import Rates
from .timeline import Costs, prompt_tokens, read_all, timeline

MISS_S = 40e-6  # deciding a victim, queueing a read, waking a loader thread and being woken, where nothing ran yet
# What a disturbed run shows beyond these is noise: a miss costs no more than to fetch from memory what a core's own cache
# could have held (a megabyte), a wait no more than some hundred microseconds of falling asleep and waking.
MISS_MOST_S, WAIT_MOST_S = 100e-6, 250e-6
LAYER_S = 300e-6  # a decode step's time in one layer beside moving weights, where no probe measured it
KV_SLOWEST = 1e9  # bytes of keys and values per second, at least
ESTIMATE_SPREAD = 0.35  # of costs that no run of this model has confirmed


@dataclass(frozen=True, eq=False)
class Calibration:
    """What runs showed: `costs`, read rates by storage, the runs' own trace, and how well the formula fits them.

    reads        (device, page cache) rates, each None when not measured
    read_factor  seconds that reads took while the engine computed, relative to reads alone
    slots        the slot counts of the runs
    steps, n     decode steps of a run, and runs at each slot count
    """

    costs: Costs
    reads: tuple[Rates | None, Rates | None]
    read_factor: float
    trace: Trace
    settings: dict
    slots: tuple[int, ...]
    steps: int
    n: int


class Calibrator:
    """Runs the same tokens at several slot counts in turn, each from a cold expert cache, and reads the model's files.

    With many slots nearly everything hits, which shows what computing costs. With few, every miss adds more than its read:
    the engine waits and wakes, and computes with weights that no processor cache holds.
    """

    def __init__(
        self, lab, prompt: str = "def main():\n    ", tokens: int = 48, slots: Sequence[int] | None = None,
        memory: int | None = None,
    ):  # fmt: skip
        """`slots` are by default four, in equal ratios, from 1.25 times one token's experts to all, or to what `memory` bytes
        hold, by default half of what is free. Expert files are read once before, unless storage goes past the page cache.

        Raises `SettingError` when fewer than 8 tokens would be decoded.
        """
        if tokens < 8:
            raise SettingError(f"calibration needs at least 8 decoded tokens, got {tokens}")
        self.lab, self.prompt, self.tokens = lab, prompt, tokens
        self.shape = Shape.of_container(lab.container)
        self.slots = tuple(sorted(set(slots or self._usual_slots(memory or machine.memory()[1] // 2))))
        self._settings = {count: dict(lab.settings, expert_cache_slots=count) for count in self.slots}
        self._runs: dict[int, list[list[Step]]] = {count: [] for count in self.slots}
        self._reads: list[tuple[Rates | None, Rates | None]] = []
        if lab.settings["storage"] in ("pread", "mmap"):
            page_cache.warm(expert_files(lab.path))
        with lab.record() as recorder:  # recording takes time, so the run that is recorded does not count
            run_cold(lab, prompt, tokens)
        self.trace = recorder.trace

    def _usual_slots(self, memory: int) -> list[int]:
        shape = self.shape
        scale = len(shape.moe_layers) if self.lab.settings["scope"] == "global" else 1
        each = shape.block_bytes * len(shape.moe_layers) // scale
        most = max(1, min(shape.blocks * scale, memory // each))
        few = min(round(1.25 * shape.top_k * scale), most)
        return [round(count) for count in np.geomspace(few, most, 4)]

    def round(self, read_s: float = 0.5) -> None:
        """One run at each slot count, and `read_s` seconds of reading. Leaves the lab at the last of them."""
        if self.lab.settings["storage"] != "modelled":
            self._reads.append(measure_reads(self.lab, read_s, seed=len(self._reads)))
        for count in self.slots:
            if self.lab.settings["expert_cache_slots"] != count:
                self.lab.configure(expert_cache_slots=count)
                run_cold(self.lab, self.prompt, self.tokens)  # the system gives memory when it is first touched
            steps = run_cold(self.lab, self.prompt, self.tokens)
            if sum(step.phase == "decode" for step in steps) < 4:
                raise SettingError(
                    f"calibration: fewer than 4 of {self.tokens} tokens were decoded; give a shorter prompt or more "
                    "max_seq_len"
                )
            self._runs[count].append(steps)

    def result(self) -> Calibration:
        """Costs from all rounds so far: of each step the mean over its runs counts. Raises `SettingError` without any."""
        count = len(self._runs[self.slots[0]])
        if not count:
            raise SettingError("calibration: no round was run; call round() first")
        reads = tuple(Rates.pooled(list(each)) for each in zip(*self._reads, strict=True)) or (None, None)
        seen = [_Observed.of(self._runs[n], self._served(n), self.shape) for n in self.slots]
        costs = _costs(seen, self.shape)
        factor = 1.0 if reads == (None, None) else self._read_factor(costs, seen, reads)
        settings = self._settings[self.slots[0]]
        return Calibration(costs, reads, factor, self.trace, settings, self.slots, len(seen[0].wall_s), count)

    def _served(self, slots: int) -> Served:
        return serve(self.trace, **serve_settings(self._settings[slots], self.shape))

    def _read_factor(self, costs: Costs, seen: list[_Observed], reads) -> float:
        """The factor with which the formula gives the time that all runs waited."""
        lanes, layers = self.lab.settings["loader_threads"], len(self.shape.moe_layers)
        times = []
        for count, each in zip(self.slots, seen, strict=True):
            settings = self._settings[count]
            reader = reader_for(settings, self.shape, reads, page_cache_bytes=self.shape.experts_bytes)
            times.append(read_all(each.served, reader, wave_of(settings, self.shape)))

        def predicted(factor: float) -> float:
            total = 0.0
            for read, each in zip(times, seen, strict=True):
                scaled = replace(read, early_s=read.early_s * factor, late_s=read.late_s * factor)
                line = timeline(each.served, scaled, costs, lanes, layers)
                total += each.served.per_step(line.wait_device_s + line.wait_cache_s).sum()
            return total

        measured, low, high = sum((each.wall_s - each.busy_s).sum() for each in seen), 0.0, 16.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if predicted(middle) < measured else (low, middle)
        return float(middle)


def calibrate(
    lab,
    prompt: str = "def main():\n    ",
    tokens: int = 48,
    *,
    repeats: int = 3,
    read_s: float = 2.0,
    memory: int | None = None,
) -> Calibration:
    """Costs from `repeats` rounds of a `Calibrator`, whose slots may take `memory` bytes; `read_s` seconds of reading in
    all. The lab keeps its settings.

    Raises `SettingError` when fewer than 8 tokens would be decoded.
    """
    slots = lab.settings["expert_cache_slots"]
    calibrator = Calibrator(lab, prompt, tokens, memory=memory)
    try:
        for _ in range(repeats):
            calibrator.round(read_s / repeats)
    finally:
        lab.configure(expert_cache_slots=slots)
    return calibrator.result()


def run_cold(lab, prompt: str, tokens: int) -> list[Step]:
    """The steps of a run from a cold expert cache: the prompt, then `tokens` decode steps, sampled with seed 1."""
    lab.reset_cache()
    return list(lab.stream(prompt, max_tokens=tokens + 1, temperature=1.0, seed=1, stop_at_eos=False))


def estimate(shape: Shape, probe, threads: int | None = None, activations: str | None = None) -> Costs:
    """Costs of a model that has not run here, from kernel speeds and the layer time of a probe. `threads` and
    `activations` as in the settings."""
    activations = activations or SETTINGS["activations"].default
    threads = threads or probe.machine["physical_cores"]
    kinds = {row["format"] for row in probe.kernels}
    if not kinds:
        raise SettingError("the probe has no kernel speeds; run `colibri probe` again")

    def speed(format: str, tokens: int, name: str) -> float:
        # A format that was not measured is taken to move as many bytes a second, and compute as fast, as the nearest one.
        kind = FORMATS[format].kind if format in FORMATS else "int8"
        alike = [name for name in kinds if FORMATS[name].kind == kind]
        wanted = format if format in kinds else (alike or sorted(kinds, key=lambda name: name != "int8"))[0]
        key = {"format": wanted, "tokens": tokens, "activations": activations if FORMATS[wanted].scaled else "fp32"}
        rows = [row for row in probe.kernels if key.items() <= row.items()]
        fits = [row for row in rows if row["threads"] <= threads] or rows
        return max(fits, key=lambda row: row["threads"])[name]

    layer_s = probe.layer_s["seconds"] if probe.layer_s else LAYER_S
    experts, dense = shape.formats
    memory = max(row["bytes_per_s"] for row in probe.memory)
    moved_s = shape.block_bytes / speed(experts, 1, "weight_bytes_per_s")
    return Costs(
        step_s=shape.step_bytes / speed(dense, 1, "weight_bytes_per_s") + shape.layers * layer_s,
        position_s=4 * shape.kv_elements * shape.layers / memory,
        expert_s=moved_s,
        miss_s=MISS_S,
        prefill_token_s=2 * shape.step_params / speed(dense, 64, "flop_per_s"),
        prefill_block_s=moved_s,
        prefill_assign_s=2 * shape.expert_params / speed(experts, 64, "flop_per_s"),
        spread=ESTIMATE_SPREAD,
        source=f"kernel speeds of the probe, {threads} threads",
    )


def serve_settings(settings: dict, shape: Shape) -> dict:
    """Keyword arguments of `serve` for settings of scope "open"."""
    ahead = settings.get("prefetch", "none")
    return {
        "slots": settings["expert_cache_slots"], "policy": settings["policy"], "scope": settings["scope"],
        "lookup": settings["lookup"], "order": settings["order"], "admission": settings["admission"],
        "seed": settings["cache_seed"], "reset": settings["cache_reset"], "block_size": shape.block_size,
        "prefetch": "none" if ahead == "lookahead" else ahead, "prefetch_budget": settings.get("prefetch_budget"),
    }  # fmt: skip


def wave_of(settings: dict, shape: Shape) -> int:
    """Blocks that are read at a time where slots are short."""
    from ..engine.sizes import transient_buffers

    layers = len(shape.moe_layers)
    slots = settings["expert_cache_slots"] * (1 if settings["scope"] == "global" else layers)
    return max(1, transient_buffers(slots, layers, shape.blocks, settings))


@dataclass(frozen=True, eq=False)
class _Observed:
    """Runs at one slot count. Arrays are by decode step, means over the runs; `totals_s` are the runs' sums.

    wall_s    whole steps
    busy_s    the same without waiting for reads
    routed_s  products of routed experts
    prefill   seconds of all prefill steps, likewise: wall, busy, routed
    """

    served: Served
    wall_s: np.ndarray
    busy_s: np.ndarray
    routed_s: np.ndarray
    totals_s: np.ndarray
    prefill: tuple[float, float, float]

    @classmethod
    def of(cls, runs: list[list[Step]], served: Served, shape: Shape) -> _Observed:
        def gather(phase: str, dense: float) -> np.ndarray:
            """(runs, steps, 3): wall, busy and routed seconds."""
            return np.array(
                [[(step.wall_s, step.wall_s - step.stages.get("expert_load_wait", 0.0),
                   step.stages.get("expert_compute", 0.0) * (1 - dense)) for step in run if step.phase == phase]
                 for run in runs]
            )  # fmt: skip

        mine = served.phase == PREFILL
        prompt = float(prompt_tokens(served))
        each = gather("decode", _dense_share(shape, 1.0, shape.top_k))
        assigned = float(served.assignments[mine].sum()) / max(1, len(shape.moe_layers))
        prefill = gather("prefill", _dense_share(shape, prompt, assigned)).sum(axis=1)
        wall, busy, routed = trimmed_mean(each).T
        return cls(served, wall, busy, routed, each[:, :, 1].sum(axis=1), tuple(trimmed_mean(prefill)))


def _costs(seen: list[_Observed], shape: Shape) -> Costs:
    """`seen`: by slots, ascending."""
    many = seen[-1]
    asked = many.served.per_step(many.served.blocks)
    expert_s = float(np.median(many.routed_s / asked))
    rest = np.concatenate([each.busy_s for each in seen]) - expert_s * np.tile(asked, len(seen))
    at = np.tile(prompt_tokens(many.served) + np.arange(len(asked), dtype=float), len(seen))
    misses, waits = (
        np.concatenate([each.served.per_step(of(each.served)) for each in seen])
        for of in (lambda s: s.misses, lambda s: s.misses > 0)
    )
    # A position adds its keys and values to read; noise in a short run must not pass for more than reading them slowly.
    most = 4 * shape.kv_elements * shape.layers / KV_SLOWEST
    alike = len(seen) < 2  # nothing to tell a miss's cost by
    limits = {"position_s": most, "miss_s": 0.0 if alike else MISS_MOST_S, "wait_s": 0.0 if alike else WAIT_MOST_S}
    found = bounded_fit({"position_s": at, "miss_s": misses, "wait_s": waits}, rest, limits)
    if alike:
        found |= {"miss_s": MISS_S, "step_s": max(0.0, found["step_s"] - MISS_S * misses.mean())}
    low, mid, high = np.quantile(many.totals_s if len(many.totals_s) >= 3 else many.busy_s, [0.1, 0.5, 0.9])
    return Costs(
        expert_s=expert_s,
        spread=float((high - low) / 2 / mid),
        source=f"calibration run of {len(asked)} tokens",
        **found,
        **_prefill(many, expert_s, found["miss_s"]),
    )


def bounded_fit(columns: dict[str, np.ndarray], y: np.ndarray, most: dict[str, float]) -> dict[str, float]:
    """Least squares of `y` (n,) on a constant, named step_s, and `columns` (n,), no coefficient below 0 or above `most`.

    A coefficient that leaves its bounds is held at them, the worst first, and the others are fitted again.
    """
    held: dict[str, float] = {}
    while True:
        free = [name for name in columns if name not in held]
        rest = y - sum((held[name] * columns[name] for name in held), np.zeros(len(y)))
        table = np.column_stack([np.ones(len(y)), *(columns[name] for name in free)])
        constant, *slopes = np.linalg.lstsq(table, rest, rcond=None)[0]
        bounds = {
            name: (float(slope), float(np.clip(slope, 0.0, most[name])))
            for name, slope in zip(free, slopes, strict=True)
        }
        outside = {n: abs(slope - bound) * np.ptp(columns[n]) for n, (slope, bound) in bounds.items() if slope != bound}
        if not outside:
            return {"step_s": max(0.0, float(constant)), **held, **{name: slope for name, (slope, _) in bounds.items()}}
        worst = max(outside, key=outside.get)
        held[worst] = bounds[worst][1]


def trimmed_mean(values) -> np.ndarray:
    """Mean along the first axis without the largest and the smallest tenth. Where a machine changes between a fast and a
    slow state, the mean of many runs settles and their median jumps from one state to the other."""
    ordered = np.sort(values, axis=0)
    cut = len(ordered) // 10
    return ordered[cut : len(ordered) - cut].mean(axis=0)


def _dense_share(shape: Shape, tokens: float, assigned: float) -> float:
    """Share of stage expert_compute that dense feed-forward layers take, by weights; `assigned` experts in an MoE layer."""
    dense = (shape.layers - len(shape.moe_layers)) * 3 * shape.hidden * shape.dense_width * tokens
    return dense / (dense + len(shape.moe_layers) * assigned * shape.expert_params)


def _prefill(seen: _Observed, expert_s: float, miss_s: float) -> dict[str, float]:
    """Costs of a prompt: its routed products are a part per block and a part per assignment, one of each in decode."""
    served, mine = seen.served, seen.served.phase == PREFILL
    _, busy, routed = seen.prefill
    blocks, assigned = float(served.blocks[mine].sum()), float(served.assignments[mine].sum())
    assign_s = (routed - blocks * expert_s) / (assigned - blocks) if assigned > blocks else expert_s
    assign_s = float(np.clip(assign_s, 0.0, expert_s))
    rest = max(0.0, busy - routed - miss_s * float(served.misses[mine].sum()))
    return {
        "prefill_token_s": rest / max(1, prompt_tokens(served)),
        "prefill_block_s": expert_s - assign_s,
        "prefill_assign_s": assign_s,
    }
