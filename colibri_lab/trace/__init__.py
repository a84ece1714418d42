"""Routing traces: record, import, replay, measure."""

from __future__ import annotations

import importlib

_HOMES = {
    "Trace": "table",
    "TraceRecorder": "record",
    "load_trace": "formats",
    "record_transformers": "formats.transformers",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    # Names load on first use: the command line needs none of them to print its help.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
