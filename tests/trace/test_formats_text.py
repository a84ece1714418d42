"""Text importers: what each file says, what it cannot say, and every malformed line named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from colibri_lab.errors import StorageError, TraceError
from colibri_lab.trace import load_trace
from colibri_lab.trace.formats import FORMATS
from colibri_lab.trace.formats.colibri import engine_id
from colibri_lab.trace.formats.tables import read_metrics


@pytest.fixture
def write(tmp_path):
    def make(text: str | bytes, name: str = "trace.bin"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def json_lines(*records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_warp_trace_of_olmoe(traces):
    trace = load_trace(traces / "warp_olmoe_1b7b_299.jsonl")
    assert (len(trace), trace.k, trace.num_experts, len(trace.layers)) == (299 * 16, 8, 64, 16)
    assert trace.experts[0].tolist() == [6, 8, 15, 23, 31, 37, 53, 63]
    report = trace.report()
    assert (report["id_order"], report["steps_by_phase"]["decode"]) == ("unranked", 299)
    assert {"rank", "gates"} <= set(report["lacks"])


def test_bigmoe_trace_of_qwen(traces):
    trace = load_trace(traces / "bigmoe_qwen.route.csv")
    assert trace.report()["rows_by_phase"] == {"prefill": 47 * 28 + 1, "decode": 128 * 48}
    assert trace.experts[0].tolist() == [49, 19, 58, 29, 16, 70]
    assert trace.weights[0, 0] == pytest.approx(0.221297)
    assert trace.header["expert_bytes"][0] == 3059712
    assert trace.header["expert_bytes"][6] == 2654208
    assert trace.report()["lacks"] == {}
    assert "layers [47] list fewer prompt tokens" in trace.header["notes"][1]


def test_bigmoe_prompt_tokens_become_rows_of_one_step(traces):
    prompt = load_trace(traces / "bigmoe_qwen.route.csv").select(phase="prefill")
    assert set(prompt.step) == {0}
    assert prompt.row[prompt.layer == 0].tolist() == list(range(28))
    assert prompt.row[prompt.layer == 47].tolist() == [27]


def test_bigmoe_residency_is_the_hit_rate_of_the_recording_engine(traces):
    """Known: 74.9 % over all phases, where a prompt counts as unions, and 80.3 % for decode."""
    trace = load_trace(traces / "bigmoe_qwen.route.csv")
    assert trace.events().resident.mean() == pytest.approx(0.7488, abs=5e-5)
    assert trace.select(phase="decode").resident.mean() == pytest.approx(0.8029, abs=5e-5)


def test_bigmoe_turns_become_sequences(write, traces):
    head, rows = [], []
    for line in (traces / "bigmoe_qwen.route.csv").read_text().splitlines():
        (rows if line[0].isdigit() else head).append(line)
    again = ["1" + line[1:] for line in rows]
    trace = load_trace(write("\n".join(head + rows + again)))
    assert sorted(set(trace.sequence)) == [0, 1]
    assert trace.report()["steps_by_phase"] == {"prefill": 2, "decode": 256}
    assert trace.report()["events"] == 2 * load_trace(traces / "bigmoe_qwen.route.csv").report()["events"]


def test_bigmoe_metrics_are_read_and_not_taken_for_a_trace(traces):
    path = traces / "bigmoe_qwen.metrics.csv"
    table = read_metrics(path)
    assert len(table) == 128
    assert table.wall_ms[0] == pytest.approx(265.825)
    assert table.read_bytes.dtype == np.int64
    assert table.attrs["summary"]["cache_budget_MiB"] == 4000
    assert table.attrs["summary"]["n_prompt"] == 28
    with pytest.raises(TraceError, match="expected a routing trace, found per-token timings"):
        load_trace(path)


def test_toy_event_table(traces):
    trace = load_trace(traces / "mce_toy_events.csv")
    assert trace.report()["granularity"] == "union per batch"
    assert trace.events().experts[:4].tolist() == [0, 1, 0, 1]
    assert trace.header["settings"] == {"recorded_hits": 12, "recorded_misses": 18}


USAGE = "-1 3 8\n-2 1 3841822045\n-9 0 0\n1 0 5\n1 7 2\n3 4 1\n"


def test_usage_counts(write):
    trace = load_trace(write(USAGE))
    assert trace.header["engine"] == "olmoe"
    assert trace.layers == [1, 3], "layer 0 was never counted, so it is dense or unused"
    assert trace.counts[0].tolist() == [5, 0, 0, 0, 0, 0, 0, 2]
    notes = " ".join(trace.header["notes"])
    assert "header -9 ignored" in notes
    assert "layer 3 is the multi-token-prediction row" in notes
    assert set(trace.lacks()) == {"rows", "rank", "gates", "tokens", "residency", "bytes", "expert_bytes"}


def test_engine_ids_are_fnv1a():
    """Published: glm_moe_dsa is 3815245270; the others follow from the same hash."""
    assert engine_id("glm_moe_dsa") == 3815245270
    assert engine_id("olmoe") == 3841822045
    assert engine_id("kimi_k3") == 1820578806
    assert engine_id("inkling") == 2050583463


def test_legacy_usage_without_header_is_said_to_be_unverifiable(write):
    trace = load_trace(write("0 3 9\n1 2 4\n"))
    assert trace.num_experts == 4
    assert "cannot be verified" in " ".join(trace.header["notes"])


@pytest.mark.parametrize(
    ("text", "options", "match"),
    [
        ("0 1 2\n0 1\n", {}, "line 2: expected three integers"),
        ("0 1 2\n0 1 2 3\n", {}, "line 2: expected three integers"),
        ("0 1 2\n0 1 x\n", {}, "line 2: expected three integers"),
        ("-1 3 8\n0 8 1\n", {}, "line 2: expected an expert from 0 to 7, found 8"),
        ("-1 3 8\n4 0 1\n", {}, "line 2: expected a layer from 0 to 3, found 4"),
        ("-1 3 8\n0 0 -1\n", {}, "line 2: expected a count from 0"),
        ("-1 3 8\n0 0 1\n0 0 2\n", {}, "line 3: expected layer 0 expert 0 once"),
        ("-2 7 1\n0 0 1\n", {}, "line 1: expected usage format version 1, found 7"),
        ("-1 3 8\n0 0 1\n", {"num_experts": 64}, "line 1: expected 64 experts, found 8"),
        ("-1 3 8\n", {}, "end of file: expected at least one"),
        ("-1 3 8\n0 0 0\n", {}, "every expert was used 0 times"),
    ],
)
def test_usage_refuses(write, text, options, match):
    with pytest.raises(TraceError, match=match):
        load_trace(write(text), **options)


ROUTE = """0 0 1 3:0.6 1:0.4
0 1 1 3:0.7 0:0.3
1 0 2 2:0.5 1:0.5
1 1 2 1:0.9 2:0.1
2 0 1 0:0.8 3:0.2
3 0 2 1:0.6 0:0.4
"""


def test_route_trace_steps_phases_and_rows(write):
    trace = load_trace(write(ROUTE))
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.row.tolist() == [0, 1, 0, 1, 0, 0]
    assert trace.layers == [1, 2]
    assert trace.report()["id_order"] == "ranked"
    assert trace.events().experts[:3].tolist() == [3, 1, 0]


def test_route_trace_of_one_layer_has_a_step_per_call(write):
    trace = load_trace(write("5 0 0 1:1.0\n6 0 0 2:1.0\n7 0 0 1:1.0\n"))
    assert trace.step.tolist() == [0, 1, 2]


def test_route_trace_can_ask_per_row(write):
    """An engine that does not share a call's reads asks for expert 3 twice in the first call."""
    per_call, per_row = (load_trace(write(ROUTE), dedupe_per_call=flag) for flag in (True, False))
    assert len(per_call.events().experts) == 3 + 2 + 2 + 2
    assert len(per_row.events().experts) == 12
    assert per_row.report()["events"] == 6


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (ROUTE.replace("2 0 1 0:0.8", "4 0 1 0:0.8"), "line 5: expected call 2, found call 4; lines are missing"),
        (ROUTE.replace("1 1 2", "1 0 2"), "line 4: expected layer 2 and a row above 0 in call 1"),
        (ROUTE.replace("1:0.4", "1"), "not a trace|line 1"),
        (ROUTE.replace("3:0.7 0:0.3", "3:0.7 3:0.3"), "line 2: expected distinct expert ids"),
        (ROUTE + "4 0 1 0:0.8 3\n", "line 7: expected call row layer expert:gate"),
        (ROUTE + "4 0 1 0:e 3:1\n", "line 7: expected a number after each colon"),
    ],
)
def test_route_trace_refuses(write, text, match):
    with pytest.raises(TraceError, match=match):
        load_trace(write(text))


