"""Keys and values of the tokens so far, in pages out of the memory pool.

A page holds `page_size` positions of every layer: [layer][keys, values][position][kv_head][head_dim], float32 or
float16. A sequence's page table maps positions to pages. `paged` takes a page when the sequence reaches it; `naive` is
a single page as long as max_seq_len. Both give everything back at the end, and the kernels read both through the page
table, so they cannot differ in results. Sequences may begin with the same pages: those are counted, and copied when one
of them writes.
"""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..config import ModelConfig
from ..errors import MemoryPlanError, SettingError
from .memory import BLOCK, MemoryPool
from .sizes import page_shape

LARGEST_HALF = 65504.0


class KvPages:
    """The pages of all sequences of one engine. A page's number is its first block in the pool."""

    def __init__(self, pool: MemoryPool, config: ModelConfig, settings: dict, load=kernels.load):
        self.load = load
        self.pool, self.kv_heads, self.max_seq_len = pool, config.num_kv_heads, settings["max_seq_len"]
        self.half = settings["kv_dtype"] == "fp16"
        self.page_size, self.page_bytes = page_shape(config, settings)
        self.layer_bytes = self.page_size * config.num_kv_heads * config.head_dim * (2 if self.half else 4)
        self.per_sequence = -(-self.max_seq_len // self.page_size)
        self._holders: dict[int, int] = {}  # page → sequences that hold it

    def take(self) -> int:
        """A fresh page. Raises `PoolExhausted`."""
        page = self.pool.allocate(self.page_bytes, "kv") // BLOCK
        self._holders[page] = 1
        return page

    def share(self, page: int) -> int:
        self._holders[page] += 1
        return page

    def drop(self, page: int) -> None:
        """One holder less; without holders the page goes back to the pool."""
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            self.pool.release(page * BLOCK)

    def shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def copy(self, page: int) -> int:
        """A page of its own with the same content, in exchange for one hold on `page`."""
        own = self.take()
        memory, size = self.pool.memory, self.page_bytes
        memory[own * BLOCK : own * BLOCK + size] = memory[page * BLOCK : page * BLOCK + size]
        self.drop(page)
        return own

    @property
    def used(self) -> int:
        """Pages in use; one that several sequences hold counts once."""
        return len(self._holders)


class KvCache:
    """KV cache of one sequence: `length` positions, in pages `table[: pages_used]`."""

    def __init__(self, pages: KvPages):
        self.pages, self.max_seq_len, self.page_size = pages, pages.max_seq_len, pages.page_size
        self.table = np.zeros(pages.per_sequence, np.int32)
        self.length = 0
        self.pages_used = 0
        kernel = pages.load("attention")
        self._write, self._attend = kernel.write_pool, kernel.attend_pool

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more positions. Raises `MemoryPlanError` beyond max_seq_len, `PoolExhausted`."""
        needed = self.length + tokens
        if needed > self.max_seq_len:
            raise MemoryPlanError(
                f"KV cache: {needed} positions are needed, max_seq_len is {self.max_seq_len}; open the model with a larger one"
            )
        last, at = divmod(self.length, self.page_size)
        if at and self.pages.shared(int(self.table[last])):
            self.table[last] = self.pages.copy(int(self.table[last]))
        while self.pages_used * self.page_size < needed:
            self.table[self.pages_used] = self.pages.take()
            self.pages_used += 1

    def adopt(self, other: KvCache, tokens: int) -> None:
        """Begin this empty sequence with the first `tokens` positions of another, sharing its pages."""
        if self.length or not 0 <= tokens <= other.length or other.pages is not self.pages:
            raise SettingError(
                f"adopt: an empty sequence of the same engine can begin with up to {other.length} positions of the other, "
                f"asked for {tokens} with {self.length} of its own"
            )
        self.pages_used = -(-tokens // self.page_size)
        for i in range(self.pages_used):
            self.table[i] = self.pages.share(int(other.table[i]))
        self.length = tokens

    def write(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store (tokens, kv_heads, head_dim) float32 at the positions from `length` on; `advance` moves `length` later.

        Raises `SettingError` for a number that float16 cannot hold.
        """
        p, k_at = self.pages, 2 * layer * self.pages.layer_bytes
        largest = self._write(
            k, v, p.pool.memory, self.table, k_at, k_at + p.layer_bytes, p.page_size, p.half, self.length
        )
        if largest > LARGEST_HALF:
            raise SettingError(
                f"kv_dtype fp16 cannot hold a key or value of {largest:g} in layer {layer}; open the model with kv_dtype='fp32'"
            )

    def attend(self, layer: int, q: np.ndarray, window: int, scale: float, out: np.ndarray, threads: int) -> None:
        """out, q (tokens, heads, head_dim) at the positions from `length` on, over all positions up to their own."""
        p, k_at = self.pages, 2 * layer * self.pages.layer_bytes
        self._attend(
            q, p.pool.memory, self.table, k_at, k_at + p.layer_bytes, p.page_size, p.kv_heads, p.half, self.length, window,
            scale, out, threads,
        )  # fmt: skip

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def release(self) -> None:
        """End of the sequence: every page goes back to the pool, unless another sequence holds it too."""
        while self.pages_used:
            self.pages_used -= 1
            self.pages.drop(int(self.table[self.pages_used]))
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that this sequence holds, shared ones included."""
        return self.pages_used * self.pages.page_bytes
