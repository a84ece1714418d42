"""A storage device that exists only as four numbers, on a clock that needs no sleeping.

"What if my disk read 500 MB/s?" is answered by letting the real reads happen, which brings the bytes, and putting the
modelled device's time in their place. Requests queue first come, first served: each waits for one of `queue_depth`
places, then `latency_s`, then for the wire, which carries `bandwidth` bytes per second and one block at a time. Blocks in
the page cache (least recently used, `page_cache_bytes` in all) come at `cached_bandwidth` instead.

Which blocks are read, from where, and how long the device works depends on the sequence of requests alone, so two runs
give the same answer. What the engine waits also depends on how long it computes meanwhile, which is measured.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from ..errors import SettingError


@dataclass
class ModelledDevice:
    """Times of reads on a modelled device. Sizes in bytes, times in seconds, rates in bytes per second."""

    bandwidth: float
    latency_s: float = 100e-6
    queue_depth: int = 8
    page_cache_bytes: int = 0
    cached_bandwidth: float = 8e9
    reads: int = 0
    bytes_read: int = 0
    device_bytes: int = 0  # of bytes_read, what the page cache did not have
    service_s: float = 0.0  # summed over reads, from the place in the queue to the last byte
    _wire_free: float = 0.0
    _places: list[float] = field(default_factory=list)  # when each of the last queue_depth requests is done
    _cached: OrderedDict = field(default_factory=OrderedDict)
    _cached_bytes: int = 0

    def __post_init__(self):
        for name in ("bandwidth", "queue_depth", "cached_bandwidth"):
            if not getattr(self, name) > 0:
                raise SettingError(f"modelled device: {name} must be positive, got {getattr(self, name)!r}")
        for name in ("latency_s", "page_cache_bytes"):
            if not getattr(self, name) >= 0:
                raise SettingError(f"modelled device: {name} must not be negative, got {getattr(self, name)!r}")

    def read(self, key, size: int, now_s: float) -> float:
        """A block is asked for at `now_s`; when its last byte has arrived."""
        self.reads += 1
        self.bytes_read += size
        if self._touch(key, size):
            begun, done = now_s, now_s + size / self.cached_bandwidth
        else:
            self.device_bytes += size
            begun = now_s
            if len(self._places) >= self.queue_depth:
                begun = max(begun, self._places.pop(0))
            done = max(self._wire_free, begun + self.latency_s) + size / self.bandwidth
            self._wire_free = done
            self._places.append(done)
        self.service_s += done - begun
        return done

    def _touch(self, key, size: int) -> bool:
        """Whether the page cache holds the block; from now on it does, unless it is larger than the whole cache."""
        if key in self._cached:
            self._cached.move_to_end(key)
            return True
        if size > self.page_cache_bytes:
            return False
        self._cached[key] = size
        self._cached_bytes += size
        while self._cached_bytes > self.page_cache_bytes:
            self._cached_bytes -= self._cached.popitem(last=False)[1]
        return False


class VirtualClock:
    """The real clock plus what modelled waiting added, less what the real reads took. Call it for nanoseconds."""

    def __init__(self, clock=time.perf_counter_ns):
        self._clock, self._offset_ns = clock, 0

    def __call__(self) -> int:
        return self._clock() + self._offset_ns

    def jump_to(self, ns: int) -> None:
        """From here the clock goes on from `ns`, forwards or backwards."""
        self._offset_ns = ns - self._clock()