def test_route_gaps_can_be_accepted_and_are_noted(write):
    trace = load_trace(write(ROUTE.replace("3 0 2", "7 0 2")), allow_gaps=True)
    assert not trace.header["complete"]
    assert "calls 3 to 6 are missing" in " ".join(trace.header["notes"])


WARP = [{"tok": 4, "layers": [[1, 2], [0, 3]]}, {"tok": 5, "layers": [[0, 2], [1, 3]]}]


@pytest.mark.parametrize(
    ("records", "match"),
    [
        ([*WARP, {"tok": 7, "layers": [[1], [2]]}], "line 3: expected tok 6, found 7"),
        ([*WARP, {"tok": 6, "layers": [[1, 2]]}], "line 3: expected 2 layers, found 1"),
        ([*WARP, {"tok": 6, "layers": [[1, 1], [2, 3]]}], "line 3: expected a list of distinct expert ids"),
        ([*WARP, {"tok": 6, "layers": [[1, -1], [2, 3]]}], "line 3: expected a list of distinct expert ids"),
        ([*WARP, {"tok": 6}], "line 3: expected layers as list, found no such field"),
        ([*WARP, [1]], "line 3: expected a JSON object, found list"),
    ],
)
def test_warp_refuses(write, records, match):
    with pytest.raises(TraceError, match=match):
        load_trace(write(json_lines(*records)))


