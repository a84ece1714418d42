"""From the engine's routing decisions to a trace: the observer behind `lab.record`."""

from __future__ import annotations

import numpy as np

from ..trace.events import PAD


class Watch:
    """Feeds a `TraceRecorder`: a step per forward pass, a sequence per text, rows in batch order.

    `resident` and `bytes` are what the cache found: an expert whose block was missing carries the block's bytes once per
    event, on the first row that asked for it. Routers other than the model's may give PAD, which stays PAD, and tokens
    without any expert, which leave no row.
    """

    def __init__(self, engine, recorder):
        self.engine, self.recorder = engine, recorder
        self._step = self._sequence = -1

    def __call__(self, layer: int, ids: np.ndarray, weights: np.ndarray, lease) -> None:
        engine = self.engine
        if layer == engine.config.moe_layers[0]:
            self._step += 1
            if engine.kv.length == 0:
                self._sequence += 1
        size, cache = engine.cache.block_size, engine.cache
        used = ids != PAD
        blocks = np.where(used, ids // size, cache.blocks)  # the last stands for PAD
        hit = np.zeros(cache.blocks + 1, np.uint8)
        hit[lease.blocks] = np.array(lease.hit, np.uint8) > 0
        resident = hit[blocks]
        read = np.zeros(ids.shape, np.int64)
        _, first = np.unique(blocks.reshape(-1), return_index=True)
        missed = first[(resident.reshape(-1)[first] == 0) & used.reshape(-1)[first]]
        for at in missed.tolist():
            read.reshape(-1)[at] = cache.block_size_bytes(lease.layer, int(blocks.reshape(-1)[at]))
        rows = used.any(axis=1)
        if not rows.all():
            ids, weights, resident, read = ids[rows], weights[rows], resident[rows], read[rows]
        if rows.any():
            self.recorder.add(
                self._step, layer, lease.phase, self._sequence, engine.tokens[rows], ids, weights, resident, read
            )
