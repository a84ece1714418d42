"""oracleGeneral files: the bytes, and that libCacheSim reads them and counts what it should."""

from __future__ import annotations

import struct

import libcachesim
import numpy as np
import pytest

from colibri_lab.errors import StorageError, TraceError
from colibri_lab.trace import Trace, load_trace
from colibri_lab.trace.export import oracle_general, write_oracle_general


def small(**header) -> Trace:
    return Trace.from_rows(
        step=[0, 0, 1], layer=[1, 2, 1], experts=[[0, 1], [1, 2], [1, 3]], header={"num_experts": 4, **header}
    )


def read(path, **params):
    parameters = libcachesim.ReaderInitParam(**params)
    return libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE, parameters)


def test_records_byte_by_byte(tmp_path):
    """24 bytes each, little-endian and packed: event, layer * experts + expert, bytes, index of the next request."""
    path = write_oracle_general(small(expert_bytes={1: 100, 2: 70}), tmp_path / "t.bin")
    expected = [(0, 4, 100, -1), (0, 5, 100, 4), (1, 9, 70, -1), (1, 10, 70, -1), (2, 5, 100, -1), (2, 7, 100, -1)]
    assert path.read_bytes() == b"".join(struct.pack("<IQIq", *record) for record in expected)


def test_libcachesim_reads_the_records(tmp_path):
    requests = list(read(write_oracle_general(small(expert_bytes={1: 100, 2: 70}), tmp_path / "t.bin")))
    assert [r.obj_id for r in requests] == [4, 5, 9, 10, 5, 7]
    assert [r.obj_size for r in requests] == [100, 100, 70, 70, 100, 100]


@pytest.mark.parametrize(("slots", "lru", "belady"), [(8, 0.3193, 0.5631), (16, 0.5706, 0.7472), (24, 0.6807, 0.8425)])
def test_libcachesim_counts_the_known_serial_hits_of_olmoe(traces, tmp_path, slots, lru, belady):
    """Known: serial LRU and forced Belady per layer at 8, 16 and 24 slots."""
    trace = load_trace(traces / "warp_olmoe_1b7b_299.jsonl")
    hits = {"LRU": 0.0, "Belady": 0.0}
    for layer in trace.layers:
        path = write_oracle_general(trace.select(layers=[layer]), tmp_path / "layer.bin")
        for name in hits:
            miss, _ = getattr(libcachesim, name)(slots).process_trace(read(path, ignore_obj_size=True))
            hits[name] += (1 - miss) / len(trace.layers)
    assert hits["LRU"] == pytest.approx(lru, abs=5e-5)
    assert hits["Belady"] == pytest.approx(belady, abs=5e-5)


def test_next_access_is_the_next_request_of_the_same_object(traces):
    records = oracle_general(load_trace(traces / "mce_toy_events.csv"))
    last = {}
    expected = np.full(len(records), -1)
    for at, record in enumerate(records):
        if int(record["obj_id"]) in last:
            expected[last[int(record["obj_id"])]] = at
        last[int(record["obj_id"])] = at
    assert np.array_equal(records["next_access_vtime"], expected)


def test_refusals(tmp_path):
    with pytest.raises(TraceError, match="sizes are 32 bits; an expert of this trace has 5000000000 bytes"):
        oracle_general(small(expert_bytes={1: 5_000_000_000, 2: 1}))
    with pytest.raises(TraceError, match="counts per expert only"):
        oracle_general(Trace.from_counts(np.ones((1, 2), int), {}))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/t.bin: cannot write trace"):
        write_oracle_general(small(), tmp_path / "file" / "t.bin")
