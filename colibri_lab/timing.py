"""Timing things against each other on a machine that may not be quiet.

`race` runs its contenders in turn, round after round, so that what slows the machine down slows all of them down. A
sample counts as clean when the process held its cores: on Linux the kernel tells how long threads waited for one, so an
engine whose threads sleep between layers and one whose threads spin are judged alike; elsewhere the share of CPU time in
wall time stands in for it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tqdm import tqdm

from .errors import SettingError

CLEAN = 0.95  # of its cores' time, held by the process during a sample
ENOUGH = 3  # clean samples, below which all samples are shown and marked


@dataclass(frozen=True)
class Sample:
    """One measurement: seconds of one call, and the share (0 to 1) of its threads' time for which they had a core."""

    seconds: float
    held: float


@dataclass(frozen=True)
class Timing:
    """Samples of one contender. Median and spread are over the clean ones, or over all when fewer than ENOUGH are."""

    samples: tuple[Sample, ...]

    @property
    def clean(self) -> int:
        return sum(s.held >= CLEAN for s in self.samples)

    @property
    def trusted(self) -> bool:
        """Whether enough samples are clean."""
        return self.clean >= ENOUGH

    @property
    def seconds(self) -> list[float]:
        kept = (
            [s.seconds for s in self.samples if s.held >= CLEAN] if self.trusted else [s.seconds for s in self.samples]
        )
        return sorted(kept)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low_s(self) -> float:
        return self.seconds[0]

    @property
    def high_s(self) -> float:
        return self.seconds[-1]

    @property
    def dropped(self) -> int:
        """Samples that median and spread leave out."""
        return len(self.samples) - len(self.seconds)

    def per(self, amount: float) -> Timing:
        """The same with seconds divided by `amount`: seconds per byte, per token, per operation."""
        return Timing(tuple(Sample(s.seconds / amount, s.held) for s in self.samples))

    def row(self) -> dict:
        """median_s, low_s, high_s, samples, clean: a row of a table."""
        return {
            "median_s": self.median_s, "low_s": self.low_s, "high_s": self.high_s,
            "samples": len(self.samples), "clean": self.clean,
        }  # fmt: skip


class Stopwatch:
    """`with Stopwatch(threads) as watch: …` then `watch.seconds` and `watch.held`."""

    def __init__(self, threads: int):
        self.threads = threads

    def __enter__(self) -> Stopwatch:
        self._waited, self._cpu, self._wall = _waited_ns(), time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.seconds = time.perf_counter() - self._wall
        cpu, waited = time.process_time() - self._cpu, _waited_ns()
        if waited is None or self._waited is None:
            self.held = min(1.0, cpu / (self.seconds * self.threads))
        else:
            self.held = max(0.0, 1 - (waited - self._waited) / 1e9 / (self.seconds * self.threads))

    @property
    def sample(self) -> Sample:
        return Sample(self.seconds, self.held)


def _waited_ns() -> int | None:
    """Nanoseconds that this process's threads have spent ready to run but without a core; None where nothing tells."""
    total = 0
    try:
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/schedstat", "rb") as file:
                    total += int(file.read().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                pass  # a thread that has just ended
    except (OSError, IndexError, ValueError):
        return None
    return total


def race(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    budget_s: float = 0.005,
    threads: int = 1,
    patience: int = 8,
    progress: str = "",
) -> dict[str, Timing]:
    """Time every contender once per round, in turn and every other round backwards.

    A sample repeats a call for about `budget_s` seconds; short ones often fall between the turns of other work. Rounds go
    on until each contender has `rounds` clean samples, but no longer than `patience` times as many. `threads` is how many
    cores a contender uses. A call that returns a float tells the share held by threads that it started and ended itself,
    which nobody can ask afterwards. `progress` is the title of a bar, "" for none. Ctrl-C raises KeyboardInterrupt.
    """
    if rounds < 1 or patience < 1 or not budget_s > 0:
        raise SettingError(
            f"race: rounds and patience must be at least 1 and budget_s positive, got {rounds}, {patience}, {budget_s}"
        )
    calls = {name: _calls_in(work, budget_s) for name, work in contenders.items()}
    found: dict[str, list[Sample]] = {name: [] for name in contenders}
    clean = dict.fromkeys(contenders, 0)
    names = list(contenders)
    with tqdm(total=rounds, desc=progress, unit=" round", disable=not progress, leave=False) as bar:
        for number in range(rounds * patience):
            for name in names if number % 2 == 0 else reversed(names):
                work, count = contenders[name], calls[name]
                with Stopwatch(threads) as watch:
                    told = [work() for _ in range(count)]
                held = min([watch.held, *(share for share in told if isinstance(share, float))])
                found[name].append(Sample(watch.seconds / count, held))
                clean[name] += held >= CLEAN
            done = min(rounds, min(clean.values(), default=rounds))
            bar.update(done - bar.n)
            if done >= rounds:
                break
    return {name: Timing(tuple(samples)) for name, samples in found.items()}


def _calls_in(work: Callable[[], object], budget_s: float) -> int:
    """How often `work` fits into the budget, after one call that does not count."""
    work()
    start = time.perf_counter()
    work()
    return max(1, min(100_000, round(budget_s / max(time.perf_counter() - start, 1e-9))))
