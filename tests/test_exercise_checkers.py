"""Every checker, with right answers, the usual wrong ones, none, and nonsense."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from colibri_lab import exercises
from colibri_lab.exercises import compare

CHECKERS = {name: f for name, f in vars(exercises).items() if name.startswith("check_")}
RIGHT = {
    "check_01_1": [[(0.731, 0.269), (0.546, 0.454)], {"softmax": [0.7311, 0.2689], "sigmoid": [0.5464, 0.4536]}],
    "check_01_2": [23.4, 23],
    "check_01_3": [0.234, np.float32(0.2339)],
}
WRONG = {
    "check_01_1": {
        ((0.644, 0.237), (0.546, 0.454)): "sum to less than 1",
        ((0.731, 0.269), (0.881, 0.731)): "sigmoid scores still have to be divided",
        ((0.546, 0.454), (0.731, 0.269)): "the other way round",
        ((0.5, 0.5), (0.5, 0.5)): "you said 0.5, 0.5, 0.5, 0.5; look again",
        (0.731, 0.269): "4 numbers are wanted",
    },
    "check_01_2": {
        12.5: "12.5 % is the share of the routed experts",
        28: "takes one row",
        0.234: "in percent",
        50: "look again",
        "23": "a number is wanted, got '23'",
    },
    "check_01_3": {
        0.921: "takes part in choosing only",
        1: "takes part in choosing only",
        0.269: "divided by the sum",
        0: "it is chosen",
        0.5: "look again",
    },
}


@pytest.mark.parametrize("name", CHECKERS)
def test_every_checker_is_tested_documented_and_named_after_its_exercise(name):
    assert re.fullmatch(r"check_\d\d_\d", name)
    assert inspect.getdoc(CHECKERS[name]).endswith(".")
    assert RIGHT[name] and WRONG[name]


@pytest.mark.parametrize("name, answer", [(name, a) for name, answers in RIGHT.items() for a in answers])
def test_right_answers(name, answer):
    got = CHECKERS[name](answer)
    assert got.ok is True and str(got).startswith("✓ yes: "), got


@pytest.mark.parametrize("name, answer, hint", [(n, a, h) for n, cases in WRONG.items() for a, h in cases.items()])
def test_wrong_answers_are_told_what_they_overlook(name, answer, hint):
    got = CHECKERS[name](answer)
    assert got.ok is False and hint in str(got), got


@pytest.mark.parametrize("name", CHECKERS)
@pytest.mark.parametrize("answer", [None, ...])
def test_no_answer_yet(name, answer):
    got = CHECKERS[name](answer)
    assert got.ok is None and "no answer yet: replace None" in got._repr_html_()


@pytest.mark.parametrize("name", CHECKERS)
@pytest.mark.parametrize("answer", ["much", True, [], {}, float("nan"), [[]], object(), [None], 1e300])
def test_nonsense_is_wrong_and_nothing_breaks(name, answer):
    assert CHECKERS[name](answer).ok is False


def test_compare_takes_numbers_in_any_nesting_and_knows_typical_mistakes():
    assert compare([1, (2.0, np.array([3, 4]))], [1, 2, 3, 4], 0).ok is True
    assert compare(5.5, 5, 0.5).ok is True and compare(5.51, 5, 0.5).ok is False
    told = compare(7, 5, 0.5, unit=" slots", why="Because.", typical=[(7, "that counts twice")])
    assert str(told) == "✗ not quite: that counts twice"
    assert str(compare(5, 5, 0.5, unit=" slots", why="Because.")) == "✓ yes: 5 slots. Because."
