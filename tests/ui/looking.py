"""What tests of views ask again and again: what a panel shows, which threads run, and two readers at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np


def values_of(panel) -> np.ndarray:
    """The numbers that were sent to the browser."""
    return np.frombuffer(panel.data, np.float32).reshape(panel.spec["shape"])


def threads() -> list[str]:
    """Names of the package's threads that run now."""
    return [t.name for t in threading.enumerate() if t.name.startswith("colibri-")]


def until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not within time"
        time.sleep(0.005)


def together(*works: Callable[[], object]) -> None:
    """Every one of `works` at once, each on a thread of its own. Raises what any of them raised."""
    trouble = []

    def guarded(work) -> None:
        try:
            work()
        except BaseException as error:
            trouble.append(error)

    workers = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    if trouble:
        raise trouble[0]
    assert not any(worker.is_alive() for worker in workers)


def hammer(actions: Callable[[random.Random], Sequence[Callable]], times: int) -> None:
    """Two threads do `times` of `actions` each at once, picked at random."""

    def work(seed: int) -> None:
        pick = random.Random(seed)
        todo = actions(pick)
        for _ in range(times):
            pick.choice(todo)()

    together(lambda: work(1), lambda: work(2))
