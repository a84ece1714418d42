"""The notebooks' exercises: `check_NN_M(answer)` says at once whether the answer to exercise M of notebook NN is right.

Every checker works out the truth itself, from the model, a trace or plain arithmetic, and knows the usual wrong answers, so
that it can say what was overlooked. An answer of None, or `...`, asks for one. Nothing is graded or stored.

To add one: compute the truth, then `return compare(answer, truth, tolerance, …)`; test it with right and wrong answers.
"""

from __future__ import annotations

from .answers import UNANSWERED, compare
from .kernels_profile import STAGES_06, check_05_1, check_05_2, check_05_3, check_06_1, check_06_2, check_06_3
from .memory_formats import check_03_1, check_03_2, check_03_3, check_04_1, check_04_2, check_04_3
from .routing_cache import check_01_1, check_01_2, check_01_3, check_02_1, check_02_2, check_02_3
from .tuning import check_07_1, check_07_2, check_07_3, check_08_1, check_08_2

__all__ = [
    "STAGES_06",
    "UNANSWERED",
    "compare",
    "check_01_1",
    "check_01_2",
    "check_01_3",
    "check_02_1",
    "check_02_2",
    "check_02_3",
    "check_03_1",
    "check_03_2",
    "check_03_3",
    "check_04_1",
    "check_04_2",
    "check_04_3",
    "check_05_1",
    "check_05_2",
    "check_05_3",
    "check_06_1",
    "check_06_2",
    "check_06_3",
    "check_07_1",
    "check_07_2",
    "check_07_3",
    "check_08_1",
    "check_08_2",
]
