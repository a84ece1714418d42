"""Grouped-query attention of one layer, with every family's switches: biases, q/k norms, clipping, partial rotary."""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..config import ModelConfig, RopeConfig
from .kv_cache import KvCache
from .memory import MemoryPool
from .sizes import matmul_scratch


class Rotary:
    """cos and sin of every position's angles, (positions, dims / 2) float32; filled as sequences get longer."""

    def __init__(self, rope: RopeConfig, positions: int, pool: MemoryPool):
        self.interleaved = rope.style == "interleaved"
        j = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
        self._frequencies = (1.0 / np.power(np.float32(rope.theta), j)).astype(np.float32)
        shape = (2, positions, rope.dims // 2)
        self.cos, self.sin = pool.array(pool.allocate(4 * positions * rope.dims, "rotary"), shape, np.float32)
        self._ready = 0

    def upto(self, positions: int) -> None:
        while self._ready < positions:
            first, last = self._ready, min(self._ready + 256, len(self.cos))
            angles = np.arange(first, last, dtype=np.float32)[:, None] * self._frequencies
            np.cos(angles, out=self.cos[first:last])
            np.sin(angles, out=self.sin[first:last])
            self._ready = last


class Attention:
    """out = o · attend(rotate(norm(q)), rotate(norm(k)), v) for one layer; keys and values go through the KV cache."""

    def __init__(self, config: ModelConfig, layer: int, weights: dict, rotary: Rotary, threads: int, load=kernels.load):
        c = config
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, c.num_heads, c.num_kv_heads, c.head_dim
        self.window = c.windows[layer] or 0
        self.scale = c.head_dim**-0.5
        self.qk_norm, self.eps, self.clip = c.qk_norm, c.rms_norm_eps, c.clip_qkv
        self.q, self.k, self.v, self.o = (weights[name] for name in "qkvo")
        self.q_norm, self.k_norm = weights.get("q_norm"), weights.get("k_norm")
        self.rotary, self.threads = rotary, threads
        self._rotate, self._rms_norm = load("attention").rotate, load("norm").rms_norm

    def __call__(self, x: np.ndarray, kv: KvCache, arena) -> np.ndarray:
        """x (tokens, hidden) at positions kv.length … → (tokens, hidden) in the arena."""
        tokens, past = len(x), kv.length
        room = arena.take((matmul_scratch(tokens, max(self.q.cols, self.o.cols)),), np.uint8)
        q = self.q(x, arena.take((tokens, self.heads * self.head_dim), np.float32), room)
        k = self.k(x, arena.take((tokens, self.kv_heads * self.head_dim), np.float32), room)
        v = self.v(x, arena.take((tokens, self.kv_heads * self.head_dim), np.float32), room)
        if self.qk_norm != "none":
            self._normalise(q, self.q_norm)
            self._normalise(k, self.k_norm)
        if self.clip is not None:
            for part in (q, k, v):
                np.clip(part, -self.clip, self.clip, out=part)
        q = q.reshape(tokens, self.heads, self.head_dim)
        k = k.reshape(tokens, self.kv_heads, self.head_dim)
        cos, sin = self.rotary.cos[past : past + tokens], self.rotary.sin[past : past + tokens]
        self._rotate(q, cos, sin, self.rotary.interleaved)
        self._rotate(k, cos, sin, self.rotary.interleaved)
        kv.write(self.layer, k, v.reshape(k.shape))
        out = arena.take(q.shape, np.float32)
        kv.attend(self.layer, q, self.window, self.scale, out, self.threads)
        return self.o(out.reshape(tokens, -1), arena.take(x.shape, np.float32), room)

    def _normalise(self, x: np.ndarray, weight: np.ndarray) -> None:
        """RMS norm in place, per head or over all heads together, as wide as the weight is."""
        rows = x.reshape(-1, len(weight))
        self._rms_norm(rows, weight, self.eps, rows, self.threads)
