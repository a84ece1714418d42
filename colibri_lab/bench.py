"""`colibri bench`: kernels, engine and disk against what this machine can do, measured in the same minutes.

Every row is a median with its spread and, where there is one, the bound: the least time (or the most tokens a second) that
the bandwidth and arithmetic peaks measured in turn with it allow.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from . import __version__, kernels, machine
from .checkpoint.formats import find_format
from .errors import SettingError, StorageError, did_you_mean
from .kernels import toolchain
from .limits import Limits, LimitWork
from .timing import Timing, race
from .units import format_size
from .workloads import Workload, workload

WEIGHTS = ("fp32", "bf16", "fp16", "int8", "int8-g64", "int4-g64", "mxfp4")
TOKENS = (1, 4, 16, 64)
WORKING_SETS = (1 << 14, 1 << 18, 3 << 18, 1 << 21, 1 << 23, 1 << 25, 3 << 25)  # bytes a thread
CONTEXT, PREFILL = 32, 128  # tokens


@dataclass
class Report:
    """`rows`: what, case, threads, unit, median, low, high, bound, share (of the bound), samples, clean."""

    facts: dict
    rows: list[dict] = field(default_factory=list)
    limits: list[dict] = field(default_factory=list)

    @property
    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def to_json(self) -> dict:
        return {"facts": self.facts, "limits": self.limits, "rows": self.rows}

    def __str__(self) -> str:
        lines = [f"{name:<10} {value}" for name, value in self.facts.items()]
        for limit in self.limits:
            dots = (
                "no byte products"
                if limit["int8_op_per_s"] is None
                else f"{limit['int8_op_per_s'] / 1e9:.0f} GOP/s int8"
            )
            lines.append(
                f"limits     {limit['threads']} threads: read {limit['bytes_per_s'] / 1e9:.1f} GB/s, "
                f"{limit['flop_per_s'] / 1e9:.0f} GFLOP/s float32, {dots}"
            )
        if self.rows:
            lines.append(self.table.to_string(index=False, formatters=_SHOWN, na_rep="-"))
        dirty = [row for row in self.rows if row["clean"] < min(3, row["samples"])]
        if dirty:
            lines.append(
                f"{len(dirty)} of {len(self.rows)} rows have fewer than 3 samples during which every thread had a core: "
                "other work is running here, and these figures are too low"
            )
        return "\n".join(lines)


def _number(value: float) -> str:
    return "-" if value is None or value != value else f"{value:.4g}"


def _percent(value: float) -> str:
    return "-" if value is None or value != value else f"{100 * value:.0f} %"


_SHOWN = {"median": _number, "low": _number, "high": _number, "bound": _number, "share": _percent}


def facts() -> dict:
    """Machine, compiler and SIMD path, as every table of this kind begins."""
    gemm = kernels.load("gemm")
    return {
        "colibri": __version__,
        "machine": f"{machine.cpu_name()}, {machine.cores()[0]} physical cores, {machine.memory()[0] / 2**30:.1f} GiB",
        "compiler": toolchain.compiler_version(toolchain.find_compiler()).splitlines()[0],
        "simd": f"{kernels.simd()} (float32 {gemm.simd}, int8 {gemm.int8_path})",
        "load": f"{os.getloadavg()[0]:.2f} over the last minute",
    }


def bench(
    parts: tuple[str, ...] = (), *, threads: list[int] | None = None, number_formats: list[str] | None = None,
    rounds: int = 7, model: str = "colibri-tiny", settings: dict | None = None, path: str | None = None,
    progress: bool = True,
) -> Report:  # fmt: skip
    """Measure `parts` of gemm, ffn, decode, prefill, bandwidth, disk (default: all).

    threads         thread counts; default 1 and the physical cores
    number_formats  of weights, for gemm and ffn; default WEIGHTS
    model, settings what decode and prefill run, and how it is opened; every expert is resident
    path            folder whose disk is read, default where converted models are kept
    Raises `SettingError` for an unknown part, `StorageError` when the disk's folder cannot be written.
    """
    for part in parts:
        if part not in PARTS:
            raise SettingError(f"nothing called {part!r} to measure; {did_you_mean(part, PARTS)}")
    if rounds < 1:
        raise SettingError(f"rounds must be at least 1, got {rounds}")
    report = Report(facts())
    counts = sorted(set(threads or (1, machine.cores()[0])))
    options = {
        "number_formats": number_formats or list(WEIGHTS),
        "model": model,
        "settings": settings or {},
        "path": path,
    }
    for part in parts or PARTS:
        PARTS[part](report, counts, rounds, progress, **options)
    return report


def row(what: str, case: str, threads: int, unit: str, timing: Timing, value: Callable[[float], float], bound) -> dict:
    """`value` turns seconds into the unit; `bound` in that unit, or None."""
    median, ends = value(timing.median_s), sorted((value(timing.low_s), value(timing.high_s)))
    share = None if bound is None else (bound / median if unit == "us" else median / bound)
    return {
        "what": what, "case": case, "threads": threads, "unit": unit, "median": median, "low": ends[0], "high": ends[1],
        "bound": bound, "share": share, "samples": len(timing.samples), "clean": timing.clean,
    }  # fmt: skip


def compare_with_limits(
    works: list[Workload], threads: int, rounds: int = 7, budget_s: float = 0.005, progress: str = ""
) -> tuple[list[Timing], Limits]:
    """Time workloads with the kernels as they are, in turn with the limits they are judged by."""
    ceiling = LimitWork(threads)
    contenders = {f"{i}": work.call(threads=threads) for i, work in enumerate(works)}
    found = race(contenders | ceiling.contenders, rounds=rounds, budget_s=budget_s, threads=threads, progress=progress)
    return [found[name] for name in contenders], ceiling.limits(found)


def _kernel(report: Report, works: list[Workload], threads: int, rounds: int, progress: str) -> None:
    timings, limits = compare_with_limits(works, threads, rounds, progress=progress)
    report.limits.append(limits.to_json())
    for work, timing in zip(works, timings, strict=True):
        bound = 1e6 * limits.bound_s(work)
        rates = {"bytes_per_s": work.bytes / timing.median_s, "operations_per_s": work.operations / timing.median_s}
        report.rows.append(row(work.kernel, work.label, threads, "us", timing, lambda s: 1e6 * s, bound) | rates)


def _variants(number_formats: list[str]) -> Iterator[dict]:
    for name in number_formats:
        yield {"format": name}
        if find_format(name).scaled:
            yield {"format": name, "int8_activations": True}


def _gemm(report, threads, rounds, progress, *, number_formats, **_) -> None:
    for options in _variants(number_formats):
        for count in threads:
            works = [workload("gemm", tokens=tokens, **options) for tokens in TOKENS]
            _kernel(report, works, count, rounds, f"gemm, {options['format']}" * progress)


def _ffn(report, threads, rounds, progress, *, number_formats, **_) -> None:
    for options in _variants(number_formats):
        for count in threads:
            for tokens in (1, 64):
                layouts = ("slots", "gathered", "stacked") if tokens == 1 else ("slots",)
                works = [workload("ffn", tokens=tokens, layout=layout, **options) for layout in layouts]
                _kernel(report, works, count, rounds, f"ffn, {options['format']}" * progress)


def _bandwidth(report, threads, rounds, progress, **_) -> None:
    kernel = kernels.load("bandwidth")
    for count in threads:
        contenders, amounts = {}, {}
        for size in WORKING_SETS:
            memory, passes = np.ones((count, size), np.uint8), max(1, (1 << 26) // size)
            contenders[size] = lambda m=memory, p=passes: kernel.read(m, p)[2]
            amounts[size] = kernel.read(memory, passes)[0]
        found = race(contenders, rounds=rounds, threads=count, progress="bandwidth" * progress)
        for size, timing in found.items():
            case = f"reading {format_size(size, binary=True)} a thread"
            report.rows.append(
                row("bandwidth", case, count, "GB/s", timing.per(amounts[size]), lambda s: 1e-9 / s, None)
            )
        ceiling = LimitWork(count)
        limits = ceiling.limits(race(ceiling.contenders, rounds=rounds, threads=count))
        report.limits.append(limits.to_json())
        peaks = [("float32 multiply-adds", limits.fma), ("int8 products", limits.dots)]
        for case, timing in peaks:
            if timing is not None:
                report.rows.append(row("peak", case, count, "GOP/s", timing, lambda s: 1e-9 / s, None))


def token_bytes(lab, context: int = 0) -> int:
    """Bytes that one decoded token reads behind `context` others: attention, routers, k experts a layer, head, KV cache."""
    c, box = lab.config, lab.container
    head = box.dense("embed" if c.tied_embeddings else "head").payload.nbytes
    dense = sum(box.dense(f"layer_{i}").payload.nbytes for i in range(c.num_layers))
    routers = sum(box.router(i).payload.nbytes for i in c.moe_layers)
    experts = 0
    for layer in c.moe_layers:
        table = box.block_layout(layer, 0)
        experts += c.top_k * table.payload_bytes // (len(table.table) // 3)
    kv_item = 2 if lab.settings.get("kv_dtype") == "fp16" else 4
    return head + dense + routers + experts + context * 2 * c.num_layers * c.num_kv_heads * c.head_dim * kv_item


def token_operations(lab, context: int = 0) -> int:
    """Multiply-adds, counted twice, that one token needs outside attention's scores, the head left out."""
    c = lab.config
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    expert = 3 * c.hidden_size * c.expert_intermediate_size
    shared = 3 * c.hidden_size * c.shared_intermediate_size if c.shared != "none" else 0
    dense = 3 * c.hidden_size * c.dense_intermediate_size
    moe = len(c.moe_layers)
    seen = 2 * c.num_layers * c.num_heads * c.head_dim * context
    return 2 * (c.num_layers * attention + moe * (c.top_k * expert + shared) + (c.num_layers - moe) * dense + seen)


