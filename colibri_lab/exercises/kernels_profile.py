"""Exercises of notebooks 05, kernels, and 06, the pipeline profile."""

from __future__ import annotations

import numpy as np

from ..ui.exercises import Answer
from .answers import compare
from .routing_cache import shipped_trace

READ_05, TOKEN_05 = 21.8, 0.307  # of exercise 1: GB/s that two threads can read, GB that a decoded token reads
PEAK_05, OPERATIONS_05 = 291.0, 0.570  # GFLOP/s of two threads, GFLOP that a decoded token needs
ROWS_05 = 16  # of exercise 2
SUM_05 = {"length": 2048, "orders": 100, "seed": 5}  # of exercise 3


def check_05_1(answer) -> Answer:
    """The most tokens per second at 21.8 GB/s and 291 GFLOP/s, when a token reads 0.307 GB and needs 0.570 GFLOP."""
    by_bytes, by_operations = READ_05 / TOKEN_05, PEAK_05 / OPERATIONS_05
    return compare(
        answer,
        by_bytes,
        0.5,
        unit=" tokens/s",
        why=f"The operations alone would allow {by_operations:.0f}; they wait for the bytes.",
        typical=[
            (by_operations, "that is what the arithmetic allows; how long does it take to read the weights?"),
            (TOKEN_05 / READ_05, "that is seconds per token; the question is tokens per second"),
            (1 / (1 / by_bytes + 1 / by_operations), "reading and computing overlap, so the slower of the two decides"),
        ],
    )


def check_05_2(answer) -> Answer:
    """Operations per byte of weights of a product with an int8 matrix: with one row of activations, and with 16."""
    return compare(
        answer,
        (2, 2 * ROWS_05),
        0.1,
        why="Every weight is one byte and takes part in one multiplication and one addition for each row.",
        typical=[
            ((2, 2), "the weights are read once however many rows meet them"),
            ((1, ROWS_05), "a multiply-add is two operations"),
            ((2 * ROWS_05, 2), "these are right, the other way round: first one row, then 16"),
        ],
    )


def check_05_3(answer) -> Answer:
    """Of 100 orders of one sum, how many pass numpy.isclose against the first, and how many are equal to it."""
    from ..ui.kernel_lessons import sum_order

    results = sum_order(**SUM_05).table["sum"].to_numpy()
    close, equal = int(np.isclose(results, results[0]).sum()), int((results == results[0]).sum())
    return compare(
        answer,
        (close, equal),
        0,
        why="A kernel that adds in another order is right all the same: compare with a tolerance, not for equality.",
        typical=[
            ((close, close), "the last digits differ from order to order; compare with == and count"),
            ((equal, close), "these are right, the other way round: first isclose, then =="),
            ((close, equal - 1), "the first order is one of them"),
        ],
    )


SKIP_06 = 10  # of exercise 1: tokens at the start that are left out
COMPUTE_06, STALL_06 = 90.0, 40.0  # ms, of exercise 2, at a hit rate of
HITS_06 = (0.90, 0.95)  # before and after
STAGES_06 = {"attention": 0.6, "router": 0.2, "expert_compute": 1.4, "shared_expert": 0.3, "head": 0.2, "other": 0.1,
             "expert_load_wait": 2.2}  # ms, of exercise 3  # fmt: skip
SERVICE_06 = 6.4  # ms that the loader threads were reading meanwhile


def check_06_1(answer) -> Answer:
    """Qwen3 trace without its first 10 tokens: (ms a token waits without any miss, ms per miss), by least squares."""
    from ..front import project_root
    from ..ui.profile_lessons import decode_times, line

    times = decode_times(shipped_trace("bigmoe_qwen.route.csv"), project_root() / "data/traces/bigmoe_qwen.metrics.csv")
    rest = times.iloc[SKIP_06:]
    wait, wall = line(rest.misses, rest.wait_ms), line(rest.misses, rest.wall_ms)
    return compare(
        answer,
        wait[:2],
        np.array([0.6, 0.06]),
        why=f"With wall time instead the correlation drops from {wait[2]:.3f} to {wall[2]:.2f}: compute varies for reasons of its own.",
        typical=[
            (
                wall[:2],
                "that line is fitted to wall time, in which compute hides the misses; subtract compute_ms first",
            ),
            (wait[1::-1], "these are right, the other way round: first the ms without a miss, then the ms per miss"),
        ],
    )


def check_06_2(answer) -> Answer:
    """Milliseconds per token when the hit rate rises from 90 to 95 %: before, 90 ms of compute and 40 ms of stall."""
    before, after = HITS_06
    ratio = (1 - after) / (1 - before)
    whole = COMPUTE_06 + STALL_06
    return compare(
        answer,
        COMPUTE_06 + STALL_06 * ratio,
        0.5,
        unit=" ms",
        why="Misses halve, and with them the stall; compute stays.",
        typical=[
            (whole * ratio, "only the stall halves; compute does not care where an expert came from"),
            (STALL_06 * ratio, "that is what is left of the stall; the token is computed, too"),
            (
                COMPUTE_06 + STALL_06 * before / after,
                "count misses, not hits: they fall from 10 to 5 %, which is by half",
            ),
            (COMPUTE_06, "the other 5 % still miss"),
        ],
    )


def check_06_3(answer) -> Answer:
    """Milliseconds of wall time of a token, from its stages and the time that loader threads spent reading meanwhile."""
    wall = sum(STAGES_06.values())
    wait = STAGES_06["expert_load_wait"]
    return compare(
        answer,
        wall,
        0.01 * wall,
        unit=" ms",
        why=f"Stages exclude each other and sum to wall time. Of {SERVICE_06} ms of reading only the wait of {wait} ms is in there; "
        "the rest happened while something else was computed.",
        typical=[
            (
                wall + SERVICE_06,
                "reading overlaps the stages, and what does not is expert_load_wait already: it must not be added",
            ),
            (
                wall - wait + SERVICE_06,
                "reading is not waiting: most of it happened while experts that were there were computed",
            ),
            (wall - wait, "waiting is wall time, too"),
        ],
    )
