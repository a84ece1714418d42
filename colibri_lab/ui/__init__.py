"""Views: `run_monitor` moves while the model generates, `plots` draws the same pictures for paper.

The views read what the recorder counted and compute nothing else, so every number here can be had without a picture.
"""

from . import plots
from .cache_tuner import CacheTuner, cache_tuner
from .exercises import check, fewest_slots
from .plots import pipeline
from .widgets import RunMonitor, run_monitor

__all__ = [
    "CacheTuner",
    "RunMonitor",
    "cache_tuner",
    "check",
    "fewest_slots",
    "pipeline",
    "plots",
    "run_monitor",
]
