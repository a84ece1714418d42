"""SGLang's expert distribution recorder: `.pt` files of mode per_token, per_pass and stat, read without torch."""

from __future__ import annotations

import numpy as np

from ..table import DECODE, PAD, PREFILL, Trace
from .common import Head, bad
from .torch_file import load_torch

# SGLang's ForwardMode: 1 extend, 2 decode, 3 mixed, 4 idle, above that speculative passes
_DECODE_MODE, _IDLE_MODE = 2, 4


def is_torch(head: Head) -> bool:
    return any(name.endswith("data.pkl") for name in head.members)


def load_sglang(
    path, physical_is_logical: bool = False, counts_only: bool = False, num_experts: int | None = None
) -> Trace:
    """A recorder dump. Physical expert ids become logical ones through the table in the file.

    `physical_is_logical=True` accepts a per-token dump without that table. `counts_only=True` keeps totals of a stat
    dump (with their true sizes) in place of one union per forward pass.
    """
    data = load_torch(path)
    if not isinstance(data, dict):
        raise bad(path, "top level", "a dict", type(data).__name__)
    if "logical_count" in data:
        return _stat(path, data["logical_count"], counts_only)
    if "records" not in data:
        raise bad(path, "top level", "records or logical_count", sorted(map(str, data))[:8])
    records = data["records"]
    if not isinstance(records, list) or not records:
        raise bad(path, "records", "at least one forward pass", "none")
    table = data.get("last_physical_to_logical_map")
    if table is None and not physical_is_logical:
        raise bad(path, "top level", "last_physical_to_logical_map (or physical_is_logical=True)", "no such table")
    if not all(isinstance(record, dict) for record in records):
        raise bad(path, "records", "a dict per forward pass", "something else")
    if "topk_ids_of_layer" in records[0]:
        return _per_token(path, records, table, num_experts)
    return _per_pass(path, records, table, counts_only)


def _logical(path, table, layer: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Logical ids for physical ids of the given layers, -1 where there is none."""
    if table is None:
        return ids
    if ids.max(initial=0) >= table.shape[1]:
        raise bad(path, "topk_ids_of_layer", f"physical ids below {table.shape[1]}", int(ids.max()))
    return np.where(ids < 0, -1, table[layer[:, None], np.maximum(ids, 0)])


def _per_token(path, records: list, table, num_experts: int | None) -> Trace:
    notes = ["requests are not named in this format: all tokens are one sequence"]
    parts: dict[str, list] = {name: [] for name in ("step", "layer", "row", "phase", "token_id", "experts")}
    speculative = mixed = 0
    for step, record in enumerate(records):
        where = f"record {step}"
        ids = record.get("topk_ids_of_layer")
        if not isinstance(ids, np.ndarray) or ids.ndim != 3:
            raise bad(path, where, "topk_ids_of_layer (layers, tokens, k)", getattr(ids, "shape", type(ids).__name__))
        mode = record.get("forward_mode", 0)
        tokens = np.array(record.get("input_ids", []), np.int64)
        if len(tokens) != ids.shape[1]:
            raise bad(path, where, f"{ids.shape[1]} input_ids", len(tokens))
        if mode == _IDLE_MODE or not len(tokens):
            continue
        mixed += mode == 3
        speculative += mode > _IDLE_MODE
        layers, rows = (index.reshape(-1) for index in np.indices(ids.shape[:2]))
        if table is not None and ids.shape[0] != len(table):
            raise bad(path, where, f"{len(table)} layers as in the physical-to-logical map", ids.shape[0])
        experts = _logical(path, table, layers, ids.reshape(-1, ids.shape[2]))
        routed = (experts >= 0).any(1)
        parts["step"].append(np.full(routed.sum(), step))
        parts["layer"].append(layers[routed])
        parts["row"].append(rows[routed])
        parts["phase"].append(
            np.full(routed.sum(), DECODE if mode in (_DECODE_MODE,) or mode > _IDLE_MODE else PREFILL)
        )
        parts["token_id"].append(tokens[rows[routed]])
        parts["experts"].append(_left(experts[routed]))
    if not sum(map(len, parts["step"])):
        raise bad(path, "records", "at least one routed token", "none")
    if mixed:
        notes.append(f"{mixed} mixed passes (prompts and decoding together) count as prefill")
    if speculative:
        notes.append(f"{speculative} speculative passes count as decode")
    joined = {name: np.concatenate(values) for name, values in parts.items()}
    experts = joined.pop("experts")
    experts = experts[:, (experts >= 0).any(0)]
    known = int(table.max()) + 1 if table is not None else int(experts.max()) + 1
    header = {"engine": "SGLang", "capture": "per_token", "num_experts": num_experts or known, "notes": notes}
    return Trace.from_rows(**joined, experts=np.where(experts < 0, PAD, experts), header=header)


def _left(ids: np.ndarray) -> np.ndarray:
    """Rows with their -1 entries moved to the end, order kept."""
    return np.take_along_axis(ids, np.argsort(ids < 0, axis=1, kind="stable"), axis=1)


def _per_pass(path, records: list, table, counts_only: bool) -> Trace:
    counts = [record.get("global_physical_count") for record in records]
    if any(not isinstance(count, np.ndarray) or count.ndim != 2 for count in counts):
        raise bad(path, "records", "topk_ids_of_layer or global_physical_count in each", "neither")
    physical = np.stack(counts).astype(np.int64)
    if table is None:
        return _stat(path, physical, counts_only)
    if physical.shape[1:] != table.shape:
        raise bad(path, "global_physical_count", f"shape {table.shape}", physical.shape[1:])
    logical = np.zeros((*physical.shape[:2], int(table.max()) + 1), np.int64)
    for layer, mapping in enumerate(table):
        np.add.at(logical[:, layer], (slice(None), mapping), physical[:, layer])
    return _stat(path, logical, counts_only)


def _stat(path, counts: np.ndarray, counts_only: bool) -> Trace:
    """counts (steps, layers, experts): every step and layer is one union of the experts counted in it."""
    if not isinstance(counts, np.ndarray) or counts.ndim != 3 or counts.dtype.kind not in "iu":
        raise bad(path, "logical_count", "integers (steps, layers, experts)", getattr(counts, "shape", type(counts)))
    if not counts.any():
        raise bad(path, "logical_count", "at least one count above 0", "all 0")
    layers = np.flatnonzero(counts.any((0, 2)))
    counts = counts[:, layers]
    header = {"engine": "SGLang", "capture": "stat", "moe_layers": layers.tolist(), "num_experts": counts.shape[2]}
    if counts_only:
        return Trace.from_counts(counts.sum(0), header)
    step, layer = np.nonzero(counts.any(2))
    used = counts[step, layer] > 0
    width = int(used.sum(1).max())
    order = np.argsort(~used, axis=1, kind="stable")[:, :width]
    experts = np.where(np.take_along_axis(used, order, axis=1), order, PAD)
    notes = [
        "a step is a forward pass over a batch; which token used which expert, and how often, is not kept",
        "steps are in buffer order, which wraps around on long recordings; empty steps are left out",
        "phase was not recorded; every step is taken as decode",
    ]
    header |= {"union": True, "notes": notes, "complete": False, "top_k": width}
    return Trace.from_rows(step=step, layer=layers[layer], experts=experts, header=header)
