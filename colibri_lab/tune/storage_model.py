"""How long misses take to read: a device, the page cache in front of it, and the loader threads between.

Three kinds, one interface: `seconds(keys)` is the time from asking for these blocks of one layer until the last is in
memory, the part of it that the device took, and the bytes that came from the device.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from ..cache.storage import ModelledDevice
from ..errors import SettingError
from ..units import parse_rate


@dataclass(frozen=True)
class Rates:
    """Bytes per second of reads by size and number, with the half-width by which they scatter, relative.

    `cells` are (block_bytes, count, bytes_per_s): between sizes and counts the rate is interpolated over logarithms,
    beyond them it is that of the nearest. `batch`: count is how many blocks are asked for at once, measured through the
    loader threads there are; else it is how many reads are under way.
    """

    cells: tuple[tuple[int, int, float], ...]
    spread: float = 0.0
    source: str = ""
    batch: bool = False

    @classmethod
    def constant(cls, rate: float | str, spread: float = 0.0, source: str = "as given") -> Rates:
        return cls(((1, 1, parse_rate(rate, "disk")),), spread, source)

    @classmethod
    def of_rows(cls, rows: list[dict], source: str, batch: bool = False) -> Rates | None:
        """From rows of a probe's table (depth or count, bytes_per_s, low, high, perhaps block_bytes); None without any."""
        if not rows:
            return None
        cells = tuple(
            (row.get("block_bytes", 1), row.get("depth", row.get("count")), row["bytes_per_s"]) for row in rows
        )
        spread = float(np.median([(row["high"] - row["low"]) / 2 / row["bytes_per_s"] for row in rows]))
        return cls(cells, spread, source, batch)

    @classmethod
    def pooled(cls, several: list[Rates | None]) -> Rates | None:
        """Medians of several measurements of the same cells; None when none was made."""
        known = [rates for rates in several if rates is not None]
        if not known:
            return None
        cells = tuple(
            (size, count, float(np.median([rates.cells[i][2] for rates in known])))
            for i, (size, count, _) in enumerate(known[0].cells)
        )
        return replace(known[0], cells=cells, spread=float(np.median([rates.spread for rates in known])))

    def at(self, block_bytes: int, count: int, lanes: int) -> float:
        """Bytes per second of `count` reads of this size through `lanes` loader threads."""
        count = count if self.batch else min(count, lanes)
        by_size = []
        sizes = sorted({size for size, _, _ in self.cells})
        for size in sizes:
            counts, rates = zip(*sorted((n, rate) for s, n, rate in self.cells if s == size), strict=True)
            by_size.append(np.interp(np.log(count), np.log(counts), np.log(rates)))
        return float(np.exp(np.interp(np.log(block_bytes), np.log(sizes), by_size)))

    def scaled(self, factor: float) -> Rates:
        """All rates times a factor."""
        return replace(self, cells=tuple((size, count, rate * factor) for size, count, rate in self.cells))


@dataclass
class Reader:
    """Reads of one model's blocks. Holds the state of the page cache as it is modelled: make a new one for each run.

    device            rates of the disk
    cached            rates of the page cache; None for O_DIRECT, which goes past it
    page_cache_bytes  what is left of memory for it; least recently read blocks leave it
    lanes             loader threads
    blocks            how many the model has in all
    warm              the page cache starts with as many of the model's blocks as fit, else empty
    """

    block_bytes: int
    device: Rates
    cached: Rates | None
    page_cache_bytes: int
    lanes: int
    blocks: int
    warm: bool = True
    _present: OrderedDict = field(default_factory=OrderedDict, repr=False)
    _known: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self._room = 0 if self.cached is None else self.page_cache_bytes // self.block_bytes
        self._all_present = self.warm and self._room >= self.blocks
        if self.warm and not self._all_present:
            self._present.update((key, None) for key in range(self._room))

    @property
    def spread(self) -> float:
        """Of the rates, the larger."""
        return max(rates.spread for rates in (self.device, self.cached) if rates is not None)

    def seconds(self, keys) -> tuple[float, float, int]:
        found = len(keys) if self._all_present else sum(self._touch(key) for key in keys)
        missing = len(keys) - found
        device_s, cached_s = self._time("device", missing), self._time("cached", found)
        return device_s + cached_s, device_s, missing * self.block_bytes

    def _time(self, name: str, count: int) -> float:
        if not count:
            return 0.0
        if (name, count) not in self._known:
            rate = getattr(self, name).at(self.block_bytes, count, self.lanes)
            self._known[name, count] = count * self.block_bytes / rate
        return self._known[name, count]

    def _touch(self, key: int) -> bool:
        if key in self._present:
            self._present.move_to_end(key)
            return True
        if self._room:
            self._present[key] = None
            if len(self._present) > self._room:
                self._present.popitem(last=False)
        return False


@dataclass
class ModelledReader:
    """The device of storage "modelled", asked as the engine asks it: all of a layer's misses at once."""

    block_bytes: int
    device: ModelledDevice
    spread: float = 0.0
    _now_s: float = 0.0

    def seconds(self, keys) -> tuple[float, float, int]:
        if not len(keys):
            return 0.0, 0.0, 0
        before = self.device.device_bytes
        self._now_s += 1e4  # every read of the layer before is done by then
        spent = max(self.device.read(int(key), self.block_bytes, self._now_s) for key in keys) - self._now_s
        moved = self.device.device_bytes - before
        return spent, spent if moved else 0.0, moved


@dataclass
class FixedReader:
    """Every block takes `each_s`, `lanes` at a time: a loader that sleeps."""

    block_bytes: int
    each_s: float
    lanes: int
    spread: float = 0.0

    def __post_init__(self):
        if self.lanes < 1 or self.each_s < 0:
            raise SettingError(f"lanes {self.lanes}, {self.each_s} s a block: expected at least 1 and at least 0")

    def seconds(self, keys) -> tuple[float, float, int]:
        spent = -(-len(keys) // self.lanes) * self.each_s
        return spent, spent, len(keys) * self.block_bytes
