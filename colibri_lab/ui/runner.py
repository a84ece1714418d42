"""Runs jobs on a `Lab`, one at a time, in the background or in the caller's thread. Knows no widgets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from .newest import Newest
from .runs import Job, MonitorRun


class Watcher(Protocol):
    """What a `Runner` tells; called on the thread that runs the job, with no lock held."""

    interval_s: float  # between two calls of `paint`

    def begun(self, run: MonitorRun) -> None: ...  # still without steps; it grows from here on
    def paint(self) -> None: ...  # from a thread of its own, while a run lasts
    def ended(self, run: MonitorRun, replaced: bool) -> None: ...  # replaced: another run follows at once
    def failed(self, run: MonitorRun, error: BaseException) -> None: ...


class Runner(Newest):
    """Serves `Job`s on one `lab` and reports to one `watcher`; a newer job ends the one that runs after its step."""

    def __init__(self, lab, watcher: Watcher):
        super().__init__(self._run, "colibri-monitor", interrupt=lab.stop)
        self.lab, self.watcher = lab, watcher

    def _run(self, job: Job, stale: Callable[[], bool]) -> MonitorRun:
        lab = self.lab
        wanted = {"expert_cache_slots": job.slots, "policy": job.policy}
        run = MonitorRun(job, dict(lab.settings) | wanted | job.generate, lab.config.moe_layers, lab.config.top_k)
        try:
            self.watcher.begun(run)
            with Ticker(self.watcher.paint, self.watcher.interval_s):
                self._stream(run, wanted, stale)
            self.watcher.ended(run, self.more)
            return run
        except BaseException as error:
            self.watcher.failed(run, error)
            raise

    def _stream(self, run: MonitorRun, wanted: dict, stale: Callable[[], bool]) -> None:
        """Fill `run`, from a cold cache, so that runs with different settings start alike."""
        lab, generate = self.lab, run.job.generate
        if any(lab.settings[name] != value for name, value in wanted.items()):
            lab.configure(**wanted)
            run.settings = dict(lab.settings) | generate  # as they took effect
        lab.reset_cache()
        stream = lab.stream(run.prompt, **generate)
        try:
            while not stale() and (step := next(stream, None)) is not None:
                run.add(step, lab.residency())
        finally:
            stream.close()
        tokens = run.tokens
        if stale() and len(tokens) < generate["max_tokens"]:
            run.stop_reason = "interrupted"
        else:
            run.stop_reason = "eos" if tokens and tokens[-1] in lab.config.eos_token_ids else "length"


class Ticker:
    """`with Ticker(draw, interval_s):` calls `draw` on a thread of its own until the block ends.

    Drawing never takes more than half of the time. What `draw` raised is raised at the end of the block.
    """

    def __init__(self, draw: Callable[[], None], interval_s: float):
        self._draw, self._interval_s = draw, interval_s
        self._end = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._tick, name="colibri-painter", daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._end.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _tick(self) -> None:
        pause = self._interval_s
        while not self._end.wait(pause):
            start = time.perf_counter()
            try:
                self._draw()
            except Exception as error:
                self._error = error
                return
            pause = max(self._interval_s, time.perf_counter() - start)
