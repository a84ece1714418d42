"""A worker for views that answer controls: serves the newest request, drops those that waited, and ends when idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import ColibriError


class Newest:
    """Calls `serve(job, stale)`, one at a time, on a thread that lives only while there is something to do.

    `stale()` turns True when somebody has asked for something newer, so that `serve` can give up early; `interrupt` is
    called then, too, while something is being served. `serve` shows its own errors; in the background they end with it, in
    `run` they are raised.
    """

    def __init__(
        self, serve: Callable[[Any, Callable[[], bool]], Any], name: str, interrupt: Callable[[], Any] | None = None
    ):
        self._serve, self._name, self._interrupt = serve, name, interrupt
        self._lock = threading.Lock()  # the fields below; never held while anything is served
        self._mail: list = []  # at most one job
        self._turn = 0
        self._worker: threading.Thread | None = None
        self._serving: threading.Thread | None = None
        self._busy = threading.Lock()  # whoever holds it may serve

    @property
    def more(self) -> bool:
        """Another job follows at once."""
        return bool(self._mail)

    def submit(self, job) -> None:
        """Serve `job` in the background, in the place of whatever waits or runs."""
        with self._lock:
            self._replace([job])
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()

    def run(self, job):
        """Serve `job` now, in this thread, and return what `serve` returns. `ColibriError` when asked from inside `serve`."""
        if not self.stop():
            raise ColibriError(
                f"{self._name}: asked to run from inside its own run; submit() it, or wait for the end first"
            )
        with self._busy:
            with self._lock:
                mine, self._serving = self._turn, threading.current_thread()
            return self._answer(job, mine)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Drop what waits, tell what runs that it is stale, wait. True when nothing runs any more."""
        with self._lock:
            self._replace([])
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs any more. False after `timeout_s`, or when asked from inside `serve`."""
        with self._lock:
            worker = self._worker
        if threading.current_thread() is self._serving:
            return False
        if worker is not None:
            worker.join(timeout_s)
            if worker.is_alive():
                return False
        free = self._busy.acquire(timeout=-1 if timeout_s is None else timeout_s)
        if free:
            self._busy.release()
        return free

    def _replace(self, mail: list) -> None:
        self._mail, self._turn = mail, self._turn + 1
        if self._serving is not None and self._interrupt is not None:
            self._interrupt()

    def _answer(self, job, mine: int):
        try:
            return self._serve(job, lambda: self._turn != mine)
        finally:
            with self._lock:
                self._serving = None

    def _work(self) -> None:
        while True:
            with self._busy:
                with self._lock:
                    if not self._mail:
                        self._worker = None
                        return
                    job, mine, self._serving = self._mail.pop(), self._turn, threading.current_thread()
                try:
                    self._answer(job, mine)
                except Exception:  # the view shows it; the next job must still be served
                    continue
