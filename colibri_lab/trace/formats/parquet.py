"""Our own file: parquet, one record per routing row, with the trace's JSON header in the schema metadata.

Columns are those of `Trace`; `experts`, `weights`, `resident`, `bytes` and `load_us` are fixed-size lists of k.
A counts-only trace is three columns instead: layer, expert, count.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ...errors import StorageError, TraceError
from ..table import K_COLUMNS, OPTIONAL, ROW_COLUMNS, Trace, new_header
from .common import whole_file

VERSION = 1
_KEY = b"colibri_trace"


def save(trace: Trace, path) -> Path:
    """Write `trace` to `path`, complete or not at all. Raises `StorageError` naming the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    trace.validate()
    path = Path(path)
    if trace.header["counts_only"]:
        layer, expert = np.nonzero(trace.counts)
        layers = np.array(trace.layers, np.int32)
        columns = {"layer": layers[layer], "expert": expert.astype(np.int32), "count": trace.counts[layer, expert]}
    else:
        columns = {name: getattr(trace, name) for name in (*ROW_COLUMNS, *K_COLUMNS)}
    arrays = {}
    for name, values in columns.items():
        if values is None:
            continue
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        arrays[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    meta = json.dumps({"format": VERSION, **trace.header}, default=_plain)
    table = pa.table(arrays).replace_schema_metadata({_KEY: meta.encode()})
    with whole_file(path) as part:
        pq.write_table(table, part, compression="zstd")
    return path


def load(path) -> Trace:
    """Read what `save` wrote. Raises `TraceError` naming the file when it is damaged or not ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise StorageError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: not a readable parquet file: {error}") from error
    meta = (table.schema.metadata or {}).get(_KEY)
    if meta is None:
        raise TraceError(f"{path}: parquet without a {_KEY.decode()} header; it was not written by Trace.save")
    try:
        header = json.loads(meta)
        found = header.pop("format", None)
        if found != VERSION:
            raise TraceError(f"trace format {VERSION} expected, found {found!r}")
        header = new_header(**header)
        columns = {name: _from_arrow(table.column(name)) for name in table.column_names}
        return _counts(columns, header) if header["counts_only"] else _rows(columns, header)
    except (TraceError, KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise TraceError(f"{path}: {error}") from error


def _rows(columns: dict, header: dict) -> Trace:
    strange = set(columns) - set(ROW_COLUMNS) - set(K_COLUMNS)
    missing = (set(ROW_COLUMNS) | {"experts"}) - set(columns) - set(OPTIONAL)
    if strange or missing:
        raise TraceError(f"unexpected columns {sorted(strange)}, missing columns {sorted(missing)}")
    trace = Trace(**columns, header=header)
    trace.validate()
    return trace


def _counts(columns: dict, header: dict) -> Trace:
    counts = np.zeros((len(header["moe_layers"]), header["num_experts"]), np.int64)
    counts[np.searchsorted(header["moe_layers"], columns["layer"]), columns["expert"]] = columns["count"]
    return Trace.from_counts(counts, header)


def _from_arrow(column) -> np.ndarray:
    import pyarrow as pa

    array = column.combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        return array.flatten().to_numpy(zero_copy_only=False).reshape(len(array), array.type.list_size)
    return array.to_numpy(zero_copy_only=False)


def _plain(value):
    """numpy scalars and arrays inside a header, as JSON can hold them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)