def test_cut_off_json_names_line_and_column(write):
    with pytest.raises(TraceError, match="trace.bin: line 2, column .*: expected one JSON object per line"):
        load_trace(write(json_lines(*WARP)[:-5]))


def test_warp_layer_numbers_and_expert_count_can_be_told(write):
    trace = load_trace(write(json_lines(*WARP)), moe_layers=[3, 7], num_experts=16)
    assert (trace.layers, trace.num_experts) == ([3, 7], 16)
    with pytest.raises(TraceError, match="expected below num_experts 3, found 3"):
        load_trace(write(json_lines(*WARP)), num_experts=3)


CACHE_LAB_1 = [
    {"record_type": "metadata", "format": "moe-cache-lab.routing-jsonl", "format_version": 1, "model_id": "m",
     "num_experts": 4, "experts_per_token": 2, "capture_method": "hook"},
    *({"record_type": "routing_selection", "phase": phase, "token_position": token, "layer": layer, "token_id": 9,
       "selected_experts": ids, "selected_probabilities": p}
      for phase, token, layer, ids, p in [
          ("prompt", 0, 0, [0, 1], [0.6, 0.3]), ("prompt", 1, 0, [1, 2], [0.5, 0.2]),
          ("prompt", 0, 2, [0, 2], [0.6, 0.3]), ("prompt", 1, 2, [0, 3], [0.6, 0.3]),
          ("generated", 2, 0, [0, 2], [0.6, 0.3]), ("generated", 2, 2, [3, 2], [0.6, 0.3])]),
]  # fmt: skip


def test_cache_lab_version_1(write):
    trace = load_trace(write(json_lines(*CACHE_LAB_1)))
    assert trace.header["model"] == "m"
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.layers == [0, 2]
    assert trace.report()["id_order"] == "ranked"
    assert trace.token_id.tolist() == [9] * 6
    assert trace.events().experts[:3].tolist() == [0, 1, 2]


def test_cache_lab_without_probabilities_is_unranked(write):
    records = [{**record, "selected_probabilities": []} for record in CACHE_LAB_1[1:]]
    trace = load_trace(write(json_lines(CACHE_LAB_1[0], *records)))
    assert trace.weights is None
    assert trace.report()["id_order"] == "unranked"


def test_cache_lab_version_2_stages_and_unassigned_tokens(write):
    stage = {"num_experts": 8, "assigned_experts_per_token": 1, "allows_unassigned": True}
    meta = {"record_type": "metadata", "format": "moe-cache-lab.routing-jsonl", "format_version": 2, "model_id": "m",
            "routing_stages": [stage | {"routing_stage": name} for name in ("encoder", "decoder")]}  # fmt: skip
    row = {
        "record_type": "routing_selection",
        "assignment_state": "assigned",
        "selected_probabilities": [0.7],
        "layer": 3,
    }
    records = [
        {**row, "phase": "source", "routing_stage": "encoder", "token_position": 0, "selected_experts": [5]},
        {**row, "phase": "decoder_prompt", "routing_stage": "decoder", "token_position": 0, "selected_experts": [6]},
        {**row, "phase": "decoder_generated", "routing_stage": "decoder", "token_position": 1, "selected_experts": [],
         "selected_probabilities": [], "assignment_state": "unassigned", "unassigned_reason": "capacity"},
    ]  # fmt: skip
    trace = load_trace(write(json_lines(meta, *records)))
    assert trace.layer.tolist() == [3, 7], "decoder layer 3 comes after encoder layers 0 to 3"
    assert not trace.header["complete"]
    assert "1 rows had no expert assigned" in trace.header["notes"][0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: r[0].update(format_version=3), "line 1: expected format_version 1 or 2, found 3"),
        (lambda r: r[2].update(phase="warm"), "line 3: expected phase prompt or generated"),
        (lambda r: r.insert(1, r.pop(2)), "line 3: expected stage, layer and token in rising order"),
        (lambda r: r[1].update(selected_probabilities=[0.5]), "line 2: expected 2 selected_probabilities"),
        (lambda r: r[1].update(selected_experts=[]), "line 2: expected a list of distinct expert ids"),
        (lambda r: r[1].pop("layer"), "line 2: expected layer as int, found no such field"),
        (lambda r: r.__delitem__(slice(1, None)), "end of file: expected at least one routed token"),
    ],
)
def test_cache_lab_refuses(write, change, match):
    records = [dict(record) for record in CACHE_LAB_1]
    change(records)
    with pytest.raises(TraceError, match=match):
        load_trace(write(json_lines(*records)))


