"""Runs jobs on a `Lab`, one at a time, in the background or in the caller's thread. Knows no widgets.

The mailbox has one slot: a newer job replaces one that waits and ends the one that runs. The worker thread lives only
while there is something to do, so nothing is left running when a notebook ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from .runs import Job, MonitorRun


class Watcher(Protocol):
    """What a `Runner` tells; called on the thread that runs the job, with no lock held."""

    interval_s: float  # between two calls of `paint`

    def begun(self, run: MonitorRun) -> None: ...  # still without steps; it grows from here on
    def paint(self) -> None: ...  # from a thread of its own, while a run lasts
    def ended(self, run: MonitorRun, replaced: bool) -> None: ...  # replaced: another run follows at once
    def failed(self, run: MonitorRun, error: BaseException) -> None: ...


class Runner:
    """Serves one `lab` and reports to one `watcher`."""

    def __init__(self, lab, watcher: Watcher):
        self.lab, self.watcher = lab, watcher
        self._lock = threading.Lock()  # the three fields below; never held while the engine computes
        self._mail: Job | None = None
        self._worker: threading.Thread | None = None
        self._cancel: threading.Event | None = None  # of the run that is under way
        self._engine = threading.Lock()  # whoever holds it may use the lab
        self._running: threading.Thread | None = None  # and is this thread

    def submit(self, job: Job) -> None:
        """Run `job` in the background as soon as the present run has been stopped."""
        with self._lock:
            self._mail = job
            self._interrupt()
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="colibri-monitor", daemon=True)
                self._worker.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Drop what waits, end what runs after its current step, wait for it. True when nothing runs any more."""
        with self._lock:
            self._mail = None
            self._interrupt()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs any more. True when that is so, False after `timeout_s` or from inside the run."""
        with self._lock:
            worker = self._worker
        if threading.current_thread() is self._running:
            return False
        if worker is not None:
            worker.join(timeout_s)
            if worker.is_alive():
                return False
        free = self._engine.acquire(timeout=-1 if timeout_s is None else timeout_s)
        if free:
            self._engine.release()
        return free

    def run(self, job: Job) -> MonitorRun:
        """Run `job` now, in this thread. Raises what the engine raises."""
        with self._engine:
            with self._lock:
                cancel = self._cancel = threading.Event()
            return self._run(job, cancel)

    def _interrupt(self) -> None:
        if self._cancel is not None:
            self._cancel.set()
            self.lab.stop()

    def _serve(self) -> None:
        while True:
            with self._engine:
                with self._lock:
                    job, self._mail = self._mail, None
                    if job is None:
                        self._worker = None
                        return
                    cancel = self._cancel = threading.Event()
                try:
                    self._run(job, cancel)
                except Exception:  # the watcher has shown it; the next job must still be served
                    continue

    def _run(self, job: Job, cancel: threading.Event) -> MonitorRun:
        lab = self.lab
        wanted = {"expert_cache_slots": job.slots, "policy": job.policy}
        run = MonitorRun(job, dict(lab.settings) | wanted | job.generate, lab.config.moe_layers, lab.config.top_k)
        self._running = threading.current_thread()
        try:
            self.watcher.begun(run)
            with Ticker(self.watcher.paint, self.watcher.interval_s):
                self._stream(run, wanted, cancel)
            with self._lock:
                replaced = self._mail is not None
            self.watcher.ended(run, replaced)
            return run
        except BaseException as error:
            self.watcher.failed(run, error)
            raise
        finally:
            self._running = None
            with self._lock:
                self._cancel = None

    def _stream(self, run: MonitorRun, wanted: dict, cancel: threading.Event) -> None:
        """Fill `run`, from a cold cache, so that runs with different settings start alike."""
        lab, generate = self.lab, run.job.generate
        if any(lab.settings[name] != value for name, value in wanted.items()):
            lab.configure(**wanted)
            run.settings = dict(lab.settings) | generate  # as they took effect
        lab.reset_cache()
        stream = lab.stream(run.prompt, **generate)
        try:
            while not cancel.is_set() and (step := next(stream, None)) is not None:
                run.add(step, lab.residency())
        finally:
            stream.close()
        tokens = run.tokens
        if cancel.is_set() and len(tokens) < generate["max_tokens"]:
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
