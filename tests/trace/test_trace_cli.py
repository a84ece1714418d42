"""The trace commands, as a user types them."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from colibri_lab import cli
from colibri_lab.trace import Trace, load_trace


@pytest.fixture
def colibri(monkeypatch, capsys):
    """Run a command line; (exit code, stdout, stderr)."""
    monkeypatch.setattr(cli, "EXTENSIONS", ("trace.cli",))

    def run(*words):
        code = cli.main([str(word) for word in words])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def olmoe(traces):
    return traces / "warp_olmoe_1b7b_299.jsonl"


@pytest.fixture
def qwen(traces):
    return traces / "bigmoe_qwen.route.csv"


def test_info_says_what_a_trace_holds_and_lacks(colibri, olmoe, qwen):
    code, out, _ = colibri("trace", "info", olmoe, qwen)
    assert code == 0
    assert "4784 rows in 4784 events (299 decode steps), 16 layers, top-8 of 64, 1 text\n" in out
    assert "no gates: gate weights were not recorded" in out
    assert "1 prefill steps, 128 decode steps" in out
    assert "also holds weights, resident, bytes, expert_bytes" in out


def test_info_as_json(colibri, olmoe):
    code, out, _ = colibri("trace", "info", olmoe, "--json", "--set", "num_experts=64")
    (report,) = json.loads(out)
    assert code == 0
    assert report["assignments"] == 299 * 16 * 8
    assert report["id_order"] == "unranked"


def test_counts_only_info(colibri, tmp_path):
    (tmp_path / "usage").write_text("-1 2 4\n0 1 5\n")
    code, out, _ = colibri("trace", "info", tmp_path / "usage")
    assert code == 0
    assert "5 counts, 1 layers x 4 experts, no order" in out


def test_cut_and_concat_give_the_trace_back(colibri, olmoe, tmp_path):
    first, second, whole = (tmp_path / f"{name}.parquet" for name in ("a", "b", "ab"))
    assert colibri("trace", "cut", olmoe, "--out", first, "--steps", ":100")[0] == 0
    assert colibri("trace", "cut", olmoe, "--out", second, "--steps", "100:")[0] == 0
    code, _, err = colibri("trace", "concat", first, second, "--out", whole)
    assert code == 0
    assert "4784 rows" in err
    assert np.array_equal(Trace.load(whole).experts, load_trace(olmoe).experts)


def test_cut_by_layer_phase_and_last_steps(colibri, qwen, tmp_path):
    out = tmp_path / "part.parquet"
    colibri("trace", "cut", qwen, "--out", out, "--layers", "0,3-5", "--phase", "decode", "--steps=-20:")
    part = Trace.load(out)
    assert part.layers == [0, 3, 4, 5]
    assert len(part) == 20 * 4


def test_convert_to_parquet_and_to_libcachesim(colibri, olmoe, tmp_path):
    assert colibri("trace", "convert", olmoe, "--out", tmp_path / "t.parquet")[0] == 0
    assert Trace.load(tmp_path / "t.parquet").num_experts == 64
    assert colibri("trace", "convert", olmoe, "--out", tmp_path / "t.bin", "--to", "oracle-general")[0] == 0
    assert (tmp_path / "t.bin").stat().st_size == 24 * 299 * 16 * 8


def test_files_are_not_overwritten_by_accident(colibri, olmoe, tmp_path):
    out = tmp_path / "t.parquet"
    out.write_text("precious")
    code, _, err = colibri("trace", "convert", olmoe, "--out", out)
    assert (code, out.read_text()) == (1, "precious")
    assert "is already there; give --overwrite to replace it" in err
    assert colibri("trace", "convert", olmoe, "--out", out, "--overwrite")[0] == 0
    code, _, err = colibri("trace", "cut", out, "--out", out, "--overwrite", "--steps", "0:1")
    assert (code, len(Trace.load(out))) == (1, 4784)
    assert "is an input of this command" in err


@pytest.mark.parametrize(
    ("words", "code", "match"),
    [
        (["trace", "info", "nothing.here"], 1, "nothing.here: cannot read trace: No such file"),
        (["trace", "cut", "TRACE", "--out", "OUT", "--layers", "5-3"], 2, "range '5-3' runs backwards"),
        (["trace", "cut", "TRACE", "--out", "OUT", "--steps", "7"], 2, "expected A:B, got '7'"),
        (["trace", "cut", "TRACE", "--out", "OUT", "--layers", "99"], 1, "layer 99 is not in the trace"),
        (["trace", "info", "TRACE", "--set", "num_experts"], 2, "expected NAME=VALUE"),
        (["trace", "info", "TRACE", "--set", "experts=3"], 1, "does not take 'experts'"),
        (["trace", "info", "TRACE", "--format", "warpp"], 1, "did you mean 'warp'"),
        (["replay", "TRACE", "--policy", "lruu"], 1, "did you mean 'lru'"),
        (["replay", "TRACE", "--slots", "4,,8"], 2, "expected sizes such as 4,8,4000MiB"),
        (["replay", "TRACE", "--slots", "4G"], 1, "write 4 GB or 4 GiB"),
        (["replay", "TRACE", "--scope", "galactic"], 1, "scope cannot be 'galactic'"),
        (["curve", "TRACE", "--out", "curve.txt"], 1, "must end in .parquet, .csv or .json"),
        (["curve", "TRACE", "--plot", "curve.jpg"], 1, "must end in .png"),
    ],
)
def test_mistakes_are_named(colibri, olmoe, tmp_path, words, code, match):
    names = {"TRACE": olmoe, "OUT": tmp_path / "out.parquet"}
    got, _, err = colibri(*(names.get(word, word) for word in words))
    assert got == code
    assert match in err


def test_replay_json_has_the_promised_fields(colibri, olmoe):
    code, out, _ = colibri("replay", olmoe, "--policy", "lru,belady-bypass", "--slots", "8,16", "--json")
    found = json.loads(out)
    assert code == 0
    assert [(one["policy"], one["slots"]) for one in found] == [
        ("lru", 8), ("lru", 16), ("belady-bypass", 8), ("belady-bypass", 16)]  # fmt: skip
    fields = {"policy", "slots", "scope", "lookup", "admission", "accesses", "hits", "misses", "hit_rate",
              "full_event_hit_rate", "evictions", "bytes_loaded", "compulsory", "per_layer"}  # fmt: skip
    assert fields <= set(found[0])
    assert found[0]["hit_rate"] == pytest.approx(0.4337, abs=5e-5)
    assert found[1]["hit_rate"] == pytest.approx(0.5968, abs=5e-5)
    assert found[1]["full_event_hit_rate"] == pytest.approx(0.075, abs=5e-4)
    assert len(found[0]["per_layer"]) == 16
    assert found[0]["bytes_loaded"] is None, "this trace does not know its expert sizes"


def test_replay_reproduces_the_recording_engine_from_a_byte_budget(colibri, qwen):
    """A global LRU of 4000 MiB, as the engine ran it, has the hit rate of its residency column: 0.7488, all phases."""
    _, out, _ = colibri("replay", qwen, "--slots", "4000MiB", "--scope", "global", "--json")
    (one,) = json.loads(out)
    assert one["hit_rate"] == pytest.approx(0.7488, abs=1e-3)
    assert one["capacity_bytes"] == 4000 * 2**20


def test_replay_text_names_its_denominators(colibri, olmoe):
    _, out, _ = colibri("replay", olmoe, "--slots", "16", "--phase", "decode")
    assert "59.68%" in out
    assert "hit rate: hits / accesses, pooled over layers" in out
    assert "phase: decode" in out


def test_replay_warns_below_one_tokens_cycle(colibri, olmoe):
    """16 layers x 8 experts: a shared cache of fewer than 128 slots is refilled by every token."""
    code, _, err = colibri("replay", olmoe, "--slots", "100", "--scope", "global", "--json")
    assert code == 0
    assert "100 slots are below one token's cycle of 128 blocks" in err


def test_replay_all_leaves_out_what_the_trace_cannot_feed(colibri, olmoe):
    code, out, err = colibri("replay", olmoe, "--policy", "all", "--slots", "8", "--json")
    assert code == 0
    assert "left out gate-weighted" in err
    assert len(json.loads(out)) >= 20


def test_replay_with_a_fitted_set_from_another_trace(colibri, olmoe, tmp_path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    colibri("trace", "cut", olmoe, "--out", first, "--steps", ":149")
    colibri("trace", "cut", olmoe, "--out", second, "--steps", "149:")
    _, out, _ = colibri("replay", second, "--policy", "static-pin", "--slots", "16", "--fit", first, "--json")
    assert json.loads(out)[0]["hit_rate"] == pytest.approx(0.46, abs=0.01)


def test_curve_writes_table_and_picture(colibri, olmoe, tmp_path):
    table, plot = tmp_path / "curve.parquet", tmp_path / "curve.png"
    code, out, _ = colibri("curve", olmoe, "--policy", "lru,belady-bypass", "--out", table, "--plot", plot)
    assert (code, out) == (0, "")
    rows = pd.read_parquet(table)
    at16 = rows[rows.slots == 16].set_index("policy").hit_rate
    assert at16["lru"] == pytest.approx(0.5968, abs=5e-5)
    assert at16["belady-bypass"] > at16["lru"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_curve_text_and_json(colibri, olmoe):
    _, out, _ = colibri("curve", olmoe, "--policy", "lru")
    assert out.startswith("hit rate, % of accesses, by slots")
    _, out, _ = colibri("curve", olmoe, "--policy", "lru", "--json")
    assert {"policy", "slots", "hit_rate"} <= set(json.loads(out)[0])


def test_locality_text_and_json(colibri, olmoe):
    code, out, _ = colibri("locality", olmoe)
    assert code == 0
    assert "decode phase, 299 tokens x 16 layers x top-8 of 64" in out
    assert "next token overlap                           0.4352" in out
    _, out, _ = colibri("locality", olmoe, "--json", "--sch", "4")
    report = json.loads(out)
    assert report["summary"]["distinct_experts"] == 60.875
    assert report["sch"][15]["slots"] == 16
    assert report["srp"][0]["low"] is None, "one sample gives no interval"


def test_a_run_writes_a_trace_that_replays_to_its_own_hits(colibri, tmp_path):
    file = tmp_path / "run.parquet"
    words = (
        "run",
        "--model",
        "colibri-tiny",
        "--prompt",
        "In those days",
        "--max-tokens",
        12,
        "--expert-cache-slots",
        8,
    )
    code, out, err = colibri(*words, "--trace", file, "--json")
    assert code == 0 and f"in {file}" in err
    cache = json.loads(out)["cache"]
    replayed = load_trace(file).replay(policy="lru", slots=8, phase="all")
    assert replayed.hits.sum() == sum(row["hits"] for row in cache)
    before = file.read_bytes()
    code, _, err = colibri(*words, "--trace", file)
    assert code == 1 and "run.parquet is already there" in err and file.read_bytes() == before
