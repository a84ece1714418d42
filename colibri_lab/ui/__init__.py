"""Views: `run_monitor` moves while the model generates, `router_explorer` looks into its routers, `cache_tuner` replays
recorded routing; `plots` and `router_plots` draw the same pictures for paper.

The views read what was recorded and compute nothing else, so every number here can be had without a picture.
"""

from . import plots, router_plots
from .cache_tuner import CacheTuner, cache_tuner
from .exercises import check, fewest_slots
from .plots import pipeline
from .router_view import RouterExplorer, router_explorer
from .widgets import RunMonitor, run_monitor

__all__ = [
    "CacheTuner",
    "RouterExplorer",
    "RunMonitor",
    "cache_tuner",
    "check",
    "fewest_slots",
    "pipeline",
    "plots",
    "router_explorer",
    "router_plots",
    "run_monitor",
]
