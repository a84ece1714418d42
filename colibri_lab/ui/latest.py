"""A mailbox with one slot: the newest request is worked on, older ones that have not begun are dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Latest:
    """Calls `work(request)` on a thread of its own, which lives only while there is something to do.

    `work` must not raise: whoever asks is not there any more to hear it.
    """

    def __init__(self, work: Callable[[Any], None], name: str):
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._mail: tuple | None = None  # (request,)
        self._worker: threading.Thread | None = None

    def submit(self, request: Any) -> None:
        """Work on `request` as soon as what is under way has ended."""
        with self._lock:
            self._mail = (request,)
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._worker.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is nothing to do. True when that is so, False after `timeout_s`."""
        with self._lock:
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout_s)
            return not worker.is_alive()
        return worker is None

    def clear(self) -> None:
        """Drop what waits; what is under way goes on."""
        with self._lock:
            self._mail = None

    def _serve(self) -> None:
        while True:
            with self._lock:
                mail, self._mail = self._mail, None
                if mail is None:
                    self._worker = None
                    return
            self._work(*mail)
