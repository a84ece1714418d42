"""JSON-lines traces: WARP (a token per line), moe-cache-lab v1 and v2, and lattice (a routing event per line)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from ..table import DECODE, PREFILL, Trace
from .common import Head, bad, descending, expert_range, numbered_lines, pad_rows

_CACHE_LAB = "moe-cache-lab.routing-jsonl"


def _first(head: Head) -> dict:
    try:
        record = json.loads(head.line) if head.line.startswith("{") else {}
    except json.JSONDecodeError:
        return {}
    return record if isinstance(record, dict) else {}


def _records(path) -> Iterator[tuple[str, dict]]:
    for number, line in numbered_lines(path):
        where = f"line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise bad(path, f"{where}, column {error.colno}", "one JSON object per line", error.msg) from None
        if not isinstance(record, dict):
            raise bad(path, where, "a JSON object", type(record).__name__)
        yield where, record


def _field(path, where: str, record: dict, name: str, kind: type | tuple):
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise bad(path, where, f"{name} as {kinds}", repr(value) if name in record else "no such field")
    return value


def _ids(path, where: str, ids, allow_empty: bool = False) -> list[int]:
    good = isinstance(ids, list) and all(type(i) is int and 0 <= i < 65535 for i in ids)
    if not good or len(set(ids)) != len(ids) or not (ids or allow_empty):
        raise bad(path, where, "a list of distinct expert ids", repr(ids)[:80])
    return ids


def is_warp(head: Head) -> bool:
    return {"tok", "layers"} <= _first(head).keys()


def load_warp(path, num_experts: int | None = None, moe_layers=None) -> Trace:
    """`{"tok": t, "layers": [[ids], …]}`, one decode token per line, one list per MoE layer, ids sorted by number."""
    notes, rows, toks, width = [], [], [], None
    for where, record in _records(path):
        layers = _field(path, where, record, "layers", list)
        tok = _field(path, where, record, "tok", int)
        if toks and tok != toks[-1] + 1:
            raise bad(path, where, f"tok {toks[-1] + 1}", tok)
        width = width or len(layers)
        if len(layers) != width or not width:
            raise bad(path, where, f"{width or 'some'} layers", len(layers))
        toks.append(tok)
        rows += [_ids(path, where, ids) for ids in layers]
    if not rows:
        raise bad(path, "end of file", "at least one token", "none")
    numbers = list(range(width)) if moe_layers is None else [int(layer) for layer in moe_layers]
    if len(numbers) != width:
        raise bad(path, "moe_layers", f"{width} layer numbers", len(numbers))
    num_experts = expert_range(path, max(map(max, rows)), num_experts, notes)
    if moe_layers is None:
        notes.append("layers are counted from 0 over the MoE layers; the file does not say which model layers they are")
    return Trace.from_rows(
        step=np.repeat(np.arange(len(toks)), width),
        layer=np.tile(numbers, len(toks)),
        experts=pad_rows(rows),
        header={"engine": "WARP", "capture": "JSONL, decode only", "num_experts": num_experts, "notes": notes},
    )


def is_lattice(head: Head) -> bool:
    return {"layer_idx", "token_idx", "selected_ids"} <= _first(head).keys()


def load_lattice(path, num_experts: int | None = None) -> Trace:
    """`{"layer_idx", "token_idx", "selected_ids", "gate_weights"}` per line in any order; sorted by token and layer."""
    notes, events = ["phase was not recorded; every token is taken as decode"], {}
    for where, record in _records(path):
        key = (_field(path, where, record, "token_idx", int), _field(path, where, record, "layer_idx", int))
        if min(key) < 0:
            raise bad(path, where, "token_idx and layer_idx from 0", key)
        if key in events:
            raise bad(path, where, f"token {key[0]} layer {key[1]} once", "it a second time")
        ids = _ids(path, where, record.get("selected_ids"))
        gates = record.get("gate_weights")
        if gates is not None and (not isinstance(gates, list) or len(gates) != len(ids)):
            raise bad(path, where, f"{len(ids)} gate_weights", repr(gates)[:80])
        events[key] = (ids, gates)
    if not events:
        raise bad(path, "end of file", "at least one event", "none")
    keys = sorted(events)
    rows = [events[key][0] for key in keys]
    weights = _weights(path, [events[key][1] for key in keys], notes)
    num_experts = expert_range(path, max(map(max, rows)), num_experts, notes)
    header = {"engine": "lattice", "capture": "JSONL", "num_experts": num_experts, "notes": notes,
              "ranked": weights is not None and descending(weights)}  # fmt: skip
    return Trace.from_rows(
        step=[token for token, _ in keys],
        layer=[layer for _, layer in keys],
        experts=pad_rows(rows),
        weights=weights,
        header=header,
    )


def _weights(path, rows: list, notes: list[str]) -> np.ndarray | None:
    """float32 (n, k), or None when some rows have none."""
    have = sum(bool(row) for row in rows)
    if have < len(rows):
        if have:
            notes.append(f"gate weights are missing in {len(rows) - have} of {len(rows)} rows and were dropped")
        return None
    try:
        return pad_rows(rows, 0, np.float32)
    except (TypeError, ValueError) as error:
        raise bad(path, "gate weights", "numbers", error) from None


def is_cache_lab(head: Head) -> bool:
    return _first(head).get("format") == _CACHE_LAB


def load_cache_lab(path) -> Trace:
    """moe-cache-lab version 1 or 2: a metadata line, then one routing_selection per line in strict order.

    The prompt comes layer by layer, generated tokens one after the other. Encoder and decoder stages become separate
    layers: decoder layer l is numbered l plus the number of encoder layers. Unassigned tokens have no row.
    """
    records = _records(path)
    where, meta = next(records)
    version = meta.get("format_version")
    if version not in (1, 2):
        raise bad(path, where, "format_version 1 or 2", repr(version))
    notes, events = [], []
    for where, record in records:
        if record.get("record_type") != "routing_selection":
            raise bad(path, where, "record_type routing_selection", repr(record.get("record_type")))
        phase = _field(path, where, record, "phase", str)
        known = ("prompt", "generated") if version == 1 else ("source", "decoder_prompt", "decoder_generated")
        if phase not in known:
            raise bad(path, where, f"phase {' or '.join(known)}", repr(phase))
        position = _field(path, where, record, "token_position", int)
        layer = _field(path, where, record, "layer", int)
        unassigned = record.get("assignment_state") == "unassigned"
        ids = _ids(path, where, record.get("selected_experts"), allow_empty=unassigned)
        gates = record.get("selected_probabilities") or None
        if gates is not None and len(gates) != len(ids):
            raise bad(path, where, f"{len(ids)} selected_probabilities or none", len(gates))
        stage = known.index(phase)
        generated = phase.endswith("generated")
        order = (stage, position, layer) if generated else (stage, layer, position)
        if events and order <= events[-1]["order"]:
            raise bad(path, where, "stage, layer and token in rising order", f"{phase} layer {layer} token {position}")
        events.append({"order": order, "phase": phase, "layer": layer, "position": position, "ids": ids, "gates": gates,
                       "token_id": record.get("token_id"), "generated": generated})  # fmt: skip
    lost = sum(not event["ids"] for event in events)
    encoder = [event["layer"] for event in events if event["phase"] == "source"]
    shift = max(encoder, default=-1) + 1
    events = [event for event in events if event["ids"]]
    if not events:
        raise bad(path, "end of file", "at least one routed token", "none")
    if lost:
        notes.append(f"{lost} rows had no expert assigned (over capacity) and were left out")
    if encoder:
        notes.append(f"decoder layer l is numbered l + {shift}; lower numbers are the encoder")
    for event in events:
        event["layer"] += 0 if event["phase"] == "source" else shift
    rows = [event["ids"] for event in events]
    weights = _weights(path, [event["gates"] for event in events], notes)
    if weights is not None:
        notes.append("weights are router probabilities, not renormalised over the chosen experts")
    told = meta.get("num_experts") or max((s["num_experts"] for s in meta.get("routing_stages", [])), default=None)
    tokens = [event["token_id"] for event in events]
    passes = {key: at for at, key in enumerate(dict.fromkeys(_pass(event) for event in events))}
    header = {"model": meta.get("model_id"), "revision": meta.get("model_revision"), "engine": "transformers",
              "version": meta.get("transformers_version"), "capture": meta.get("capture_method"), "notes": notes,
              "num_experts": expert_range(path, max(map(max, rows)), told, notes), "complete": not lost,
              "ranked": weights is not None and descending(weights)}  # fmt: skip
    return Trace.from_rows(
        step=[passes[_pass(event)] for event in events],
        layer=[event["layer"] for event in events],
        row=[0 if event["generated"] else event["position"] for event in events],
        phase=[DECODE if event["generated"] else PREFILL for event in events],
        experts=pad_rows(rows),
        weights=weights,
        token_id=None if None in tokens else tokens,
        header=header,
    )


def _pass(event: dict) -> tuple:
    """What ran as one step: a whole prompt, or one generated token."""
    return (event["phase"], event["position"] if event["generated"] else -1)
