"""The notebooks' exercises: `check_NN_M(answer)` says at once whether the answer to exercise M of notebook NN is right.

Every checker works out the truth itself, from the model, a trace or plain arithmetic, and knows the usual wrong answers, so
that it can say what was overlooked. An answer of None, or `...`, asks for one. Nothing is graded or stored.

To add one: compute the truth, then `return compare(answer, truth, tolerance, …)`; test it with right and wrong answers.
"""

from __future__ import annotations

from collections.abc import Iterable

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
