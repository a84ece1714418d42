"""Comma-separated traces: BigMoeOnEdge route and metrics files, event tables of moe-cache-eval, SGLang's old counts."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from ..table import PAD, PREFILL, Trace
from .common import Head, bad, expert_range, numbered_lines, pad_rows

_ROUTE = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_METRICS = "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms"
_EVENTS = "event_index,scheduler_step,layer,requested_experts,misses,hits"
_COUNTS = "layer_id,expert_id,count"


def _title(head: Head) -> str:
    return next((line for line in head.lines if not line.startswith("#")), "")


def _table(path, title: str, types: dict[str, type]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns by name, and the line number of each record. `types` gives a column's type when it is not int."""
    names = title.split(",")
    rows, numbers = [], []
    for number, line in numbered_lines(path, comment="#"):
        parts = line.split(",")
        if not numbers and not rows and line == title:
            numbers.append(number)
            continue
        if not numbers:
            raise bad(path, f"line {number}", f"the header {title}", repr(line[:80]))
        if len(parts) != len(names):
            raise bad(path, f"line {number}", f"{len(names)} fields", f"{len(parts)}: {line[:80]!r}")
        rows.append(parts)
        numbers.append(number)
    if not rows:
        raise bad(path, "end of file", "at least one record", "none")
    columns = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        kind = types.get(name, int)
        try:
            columns[name] = np.array(values if kind is str else list(map(kind, values)))
        except ValueError:
            at = next(i for i, value in enumerate(values) if not _converts(kind, value))
            raise bad(path, f"line {numbers[at + 1]}", f"{name} as {kind.__name__}", repr(values[at])) from None
    return columns, np.array(numbers[1:])


