"""Files of the public colibri engine: usage counts (`.coli_usage`, `stats.txt`, IKU1) and the `ROUTE_TRACE` stream."""

from __future__ import annotations

import re

import numpy as np

from ..table import DECODE, PREFILL, Trace
from .common import Head, bad, expert_range, numbered_lines, pad_rows

IKU1 = 0x31554B49
_ENGINES = ("glm_moe_dsa", "olmoe", "kimi_k3", "inkling", "deepseek_v4", "qwen38")
_USAGE_VERSION = 1
_INTEGERS = re.compile(r"-?\d+( +-?\d+)*$")
_ROUTE = re.compile(r"\d+ \d+ \d+( \d+:[-+.\deEnaif]+)+$")


def engine_id(name: str) -> int:
    """FNV-1a, 32 bit, of the engine's name: the identity written in usage files."""
    value = 2166136261
    for byte in name.encode():
        value = ((value ^ byte) * 16777619) % 2**32
    return value


def is_usage(head: Head) -> bool:
    return bool(_INTEGERS.match(head.line)) and len(head.line.split()) == 3


def load_usage(path, num_layers: int | None = None, num_experts: int | None = None) -> Trace:
    """Counts from `layer expert count` lines; header lines `-1 layers experts` and `-2 version engine`.

    Layer number `num_layers` is the multi-token-prediction row. `num_layers` and `num_experts`, when given, must agree
    with the header. Files without a header are accepted and said to be unverifiable.
    """
    notes, seen, shape, engine = [], {}, None, None
    for number, line in numbered_lines(path):
        where = f"line {number}"
        if not _INTEGERS.match(line) or len(line.split()) != 3:
            raise bad(path, where, "three integers: layer expert count", repr(line))
        layer, expert, count = map(int, line.split())
        if layer == -1:
            shape = (expert, count)
            for name, want, found in (("layers", num_layers, expert), ("experts", num_experts, count)):
                if want is not None and want != found:
                    raise bad(path, where, f"{want} {name}", found)
        elif layer == -2:
            if expert != _USAGE_VERSION:
                raise bad(path, where, f"usage format version {_USAGE_VERSION}", expert)
            known = {engine_id(name): name for name in _ENGINES}
            engine = known.get(count % 2**32, f"engine {count}")
        elif layer < 0:
            notes.append(f"line {number}: header {layer} ignored")
        else:
            limits = shape or (num_layers, num_experts)
            if expert < 0 or (limits[1] is not None and expert >= limits[1]):
                raise bad(path, where, f"an expert from 0 to {(limits[1] or 65535) - 1}", expert)
            if limits[0] is not None and layer > limits[0]:
                raise bad(path, where, f"a layer from 0 to {limits[0]}", layer)
            if not 0 <= count < 2**32:
                raise bad(path, where, "a count from 0 to 4294967295", count)
            if (layer, expert) in seen:
                raise bad(path, where, f"layer {layer} expert {expert} once", "it a second time")
            seen[layer, expert] = count
    if not seen:
        raise bad(path, "end of file", "at least one `layer expert count` line", "none")
    if shape is None:
        notes.append("no -1 header: a legacy file whose model cannot be verified")
    elif any(layer == shape[0] for layer, _ in seen):
        notes.append(f"layer {shape[0]} is the multi-token-prediction row")
    experts = expert_range(path, max(e for _, e in seen), shape[1] if shape else num_experts, notes)
    layers = sorted({layer for layer, _ in seen})
    counts = np.zeros((len(layers), experts), np.int64)
    for (layer, expert), count in seen.items():
        counts[layers.index(layer), expert] = count
    header = {"engine": engine, "num_experts": experts, "moe_layers": layers, "capture": "usage counts", "notes": notes}
    return Trace.from_counts(counts, header)


def is_iku1(head: Head) -> bool:
    return head.bytes[:4] == IKU1.to_bytes(4, "little")


