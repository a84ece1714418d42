"""Routing traces: record, import, replay, measure."""

from __future__ import annotations

from .record import TraceRecorder
from .table import Trace

__all__ = ["Trace", "TraceRecorder", "load_trace", "record_transformers"]


def __getattr__(name: str):
    # importers load on first use: the engine needs the recorder only
    if name == "load_trace":
        from .formats import load_trace

        return load_trace
    if name == "record_transformers":
        from .formats.transformers import record_transformers

        return record_transformers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
