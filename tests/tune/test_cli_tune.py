"""The commands probe, sweep, compare and runs: what they print, and what they refuse."""

from __future__ import annotations

import json

import pytest

from colibri_lab import cli
from colibri_lab.tune import probe, runs


@pytest.fixture
def trace_file(olmoe, tmp_path):
    return str(olmoe.select(steps=slice(40)).save(tmp_path / "t.parquet"))


def json_of(capsys, *args: str):
    code = cli.main([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_sweep_prints_a_row_per_point_and_goes_on_where_it_was(trace_file, tmp_path, capsys):
    args = (
        "sweep",
        "--trace",
        trace_file,
        "policy=lru,gate-weighted",
        "slots=8,16",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "s"),
    )
    code, rows = json_of(capsys, *args)
    assert code == 0 and len(rows) == 4
    assert [row["error"] is None for row in rows] == [True, True, False, False]
    assert rows[0]["hits"] + rows[0]["misses"] == rows[0]["accesses"]
    assert json_of(capsys, *args) == (0, rows)
    assert cli.main(["sweep", "--trace", trace_file, "policy=gate-weighted", "slots=8", "--workers", "1"]) == 1
    assert "TraceError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["sweep", "--trace", "t", "slots"], "expected NAME=VALUE, got 'slots'"),
        (["sweep", "slots=1"], "one of the arguments --model --trace is required"),
        (["compare", "slots=8", "", "--model", "colibri-tiny"], "did you mean 'expert_cache_slots'"),
        (["compare", "nothing", "either"], "0 records match 'nothing'"),
        (["runs", "--kind", "genrate"], "record kind 'genrate'"),
        (["tune", "--model", "colibri-tiny", "--time", "soon"], "time must be seconds"),
        (["plan", "--model", "Qwen3-31B"], "shapes known by name"),
        (["run", "--model", "colibri-tiny", "--settings", "none.json", "--prompt", "a"], "none.json: not a settings file"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_line(args, says, capsys):
    assert cli.main(args) in (1, 2)
    assert says in capsys.readouterr().err


def test_compare_runs_a_model_and_reads_records(tiny, capsys):
    code, found = json_of(capsys, "compare", "expert_cache_slots=4", "expert-cache-slots=8", "--model", str(tiny), "-n", "3",
                          "--max-tokens", "4")  # fmt: skip
    assert code == 0
    assert (found["a"], found["b"]) == ({"expert_cache_slots": 4}, {"expert_cache_slots": 8})
    assert [side["n"] for side in found["sides"]] == [12, 6, 6]
    assert found["winner"] is None and "take a larger n" in found["reason"]
    ids = [
        runs.save("generate", requested={"policy": name}, facts={"tokens_per_s": speed}).id
        for name, speed in (("lru", 9.0), ("arc", 10.0))
    ]
    assert cli.main(["compare", *ids]) == 0
    said = capsys.readouterr().out
    assert "varied: policy; n = 1 each" in said and "No winner" in said
    assert "confounded: page cache before the run: not recorded" in said


def test_runs_are_listed_filtered_and_shown(capsys):
    assert cli.main(["runs"]) == 0
    assert "no run records in" in capsys.readouterr().out
    kept = runs.save(
        "generate", requested={}, effective={"policy": "arc", "expert_cache_slots": 16}, facts={"tokens_per_s": 12.0}
    )
    runs.save(
        "generate", requested={}, effective={"policy": "lru", "expert_cache_slots": 16}, facts={"tokens_per_s": 9.0}
    )
    code, rows = json_of(capsys, "runs", "--where", "policy=arc", "expert_cache_slots=16")
    assert code == 0 and [row["id"] for row in rows] == [kept.id]
    assert cli.main(["runs", kept.id]) == 0
    assert json.loads(capsys.readouterr().out)["facts"] == {"tokens_per_s": 12.0}


def test_run_keeps_a_record_when_asked(tiny, capsys):
    args = [
        "run",
        "--model",
        str(tiny),
        "--prompt",
        "def",
        "--max-tokens",
        "3",
        "--expert-cache-slots",
        "5",
        "--record",
    ]
    assert cli.main(args) == 0
    assert "run record" in capsys.readouterr().err
    assert runs.runs("generate").expert_cache_slots.tolist() == [5]
    assert runs.load(runs.runs().id[0]).manifest["settings"]["requested"] == {"expert_cache_slots": 5, "max_tokens": 3}


def test_probe_prints_and_writes(probe_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probe, "probe", lambda path, seconds: probe_of)
    code, found = json_of(capsys, "probe", "--path", str(tmp_path), "--out", str(tmp_path / "p.json"))
    assert code == 0 and found["disk"] == probe_of.disk
    assert probe.Probe.load(tmp_path / "p.json").disk == probe_of.disk
    assert cli.main(["probe"]) == 0
    assert "GB/s" in capsys.readouterr().out
