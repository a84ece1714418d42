"""`TraceRecorder`: collects what the engine's routers chose, layer by layer, and turns it into a `Trace`."""

from __future__ import annotations

import numpy as np

from ..errors import TraceError
from .table import K_COLUMNS, PAD, PHASE_CODES, Trace, new_header

_OPTIONAL = ("weights", "resident", "bytes", "load_us")


class TraceRecorder:
    """Fed once per (step, layer) while a model runs; `trace` may be taken at any time. One thread writes.

    `header` fields describe the run: model, num_experts, top_k, moe_layers, expert_bytes, engine, settings, …
    `ranked=None` leaves it to the weights to tell: ids are in rank order when every row's weights fall.
    """

    def __init__(self, **header):
        new_header(**header)  # an unknown field is an error now, not after an hour of recording
        self.header = {"capture": "TraceRecorder", "ranked": True, **header}
        self._parts: list[dict] = []

    def __len__(self) -> int:
        """Events so far."""
        return len(self._parts)

    def add(
        self, step, layer, phase, sequence, tokens, experts, weights=None, resident=None, bytes=None, load_us=None
    ) -> None:
        """One layer of one step. `experts` (T, k) is in router rank order, `weights` to `load_us` have its shape.

        `tokens` are the T token ids or None; `phase` is "prefill", "decode" or its code; `sequence` is a number, or T
        of them when the batch mixes texts. Arrays are copied, so the engine may reuse its buffers.
        """
        experts = np.array(experts, np.uint16, ndmin=2)
        rows = len(experts)
        part = {
            "step": np.full(rows, step, np.int32),
            "layer": np.full(rows, layer, np.int32),
            "row": np.arange(rows, dtype=np.int32),
            "sequence": np.broadcast_to(np.asarray(sequence, np.int32), rows).copy(),
            "phase": np.full(rows, PHASE_CODES.get(phase, phase), np.uint8),
            "token_id": None if tokens is None else np.array(tokens, np.int32).reshape(-1),
            "experts": experts,
        }
        given = (weights, resident, bytes, load_us)
        for name, values in zip(_OPTIONAL, given, strict=True):
            part[name] = None if values is None else np.array(values, K_COLUMNS[name], ndmin=2)
            if values is not None and part[name].shape != experts.shape:
                raise TraceError(
                    f"recorder: {name} must have the shape of experts {experts.shape}, got {part[name].shape}"
                )
        if tokens is not None and len(part["token_id"]) != rows:
            raise TraceError(f"recorder: {rows} rows of experts but {len(part['token_id'])} token ids")
        self._parts.append(part)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._parts = []

    @property
    def trace(self) -> Trace:
        """What was recorded. Raises `TraceError` when that is nothing; a column some steps lack is left out."""
        parts = list(self._parts)
        if not parts:
            raise TraceError(
                "nothing was recorded: no MoE layer ran while the recorder was on; generate something first"
            )
        k = max(part["experts"].shape[1] for part in parts)
        columns, notes = {}, list(self.header.get("notes", []))
        for name in parts[0]:
            values = [part[name] for part in parts]
            have = sum(value is not None for value in values)
            if have < len(values):
                columns[name] = None
                if have:
                    notes.append(f"{name} was recorded in {have} of {len(values)} events and was left out")
                continue
            if name in K_COLUMNS:
                fill = PAD if name == "experts" else 0
                values = [np.pad(v, ((0, 0), (0, k - v.shape[1])), constant_values=fill) for v in values]
            columns[name] = np.concatenate(values)
        header = {**self.header, "notes": notes}
        if header.get("num_experts") is None:
            header["num_experts"] = int(columns["experts"][columns["experts"] != PAD].max()) + 1
        if header["ranked"] is None:
            weights = columns["weights"]
            header["ranked"] = weights is not None and bool((np.diff(weights, axis=1) <= 1e-6).all())
        lengths = [len(part["experts"]) for part in parts]
        return Trace.from_rows(**columns, event=np.repeat(np.arange(len(parts)), lengths), header=header)

    def save(self, path):
        """`trace.save(path)`."""
        return self.trace.save(path)
