"""Exercises of notebooks 01, the router, and 02, the expert cache."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..ui.exercises import Answer
from .answers import compare

LOGITS_01 = (2.0, 1.0, 0.0, -1.0)  # of exercises 1 and 3
BIAS_01 = (0.0, 0.0, 0.0, 10.0)  # of exercise 3


def check_01_1(answer) -> Answer:
    """Weights of the two chosen experts, for logits 2, 1, 0, -1 and k = 2: softmax renormalised, then sigmoid."""
    from ..routing import rules

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
    from ..checkpoint.families import read_config
    from ..front import find_model
    from ..routing import parameters

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
    from ..routing import rules

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


SETS_02 = ((0, 1), (2, 0))  # of exercise 1: what two tokens want of one layer
SLOTS_02 = 16  # of exercise 3


@cache
def shipped_trace(name: str):
    from ..front import project_root
    from ..trace import load_trace

    return load_trace(project_root() / "data/traces" / name)


def _olmoe():
    return shipped_trace("warp_olmoe_1b7b_299.jsonl")


def check_02_1(answer) -> Answer:
    """Hits of a cache of two slots when a token wants experts {0, 1} and the next {2, 0}, served together (atomic)."""
    from ..trace import Trace

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
    from ..trace.experiments import cliff

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
