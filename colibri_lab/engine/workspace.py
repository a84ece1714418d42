"""Scratch arrays that are allocated once and reused by every layer and every step."""

from __future__ import annotations

import numpy as np


class Workspace:
    """Named scratch: `take("q", (tokens, 192))` returns a view of one buffer per name, grown only when it is too small.

    A view is valid until the same name is taken again. Layers take the same names, so peak scratch does not depend on
    how many layers there are.
    """

    def __init__(self):
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
        size = 1
        for n in shape:
            size *= n
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, dtype)
        return buffer[:size].reshape(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