def load_iku1(path) -> Trace:
    """u32 magic, layers, experts, then u32 counts (layers, experts), all little-endian."""
    data = np.fromfile(path, "<u4")
    if len(data) < 3:
        raise bad(path, "byte 0", "a header of 12 bytes", f"{4 * len(data)} bytes")
    layers, experts = int(data[1]), int(data[2])
    if len(data) - 3 != layers * experts or not layers * experts:
        found = f"{len(data) - 3} counts"
        raise bad(path, "byte 12", f"{layers} x {experts} counts", found)
    counts = data[3:].reshape(layers, experts).astype(np.int64)
    used = np.flatnonzero(counts.any(1))
    if not len(used):
        raise bad(path, "byte 12", "at least one count above 0", "none")
    header = {"engine": "inkling", "moe_layers": used.tolist(), "num_experts": experts, "capture": "IKU1 usage counts"}
    return Trace.from_counts(counts[used], header)


def is_route(head: Head) -> bool:
    return bool(_ROUTE.match(head.line))


def load_route(path, num_experts: int | None = None, dedupe_per_call: bool = True, allow_gaps: bool = False) -> Trace:
    """`call row layer expert:gate …` lines. `call` counts MoE layer invocations; rows of one call are a batch.

    A forward pass begins where the layer number does not rise. Engines differ in what a batch asks for:
    `dedupe_per_call=True` reads each expert once per call, False once per row (every row becomes an event of its own).
    A gap in the call numbers means lost lines and is refused unless `allow_gaps`.
    """
    notes, calls, rows_of, layers, experts, gates = [], [], [], [], [], []
    for number, line in numbered_lines(path):
        where = f"line {number}"
        if not _ROUTE.match(line):
            raise bad(path, where, "call row layer expert:gate …", repr(line[:80]))
        call, row, layer, *pairs = line.split()
        call, row, layer = int(call), int(row), int(layer)
        if calls and call == calls[-1]:
            if layer != layers[-1] or row <= rows_of[-1]:
                raise bad(path, where, f"layer {layers[-1]} and a row above {rows_of[-1]} in call {call}", (layer, row))
        elif calls and call != calls[-1] + 1:
            if not allow_gaps or call < calls[-1]:
                raise bad(path, where, f"call {calls[-1] + 1}", f"call {call}; lines are missing, the trace is damaged")
            notes.append(f"line {number}: calls {calls[-1] + 1} to {call - 1} are missing")
        ids = [int(pair.split(":")[0]) for pair in pairs]
        try:
            gates.append([float(pair.split(":")[1]) for pair in pairs])
        except ValueError:
            raise bad(path, where, "a number after each colon", repr(line[:80])) from None
        if len(set(ids)) != len(ids) or max(ids) >= 65535:
            raise bad(path, where, "distinct expert ids below 65535", ids)
        calls.append(call)
        rows_of.append(row)
        layers.append(layer)
        experts.append(ids)
    num_experts = expert_range(path, max(map(max, experts)), num_experts, notes)
    calls, layers = np.array(calls), np.array(layers)
    new_call = np.r_[True, calls[1:] != calls[:-1]]
    first = np.flatnonzero(new_call)
    passes = np.cumsum(np.r_[False, np.diff(layers[first]) <= 0])
    step = passes[np.cumsum(new_call) - 1]
    batched = np.bincount(step[~new_call], minlength=passes[-1] + 1) > 0
    weights = pad_rows(gates, 0, np.float32)
    notes.append("phase is a guess: a forward pass with several rows in a call is prefill, one row is decode")
    if not dedupe_per_call:
        notes.append("every row of a batch is an event of its own: this engine reads per row, not per call")
    header = {"engine": "colibri", "capture": "ROUTE_TRACE", "num_experts": num_experts, "notes": notes,
              "settings": {"dedupe_per_call": dedupe_per_call}, "complete": not any("missing" in n for n in notes),
              "ranked": bool((np.diff(weights, axis=1) <= 1e-4).all())}  # fmt: skip
    return Trace.from_rows(
        step=step,
        layer=layers,
        experts=pad_rows(experts),
        weights=weights,
        row=rows_of,
        phase=np.where(batched[step], PREFILL, DECODE),
        event=None if dedupe_per_call else np.arange(len(step)),
        header=header,
    )
