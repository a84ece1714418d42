"""What this machine can do at best, measured: bytes read per second, multiply-adds and byte products per second.

The least time of a piece of work is that of its bytes or that of its operations, whichever is longer (Williams, Waterman
and Patterson 2009, the roofline). `LimitWork` measures the limits in turn with the work they are to bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import kernels, machine
from .timing import Timing, race
from .workloads import Workload

READ_BYTES = 96 << 20  # a thread reads this much, more than any cache holds
ROUNDS, SCALAR_ROUNDS = 1_000_000, 10_000  # of multiply-adds; the scalar path calls a library for each


@dataclass(frozen=True)
class Limits:
    """Rates of `threads` threads; timings are seconds per byte, per float32 operation and per byte operation.

    `dots` is None where the SIMD path has no instruction for products of bytes.
    """

    threads: int
    simd: str
    read: Timing
    fma: Timing
    dots: Timing | None

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.read.median_s

    @property
    def flop_per_s(self) -> float:
        return 1 / self.fma.median_s

    @property
    def int8_op_per_s(self) -> float | None:
        return None if self.dots is None else 1 / self.dots.median_s

    def peak(self, integer: bool = False) -> float:
        """Operations per second of the arithmetic that is used."""
        return self.int8_op_per_s if integer and self.dots is not None else self.flop_per_s

    def bound_s(self, work: Workload) -> float:
        """The least seconds this machine needs for `work`."""
        return max(work.bytes / self.bytes_per_s, work.operations / self.peak(work.integer))

    def to_json(self) -> dict:
        return {
            "threads": self.threads, "simd": self.simd, "bytes_per_s": self.bytes_per_s, "flop_per_s": self.flop_per_s,
            "int8_op_per_s": self.int8_op_per_s, "clean": min(t.clean for t in (self.read, self.fma, self.dots) if t),
        }  # fmt: skip


class LimitWork:
    """Contenders for `race` on `threads` threads, under names that begin with "limit:", and the limits they give."""

    def __init__(self, threads: int):
        self.threads, self._kernel = threads, kernels.load("bandwidth")
        self._memory = np.ones((threads, READ_BYTES), np.uint8)
        self._rounds = SCALAR_ROUNDS if self._kernel.simd == "scalar" else ROUNDS
        self.contenders = {"limit:read": self._read, "limit:fma": self._fma}
        self._amounts = {
            "limit:read": self._kernel.read(self._memory)[0],
            "limit:fma": self._kernel.multiply_adds(threads, 1)[0],
        }
        self._amounts["limit:fma"] *= self._rounds
        if self._kernel.has_byte_dots:
            self.contenders["limit:dots"] = self._dots
            self._amounts["limit:dots"] = self._kernel.byte_dots(threads, self._rounds)[0]

    def _read(self) -> float:
        return self._kernel.read(self._memory)[2]

    def _fma(self) -> float:
        return self._kernel.multiply_adds(self.threads, self._rounds)[2]

    def _dots(self) -> float:
        return self._kernel.byte_dots(self.threads, self._rounds)[2]

    def limits(self, timings: dict[str, Timing]) -> Limits:
        """From what `race` returned for a set of contenders that these were among."""
        each = {name: timings[name].per(amount) for name, amount in self._amounts.items()}
        return Limits(self.threads, self._kernel.simd, each["limit:read"], each["limit:fma"], each.get("limit:dots"))


def measure_limits(threads: int | None = None, rounds: int = 5) -> Limits:
    """The limits alone; `threads` default physical cores. Takes about half a second on a quiet machine."""
    work = LimitWork(threads or machine.cores()[0])
    return work.limits(race(work.contenders, rounds=rounds, threads=work.threads))
