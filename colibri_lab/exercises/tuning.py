"""Exercises of notebooks 07, tuning, and 08, claims."""

from __future__ import annotations

from ..ui.exercises import Answer
from .answers import compare

SLOTS_BUDGET_07 = 2e9  # bytes, of exercise 1
DISK_07, COMPUTE_07, HITS_07 = 1e9, 0.090, 0.75  # of exercise 2: bytes/s, seconds a token computes, hit rate


def _olmoe():
    from ..tune.shapes import find_shape

    return find_shape("OLMoE-1B-7B").in_format("int8")


def check_07_1(answer) -> Answer:
    """Slots per layer that 2 GB hold for OLMoE in int8: 16 layers, 6.31 MB an expert."""
    shape = _olmoe()
    layers, each = len(shape.moe_layers), shape.block_bytes
    slots = SLOTS_BUDGET_07 // (layers * each)
    return compare(
        answer, slots, 0, unit=" slots",
        why=f"A slot per layer costs {layers} × {each / 1e6:.3g} MB = {layers * each / 1e6:.0f} MB.",
        typical=[
            (SLOTS_BUDGET_07 // each, f"that many in all; each of the {layers} layers needs slots of its own"),
            (slots + 1, "that is a little more than 2 GB; a slot is there whole or not at all"),
        ],
    )  # fmt: skip


def check_07_2(answer) -> Answer:
    """Tokens/s of OLMoE in int8 at a hit rate of 75 %: 1 GB/s of disk and then 90 ms of compute, nothing at the same time."""
    shape = _olmoe()
    asked = shape.top_k * len(shape.moe_layers) * shape.block_bytes
    wait = asked * (1 - HITS_07) / DISK_07
    return compare(
        answer, 1 / (wait + COMPUTE_07), 0.06, unit=" tokens/s",
        why=f"{asked * (1 - HITS_07) / 1e6:.0f} MB a token are read in {1e3 * wait:.0f} ms; then it is computed. With both at "
        f"once it would be {1 / max(wait, COMPUTE_07):.3g}.",
        typical=[
            (1 / wait, "that is the disk alone; a token is computed, too"),
            (1 / (asked * HITS_07 / DISK_07 + COMPUTE_07), "those are the hits, which are not read"),
            (1 / (asked / DISK_07 + COMPUTE_07), "that reads every expert; three of four are in memory"),
            (1 / COMPUTE_07, "that is compute alone; a quarter of the experts must be read first"),
        ],
    )  # fmt: skip


def check_07_3(answer) -> Answer:
    """Fewest pairs of runs, all won by B, that chance explains in less than 1 % of cases (either side could have won)."""
    from ..tune.compare import CHANCE

    pairs = next(n for n in range(1, 64) if 2 * 0.5**n < CHANCE)
    return compare(
        answer, pairs, 0, unit=" pairs",
        why=f"All to one side happens by chance in 2 of 2^{pairs} = {2**pairs} cases, {2 / 2**pairs:.2%}.",
        typical=[
            (pairs - 1, "one side in particular wins all of them that rarely, but A could have won them all as well"),
            (1, "one pair is a coin thrown once"),
            (100, "1 % does not mean 100 runs: each further pair halves the chance"),
        ],
    )  # fmt: skip


def check_08_1(answer) -> Answer:
    """Bytes of KV cache of one token in Mixtral-8x7B: 32 layers, 8 heads of keys and values of 128 numbers each, fp16."""
    from ..tune.shapes import find_shape

    shape = find_shape("Mixtral-8x7B")
    layer = 2 * shape.kv_elements
    return compare(
        answer, layer * shape.layers, 0, unit=" bytes",
        why="A claim of 128 bytes a token is off by a factor of a thousand.",
        typical=[
            (layer, f"that is one layer; each of the {shape.layers} keeps keys and values of its own"),
            (layer * shape.layers / 2, "keys and values, two of each; or two bytes for each number"),
            (layer * shape.layers / 4, "keys and values, and two bytes for each number"),
        ],
    )  # fmt: skip


def check_08_2(answer) -> Answer:
    """Fewest requests of which one is slower than the P99.9."""
    return compare(
        answer, 1000, 0, unit=" requests",
        why="With fewer, the P99.9 is the slowest request by another name.",
        typical=[
            (100, "that is enough for a P99; here one in a thousand is slower"),
            (999, "one of them is slower, and 999 are not"),
        ],
    )  # fmt: skip
