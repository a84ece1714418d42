"""Reading routing traces of many engines: `load_trace` looks at what is in a file, never at its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import TraceError, did_you_mean
from ..table import Trace
from . import arrays, binary, colibri, jsonl, parquet, sglang, tables
from .common import Head


@dataclass(frozen=True)
class Format:
    """One importer: how to recognise its files, how to read them, what they hold."""

    name: str
    about: str
    recognise: Callable[[Head], bool]
    load: Callable[..., Trace]

    @property
    def options(self) -> list[str]:
        """Names that `load_trace(path, **options)` takes for this format."""
        return list(inspect.signature(self.load).parameters)[1:]


_ALL = (
    Format("colibri-lab", "our parquet", lambda head: head.bytes[:4] == b"PAR1", parquet.load),
    Format("iku1", "colibri IKU1 usage counts", colibri.is_iku1, colibri.load_iku1),
    Format("mbolt", "mbolt binary routing log", binary.is_mbolt, binary.load_mbolt),
    Format("imatrix", "llama.cpp importance matrix (GGUF), expert counts", binary.is_imatrix, binary.load_imatrix),
    Format("sglang", "SGLang expert distribution recorder (.pt)", sglang.is_torch, sglang.load_sglang),
    Format("routed-experts", "vLLM / SGLang routed experts (npy, npz)", arrays.is_routed, arrays.load_routed),
    Format("router-logits", "transformers router logits (npz)", arrays.is_logits, arrays.load_logits),
    Format("warp", "WARP JSONL, a decode token per line", jsonl.is_warp, jsonl.load_warp),
    Format("moe-cache-lab", "moe-cache-lab JSONL version 1 or 2", jsonl.is_cache_lab, jsonl.load_cache_lab),
    Format("lattice", "lattice JSONL, an event per line", jsonl.is_lattice, jsonl.load_lattice),
    Format("bigmoe", "BigMoeOnEdge route CSV", tables.is_bigmoe, tables.load_bigmoe),
    Format("bigmoe-metrics", "BigMoeOnEdge timings: not a trace", tables.is_metrics, tables.refuse_metrics),
    Format("event-table", "moe-cache-eval event table", tables.is_event_table, tables.load_event_table),
    Format("sglang-counts", "SGLang counts CSV", tables.is_count_table, tables.load_count_table),
    Format("usage", "colibri .coli_usage / stats counts", colibri.is_usage, colibri.load_usage),
    Format("route", "colibri ROUTE_TRACE lines", colibri.is_route, colibri.load_route),
    Format("matrix", "load matrix (layers, experts): npy, npz, JSON", arrays.is_matrix, arrays.load_matrix),
)

FORMATS: dict[str, Format] = {format.name: format for format in _ALL}


def load_trace(path, format: str | None = None, **options) -> Trace:
    """Read a routing trace of any known format, recognised by content (or named by `format`).

    `options` are the importer's own, for what a file does not say: `num_experts`, `moe_layers`, `config`, …
    Raises `TraceError` naming the file, the line or byte, what was expected and what was found.
    """
    head = Head(path)
    if format is None:
        chosen = next((f for f in _ALL if f.recognise(head)), None)
        if chosen is None:
            start = head.line[:60] or head.bytes[:16]
            raise TraceError(
                f"{path}: not a trace of any known format; it starts {start!r}. Known: {', '.join(FORMATS)}"
            )
    elif format in FORMATS:
        chosen = FORMATS[format]
    else:
        raise TraceError(f"unknown trace format {format!r}; {did_you_mean(format, FORMATS)}")
    unknown = set(options) - set(chosen.options)
    if unknown:
        takes = ", ".join(chosen.options) or "no options"
        raise TraceError(f"{path}: format {chosen.name} does not take {min(unknown)!r}; it takes {takes}")
    try:
        trace = chosen.load(path, **options)
    except TraceError as error:
        if str(path) in str(error):
            raise
        raise TraceError(f"{path}: {error}") from error
    trace.header["notes"] = [*trace.header["notes"]]
    return trace
