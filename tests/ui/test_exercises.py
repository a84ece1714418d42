from __future__ import annotations

import pytest

from colibri_lab.errors import SettingError
from colibri_lab.ui import check, fewest_slots


@pytest.mark.parametrize(
    ("answer", "ok", "text"),
    [
        (None, None, "… no answer yet"),
        (47, True, "✓ yes: you said 47 %, measured 47.2 %. Text repeats itself."),
        (25, False, "✗ not quite: you said 25 %, measured 47.2 %. Text repeats itself."),
        (52.2, True, "✓ yes"),
        (52.3, False, "✗ not quite"),
        ("47", False, "a number is wanted, got '47'"),
        (True, False, "a number is wanted, got True"),
        (float("nan"), False, "not quite"),
    ],
)
def test_check(answer, ok, text):
    got = check(answer, 47.2, tolerance=5, unit=" %", why="Text repeats itself")
    assert got.ok is ok and text in str(got) and str(got) in got._repr_html_()


def test_fewest_slots_is_what_trying_all_finds(lab):
    def misses(slots):
        lab.configure(expert_cache_slots=slots)
        decode = [s.misses for s in lab.stream("x", max_tokens=40, seed=2) if s.phase == "decode"]
        return sum(decode) / len(decode)

    slow = min(slots for slots in range(1, 33) if misses(slots) < 6)
    lab.configure(expert_cache_slots=8, policy="weighted-lru")
    assert fewest_slots(lab, 6, "x", max_tokens=40, seed=2) == slow
    assert (lab.settings["expert_cache_slots"], lab.settings["policy"]) == (8, "weighted-lru")


def test_fewest_slots_refuses_the_impossible(lab):
    with pytest.raises(SettingError, match="all 32 experts in memory still miss more often"):
        fewest_slots(lab, 0, "x", max_tokens=10)
    assert lab.settings["expert_cache_slots"] == 8
