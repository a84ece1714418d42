"""What quantisation costs, measured: texts and windows, losses on identical tokens, errors of single matrices."""

from .logits import Comparison, compare
from .report import QualityReport, quality_report
from .texts import Text, Window, stdlib_texts, windows

__all__ = ["Comparison", "QualityReport", "Text", "Window", "compare", "quality_report", "stdlib_texts", "windows"]