def all_resident(model: str | os.PathLike) -> dict:
    """Settings with which a model is opened with every expert in memory from the start."""
    from .checkpoint.container import Container
    from .front import container_of

    box = Container.open(container_of(model), allow_fp32=True)
    blocks = [(layer, block) for layer in box.config.moe_layers for block in range(box.blocks)]
    return {"expert_cache_slots": len(blocks), "cache_start": "preloaded", "cache_blocks": blocks}


class Decoder:
    """A lab with every expert resident, decoding one token a call behind a short context; seeded random tokens."""

    def __init__(self, model: str, threads: int, settings: dict, prefill: int = PREFILL):
        import colibri_lab as cl

        self.lab = cl.open(model, **{**all_resident(model), "threads": threads, "prefill_chunk": prefill, **settings})
        self._ids = np.random.default_rng(0).integers(0, self.lab.config.vocab_size, prefill)
        self.prefill_tokens = min(prefill, self.lab.settings["max_seq_len"] - 1)
        self._restart()

    def _restart(self) -> None:
        self.lab.engine.kv.release()
        self.lab.engine.forward(self._ids[:CONTEXT], "prefill")

    def decode(self) -> None:
        kv = self.lab.engine.kv
        if kv.length >= min(2 * CONTEXT, self.lab.settings["max_seq_len"]):
            kv.length = CONTEXT  # the same stretch again, without the cost of reading the prompt
        self.lab.engine.forward(self._ids[kv.length : kv.length + 1], "decode")

    def prefill(self) -> None:
        self.lab.engine.kv.release()
        self.lab.engine.forward(self._ids[: self.prefill_tokens], "prefill")


