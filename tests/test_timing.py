"""Timing in turn: order, what counts as clean, and what is said when nothing is."""

from __future__ import annotations

import time

import pytest

from colibri_lab.errors import SettingError
from colibri_lab.timing import Sample, Stopwatch, Timing, race


def samples(*pairs) -> Timing:
    return Timing(tuple(Sample(seconds, held) for seconds, held in pairs))


def test_median_and_spread_are_over_the_samples_that_held_their_cores():
    timing = samples((1.0, 1.0), (1.2, 0.97), (1.1, 0.99), (9.0, 0.5), (8.0, 0.1))
    assert (timing.median_s, timing.low_s, timing.high_s) == (1.1, 1.0, 1.2)
    assert (timing.clean, timing.dropped, timing.trusted) == (3, 2, True)


def test_with_too_few_clean_samples_all_are_shown_and_none_are_dropped():
    timing = samples((1.0, 1.0), (2.0, 0.5), (3.0, 0.5))
    assert (timing.median_s, timing.clean, timing.dropped, timing.trusted) == (2.0, 1, 0, False)


def test_per_divides_seconds_and_keeps_the_share():
    timing = samples((6.0, 1.0), (4.0, 0.3)).per(2)
    assert [(s.seconds, s.held) for s in timing.samples] == [(3.0, 1.0), (2.0, 0.3)]


def test_contenders_take_turns_and_the_order_alternates():
    said = []
    race({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, rounds=3, budget_s=1e-9, patience=1)
    assert "".join(said[-6:]) == "abbaab"


def test_a_contender_that_lost_its_cores_is_tried_again_but_not_for_ever():
    tries = []

    def starved() -> float:
        tries.append(0)
        return 0.2  # what its own threads held

    timing = race({"starved": starved}, rounds=2, budget_s=1e-9, patience=3)["starved"]
    assert len(timing.samples) == 6 and timing.clean == 0 and not timing.trusted
    assert all(s.held <= 0.2 for s in timing.samples)  # the process itself may have held less


def test_a_sleeping_process_is_not_taken_for_a_starved_one():
    with Stopwatch(2) as watch:
        time.sleep(0.05)
    assert watch.seconds >= 0.05
    assert 0 <= watch.held <= 1


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"patience": 0}, {"budget_s": 0}])
def test_impossible_races_are_refused(wrong):
    with pytest.raises(SettingError, match="rounds and patience must be at least 1"):
        race({"a": lambda: None}, **wrong)
