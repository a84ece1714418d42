"""Keys and values of the tokens so far, in pages.

A page holds `page_size` positions of every layer; the page table maps a sequence's positions to pages. `paged` takes a
page when the sequence reaches it and gives all of them back at the end; `naive` is one page as long as max_seq_len,
taken at once. The attention kernel reads both through the page table, so they cannot differ in results.
"""

from __future__ import annotations

import numpy as np

from ..errors import MemoryPlanError, SettingError


class KvCache:
    """KV cache of one sequence. `k[layer]`, `v[layer]`: (pages, page_size, kv_heads, head_dim) float32."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, max_seq_len: int, kind: str = "paged", page_size: int = 256):
        if kind not in ("paged", "naive"):
            raise SettingError(f"kv_cache_type cannot be {kind!r}; Known: naive, paged")
        self.max_seq_len, self.kind = max_seq_len, kind
        self.page_size = max_seq_len if kind == "naive" else min(page_size, max_seq_len)
        self.pages_total = -(-max_seq_len // self.page_size)
        shape = (self.pages_total, self.page_size, kv_heads, head_dim)
        # Untouched pages of an empty array take no memory: the system maps them when they are first written.
        allocate = np.zeros if kind == "paged" else np.ones
        self.k = [allocate(shape, np.float32) for _ in range(layers)]
        self.v = [allocate(shape, np.float32) for _ in range(layers)]
        self.page_bytes = 2 * layers * self.page_size * kv_heads * head_dim * 4
        self.table = np.zeros(self.pages_total, np.int32)
        self._free = list(range(self.pages_total - 1, -1, -1))
        self.length = 0
        self.pages_used = 0

    def reserve(self, tokens: int) -> None:
        """Take the pages that `tokens` more positions need. Raises `MemoryPlanError` beyond max_seq_len."""
        needed = self.length + tokens
        if needed > self.max_seq_len:
            raise MemoryPlanError(
                f"KV cache: {needed} positions are needed, max_seq_len is {self.max_seq_len}; open the model with a larger one"
            )
        while self.pages_used * self.page_size < needed:
            self.table[self.pages_used] = self._free.pop()
            self.pages_used += 1

    def write(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store (tokens, kv_heads, head_dim) at the positions from `length` on; `advance` moves `length` afterwards."""
        done, tokens = 0, len(k)
        while done < tokens:
            page, at = divmod(self.length + done, self.page_size)
            n = min(tokens - done, self.page_size - at)
            self.k[layer][self.table[page], at : at + n] = k[done : done + n]
            self.v[layer][self.table[page], at : at + n] = v[done : done + n]
            done += n

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def release(self) -> None:
        """End of the sequence: every page is free again."""
        while self.pages_used:
            self.pages_used -= 1
            self._free.append(int(self.table[self.pages_used]))
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use; a naive cache is always wholly in use."""
        return self.page_bytes * (self.pages_total if self.kind == "naive" else self.pages_used)
