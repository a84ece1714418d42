"""How fast this machine reads a model's blocks: measured through the lab's own loader threads, and the reader made of it."""

from __future__ import annotations

import mmap
import time

import numpy as np

from .. import kernels
from ..errors import SettingError
from . import page_cache
from .shapes import Shape
from .storage_model import ModelledReader, Rates, Reader


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
    memory = np.frombuffer(mmap.mmap(-1, count * room), np.uint8).reshape(count, room)
    memory[:, ::4096] = 1
    return memory


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
