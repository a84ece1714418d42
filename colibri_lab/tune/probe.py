"""`colibri probe`: what this machine can do, measured with the code the engine runs.

Disk reads go through the engine's own loader threads, matrix products through its own kernel. Every figure is a median
with its spread. A probe carries the fingerprint of its machine, and one machine's probe is refused on another.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from .. import kernels, machine
from ..bench import scratch_file
from ..checkpoint.files import AtomicFile
from ..checkpoint.formats import find_format
from ..errors import ColibriError, SettingError, StorageError
from ..limits import measure_limits
from ..timing import Timing, race
from ..units import format_size
from ..workloads import gemm
from . import page_cache
from .fingerprint import machine_facts, swap_bytes

FORMAT = 2
BLOCKS = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 23)  # bytes of one read
DEPTHS = (1, 2, 4, 8)  # reads in flight
CACHED_SHARE = 0.02  # of a file in the page cache, above which a read does not count as cold
ROUNDS = 5  # samples of a kernel
MEASURED = ("fp16", "bf16", "int8", "int4-g64", "mxfp4")  # number formats, one of each kind
_ROWS, _COLS = 1024, 2048  # the matrix of the kernel table


@dataclass
class Probe:
    """The measurements of one machine. Tables are lists of rows; rates in bytes/s, each with low, high and n samples.

    disk           block_bytes, depth, how ("direct", "evicted", "cached"), bytes_per_s
    page_cache     depth, bytes_per_s: reads of 4 MiB that the page cache answers
    memory         threads, bytes_per_s: reads of arrays far larger than the caches
    kernels        format, activations ("int8", "fp32"), threads, tokens, seconds, weight_bytes_per_s, flop_per_s: product
                   with a 1024 x 2048 matrix
    layer_s        seconds a decode step spends in one MoE layer beside moving weights; None when not measured
    """

    machine: dict
    path: str
    available_bytes: int
    swap_bytes: int
    disk: list[dict] = field(default_factory=list)
    page_cache: list[dict] = field(default_factory=list)
    memory: list[dict] = field(default_factory=list)
    kernels: list[dict] = field(default_factory=list)
    layer_s: dict | None = None
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        return self.machine["fingerprint"]

    def table(self, name: str) -> pd.DataFrame:
        """One of disk, page_cache, memory, kernels as a DataFrame."""
        return pd.DataFrame(getattr(self, name))

    def to_json(self) -> dict:
        return asdict(self)

    def save(self, path: str | os.PathLike) -> Path:
        """Write as JSON, whole or not at all."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with AtomicFile(path) as file:
                file.write(json.dumps(self.to_json(), indent=1).encode())
        except OSError as error:
            raise StorageError(f"{path}: cannot store the probe: {error}") from error
        return path

    @classmethod
    def load(cls, path: str | os.PathLike, here: bool = True) -> Probe:
        """Read a probe. Raises `SettingError` when it is another machine's and `here` is true, `StorageError` for a file
        that is no probe."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            found = cls(**data)
            its = found.machine["fingerprint"], found.machine["cpu"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path}: not a probe: {error}; run `colibri probe`") from error
        mine = machine_facts()
        if here and its[0] != mine["fingerprint"]:
            raise SettingError(
                f"{path}: measured on another machine ({its[1]}, {found.machine['physical_cores']} cores, fingerprint "
                f"{its[0]}); this one is {mine['cpu']}, {mine['physical_cores']} cores, {mine['fingerprint']}. Run `colibri "
                "probe` here, or plan for that machine with --machine FILE"
            )
        return found

    def __str__(self) -> str:
        lines = [
            f"{self.machine['cpu']}: {self.machine['physical_cores']} physical of {self.machine['logical_cores']} logical "
            f"cores, {format_size(self.available_bytes)} of {format_size(self.machine['ram_bytes'])} RAM free, swap "
            f"{format_size(self.swap_bytes)}; fingerprint {self.fingerprint}",
            _rates(f"disk ({self.path}), random reads", self.table("disk"), ["how", "block_bytes", "depth"]),
            _rates("page cache, 4 MiB reads", self.table("page_cache"), ["depth"]),
            _rates("memory, reading", self.table("memory"), ["threads"]),
        ]
        if self.kernels:
            table = self.table("kernels")
            shown = pd.DataFrame(
                {
                    "format": table.format, "activations": table.activations, "threads": table.threads, "tokens": table.tokens,
                    "weights GB/s": (table.weight_bytes_per_s / 1e9).map("{:.2f}".format),
                    "GFLOP/s": (table.flop_per_s / 1e9).map("{:.1f}".format),
                    "spread": _spread(table, "seconds"), "n": table.n,
                }
            )  # fmt: skip
            lines.append("kernels, 1024 x 2048\n" + shown.to_string(index=False))
        if self.layer_s:
            lines.append(f"engine: {self.layer_s['seconds'] * 1e6:.0f} µs a MoE layer beside moving weights")
        return "\n".join([*lines, *self.notes])


def _spread(table: pd.DataFrame, name: str) -> pd.Series:
    return (50 * (table.high - table.low) / table[name]).map("±{:.0f} %".format)


def _rates(title: str, table: pd.DataFrame, keys: list[str]) -> str:
    if table.empty:
        return f"{title}: not measured"
    shown = table[keys].assign(**{"GB/s": (table.bytes_per_s / 1e9).map("{:.2f}".format),
                                  "spread": _spread(table, "bytes_per_s"), "n": table.n})  # fmt: skip
    if "block_bytes" in keys:
        shown["block_bytes"] = [format_size(value, binary=True) for value in table.block_bytes]
    return f"{title}\n{shown.to_string(index=False)}"


def default_path() -> Path:
    """Where this machine's probe is kept."""
    from ..kernels import cache_root

    return cache_root().parent / "probes" / f"{machine_facts()['fingerprint']}.json"