def _engine(report, threads, rounds, progress, part, model, settings) -> None:
    for count in threads:
        engine, ceiling = Decoder(model, count, settings), LimitWork(count)
        lab, tokens = engine.lab, 1 if part == "decode" else engine.prefill_tokens
        work = engine.decode if part == "decode" else engine.prefill
        if part == "decode":
            engine._restart()
        found = race({part: work} | ceiling.contenders, rounds=rounds, threads=count, progress=part * progress)
        limits = ceiling.limits(found)
        report.limits.append(limits.to_json())
        integer = lab.settings.get("activations") == "int8"
        if part == "decode":
            bound = limits.bytes_per_s / token_bytes(lab, CONTEXT)
        else:
            bound = limits.peak(integer) / token_operations(lab, tokens // 2)
        case = f"{lab.name}, {lab.container.info['formats']['expert']} experts"
        case += f", {tokens} tokens" * (part == "prefill")
        report.rows.append(row(part, case, count, "tokens/s", found[part].per(tokens), lambda s: 1 / s, bound))


def _decode(report, threads, rounds, progress, *, model, settings, **_) -> None:
    _engine(report, threads, rounds, progress, "decode", model, settings)


def _prefill(report, threads, rounds, progress, *, model, settings, **_) -> None:
    _engine(report, threads, rounds, progress, "prefill", model, settings)


@contextmanager
def scratch_file(folder: Path, size: int) -> Iterator[Path]:
    """A file of random bytes that is on the disk and not only in memory; removed afterwards."""
    rng = np.random.default_rng(0)
    try:
        with tempfile.NamedTemporaryFile(prefix="colibri-bench-", dir=folder) as file:
            for at in range(0, size, 1 << 23):
                file.write(rng.bytes(min(1 << 23, size - at)))
            file.flush()
            os.fsync(file.fileno())
            yield Path(file.name)
    except OSError as error:
        raise StorageError(
            f"{folder}: its disk cannot be measured: {error}; choose another folder with --path"
        ) from error


def _disk(report, threads, rounds, progress, *, path, **_) -> None:
    from .tune.probe import read_rate

    folder = Path(path) if path else kernels.cache_root().parent
    size = 1 << 28
    with scratch_file(folder, size) as file:
        for block in (1 << 20, 1 << 22, 1 << 23):
            for depth in (1, 4):
                found = read_rate(file, size, block, depth, 0.05 * rounds)
                report.rows.append({
                    "what": "disk", "case": f"{found['how']}, {format_size(block, binary=True)} reads, {depth} in flight",
                    "threads": depth, "unit": "GB/s", "median": found["bytes_per_s"] / 1e9, "low": found["low"] / 1e9,
                    "high": found["high"] / 1e9, "bound": None, "share": None, "samples": found["n"], "clean": found["n"],
                })  # fmt: skip


PARTS = {
    "bandwidth": _bandwidth, "gemm": _gemm, "ffn": _ffn, "decode": _decode, "prefill": _prefill, "disk": _disk,
}  # fmt: skip
