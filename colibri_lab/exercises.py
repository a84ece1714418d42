"""The notebooks' exercises: `check_NN_M(answer)` says at once whether the answer to exercise M of notebook NN is right.

Every checker works out the truth itself, from the model, a trace or plain arithmetic, and knows the usual wrong answers, so
that it can say what was overlooked. An answer of None, or `...`, asks for one. Nothing is graded or stored.

To add one: compute the truth, then `return compare(answer, truth, tolerance, …)`; test it with right and wrong answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from .ui.exercises import Answer

UNANSWERED = "no answer yet: replace None in the cell above and run both cells again"


def compare(
    answer, truth, tolerance: float, unit: str = "", why: str = "", typical: Iterable[tuple[object, str]] = ()
) -> Answer:
    """A number, or numbers in any nesting, against `truth` of the same count, each within ± `tolerance`.

    `typical` are wrong answers with what they overlook, compared with the same tolerance; `why` explains the right one.
    """
    if answer is None or answer is ...:
        return Answer(None, UNANSWERED)
    truth = np.ravel(truth)
    given = _numbers(answer)
    if given is None or len(given) != len(truth):
        wanted = "a number is" if len(truth) == 1 else f"{len(truth)} numbers are"
        return Answer(False, f"{wanted} wanted, got {answer!r}")
    if (np.abs(given - truth) <= tolerance).all():
        return Answer(True, f"yes: {_said(truth, unit)}.{' ' * bool(why)}{why}")
    for wrong, reason in typical:
        if (np.abs(given - np.ravel(wrong)) <= tolerance).all():
            return Answer(False, f"not quite: {reason}")
    return Answer(False, f"not quite: you said {_said(given, unit)}; look again")


def _numbers(answer) -> np.ndarray | None:
    """float64 (n,) of numbers in lists, tuples, arrays or dicts, in order; None where anything else is in there."""
    if isinstance(answer, dict):
        answer = tuple(answer.values())
    if isinstance(answer, (list, tuple, np.ndarray)):
        parts = [_numbers(part) for part in answer]
        return None if any(part is None for part in parts) or not parts else np.concatenate(parts)
    if isinstance(answer, bool) or not isinstance(answer, (int, float, np.integer, np.floating)):
        return None
    return np.array([answer], np.float64)


def _said(values: np.ndarray, unit: str) -> str:
    return ", ".join(f"{value:.4g}{unit}" for value in values)


# 01 router

LOGITS_01 = (2.0, 1.0, 0.0, -1.0)  # of exercises 1 and 3
BIAS_01 = (0.0, 0.0, 0.0, 10.0)  # of exercise 3


def check_01_1(answer) -> Answer:
    """Weights of the two chosen experts, for logits 2, 1, 0, -1 and k = 2: softmax renormalised, then sigmoid."""
    from .routing import rules

    table = rules(LOGITS_01, 2)[[0, 1]]
    softmax, whole, sigmoid = (
        table.loc[name].to_numpy()
        for name in ("softmax, top-k, renormalised", "softmax, then top-k", "sigmoid, top-k, renormalised")
    )
    not_summed = "those softmax weights are shares of all four experts and sum to less than 1; divide them by their sum"
    score = 1 / (1 + np.exp(-np.array(LOGITS_01[:2])))
    return compare(
        answer,
        [softmax, sigmoid],
        1e-3,
        why="Both pick experts 0 and 1; they differ only in how much each counts.",
        typical=[
            ([whole, sigmoid], not_summed),
            ([whole, score], not_summed),
            ([softmax, score], "the sigmoid scores still have to be divided by their sum"),
            ([sigmoid, softmax], "these are right, the other way round: softmax first"),
        ],
    )


def check_01_2(answer) -> Answer:
    """Percent of colibri-tiny's weights that one token is multiplied with."""
    from .checkpoint.families import read_config
    from .front import find_model
    from .routing import parameters

    config = read_config(find_model("colibri-tiny"))
    count = parameters(config)
    routed = 100 * config.top_k / config.num_experts
    return compare(
        answer,
        100 * count["active"] / count["total"],
        0.8,
        unit=" %",
        why="Attention, the dense layer, the shared experts and the head work for every token.",
        typical=[
            (
                routed,
                f"{routed:g} % is the share of the routed experts; much of the rest of the model works for every token",
            ),
            (
                100 * (count["active"] + count["embedding"]) / count["total"],
                "the embedding is a table from which a token takes one row; nothing is multiplied with the rest of it",
            ),
            (count["active"] / count["total"], "in percent, please"),
        ],
    )


def check_01_3(answer) -> Answer:
    """Weight of expert 3 for logits 2, 1, 0, -1, k = 2, sigmoid scores, when its correction bias is +10."""
    from .routing import rules

    truth = rules(LOGITS_01, 2, BIAS_01).loc["sigmoid, bias chooses", 3]
    score = 1 / (1 + np.exp(-np.array(LOGITS_01)))
    biased = score + BIAS_01
    return compare(
        answer,
        truth,
        1e-3,
        why="The bias gets it chosen, always; its weight comes from its plain sigmoid, and stays small.",
        typical=[
            (
                biased[3] / (biased[3] + biased[0]),
                "the bias takes part in choosing only; the weight is made from the plain sigmoid",
            ),
            (1.0, "the bias takes part in choosing only; the weight is made from the plain sigmoid"),
            (score[3], "nearly: that is its sigmoid, which is then divided by the sum over the two chosen experts"),
            (0.0, "it is chosen: experts are compared by sigmoid plus bias, and 10 is more than any sigmoid"),
        ],
    )