def stored() -> Probe | None:
    """This machine's probe, if there is one."""
    path = default_path()
    return Probe.load(path) if path.exists() else None


def probe(
    path: str | os.PathLike | None = None,
    *,
    seconds: float = 20.0,
    file_bytes: int | None = None,
    save: bool = True,
    progress: bool = True,
) -> Probe:
    """Measure this machine and keep the result for `colibri plan`.

    path        a folder on the disk that models are read from; default where converted models are kept
    seconds     about how long to measure; more gives more samples
    file_bytes  size of the file of random bytes that is read (and removed afterwards); default 1 GB, or a quarter of what
                is free on the disk or in memory if that is less
    Raises `StorageError` naming the folder when it cannot be written.
    """
    if not seconds > 0:
        raise SettingError(f"seconds must be positive, got {seconds!r}")
    folder = Path(path) if path is not None else default_path().parent.parent / "containers"
    folder = folder if path is not None or folder.is_dir() else Path.cwd()
    if not folder.is_dir():
        raise StorageError(f"{folder}: no such folder; --path names one on the disk that models are read from")
    found = Probe(machine_facts(), str(folder.resolve()), machine.memory()[1], swap_bytes())
    threads = sorted({1, machine.cores()[0]})
    parts: list[tuple[str, Callable[[], None]]] = [
        ("disk", lambda: _disk(found, folder, file_bytes, 0.5 * seconds)),
        ("memory", lambda: found.memory.extend(_memory(threads))),
        ("kernels", lambda: _kernels(found, threads, 0.4 * seconds)),
        ("engine", lambda: _engine(found)),
    ]
    for _, measure in tqdm(parts, "probe", disable=not progress):
        measure()
    if save:
        found.save(default_path())
    return found


def _sampled(run: Callable[[], float], budget_s: float, least: int = 3, most: int = 15) -> list[float]:
    """Values of run(), at least `least`, then until the time is up."""
    end, values = time.perf_counter() + budget_s, []
    while len(values) < least or (time.perf_counter() < end and len(values) < most):
        values.append(run())
    return values


def _summary(values: list[float], name: str) -> dict:
    low, mid, high = np.quantile(values, [0.1, 0.5, 0.9])
    return {name: float(mid), "low": float(low), "high": float(high), "n": len(values)}


# ---- disk and page cache


