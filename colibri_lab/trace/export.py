"""Writing traces for other tools: libCacheSim's oracleGeneral records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import TraceError
from .formats.common import whole_file
from .table import Trace

# libCacheSim reader "oracleGeneral": packed little-endian records, next_access_vtime is -1 for "never again"
RECORD = np.dtype([("time", "<u4"), ("obj_id", "<u8"), ("size", "<u4"), ("next_access_vtime", "<i8")])


def oracle_general(trace: Trace, dedupe: bool = True) -> np.ndarray:
    """The trace as serial requests, one record per expert of each event, in event order.

    `time` is the event number, `obj_id` is layer * num_experts + expert, `size` the expert's bytes (1 when unknown),
    `next_access_vtime` the index of the next request for the same object. Events dissolve: a simulator that reads this
    evicts members of the same step, so its hit counts are those of the serial contract.
    """
    events = trace.events(dedupe)
    per_event = events.widths
    layer = np.repeat(events.layer.astype(np.int64), per_event)
    objects = layer * trace.num_experts + events.experts
    sizes = trace.expert_bytes
    if sizes is not None and sizes.max() >= 2**32:
        raise TraceError(f"oracleGeneral sizes are 32 bits; an expert of this trace has {int(sizes.max())} bytes")
    records = np.empty(len(objects), RECORD)
    records["time"] = events.event_of
    records["obj_id"] = objects
    records["size"] = 1 if sizes is None else np.repeat(sizes[events.layer_index], per_event)
    order = np.argsort(objects, kind="stable")
    following = np.full(len(objects), -1, np.int64)
    same = objects[order[1:]] == objects[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    records["next_access_vtime"] = following
    return records


def write_oracle_general(trace: Trace, path, dedupe: bool = True) -> Path:
    """`oracle_general` as a file that libCacheSim reads with trace type oracleGeneral. Written whole or not at all."""
    records = oracle_general(trace, dedupe)
    with whole_file(path) as part:
        records.tofile(part)
    return Path(path)
