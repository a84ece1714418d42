"""What every checker ends with: an answer compared with the truth, and with the usual wrong answers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..ui.exercises import Answer

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
