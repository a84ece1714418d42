"""`Trace`: which experts each token was routed to, as numpy columns with one row per (step, layer, token).

Every importer makes one, the recorder makes one, replay, curves and the locality report read one. A *step* is one
prefill chunk or one decoded token; an *event* is one layer of one step, the set of experts that must be there at once.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import TraceError
from .events import PAD, Events, flatten

PREFILL, DECODE = 0, 1
PHASE_CODES = {"prefill": PREFILL, "decode": DECODE}

_HEADER = {
    "model": None,  # name or path, as the producer wrote it
    "revision": None,
    "quant": None,
    "num_experts": None,  # routed experts per MoE layer
    "top_k": None,
    "shared": None,  # shared experts; they always run and never appear as rows
    "moe_layers": None,  # layer numbers that route, ascending; `layer` holds these numbers
    "expert_bytes": None,  # {layer: bytes of one expert} or None
    "engine": None,
    "version": None,
    "settings": None,
    "prompt_hash": None,
    "template_hash": None,
    "sampling": None,
    "capture": None,  # how the rows were obtained
    "seed": None,
    "domains": None,  # names by sequence number, for traces of several texts
    "ranked": False,  # experts in router rank order (else the order within a row means nothing)
    "union": False,  # a row is already the union over the tokens of a batch
    "complete": True,  # every layer and token of the run is there
    "counts_only": False,
    "notes": [],  # what the importer saw and the reader must know
}

ROW_COLUMNS = {"event": np.int32, "step": np.int32, "layer": np.int32, "row": np.int32, "sequence": np.int32,
                "phase": np.uint8, "token_id": np.int32}  # fmt: skip
K_COLUMNS = {
    "experts": np.uint16,
    "weights": np.float32,
    "resident": np.uint8,
    "bytes": np.int64,
    "load_us": np.float32,
}
OPTIONAL = ("token_id", "weights", "resident", "bytes", "load_us")


def new_header(**known) -> dict:
    """A complete header: `known` over the defaults. Raises `TraceError` on a key that headers do not have."""
    unknown = sorted(set(known) - set(_HEADER))
    if unknown:
        raise TraceError(f"unknown trace header field {unknown[0]!r}; known: {', '.join(_HEADER)}")
    header = copy.deepcopy(_HEADER)
    header.update(known)
    if header["moe_layers"] is not None:
        header["moe_layers"] = [int(layer) for layer in header["moe_layers"]]
    if header["expert_bytes"] is not None:  # JSON turns the layer numbers into text
        header["expert_bytes"] = {int(layer): int(size) for layer, size in header["expert_bytes"].items()}
    return header


@dataclass(repr=False, eq=False)
class Trace:
    """Routing rows in the order they ran. Columns are read-only by convention; `select` and `concat` make new traces.

    All columns have n rows, `experts` and the columns after it (n, k). Optional columns are None when not recorded.
    """

    event: np.ndarray  # int32 (n,) ascending from 0 without gaps; one value per (step, layer)
    step: np.ndarray  # int32 (n,)
    layer: np.ndarray  # int32 (n,) model layer number
    row: np.ndarray  # int32 (n,) position of the token in its step
    sequence: np.ndarray  # int32 (n,) which text (or request) the token belongs to
    phase: np.ndarray  # uint8 (n,) 0 prefill, 1 decode
    experts: np.ndarray  # uint16 (n, k) in router rank order when header["ranked"], padded with PAD
    token_id: np.ndarray | None = None  # int32 (n,)
    weights: np.ndarray | None = None  # float32 (n, k) gate weights as the engine applied them
    resident: np.ndarray | None = None  # uint8 (n, k) 1 = the recording engine found it in memory
    bytes: np.ndarray | None = None  # int64 (n, k) bytes it read for this expert, 0 on a hit
    load_us: np.ndarray | None = None  # float32 (n, k)
    header: dict = field(default_factory=new_header)
    counts: np.ndarray | None = None  # int64 (layers, experts), for counts-only imports
    _events: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_rows(
        cls, *, step, layer, experts, header: dict, event=None, row=None, sequence=None, phase=None, **optional
    ) -> Trace:
        """Columns from array-likes. Validates.

        Left out, `event` advances at each change of (step, layer), `phase` is decode, `sequence` is 0 and `row` is the
        position inside the event.
        """
        step = _column("step", step)
        n = len(step)
        layer = _column("layer", layer)
        if len(layer) != n or n == 0:
            raise TraceError(f"trace: {n} steps and {len(layer)} layers; expected equal and at least one row")
        if event is None:
            event = np.zeros(n, np.int32)
            np.cumsum((step[1:] != step[:-1]) | (layer[1:] != layer[:-1]), out=event[1:])
        event = _column("event", event)
        if row is None:
            starts = np.flatnonzero(np.diff(event, prepend=-1))
            row = np.arange(n) - np.repeat(starts, np.diff(starts, append=n))
        trace = cls(
            event=event,
            step=step,
            layer=layer,
            row=_column("row", row),
            sequence=_column("sequence", np.zeros(n) if sequence is None else sequence),
            phase=_column("phase", np.full(n, DECODE) if phase is None else phase),
            experts=_column("experts", experts),
            header=new_header(**header),
            **{name: None if values is None else _column(name, values) for name, values in optional.items()},
        )
        if trace.header["moe_layers"] is None:
            trace.header["moe_layers"] = [int(x) for x in np.unique(layer)]
        if trace.header["top_k"] is None and trace.experts.ndim == 2:
            trace.header["top_k"] = int(trace.experts.shape[1])
        trace.validate()
        return trace

    @classmethod
    def from_counts(cls, counts, header: dict) -> Trace:
        """A counts-only trace from counts (layers, experts): popularity and static sets work, order does not."""
        counts = np.asarray(counts)
        if counts.ndim != 2 or not counts.size or not np.issubdtype(counts.dtype, np.integer) or counts.min() < 0:
            raise TraceError(
                f"counts must be non-negative integers (layers, experts), got {counts.dtype} {counts.shape}"
            )
        layers, experts = counts.shape
        header = new_header(**{"moe_layers": range(layers), "num_experts": experts, **header, "counts_only": True})
        if not counts.any():
            raise TraceError("trace holds no counts: every expert was used 0 times")
        empty = {name: np.empty(0, t) for name, t in ROW_COLUMNS.items() if name != "token_id"}
        trace = cls(
            **empty,
            experts=np.empty((0, header["top_k"] or 0), np.uint16),
            header=header,
            counts=counts.astype(np.int64),
        )
        trace.validate()
        return trace

    def __repr__(self) -> str:
        name = Path(self.header["model"] or self.header["engine"] or "unnamed").name
        shape = f"{len(self.layers)} layers x {self.num_experts} experts"
        if self.header["counts_only"]:
            return f"<Trace {name}: {int(self.counts.sum())} counts, {shape}>"
        return f"<Trace {name}: {len(self)} rows, {int(self.event[-1]) + 1} events, top-{self.k}, {shape}>"

    def __len__(self) -> int:
        return len(self.event)

    @property
    def k(self) -> int:
        return self.experts.shape[1]

    @property
    def layers(self) -> list[int]:
        """Model layer numbers that route, ascending: row l of any (layers, experts) array here is `layers[l]`."""
        return self.header["moe_layers"]

    @property
    def num_experts(self) -> int:
        return self.header["num_experts"]

    @property
    def expert_bytes(self) -> np.ndarray | None:
        """int64 (layers,): bytes of one expert in each of `layers`, or None when the producer did not say."""
        sizes = self.header["expert_bytes"]
        return None if sizes is None else np.array([sizes[layer] for layer in self.layers], np.int64)

    def popularity(self) -> np.ndarray:
        """int64 (layers, experts): logical assignments, tokens x k, before any dedup."""
        if self.counts is not None:
            return self.counts
        used = self.experts != PAD
        key = (np.searchsorted(self.layers, self.layer)[:, None] * self.num_experts + self.experts)[used]
        return np.bincount(key, minlength=len(self.layers) * self.num_experts).reshape(-1, self.num_experts)

    def require(self, *needs: str, what: str = "this analysis") -> None:
        """Refuse when something is missing. `needs`: rows, rank, gates, tokens, residency, bytes, expert_bytes."""
        lacks = self.lacks()
        for need in needs:
            if need in lacks:
                name = self.header["model"] or self.header["engine"] or "trace"
                raise TraceError(f"{what} needs {need}, which this trace ({name}) lacks: {lacks[need]}")

    def lacks(self) -> dict[str, str]:
        """What cannot be had from this trace: need -> why."""
        head = self.header
        if head["counts_only"]:
            why = "it holds counts per expert only, without order"
            return {need: why for need in ("rows", "rank", "gates", "tokens", "residency", "bytes")} | (
                {} if head["expert_bytes"] else {"expert_bytes": "block sizes were not recorded"}
            )
        found = {
            "rank": None if head["ranked"] else "ids within a row are not in router rank order",
            "gates": None if self.weights is not None else "gate weights were not recorded",
            "tokens": "rows are unions over a batch" if head["union"] else None,
            "residency": None if self.resident is not None else "the engine's hits were not recorded",
            "bytes": None if self.bytes is not None else "bytes read were not recorded",
            "expert_bytes": None if head["expert_bytes"] else "block sizes were not recorded",
        }
        return {need: why for need, why in found.items() if why}

    def report(self) -> dict:
        """What this trace is and what cannot be computed from it. JSON-able."""
        head = self.header
        rows = len(self)
        phases = {name: int(np.sum(self.phase == code)) for name, code in PHASE_CODES.items()}
        steps = {name: len(np.unique(self.step[self.phase == code])) for name, code in PHASE_CODES.items()}
        return {
            **{name: head[name] for name in ("model", "engine", "capture", "num_experts", "top_k", "shared")},
            "layers": len(self.layers),
            "moe_layers": self.layers,
            "rows": rows,
            "events": int(self.event[-1]) + 1 if rows else 0,
            "assignments": int(self.popularity().sum()),
            "rows_by_phase": phases,
            "steps_by_phase": steps,
            "sequences": len(np.unique(self.sequence)),
            "id_order": None if head["counts_only"] else "ranked" if head["ranked"] else "unranked",
            "granularity": "counts" if head["counts_only"] else "union per batch" if head["union"] else "per token",
            "complete": head["complete"],
            "has": {name: getattr(self, name) is not None for name in OPTIONAL}
            | {"expert_bytes": bool(head["expert_bytes"])},
            "lacks": self.lacks(),
            "notes": head["notes"],
        }

    def select(self, phase=None, layers=None, sequence=None, steps: slice | None = None) -> Trace:
        """The rows of one phase ("prefill", "decode"), some layers, one sequence (or several), a range of step numbers.

        `steps` selects by position among the trace's distinct steps, as in `steps=slice(10, None)`. Step and sequence
        numbers are kept, events are renumbered. Raises `TraceError` when nothing is left.
        """
        self.require("rows", what="select")
        keep = np.ones(len(self), bool)
        if phase not in (None, "all"):
            if phase not in (*PHASE_CODES, *PHASE_CODES.values()):
                raise TraceError(f"phase must be prefill, decode or all, got {phase!r}")
            keep &= self.phase == PHASE_CODES.get(phase, phase)
        if layers is not None:
            wanted = sorted({int(layer) for layer in layers})
            strange = set(wanted) - set(self.layers)
            if strange:
                raise TraceError(f"layer {min(strange)} is not in the trace; its layers are {self.layers}")
            keep &= np.isin(self.layer, wanted)
        if sequence is not None:
            keep &= np.isin(self.sequence, sequence)
        if steps is not None:
            keep &= np.isin(self.step, np.unique(self.step)[steps])
        if not keep.any():
            raise TraceError(
                f"selection phase={phase} layers={layers} sequence={sequence} steps={steps} leaves no rows"
            )
        part = self._rows(keep)
        if layers is not None:
            part.header["moe_layers"] = wanted
            if part.header["expert_bytes"]:
                part.header["expert_bytes"] = {layer: part.header["expert_bytes"][layer] for layer in wanted}
        return part

    def _rows(self, keep: np.ndarray) -> Trace:
        columns = {name: getattr(self, name) for name in (*ROW_COLUMNS, *K_COLUMNS)}
        columns = {name: None if values is None else values[keep] for name, values in columns.items()}
        columns["event"] = np.cumsum(np.diff(columns["event"], prepend=columns["event"][:1]) != 0, dtype=np.int32)
        return Trace(**columns, header=copy.deepcopy(self.header))

    @classmethod
    def concat(cls, traces: list[Trace]) -> Trace:
        """One trace after the other; steps and sequences are renumbered upwards. All must describe one model shape."""
        if not traces:
            raise TraceError("concat needs at least one trace, got none")
        first = traces[0]
        for trace in traces:
            trace.require("rows", what="concat")
            for name in ("num_experts", "moe_layers"):
                if trace.header[name] != first.header[name]:
                    raise TraceError(f"concat: {name} differs: {first.header[name]} and {trace.header[name]}")
        k = max(trace.k for trace in traces)
        columns = {}
        for name, dtype in {**ROW_COLUMNS, **K_COLUMNS}.items():
            parts = [getattr(trace, name) for trace in traces]
            if any(part is None for part in parts):
                columns[name] = None
                continue
            if name in K_COLUMNS:
                fill = PAD if name == "experts" else 0
                parts = [np.pad(part, ((0, 0), (0, k - part.shape[1])), constant_values=fill) for part in parts]
            if name in ("event", "step", "sequence"):
                shifted, base = [], 0
                for part in parts:
                    shifted.append(part - (part.min() if name == "step" else 0) + base)
                    base = int(shifted[-1].max()) + 1
                parts = shifted
            columns[name] = np.concatenate(parts).astype(dtype)
        header = copy.deepcopy(first.header)
        for name in ("ranked", "complete"):
            header[name] = all(trace.header[name] for trace in traces)
        header["union"] = any(trace.header["union"] for trace in traces)
        header["top_k"] = k
        names = [trace.header["domains"] for trace in traces]
        if all(names):
            header["domains"] = [name for part in names for name in part]
        for name in ("model", "revision", "quant", "engine", "version", "settings", "prompt_hash", "template_hash",
                     "sampling", "seed", "expert_bytes"):  # fmt: skip
            if any(trace.header[name] != header[name] for trace in traces):
                header[name] = None
                header["notes"].append(f"concat: {name} differed between the parts and was dropped")
        for trace in traces[1:]:
            header["notes"] += [note for note in trace.header["notes"] if note not in header["notes"]]
        return cls(**columns, header=header)

    def events(self, dedupe: bool = True) -> Events:
        """The trace as one set of experts per event, first seen first (row by row, rank by rank).

        `dedupe=False` keeps repeats, for engines that ask again for an expert another row of the batch already got.
        An expert's weight is the largest that any row of the event gave it, its residency that of the first row.
        """
        self.require("rows", what="replay")
        if dedupe not in self._events:
            self._events[dedupe] = flatten(self, dedupe)
        return self._events[dedupe]

    def _repeats_in_rows(self) -> np.ndarray:
        ids = np.sort(self.experts, axis=1)
        return ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != PAD)).any(1)

    def validate(self) -> None:
        """Raise `TraceError` naming the column, the row, what was expected and what was found."""
        head = self.header
        experts, layers = head["num_experts"], head["moe_layers"]
        if not isinstance(experts, int) or not 1 <= experts <= PAD:
            raise TraceError(f"header: num_experts must be 1 to {PAD}, got {experts!r}")
        if not layers or any(b <= a for a, b in itertools.pairwise(layers)) or layers[0] < 0:
            raise TraceError(f"header: moe_layers must be ascending layer numbers, got {layers!r}")
        if head["expert_bytes"] is not None and (lost := set(layers) - set(head["expert_bytes"])):
            raise TraceError(f"header: expert_bytes has no entry for layer {min(lost)}")
        if head["counts_only"]:
            if self.counts is None or self.counts.shape != (len(layers), experts):
                shape = None if self.counts is None else self.counts.shape
                raise TraceError(f"counts must have shape {(len(layers), experts)}, got {shape}")
            return
        n = len(self.event)
        if n == 0:
            raise TraceError("trace holds no rows; expected at least one")
        if self.experts.ndim != 2 or self.experts.shape[1] < 1:
            raise TraceError(f"experts must have shape (rows, k), got {self.experts.shape}")
        for name, dtype in {**ROW_COLUMNS, **K_COLUMNS}.items():
            values = getattr(self, name)
            if values is None and name in OPTIONAL:
                continue
            shape = self.experts.shape if name in K_COLUMNS else (n,)
            if not isinstance(values, np.ndarray) or values.dtype != dtype or values.shape != shape:
                found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
                raise TraceError(f"column {name} must be {np.dtype(dtype)} {shape}, got {found}")
        jumps = np.diff(self.event, prepend=-1)
        self._refuse((jumps < 0) | (jumps > 1), "event", "ascending numbers from 0 without gaps")
        inside = jumps[1:] == 0
        for name in ("step", "layer", "phase"):
            values = getattr(self, name)
            self._refuse(np.r_[False, inside & (values[1:] != values[:-1])], name, "one value per event")
        self._refuse(~np.isin(self.layer, layers), "layer", f"one of {layers}")
        self._refuse(self.phase > 1, "phase", "0 (prefill) or 1 (decode)")
        used = self.experts != PAD
        self._refuse((used & (self.experts >= experts)).any(1), "experts", f"ids below num_experts {experts}")
        self._refuse(~used[:, 0], "experts", "at least one id")
        self._refuse((used[:, 1:] & ~used[:, :-1]).any(1), "experts", f"padding {PAD} only after the ids")
        self._refuse(self._repeats_in_rows(), "experts", "distinct ids")
        if self.weights is not None:
            self._refuse(~np.isfinite(np.where(used, self.weights, 0)).all(1), "weights", "finite numbers")

    def _refuse(self, bad: np.ndarray, name: str, expected: str) -> None:
        if bad.any():
            at = int(np.argmax(bad))
            raise TraceError(f"trace row {at}: {name} must be {expected}, got {getattr(self, name)[at].tolist()}")

    def save(self, path) -> Path:
        """Write parquet, see `formats.parquet`. Raises `StorageError` naming the file when the disk refuses."""
        from .formats.parquet import save

        return save(self, path)

    @classmethod
    def load(cls, path) -> Trace:
        """Read what `save` wrote; `load_trace` reads every other format. Raises `TraceError` naming the file."""
        from .formats.parquet import load

        return load(path)

    def replay(self, policy="lru", slots=8, **settings):
        """`colibri_lab.trace.replay.replay` on this trace: a DataFrame with a row per layer."""
        from .replay import replay

        return replay(self, policy, slots, **settings)

    def curve(self, policies="all", slots=None, **settings):
        """`colibri_lab.trace.curves.curve` on this trace: a DataFrame with a row per policy and slot count."""
        from .curves import curve

        return curve(self, policies, slots, **settings)

    def locality(self, **settings) -> dict:
        """`colibri_lab.trace.locality.locality` on this trace."""
        from .locality import locality

        return locality(self, **settings)


def _column(name: str, values) -> np.ndarray:
    """`values` in the column's dtype, refused when that would change a value."""
    dtype = np.dtype({**ROW_COLUMNS, **K_COLUMNS}[name])
    values = np.asarray(values)
    if dtype.kind in "iu" and values.size:
        info = np.iinfo(dtype)
        if values.dtype.kind not in "iufb" or values.min() < info.min or values.max() > info.max:
            raise TraceError(f"column {name} must fit {dtype}, got {values.dtype} {values.min()} to {values.max()}")
    return np.ascontiguousarray(values, dtype)
