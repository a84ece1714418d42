"""Ungraded exercises: an answer, the measured truth, and at once a sentence about the difference."""

from __future__ import annotations

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
