"""Costs of the engine's work: from one short run, which tells its stages apart, or from a probe when there is no model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from .. import kernels
from ..checkpoint.formats import FORMATS
from ..config import SETTINGS
from ..errors import SettingError
from ..telemetry import Step
from ..timing import CLEAN, ENOUGH, Stopwatch
from ..trace.table import Trace
from . import page_cache
from .runs import expert_files
from .served import PREFILL, Served, serve
from .shapes import Shape
from .storage_model import ModelledReader, Rates, Reader
from .timeline import Costs, read_all, timeline

MISS_S = 40e-6  # deciding a victim, queueing a read, waking a loader thread and being woken, where nothing ran yet
MISS_MOST_S = 100e-6  # a larger slope is noise of a disturbed run
LAYER_S = 300e-6  # a decode step's time in one layer beside moving weights, where no probe measured it
KV_SLOWEST = 1e9  # bytes of keys and values per second, at least
ESTIMATE_SPREAD = 0.35  # of costs that no run of this model has confirmed


@dataclass(frozen=True)
class Calibration:
    """What one run showed: `costs`, read rates by storage, the run's own trace, and how well the formula fits it.

    reads        (device, page cache) rates, each None when not measured
    read_factor  seconds that reads took while the engine computed, relative to reads alone
    steps, clean decode steps of the run, and how many of them held their cores
    """

    costs: Costs
    reads: tuple[Rates | None, Rates | None]
    read_factor: float
    trace: Trace
    settings: dict
    steps: int
    clean: int


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


def calibrate(
    lab,
    prompt: str = "def main():\n    ",
    tokens: int = 48,
    *,
    repeats: int = 3,
    read_s: float = 2.0,
    warm_page_cache: bool = True,
) -> Calibration:
    """Costs from short runs at the lab's own settings, from a cold expert cache, and from reads of the model's files.

    Few slots are best: what a miss costs shows only where there are misses. Of `repeats` equal runs each step's median
    counts, and steps that lost a core to other programs are left out where enough others remain. `read_s`: seconds of
    reading for the rates. `warm_page_cache`: read the expert files once before, unless storage goes past the page cache.
    """
    if tokens < 8:
        raise SettingError(f"calibration needs at least 8 decoded tokens, got {tokens}")
    shape, storage = Shape.of_container(lab.container), lab.settings["storage"]
    files = expert_files(lab.path)
    if warm_page_cache and storage in ("pread", "mmap"):
        page_cache.warm(files)
    reads = (None, None) if storage == "modelled" else measure_reads(lab, read_s)
    with lab.record() as recorder:  # recording takes time, so the run that is recorded is not one that counts
        _timed_run(lab, prompt, tokens)
    trace = recorder.trace
    runs_ = [_timed_run(lab, prompt, tokens) for _ in range(repeats)]
    # The same tokens each time, so steps can be paired: of each the middle one counts, which is what will be met.
    middle = [sorted(same, key=lambda pair: pair[0].wall_s)[len(same) // 2] for same in zip(*runs_, strict=True)]
    decode = [(step, share) for step, share in middle if step.phase == "decode"]
    if len(decode) < 4:
        raise SettingError(
            f"calibration: only {len(decode)} tokens were decoded; give a shorter prompt or more max_seq_len"
        )
    shares = np.array([share for _, share in decode])
    good = shares >= CLEAN
    used = good if good.sum() >= max(ENOUGH, len(decode) // 4) else shares >= np.median(shares)
    served = serve(trace, **serve_settings(lab.settings, shape))
    costs, factor = _fit([step for step, _ in middle], used, served, shape, lab, reads)
    return Calibration(costs, reads, factor, trace, dict(lab.settings), len(decode), int(good.sum()))


def _timed_run(lab, prompt: str, tokens: int) -> list[tuple[Step, float]]:
    """(step, share of their threads' time that they held a core) for each step of a run from a cold expert cache."""
    lab.reset_cache()
    stream = lab.stream(prompt, max_tokens=tokens + 1, temperature=1.0, seed=1, stop_at_eos=False)
    found = []
    while True:
        with Stopwatch(lab.settings["threads"]) as watch:
            step = next(stream, None)
        if step is None:
            return found
        found.append((step, watch.held))


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


def _fit(every: list[Step], used, served: Served, shape: Shape, lab, reads) -> tuple[Costs, float]:
    steps = [step for step in every if step.phase == "decode"]
    prefill = [step for step in every if step.phase == "prefill"]

    def column(of) -> np.ndarray:
        return np.array([of(step) for step in steps])

    asked = served.per_step(served.blocks)
    misses = served.per_step(served.misses)
    stage = {
        name: column(lambda s, n=name: s.stages.get(n, 0.0)) for name in ("expert_compute", "expert_load_wait", "other")
    }
    routed = stage["expert_compute"] * (1 - _dense_share(shape))
    rest = column(lambda s: s.wall_s) - routed - stage["expert_load_wait"]
    managed = min(MISS_MOST_S, _slope(misses[used], stage["other"][used]))
    rest = rest - managed * misses
    at = sum(step.tokens for step in prefill) + np.arange(len(steps), dtype=float)
    # A position adds its keys and values to read; noise in a short run must not pass for more than reading them slowly.
    most = 4 * shape.kv_elements * shape.layers / KV_SLOWEST
    position_s = min(most, _slope(at[used], rest[used])) if used.sum() >= 16 else 0.0
    low, mid, high = np.quantile((rest + routed)[used], [0.1, 0.5, 0.9])
    costs = Costs(
        step_s=float(np.median((rest - position_s * at)[used])),
        position_s=position_s,
        expert_s=float(np.median((routed / asked)[used])),
        miss_s=managed,
        spread=float((high - low) / 2 / mid),
        source=f"calibration run of {len(steps)} tokens",
    )
    costs = replace(costs, **_prefill(prefill, served, shape, costs.expert_s))

    settings = lab.settings
    reader = reader_for(settings, shape, reads, page_cache_bytes=shape.experts_bytes)
    times = read_all(served, reader, wave_of(settings, shape))
    measured = (routed + stage["expert_load_wait"])[used & (misses > 0)].sum()
    if settings["storage"] == "modelled" or not measured:
        return costs, 1.0

    def predicted(factor: float) -> float:
        scaled = replace(times, early_s=times.early_s * factor, late_s=times.late_s * factor)
        line = timeline(served, scaled, replace(costs, miss_s=0.0), settings["loader_threads"], len(shape.moe_layers))
        return served.per_step(line.total_s)[used & (misses > 0)].sum()

    low, high = 0.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return costs, float(middle)


def reader_for(settings: dict, shape: Shape, reads, page_cache_bytes: int, factor: float = 1.0, warm: bool = True):
    """The reader of settings of scope "open": measured rates, or the modelled device the settings describe."""
    from ..cache.storage import ModelledDevice
    from ..units import parse_rate, parse_size

    if settings["storage"] == "modelled":
        device = ModelledDevice(
            parse_rate(settings["disk_bandwidth"]), settings["disk_latency_us"] / 1e6, settings["disk_queue_depth"],
            parse_size(settings["disk_page_cache"]),
        )  # fmt: skip
        return ModelledReader(shape.block_bytes, device)
    device, cached = reads
    if device is None and cached is None:
        raise SettingError(f"no read rates for storage {settings['storage']!r}: measure them or give a disk rate")
    device = device or cached
    cached = None if settings["storage"] == "direct" else cached or device
    return Reader(
        shape.block_bytes, device.scaled(1 / factor) if factor else device,
        cached.scaled(1 / factor) if cached and factor else cached, page_cache_bytes, settings["loader_threads"],
        len(shape.moe_layers) * shape.blocks, warm,
    )  # fmt: skip


def _dense_share(shape: Shape) -> float:
    """Share of stage expert_compute that dense feed-forward layers take, by weights."""
    dense = (shape.layers - len(shape.moe_layers)) * 3 * shape.hidden * shape.dense_width
    return dense / (dense + len(shape.moe_layers) * shape.top_k * shape.expert_params)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Slope of y over x, the median over pairs of one point of each half by x; never below 0."""
    order, half = np.argsort(x, kind="stable"), len(x) // 2
    low, high = order[:half], order[-half:]
    dx = x[high] - x[low]
    usable = dx > 0
    return max(0.0, float(np.median((y[high] - y[low])[usable] / dx[usable]))) if half and usable.any() else 0.0


def _prefill(steps: list[Step], served: Served, shape: Shape, expert_s: float) -> dict[str, float]:
    """Costs of a prompt: its routed products are a part per block and a part per assignment, one of each in decode."""
    mine = served.phase == PREFILL
    blocks, assigned = float(served.blocks[mine].sum()), float(served.assignments[mine].sum())
    compute = sum(step.stages.get("expert_compute", 0.0) for step in steps)
    waiting = sum(step.stages.get("expert_load_wait", 0.0) for step in steps)
    tokens = sum(step.tokens for step in steps)
    dense = (shape.layers - len(shape.moe_layers)) * 3 * shape.hidden * shape.dense_width * tokens
    routed = compute * (1 - dense / (dense + assigned * shape.expert_params))
    assign_s = (routed - blocks * expert_s) / (assigned - blocks) if assigned > blocks else expert_s
    assign_s = float(np.clip(assign_s, 0.0, expert_s))
    rest = sum(step.wall_s for step in steps) - routed - waiting
    return {"prefill_token_s": rest / tokens, "prefill_block_s": expert_s - assign_s, "prefill_assign_s": assign_s}


def measure_reads(lab, budget_s: float = 2.0, seed: int = 0) -> tuple[Rates | None, Rates | None]:
    """(device, page cache) rates of reading the model's own blocks, n at a time, through the lab's loader threads.

    With storage direct only the device is measured. Else reads of files the page cache holds, and, where the system lets
    them be dropped from it, of files it does not hold.
    """
    storage, lanes = lab.settings["storage"], lab.settings["loader_threads"]
    container, config = lab.container, lab.config
    counts = sorted({1, 2, 4, min(lanes, 8), config.top_k})
    headers = [
        container.block_layout(layer, block) for layer in config.moe_layers[:8] for block in range(container.blocks)
    ]
    rng = np.random.default_rng(seed)
    paths = [str(header.path) for header in headers]
    most = max(header.payload_bytes for header in headers)
    room = -(-most // 4096) * 4096
    memory = _aligned(max(counts), room)
    loader = kernels.load("storage").BlockLoader(
        paths, [h.payload_offset for h in headers], [h.payload_bytes for h in headers], storage, lanes, memory
    )

    def batch(count: int, cold: bool) -> float:
        picked = rng.choice(len(headers), count, replace=count > len(headers)).tolist()
        if cold:
            page_cache.evict([paths[i] for i in picked])
        begun = time.perf_counter()
        faults = loader.wait(loader.submit(picked, list(range(count))))
        spent = time.perf_counter() - begun
        if faults:
            raise SettingError(f"calibration: {faults[0]}")
        return sum(headers[i].payload_bytes for i in picked) / spent

    def table(cold: bool, share: float) -> list[dict]:
        rows = []
        for count in counts:
            end, values = time.perf_counter() + share * budget_s / len(counts), []
            while len(values) < 5 or (time.perf_counter() < end and len(values) < 200):
                values.append(batch(count, cold))
            low, mid, high = np.quantile(values, [0.25, 0.5, 0.75])
            rows.append({"count": count, "bytes_per_s": mid, "low": low, "high": high, "n": len(values)})
        return rows

    if loader.mode == "direct":
        return Rates.of_rows(table(False, 1.0), "direct reads of the model's blocks", batch=True), None
    for count in counts:
        batch(count, False)  # buffers are touched, files opened once
    warm = page_cache.share(paths)
    cached = None
    if warm is None or warm > 0.5:
        cached = Rates.of_rows(table(False, 0.5), "reads of blocks in the page cache", batch=True)
    device = None
    if page_cache.evict([]):
        device = Rates.of_rows(table(True, 0.5), "reads of blocks evicted from the page cache", batch=True)
        page_cache.warm(paths)
    return device, cached


def _aligned(count: int, room: int) -> np.ndarray:
    import mmap

    memory = np.frombuffer(mmap.mmap(-1, count * room), np.uint8).reshape(count, room)
    memory[:, ::4096] = 1
    return memory
