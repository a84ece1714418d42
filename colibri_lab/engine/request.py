"""What one sequence needs besides the weights: its KV cache, its arenas, a row of logits and one to sample from."""

from __future__ import annotations

import numpy as np

from ..config import ModelConfig
from .kv_cache import KvCache, KvPages
from .memory import Arenas, MemoryPool
from .sizes import EngineSizes


class Request:
    """State of one sequence. Arenas and KV pages are its own, so requests may take turns between steps in any order.

    Made by `Engine.new_request`; `close` gives everything back. Not thread-safe.
    """

    def __init__(self, pool: MemoryPool, pages: KvPages, config: ModelConfig, sizes: EngineSizes, settings: dict):
        self.kv = KvCache(pages)
        self.arenas = Arenas(pool, sizes.arenas, settings["dynamic_arena"], settings["check_memory"])
        self.logits = pool.array(pool.allocate(sizes.logits_bytes, "arena"), (1, config.vocab_size), np.float32)
        self.probabilities = pool.array(
            pool.allocate(sizes.probability_bytes, "arena"), (config.vocab_size,), np.float64
        )
        self.open = False

    def close(self) -> None:
        """The sequence is over: its pages are free and the next `new_request` may use its arenas."""
        self.kv.release()
        self.open = False

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_) -> None:
        self.close()