def _disk(found: Probe, folder: Path, file_bytes: int | None, budget_s: float) -> None:
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    size = file_bytes or min(10**9, free // 4, machine.memory()[1] // 4)
    size = size // BLOCKS[-1] * BLOCKS[-1]
    if size < 4 * BLOCKS[-1]:
        found.notes.append(f"disk not measured: {folder} has room for {format_size(size)}, 34 MB are needed")
        return
    with scratch_file(folder, size) as file:
        cells = [(block, depth) for block in BLOCKS for depth in DEPTHS]
        for block, depth in cells:
            row = read_rate(file, size, block, depth, 0.8 * budget_s / len(cells))
            found.disk.append({"block_bytes": block, "depth": depth, **row})
        page_cache.warm([file])
        for depth in DEPTHS[:3]:
            rates = _sampled(lambda d=depth: _read(file, size, 1 << 22, d, "pread", 16, 0), 0.2 * budget_s / 3)
            found.page_cache.append({"depth": depth, **_summary(rates, "bytes_per_s")})
    if any(row["how"] == "cached" for row in found.disk):
        found.notes.append(
            "disk: O_DIRECT is refused here and the page cache would not let go of the file, so rows marked cached are "
            "not the disk's"
        )


def read_rate(file: Path, size: int, block: int, depth: int, budget_s: float = 0.2) -> dict:
    """Bytes per second of cold random reads of `block` bytes, `depth` in flight: how, bytes_per_s, low, high, n."""
    count = max(depth, min(size // block, 32, max(4, (32 << 20) // block)))
    seeds = iter(range(1, 1 << 30))
    one = kernels.load("storage").BlockLoader([str(file)], [0], [block], "direct", 1, _buffers(1, block))
    if one.mode == "direct":
        rates = _sampled(lambda: _read(file, size, block, depth, "direct", count, next(seeds)), budget_s)
        return {"how": "direct", **_summary(rates, "bytes_per_s")}
    shares = []

    def evicted() -> float:
        page_cache.evict([file])
        shares.append(page_cache.share([file]))
        return _read(file, size, block, depth, "pread", count, next(seeds))

    rates = _sampled(evicted, budget_s)
    cold = all(share is not None and share <= CACHED_SHARE for share in shares)
    return {"how": "evicted" if cold else "cached", **_summary(rates, "bytes_per_s")}


def _buffers(count: int, block: int) -> np.ndarray:
    """(count, block) bytes, page-aligned as O_DIRECT wants them, touched."""
    import mmap

    memory = np.frombuffer(mmap.mmap(-1, count * block), np.uint8).reshape(count, block)
    memory[:, ::4096] = 1
    return memory


def _read(file: Path, size: int, block: int, depth: int, mode: str, count: int, seed: int) -> float:
    """Bytes per second of `count` reads at random places, `depth` loader threads."""
    places = np.random.default_rng(seed).permutation(size // block)[:count] * block
    memory = _buffers(depth, block)
    loader = kernels.load("storage").BlockLoader(
        [str(file)] * len(places), places.tolist(), [block] * len(places), mode, depth, memory
    )
    begun = time.perf_counter()
    # Loader threads may write into the same buffer here; nobody looks at what arrives.
    faults = loader.wait(loader.submit(list(range(len(places))), [i % depth for i in range(len(places))]))
    spent = time.perf_counter() - begun
    if faults:
        raise StorageError(faults[0])
    return len(places) * block / spent


# ---- memory, kernels, engine


def _memory(threads: list[int]) -> list[dict]:
    """Read bandwidth of arrays far larger than the caches, with the kernel that measures the machine's limits."""
    return [{"threads": n, **_rate(measure_limits(n).read, 1.0)} for n in threads]


def _rate(timing: Timing, amount: float) -> dict:
    """A timing of `amount` bytes as a rate."""
    return {"bytes_per_s": amount / timing.median_s, "low": amount / timing.high_s, "high": amount / timing.low_s,
            "n": len(timing.seconds)}  # fmt: skip


def _kernels(found: Probe, threads: list[int], budget_s: float) -> None:
    for name in MEASURED:
        found.kernels += kernel_speed(name, threads, budget_s / len(MEASURED))


def kernel_speed(name: str, threads: list[int], budget_s: float = 1.0) -> list[dict]:
    """Time of x (tokens, 2048) times a 1024 x 2048 matrix in a number format, at 1 and 64 tokens; matrices rotate through
    128 MB, so that weights come from memory as they do in decode. Integer weights meet activations of both kinds."""
    rows = []
    kinds = ("int8", "fp32") if find_format(name).scaled else ("fp32",)
    each_s = budget_s / (2 * len(kinds) * len(threads) * ROUNDS)
    for tokens, activations in itertools.product((1, 64), kinds):
        work = gemm(name, tokens, int8_activations=activations == "int8")
        weight_bytes = work.bytes - 4 * tokens * (_ROWS + _COLS)
        for n in threads:
            timing = race({name: work.call(threads=n)}, rounds=ROUNDS, budget_s=each_s, threads=n, patience=2)[name]
            rows.append(
                {
                    "format": name, "activations": activations, "threads": n, "tokens": tokens, "seconds": timing.median_s, "low": timing.low_s,
                    "high": timing.high_s, "n": len(timing.seconds), "weight_bytes_per_s": weight_bytes / timing.median_s,
                    "flop_per_s": work.operations / timing.median_s,
                }
            )  # fmt: skip
    return rows


def _engine(found: Probe) -> None:
    """What a layer costs whatever its size, from the shipped model, whose weights are too small to matter."""
    import colibri_lab as cl

    try:
        lab = cl.open("colibri-tiny", expert_cache_slots=10**6)
        lab.warmup()
        run = lab.generate("def main():", max_tokens=24, temperature=0.0, stop_at_eos=False)
    except ColibriError as error:
        found.notes.append(f"the engine's time per layer was not measured: {error}")
        return
    walls = np.array([step.wall_s for step in run.steps if step.phase == "decode"]) / lab.config.num_layers
    found.layer_s = _summary(walls.tolist(), "seconds")