def _converts(kind: type, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def is_bigmoe(head: Head) -> bool:
    return _title(head) == _ROUTE


def load_bigmoe(path) -> Trace:
    """BigMoeOnEdge route trace: a row per (token, layer, rank) with weight, residency and bytes read.

    A turn's prompt is one step (one row per token), each generated token another. `turn` becomes the sequence number.
    """
    column, lines = _table(path, _ROUTE, {"weight": float})
    head = Head(path).lines
    facts = dict(re.findall(r"(\w+)=(\S+)", next((line for line in head if "model=" in line), "")))
    sizes = {int(m[1]): int(m[2]) for line in head if (m := re.match(r"#\s*layer=(\d+) expert_bytes=(\d+)", line))}
    k = int(facts.get("n_expert_used", column["slot"].max() + 1))
    n = len(lines) // k
    wrong = np.flatnonzero(column["slot"][: n * k] != np.tile(np.arange(k), n))
    if len(wrong) or n * k != len(lines):
        at = int(wrong[0]) if len(wrong) else len(lines) - 1
        found = f"slot {column['slot'][at]}" if len(wrong) else f"the file ends after {len(lines)} rows"
        raise bad(path, f"line {lines[at]}", f"{k} rows per token and layer, slot 0 to {k - 1}", found)
    key = np.stack([column[name].reshape(n, k) for name in ("turn", "phase", "step", "layer")])
    split = np.flatnonzero((key != key[:, :, :1]).any((0, 2)))
    if len(split):
        raise bad(path, f"line {lines[split[0] * k]}", f"one turn, phase, step and layer in {k} rows", "several")
    turn, phase, token, layer = key[:, :, 0]
    notes = ["a prompt is taken as one step; the engine may have run it in several batches"]
    run = pd.MultiIndex.from_arrays([turn, phase, np.where(phase == PREFILL, -1, token)])
    step = pd.factorize(run)[0]
    row = token - pd.Series(token).groupby(step).transform("min").to_numpy()
    prompt = phase == PREFILL
    rows_in = pd.Series(np.ones(n)).groupby([step, layer]).transform("sum").to_numpy()
    short = np.unique(layer[prompt & (rows_in < pd.Series(rows_in).groupby(step).transform("max").to_numpy())])
    if len(short):
        notes.append(
            f"layers {short.tolist()} list fewer prompt tokens than the others: only outputs that were needed ran"
        )
    if prompt.any() and not column["residency"].reshape(n, k)[prompt].any():
        notes.append(
            "residency is 0 throughout the prompt: the engine loads a prompt's union and records no hits there"
        )
    experts = column["expert"].reshape(n, k)
    told = int(facts["n_expert"]) if "n_expert" in facts else None
    header = {"model": facts.get("model"), "engine": "BigMoeOnEdge", "capture": "route_trace v1", "ranked": True,
              "num_experts": expert_range(path, int(experts.max()), told, notes), "expert_bytes": sizes or None,
              "notes": notes}  # fmt: skip
    return Trace.from_rows(
        step=step,
        layer=layer,
        row=row,
        sequence=turn,
        phase=phase,
        experts=experts,
        weights=column["weight"].reshape(n, k),
        resident=column["residency"].reshape(n, k) != 0,
        bytes=column["expert_bytes"].reshape(n, k),
        header=header,
    )


def is_metrics(head: Head) -> bool:
    return _title(head) == _METRICS


def refuse_metrics(path) -> Trace:
    raise bad(path, "line 1", "a routing trace", "per-token timings; read them with formats.tables.read_metrics")


def read_metrics(path) -> pd.DataFrame:
    """BigMoeOnEdge metrics: one row per generated token; the file's own summary line as numbers in `.attrs["summary"]`.

    `cache_hit_pct` is cumulative since the start, as recorded.
    """
    whole = {"step", "steps", "read_bytes", "majflt"}
    column, _ = _table(path, _METRICS, {name: float for name in _METRICS.split(",") if name not in whole})
    table = pd.DataFrame(column)
    text = Head(path).path.read_text(encoding="utf-8", errors="replace")
    summary = next((line for line in text.splitlines() if line.startswith("# summary")), "")
    table.attrs["summary"] = {name: float(value) for name, value in re.findall(r"(\S+)=(-?\d[\d.]*)", summary)}
    return table


def is_event_table(head: Head) -> bool:
    return _title(head) == _EVENTS


def load_event_table(path, num_experts: int | None = None) -> Trace:
    """moe-cache-eval events: the set each (scheduler step, layer) asked for, with the answer of one cache setting."""
    column, lines = _table(path, _EVENTS, {"requested_experts": str})
    rows, notes = [], []
    for text, number in zip(column["requested_experts"], lines, strict=True):
        ids = text.split()
        if not ids or not all(i.isdigit() for i in ids) or len(set(ids)) != len(ids):
            raise bad(path, f"line {number}", "distinct expert ids separated by blanks", repr(str(text)))
        rows.append([int(i) for i in ids])
    if (column["event_index"] != np.arange(len(rows))).any():
        at = int(np.argmax(column["event_index"] != np.arange(len(rows))))
        raise bad(path, f"line {lines[at]}", f"event_index {at}", column["event_index"][at])
    hits, misses = int(column["hits"].sum()), int(column["misses"].sum())
    if hits + misses != sum(map(len, rows)):
        raise bad(path, "hits and misses", f"{sum(map(len, rows))} in all", hits + misses)
    notes.append(f"the file's own answer: {hits} hits, {misses} misses")
    header = {"engine": "moe-cache-eval", "capture": "event table", "union": True, "notes": notes,
              "num_experts": expert_range(path, max(map(max, rows)), num_experts, notes),
              "settings": {"recorded_hits": hits, "recorded_misses": misses}}  # fmt: skip
    return Trace.from_rows(step=column["scheduler_step"], layer=column["layer"], experts=pad_rows(rows), header=header)


def is_count_table(head: Head) -> bool:
    return _title(head) == _COUNTS


def load_count_table(path, num_experts: int | None = None) -> Trace:
    """SGLang's old `layer_id,expert_id,count`. Each rank wrote its own file: import them all and add the counts."""
    column, lines = _table(path, _COUNTS, {})
    for name, limit in (("layer_id", 2**31), ("expert_id", PAD), ("count", 2**62)):
        wrong = np.flatnonzero((column[name] < 0) | (column[name] >= limit))
        if len(wrong):
            raise bad(path, f"line {lines[wrong[0]]}", f"{name} from 0 to {limit - 1}", column[name][wrong[0]])
    notes = ["one rank of possibly several; counts of the ranks add up"]
    layers = np.unique(column["layer_id"])
    experts = expert_range(path, int(column["expert_id"].max()), num_experts, notes)
    counts = np.zeros((len(layers), experts), np.int64)
    np.add.at(counts, (np.searchsorted(layers, column["layer_id"]), column["expert_id"]), column["count"])
    header = {"engine": "SGLang", "capture": "counts table", "moe_layers": layers.tolist(), "num_experts": experts,
              "notes": notes}  # fmt: skip
    return Trace.from_counts(counts, header)
