"""Ungraded exercises: an answer, the measured truth, and at once a sentence about the difference."""

from __future__ import annotations

import bisect

from ..errors import SettingError
from .theme import LIGHT


class Answer:
    """`ok` is True, False, or None while there is no answer; prints and shows as its sentence."""

    def __init__(self, ok: bool | None, text: str):
        self.ok, self.text = ok, text

    def __str__(self) -> str:
        mark = {True: "✓ ", False: "✗ ", None: "… "}[self.ok]
        return mark + self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        color = {True: LIGHT["attention"], False: LIGHT["miss"], None: LIGHT["other"]}[self.ok]
        return f'<div style="border-left: 4px solid {color}; padding: 2px 10px">{self}</div>'


def check(answer, truth: float, tolerance: float, unit: str = "", why: str = "") -> Answer:
    """Compare a number with `truth` within ± `tolerance`. `answer` None (or `...`) asks for one; `why` explains."""
    if answer is None or answer is ...:
        return Answer(None, "no answer yet: replace None in the cell above and run both cells again")
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        return Answer(False, f"a number is wanted, got {answer!r}")
    close = abs(answer - truth) <= tolerance
    told = f"{'yes' if close else 'not quite'}: you said {answer:g}{unit}, measured {truth:.4g}{unit}"
    return Answer(close, f"{told}. {why}".rstrip(". ") + ".")


def fewest_slots(lab, misses_below: float, prompt: str, **generate) -> int:
    """The smallest slots per layer with which a run misses less than `misses_below` times per decoded token.

    Every trial starts from a cold cache; the settings of `lab` are put back. `generate` are settings of that scope.
    Raises `SettingError` when even all experts in memory miss more often.
    """
    before = {name: lab.settings[name] for name in ("expert_cache_slots", "scope", "policy")}

    def enough(slots: int) -> bool:
        lab.configure(expert_cache_slots=slots, scope="layer", policy="lru")
        decode = [s.misses for s in lab.stream(prompt, **generate) if s.phase == "decode"]
        return sum(decode) < misses_below * max(len(decode), 1)

    every = range(1, lab.config.num_experts + 1)
    try:
        index = bisect.bisect_left(every, True, key=enough)  # with lru, more slots never miss more often
    finally:
        lab.configure(**before)
    if index == len(every):
        raise SettingError(f"misses_below {misses_below}: all {len(every)} experts in memory still miss more often")
    return every[index]