def test_lattice_events_in_any_order(write):
    records = [
        {"layer_idx": 1, "token_idx": 0, "selected_ids": [2, 0], "gate_weights": [0.9, 0.1]},
        {"layer_idx": 0, "token_idx": 1, "selected_ids": [1, 3], "gate_weights": [0.7, 0.3]},
        {"layer_idx": 0, "token_idx": 0, "selected_ids": [3, 1], "gate_weights": [0.6, 0.4]},
    ]
    trace = load_trace(write(json_lines(*records)))
    assert trace.experts.tolist() == [[3, 1], [2, 0], [1, 3]]
    assert trace.report()["id_order"] == "ranked"
    with pytest.raises(TraceError, match="line 4: expected token 1 layer 0 once"):
        load_trace(write(json_lines(*records, records[1])))
    with pytest.raises(TraceError, match="line 1: expected 2 gate_weights"):
        load_trace(write(json_lines({**records[0], "gate_weights": [1]})))


def test_sglang_count_table(write):
    trace = load_trace(write("layer_id,expert_id,count\n2,0,5\n2,3,1\n4,1,7\n2,0,1\n"))
    assert trace.layers == [2, 4]
    assert trace.counts.tolist() == [[6, 0, 0, 1], [0, 7, 0, 0]]
    with pytest.raises(TraceError, match="line 2: expected count as int, found 'x'"):
        load_trace(write("layer_id,expert_id,count\n2,0,x\n"))
    with pytest.raises(TraceError, match="line 2: expected expert_id from 0"):
        load_trace(write("layer_id,expert_id,count\n2,-1,3\n"))


@pytest.mark.parametrize(
    ("cut", "match"),
    [
        (lambda lines: lines[:-1], "expected 6 rows per token and layer, slot 0 to 5, found the file ends after 44765"),
        (lambda lines: lines[:60] + lines[61:], "line 61: expected 6 rows per token and layer"),
        (lambda lines: [*lines[:60], "0,0,1", *lines[60:]], "line 61: expected 9 fields, found 3"),
        (lambda lines: [*lines[:51], *(line.replace(",49,", ",x,") for line in lines[51:52]), *lines[52:]],
         "line 52: expected expert as int, found 'x'"),
        (lambda lines: lines[:51], "end of file: expected at least one record"),
    ],
)  # fmt: skip
def test_damaged_bigmoe_is_refused_at_the_line(write, traces, cut, match):
    lines = (traces / "bigmoe_qwen.route.csv").read_text().splitlines()
    with pytest.raises(TraceError, match=match):
        load_trace(write("\n".join(cut(lines))))


def test_empty_missing_and_unknown_files(write, tmp_path):
    with pytest.raises(TraceError, match="trace.bin: the file is empty"):
        load_trace(write(""))
    with pytest.raises(StorageError, match="nothing: cannot read trace: No such file"):
        load_trace(tmp_path / "nothing")
    with pytest.raises(TraceError, match="not a trace of any known format; it starts 'Dear diary'"):
        load_trace(write("Dear diary"))
    with pytest.raises(TraceError, match="unknown trace format 'wrap'; did you mean 'warp'"):
        load_trace(write("x"), format="wrap")


def test_options_of_another_format_are_refused(traces):
    with pytest.raises(TraceError, match="format warp does not take 'config'; it takes num_experts, moe_layers"):
        load_trace(traces / "warp_olmoe_1b7b_299.jsonl", config="x")


def test_content_decides_not_the_name(write, traces):
    disguised = write((traces / "warp_olmoe_1b7b_299.jsonl").read_bytes(), "usage.csv")
    assert load_trace(disguised).header["engine"] == "WARP"


def test_formats_describe_themselves():
    assert len(FORMATS) >= 15
    assert FORMATS["route"].options == ["num_experts", "dedupe_per_call", "allow_gaps"]
