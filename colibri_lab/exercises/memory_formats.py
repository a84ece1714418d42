"""Exercises of notebooks 03, memory, and 04, quantisation."""

from __future__ import annotations

import numpy as np

from ..ui.exercises import Answer
from .answers import compare


def check_03_1(answer) -> Answer:
    """Blocks of 4 KiB that requests of 1, 4096 and 4097 bytes take."""
    from ..engine.memory import BLOCK, MemoryPool

    pool = MemoryPool(16 * BLOCK, warn_above=None)
    taken = []
    for size in (1, BLOCK, BLOCK + 1):
        before = pool.counts()["used_bytes"]
        pool.allocate(size, "other")
        taken.append((pool.counts()["used_bytes"] - before) // BLOCK)
    return compare(
        answer, taken, 0, unit=" blocks",
        why="A run is whole blocks; what rounding up takes is internal fragmentation.",
        typical=[
            ([0, 1, 1], "sizes are rounded up, not down: a request never gets less"),
            ([1, 1, 1], "4097 bytes are one more than a block has; the last one is in a second block"),
            ([1, 2, 2], "4096 bytes are exactly one block: nothing in it is kept for a header"),
        ],
    )  # fmt: skip


def check_03_2(answer) -> Answer:
    """16 blocks taken, every second given back: free blocks, longest free run, blocks that a request of two then gets."""
    from ..engine.experiments import holes

    found = holes(16, every=2, ask=2)
    free, largest, got = found["free"], found["largest"], 0 if found["first"] is None else 2
    return compare(
        answer, (free, largest, got), 0,
        why="The largest run decides, not the sum: half of the pool is free and two blocks in a row are nowhere.",
        typical=[
            ((free, largest, 2), "two blocks in one run are wanted, and no free block has a free neighbour"),
            ((free, largest, 1), "a request is served whole or refused; it never gets a part"),
            ((free, free, 2), "the free blocks are not side by side"),
            ((free, free, 0), "the free blocks are not side by side: the longest run is shorter than that"),
        ],
    )  # fmt: skip


def check_03_3(answer) -> Answer:
    """How many times the arenas' peak of a model of 2 layers one of 6 equal layers needs."""
    import dataclasses

    from ..checkpoint.families import read_config
    from ..config import resolve
    from ..engine.sizes import arena_peaks
    from ..front import find_model

    config, settings = read_config(find_model("colibri-tiny")), resolve({}, "open")

    def peak(layers: int) -> int:
        cut = dataclasses.replace(config, num_layers=layers, ffn=("moe",) * layers, windows=(None,) * layers)
        return sum(arena_peaks(cut, 64, settings).values())

    return compare(
        answer, peak(6) / peak(2), 0.01, unit=" times",
        why="A layer's temporaries go when the layer is done, so one layer's peak is the model's.",
        typical=[(3, "three times the layers, but they run one after the other in the same memory")],
    )  # fmt: skip


RANGE_04 = 3.0  # of exercise 2


def check_04_1(answer) -> Answer:
    """Bits per weight of 4-bit codes in groups of 64, each with a 16-bit scale and a 16-bit zero point."""
    group, weights = 64, 1 << 12
    payload = weights * 4 // 8 + (weights // group) * (2 + 2)  # bytes
    return compare(
        answer, payload * 8 / weights, 1e-6, unit=" bits",
        why="Payload bytes times 8, over weights; here int4-g64 keeps its zero points in one byte: 4.375.",
        typical=[
            (4, "that is the codes alone; a scale and a zero point per group have to be stored too"),
            (4 + 16 / group, "the zero point is stored as well"),
            (4 + 24 / group, "that is this project's int4-g64, whose zero point is one byte; here both take 16 bits"),
            (36, "16 + 16 bits are for a group, not for every weight"),
        ],
    )  # fmt: skip


def check_04_2(answer) -> Answer:
    """Largest rounding error of int8 with a scale from the smallest to the largest value, when they are 3.0 apart."""
    steps = 255
    return compare(
        answer, RANGE_04 / steps / 2, 1e-5,
        why="256 codes have 255 steps between them, and the nearest code is at most half a step away.",
        typical=[
            (RANGE_04 / steps, "that is a whole step; the nearest code is at most half of one away"),
            (RANGE_04 / (steps + 1) / 2, "nearly: 256 codes have 255 steps between them"),
            (
                RANGE_04 / (steps + 1),
                "256 codes have 255 steps between them, and the nearest is at most half of one away",
            ),
        ],
    )  # fmt: skip


def check_04_3(answer) -> Answer:
    """One weight of a matrix of 128 x 192 grows a hundredfold: weights whose scale changes, with int4-g64 and int4-row."""
    from ..checkpoint.formats import FORMATS, spread
    from ..rounding import round_matrix

    w = np.random.default_rng(4).normal(size=(128, 192)).astype(np.float32)
    grown = w.copy()
    grown[5, 70] *= 100

    def changed(format: str) -> int:
        a, b = (round_matrix(m, format) for m in (w, grown))
        return int(np.broadcast_to(spread(a.scale != b.scale, FORMATS[format], w.shape[1]), w.shape).sum())

    return compare(
        answer, [changed("int4-g64"), changed("int4-row")], 0, unit=" weights",
        why="A scale reaches as far as its group; the others are rounded as before.",
        typical=[
            ((w.size, w.size), "not the whole matrix: each group, or row, has a scale of its own"),
            ((1, 1), "its neighbours share its scale, and are rounded in coarser steps from now on"),
            ((192, 64), "these are right, the other way round: groups first"),
        ],
    )  # fmt: skip
