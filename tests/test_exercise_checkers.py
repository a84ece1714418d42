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
    "check_03_1": [(1, 1, 2), np.array([1, 1, 2])],
    "check_03_2": [(8, 1, 0)],
    "check_03_3": [1, 1.0],
    "check_04_1": [4.5, 4 + 32 / 64],
    "check_04_2": [3 / 255 / 2, 0.00588],
    "check_04_3": [(64, 192), {"g64": 64, "row": 192}],
    "check_02_1": [1, [1]],
    "check_02_2": [121, np.int64(121)],
    "check_02_3": [7.46, 7.5],
    "check_05_1": [71, 71.0],
    "check_05_2": [(2, 32), [2.0, 32.0]],
    "check_05_3": [(100, 3), {"isclose": 100, "equal": 3}],
    "check_06_1": [(7.25, 0.984), [7, 0.98], {"ms at no miss": 7.4, "ms per miss": 1.0}],
    "check_06_2": [110, 110.0],
    "check_06_3": [5, 5.0],
    "check_07_1": [19, 19.0],
    "check_07_2": [3.43, 3.4],
    "check_07_3": [8],
    "check_08_1": [131072, 128 * 1024],
    "check_08_2": [1000],
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
    "check_03_1": {
        (0, 1, 1): "rounded up, not down",
        (1, 1, 1): "in a second block",
        (1, 2, 2): "exactly one block",
        (2, 2, 2): "look again",
        1: "3 numbers are wanted",
    },
    "check_03_2": {
        (8, 1, 2): "no free block has a free neighbour",
        (8, 1, 1): "served whole or refused",
        (8, 8, 2): "not side by side",
        (8, 8, 0): "the longest run is shorter",
        (7, 1, 0): "look again",
    },
    "check_03_3": {3: "one after the other in the same memory", 2: "look again"},
    "check_04_1": {
        4: "the codes alone",
        4.25: "the zero point is stored as well",
        4.375: "whose zero point is one byte",
        36: "not for every weight",
        5: "look again",
    },
    "check_04_2": {
        3 / 255: "a whole step",
        3 / 256 / 2: "255 steps between them",
        3 / 256: "at most half of one away",
        0.5: "look again",
    },
    "check_04_3": {
        (24576, 24576): "not the whole matrix",
        (1, 1): "share its scale",
        (192, 64): "the other way round",
        (64, 64): "look again",
    },
    "check_02_1": {0: "that is serial lookup", 2: "never been asked for", 3: "look again"},
    "check_02_2": {
        120: "just before its layer has its turn",
        128: "look at the foot of the step",
        8: "one layer's share",
        1: "overwritten by the next expert",
        100: "look again",
    },
    "check_02_3": {
        1.6: "takes the picks for independent",
        59.7: "all eight of a layer",
        0.075: "in percent",
        30: "look again",
    },
    "check_05_1": {
        511: "what the arithmetic allows",
        0.0141: "seconds per token",
        62.3: "the slower of the two decides",
        100: "look again",
    },
    "check_05_2": {
        (2, 2): "read once however many rows",
        (1, 16): "a multiply-add is two operations",
        (32, 2): "the other way round",
        (4, 64): "look again",
        2: "2 numbers are wanted",
    },
    "check_05_3": {
        (100, 100): "the last digits differ",
        (3, 100): "the other way round",
        (100, 2): "the first order is one of them",
        (100, 50): "look again",
    },
    "check_06_1": {
        (108.7, 1.26): "subtract compute_ms first",
        (0.984, 7.25): "the other way round",
        (0, 1): "look again",
        7: "2 numbers are wanted",
    },
    "check_06_2": {
        65: "only the stall halves",
        20: "the token is computed, too",
        127.9: "count misses, not hits",
        90: "still miss",
        100: "look again",
    },
    "check_06_3": {
        11.4: "must not be added",
        9.2: "reading is not waiting",
        2.8: "waiting is wall time",
        7: "look again",
    },
    "check_07_1": {
        316: "each of the 16 layers needs slots of its own",
        20: "a slot is there whole or not at all",
        8: "look again",
    },
    "check_07_2": {
        4.95: "a token is computed, too",
        1.44: "those are the hits",
        1.11: "that reads every expert",
        11.1: "compute alone",
        2: "look again",
    },
    "check_07_3": {
        7: "A could have won them all as well",
        1: "a coin thrown once",
        100: "each further pair halves the chance",
        5: "look again",
    },
    "check_08_1": {
        4096: "that is one layer",
        65536: "keys and values, two of each",
        32768: "two bytes for each number",
        128: "look again",
    },
    "check_08_2": {
        100: "enough for a P99",
        999: "999 are not",
        10000: "look again",
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
