"""A worker for views that answer controls: serves the newest request, drops those that waited, and ends when idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Newest:
    """Calls `serve(job, stale)`, one at a time, on a thread that lives only while there is something to do.

    `stale()` turns True when somebody has asked for something newer, so that `serve` can give up early. `serve` shows its
    own errors; in the background they end with it, in `run` they are raised.
    """

    def __init__(self, serve: Callable[[Any, Callable[[], bool]], Any], name: str):
        self._serve, self._name = serve, name
        self._lock = threading.Lock()  # the three fields below
        self._mail: list = []  # at most one job
        self._turn = 0
        self._worker: threading.Thread | None = None
        self._busy = threading.RLock()  # whoever holds it may serve

    def submit(self, job) -> None:
        """Serve `job` in the background, in the place of whatever waits or runs."""
        with self._lock:
            self._mail, self._turn = [job], self._turn + 1
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()

    def run(self, job):
        """Serve `job` now, in this thread, and return what `serve` returns."""
        self.stop()
        with self._busy:
            return self._serve(job, self._staleness())

    def stop(self, timeout_s: float | None = None) -> bool:
        """Drop what waits, tell what runs that it is stale, wait. True when nothing runs any more."""
        with self._lock:
            self._mail, self._turn = [], self._turn + 1
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs any more. False after `timeout_s`, or when asked from inside `serve`."""
        with self._lock:
            worker = self._worker
        if worker is None:
            return True
        if worker is threading.current_thread():
            return False
        worker.join(timeout_s)
        return not worker.is_alive()

    def _staleness(self) -> Callable[[], bool]:
        with self._lock:
            mine = self._turn
        return lambda: self._turn != mine

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._mail:
                    self._worker = None
                    return
                job, mine = self._mail.pop(), self._turn
            with self._busy:
                try:
                    self._serve(job, lambda mine=mine: self._turn != mine)
                except Exception:  # the view shows it; the next job must still be served
                    continue
