"""Views that move: `run_monitor` while the model generates, `router_explorer` into its routers, `cache_tuner` over recorded
routing, `memory_map` into the memory pool, `quality_explorer` and `matrix_explorer` into number formats, `profile_view` over a
token's time, `kernel_bench` under the roofline, `what_if` around any question. Pictures that stay: `plots`, `router_plots`,
`memory_plots`, `tune_plots`, and the findings of `cache_lessons`, `claim_lessons`, `kernel_lessons`, `memory_lessons`,
`plan_lessons`, `profile_lessons` and `start_lessons`.

The views read what was recorded or replayed, so every number here can be had without a picture.
"""

from . import (
    cache_lessons,
    claim_lessons,
    kernel_lessons,
    memory_lessons,
    memory_plots,
    plan_lessons,
    plots,
    profile_lessons,
    router_plots,
    start_lessons,
    tune_plots,
)
from .cache_tuner import CacheTuner, cache_tuner
from .exercises import check, fewest_slots
from .kernel_bench import KernelBench, kernel_bench
from .memory_view import MemoryMap, memory_map
from .plots import pipeline
from .profile_view import ProfileView, profile_view
from .quality_view import MatrixExplorer, QualityExplorer, matrix_explorer, quality_explorer
from .router_view import RouterExplorer, router_explorer
from .run_monitor import RunMonitor, run_monitor
from .what_if import Finding, WhatIf, what_if

__all__ = [
    "CacheTuner",
    "Finding",
    "KernelBench",
    "MatrixExplorer",
    "MemoryMap",
    "ProfileView",
    "QualityExplorer",
    "RouterExplorer",
    "RunMonitor",
    "WhatIf",
    "cache_lessons",
    "cache_tuner",
    "check",
    "claim_lessons",
    "fewest_slots",
    "kernel_bench",
    "kernel_lessons",
    "matrix_explorer",
    "memory_lessons",
    "memory_map",
    "memory_plots",
    "pipeline",
    "plan_lessons",
    "plots",
    "profile_lessons",
    "profile_view",
    "quality_explorer",
    "router_explorer",
    "router_plots",
    "run_monitor",
    "start_lessons",
    "tune_plots",
    "what_if",
]
