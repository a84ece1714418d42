"""The trace table: events, selection, joining, saving, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import StorageError, TraceError
from colibri_lab.trace import Trace
from colibri_lab.trace.table import PAD, new_header


def small(**header) -> Trace:
    """Two texts: text 0 is a prompt of two tokens and a generated one, text 1 a generated one. Layers 1 and 3."""
    return Trace.from_rows(
        step=[0, 0, 0, 0, 1, 1, 2, 2],
        layer=[1, 1, 3, 3, 1, 3, 1, 3],
        row=[0, 1, 0, 1, 0, 0, 0, 0],
        sequence=[0, 0, 0, 0, 0, 0, 1, 1],
        phase=[0, 0, 0, 0, 1, 1, 1, 1],
        experts=[[2, 0], [0, 3], [1, 2], [1, 2], [3, 2], [0, 1], [1, 0], [2, PAD]],
        weights=[[0.7, 0.3], [0.9, 0.1], [0.6, 0.4], [0.5, 0.5], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4], [1, 0]],
        token_id=[10, 11, 10, 11, 12, 12, 20, 20],
        header={"num_experts": 4, "ranked": True, "expert_bytes": {1: 100, 3: 200}, **header},
    )


def test_rows_of_one_step_and_layer_are_one_event():
    assert small().event.tolist() == [0, 0, 1, 1, 2, 3, 4, 5]


def test_events_hold_each_expert_once_in_first_seen_order_with_its_largest_weight():
    events = small().events()
    assert events.offsets.tolist() == [0, 3, 5, 7, 9, 11, 12]
    assert events.experts.tolist() == [2, 0, 3, 1, 2, 3, 2, 0, 1, 1, 0, 2]
    assert events.weights[:5] == pytest.approx([0.7, 0.9, 0.1, 0.6, 0.5])
    assert events.layer.tolist() == [1, 3, 1, 3, 1, 3]
    assert events.layer_index.tolist() == [0, 1, 0, 1, 0, 1]
    assert events.logical.tolist() == [4, 4, 2, 2, 2, 1]


def test_events_without_dedupe_keep_repeats():
    events = small().events(dedupe=False)
    assert events.experts[:4].tolist() == [2, 0, 0, 3]
    assert events.widths.tolist() == events.logical.tolist()


def test_popularity_counts_assignments_not_unions():
    assert small().popularity().tolist() == [[3, 1, 2, 2], [1, 3, 3, 0]]


def test_select_by_phase_layer_sequence_and_steps():
    trace = small()
    assert trace.select(phase="decode").step.tolist() == [1, 1, 2, 2]
    one = trace.select(layers=[3])
    assert (one.layers, one.header["expert_bytes"]) == ([3], {3: 200})
    assert trace.select(sequence=1).token_id.tolist() == [20, 20]
    assert trace.select(steps=slice(1, None)).event.tolist() == [0, 1, 2, 3]
    assert trace.select(phase="prefill", layers=[1]).event.tolist() == [0, 0]
    assert trace.layers == [1, 3], "the original is untouched"


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"phase": "warmup"}, "phase must be prefill, decode or all, got 'warmup'"),
        ({"layers": [2]}, r"layer 2 is not in the trace; its layers are \[1, 3\]"),
        ({"sequence": 5}, "leaves no rows"),
    ],
)
def test_select_refuses(how, match):
    with pytest.raises(TraceError, match=match):
        small().select(**how)


def test_concat_renumbers_steps_sequences_and_events_upwards():
    joined = Trace.concat([small(), small()])
    assert joined.step.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5]
    assert joined.sequence.max() == 3
    assert joined.event.tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 9, 10, 11]
    assert joined.weights is not None


def test_concat_drops_what_one_part_lacks_and_says_what_differs():
    bare = small(model="other")
    bare.weights = None
    joined = Trace.concat([small(model="this"), bare])
    assert joined.weights is None
    assert joined.header["model"] is None
    assert "concat: model differed" in joined.header["notes"][0]


def test_concat_of_different_models_is_refused():
    with pytest.raises(TraceError, match="concat: num_experts differs: 4 and 5"):
        Trace.concat([small(), small(num_experts=5)])
    with pytest.raises(TraceError, match="at least one trace"):
        Trace.concat([])


def test_cutting_and_joining_gives_the_same_events():
    trace = small()
    joined = Trace.concat([trace.select(steps=slice(0, 2)), trace.select(steps=slice(2, None))])
    assert np.array_equal(joined.events().experts, trace.events().experts)


def test_save_and_load_keep_everything(tmp_path):
    trace = small(model="m", settings={"slots": 3}, notes=["a note"])
    trace.resident = np.ones_like(trace.experts, np.uint8)
    back = Trace.load(trace.save(tmp_path / "deep" / "t.parquet"))
    for name in ("event", "step", "layer", "row", "sequence", "phase", "token_id", "experts", "weights", "resident"):
        assert np.array_equal(getattr(back, name), getattr(trace, name)), name
        assert getattr(back, name).dtype == getattr(trace, name).dtype
    assert back.header == trace.header
    assert back.bytes is None


def test_parquet_is_readable_without_us(tmp_path):
    import pyarrow.parquet as pq

    table = pq.read_table(small().save(tmp_path / "t.parquet"))
    assert table.column("experts")[0].as_py() == [2, 0]
    assert b'"num_experts": 4' in table.schema.metadata[b"colibri_trace"]


def test_failed_save_leaves_the_old_file(tmp_path):
    path = small().save(tmp_path / "t.parquet")
    before = path.read_bytes()
    broken = small()
    broken.experts[0, 0] = 9
    with pytest.raises(TraceError, match="below num_experts 4"):
        broken.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_save_into_an_impossible_place_names_the_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/t.parquet: cannot write trace"):
        small().save(tmp_path / "file" / "t.parquet")


def test_load_refuses_foreign_and_damaged_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"a": [1]}), foreign)
    with pytest.raises(TraceError, match="foreign.parquet: parquet without a colibri_trace header"):
        Trace.load(foreign)
    path = small().save(tmp_path / "t.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="t.parquet: not a readable parquet file"):
        Trace.load(path)
    table = pq.read_table(small().save(path))
    pq.write_table(table.drop_columns(["layer"]), path)
    with pytest.raises(TraceError, match=r"missing columns \['layer'\]"):
        Trace.load(path)
    with pytest.raises(StorageError, match="no such file"):
        Trace.load(tmp_path / "none.parquet")


def test_counts_only_round_trip_and_refusals(tmp_path):
    counts = np.array([[3, 0, 1], [0, 0, 5]])
    trace = Trace.from_counts(counts, {"moe_layers": [2, 4], "engine": "e"})
    back = Trace.load(trace.save(tmp_path / "c.parquet"))
    assert np.array_equal(back.counts, counts)
    assert np.array_equal(back.popularity(), counts)
    for use in (back.events, lambda: back.select(phase="all"), lambda: Trace.concat([back, back])):
        with pytest.raises(TraceError, match="counts per expert only, without order"):
            use()
    assert back.report()["id_order"] is None
    assert back.report()["granularity"] == "counts"


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        (np.zeros((2, 3), int), "every expert was used 0 times"),
        (np.ones(3, int), r"\(3,\)"),
        (-np.ones((1, 2), int), "non-negative"),
    ],
)
def test_bad_counts_are_refused(counts, match):
    with pytest.raises(TraceError, match=match):
        Trace.from_counts(counts, {})


def broken(name, at, value):
    trace = small()
    getattr(trace, name)[at] = value
    return trace


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: broken("experts", (1, 0), 7), r"row 1: experts must be ids below num_experts 4, got \[7, 3\]"),
        (lambda: broken("experts", (4, 1), 3), r"row 4: experts must be distinct ids, got \[3, 3\]"),
        (lambda: broken("experts", (0, 0), PAD), "row 0: experts must be at least one id"),
        (lambda: broken("layer", 4, 2), r"row 4: layer must be one of \[1, 3\], got 2"),
        (lambda: broken("layer", 1, 3), "row 1: layer must be one value per event"),
        (lambda: broken("phase", 6, 2), "row 6: phase must be 0"),
        (lambda: broken("event", 5, 9), "row 5: event must be ascending numbers from 0 without gaps"),
        (lambda: broken("weights", (0, 0), np.nan), "row 0: weights must be finite numbers"),
    ],
)
def test_validate_names_column_row_expected_and_found(make, match):
    with pytest.raises(TraceError, match=match):
        make().validate()


def test_from_rows_refuses_values_that_do_not_fit():
    with pytest.raises(TraceError, match="column experts must fit uint16"):
        Trace.from_rows(step=[0], layer=[0], experts=[[70000]], header={"num_experts": 4})
    with pytest.raises(TraceError, match="expected equal and at least one row"):
        Trace.from_rows(step=[], layer=[], experts=np.empty((0, 2)), header={"num_experts": 4})
    with pytest.raises(TraceError, match="num_experts must be 1 to 65535, got None"):
        Trace.from_rows(step=[0], layer=[0], experts=[[1]], header={})


def test_header_fields_are_closed():
    with pytest.raises(TraceError, match="unknown trace header field 'modell'"):
        new_header(modell="x")


def test_report_says_what_cannot_be_computed():
    report = small().report()
    assert report["rows_by_phase"] == {"prefill": 4, "decode": 4}
    assert report["id_order"] == "ranked"
    assert set(report["lacks"]) == {"residency", "bytes"}
    unranked = small(ranked=False)
    with pytest.raises(TraceError, match="order='rank' needs rank, which this trace .* lacks: ids within a row"):
        unranked.require("rank", what="order='rank'")


rows = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=12)


@settings(max_examples=60)
@given(rows, st.integers(1, 4))
def test_an_event_asks_for_exactly_the_experts_of_its_rows(ids, per_event):
    """Against the obvious construction: walk the rows of each event and keep an id when it is new."""
    step = np.arange(len(ids)) // per_event
    width = max(map(len, ids))
    padded = [row + [PAD] * (width - len(row)) for row in ids]
    trace = Trace.from_rows(step=step, layer=np.zeros(len(ids)), experts=padded, header={"num_experts": 8})
    events = trace.events()
    for event in range(events.count):
        expected = list(dict.fromkeys(e for row, s in zip(ids, step, strict=True) if s == event for e in row))
        assert events.experts[events.offsets[event] : events.offsets[event + 1]].tolist() == expected
    assert events.logical.sum() == sum(map(len, ids)) == trace.popularity().sum()