# 02 expert cache

SETS_02 = ((0, 1), (2, 0))  # of exercise 1: what two tokens want of one layer
SLOTS_02 = 16  # of exercise 3


@cache
def _shipped_trace(name: str):
    from .front import project_root
    from .trace import load_trace

    return load_trace(project_root() / "data/traces" / name)


def _olmoe():
    return _shipped_trace("warp_olmoe_1b7b_299.jsonl")


def check_02_1(answer) -> Answer:
    """Hits of a cache of two slots when a token wants experts {0, 1} and the next {2, 0}, served together (atomic)."""
    from .trace import Trace

    header = {"num_experts": 3, "ranked": True}
    trace = Trace.from_rows(step=range(len(SETS_02)), layer=[0, 0], experts=SETS_02, header=header)
    together, one_by_one = (int(trace.replay("lru", 2, lookup=lookup).hits.sum()) for lookup in ("atomic", "serial"))
    return compare(
        answer,
        together,
        0,
        why="Expert 0 is still there when the second token asks for both; only 2 must be read, and 1 leaves for it.",
        typical=[
            (one_by_one, "that is serial lookup: 2 comes first, throws out 0, and a moment later 0 is missing"),
            (2, "expert 2 has never been asked for before, so it cannot be there"),
        ],
    )


def check_02_2(answer) -> Answer:
    """OLMoE with one pool for all layers and lru: the fewest slots with any hit."""
    from .trace.experiments import cliff

    found, trace = cliff(_olmoe()).attrs, _olmoe()
    layers, k = len(trace.layers), found["cycle"] // len(trace.layers)
    return compare(
        answer,
        found["first"],
        0,
        unit=" slots",
        why=f"The other {layers - 1} layers ask for {k} experts each before a layer has its turn again, so "
        f"{found['first'] - 1} slots hold nothing of its last visit.",
        typical=[
            (found["first"] - 1, "so close: with that many the last expert leaves just before its layer has its turn"),
            (
                found["cycle"],
                "with that many a whole token fits; the first hit needs fewer, look at the foot of the step",
            ),
            (k, "that is one layer's share of a token; this pool is shared by all layers"),
            (1, "one slot is overwritten by the next expert at once; nothing lives until its next use"),
        ],
    )


def check_02_3(answer) -> Answer:
    """OLMoE, 16 slots per layer, lru: percent of layer steps that find all eight experts in memory."""
    totals = _olmoe().replay("lru", SLOTS_02).attrs["totals"]
    hit, full = totals["hit_rate"], totals["full_event_hit_rate"]
    k = _olmoe().k
    return compare(
        answer,
        100 * full,
        0.3,
        unit=" %",
        why=f"If the picks were independent it would be {100 * hit**k:.1f} %; they are not: an easy token is easy for all.",
        typical=[
            (
                100 * hit**k,
                f"{hit:.3f} to the power {k} takes the picks for independent; a token that repeats repeats more than one",
            ),
            (100 * hit, "that is the share of single experts; here all eight of a layer must be there together"),
            (full, "in percent, please"),
        ],
    )


# 03 memory


def check_03_1(answer) -> Answer:
    """Blocks of 4 KiB that requests of 1, 4096 and 4097 bytes take."""
    from .engine.memory import BLOCK, MemoryPool

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
    from .engine.experiments import holes

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

    from .checkpoint.families import read_config
    from .config import resolve
    from .engine.sizes import arena_peaks
    from .front import find_model

    config, settings = read_config(find_model("colibri-tiny")), resolve({}, "open")

    def peak(layers: int) -> int:
        cut = dataclasses.replace(config, num_layers=layers, ffn=("moe",) * layers, windows=(None,) * layers)
        return sum(arena_peaks(cut, 64, settings).values())

    return compare(
        answer, peak(6) / peak(2), 0.01, unit=" times",
        why="A layer's temporaries go when the layer is done, so one layer's peak is the model's.",
        typical=[(3, "three times the layers, but they run one after the other in the same memory")],
    )  # fmt: skip


# 04 quantisation

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
    from .checkpoint.formats import FORMATS, spread
    from .rounding import round_matrix

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


# 05 kernels

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
    from .ui.kernel_lessons import sum_order

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


# 06 pipeline profile

SKIP_06 = 10  # of exercise 1: tokens at the start that are left out
COMPUTE_06, STALL_06 = 90.0, 40.0  # ms, of exercise 2, at a hit rate of
HITS_06 = (0.90, 0.95)  # before and after
STAGES_06 = {"attention": 0.6, "router": 0.2, "expert_compute": 1.4, "shared_expert": 0.3, "head": 0.2, "other": 0.1,
             "expert_load_wait": 2.2}  # ms, of exercise 3  # fmt: skip
SERVICE_06 = 6.4  # ms that the loader threads were reading meanwhile


def check_06_1(answer) -> Answer:
    """Qwen3 trace without its first 10 tokens: (ms a token waits without any miss, ms per miss), by least squares."""
    from .front import project_root
    from .ui.profile_lessons import decode_times, line

    times = decode_times(
        _shipped_trace("bigmoe_qwen.route.csv"), project_root() / "data/traces/bigmoe_qwen.metrics.csv"
    )
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
