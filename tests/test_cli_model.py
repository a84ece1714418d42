"""The command line on real models: convert, validate and run one small checkpoint, and break things on the way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest

from colibri_lab import cli


@pytest.fixture(scope="module")
def container(project, tmp_path_factory):
    """A tiny mixtral, converted by the command; also what the command printed."""
    out = tmp_path_factory.mktemp("containers") / "mixtral"
    command = [sys.executable, "-m", "colibri_lab", "convert"]
    command += ["--model_name", str(project / "tests/oracle/mixtral"), "--output-dir", str(out), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out, done


def run_json(capsys, *args: str) -> dict:
    assert cli.main(["run", "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


def test_convert_states_its_plan_and_then_what_it_did(container):
    out, done = container
    assert "3 layers, 3 of them with 8 experts, top-2" in done.stderr
    assert f"{out}: " in done.stdout and "ratio" in done.stdout
    assert "agree with the source" in done.stdout


def test_convert_never_replaces_a_container_unasked(container, project, capsys):
    out, _ = container
    again = ["convert", "--input", str(project / "tests/oracle/mixtral"), "--output", str(out)]
    assert cli.main(again) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main([*again, "--overwrite"]) == 0


def test_validate_says_valid_and_exits_0(container, capsys):
    assert cli.main(["validate", str(container[0])]) == 0
    assert capsys.readouterr().out == f"{container[0]}: valid\n"
    assert cli.main(["run", "--validate", "--model", str(container[0])]) == 0
    assert "valid\n" in capsys.readouterr().out


def test_validate_names_every_fault_and_exits_1(container, tmp_path, capsys):
    bad = tmp_path / "bad"
    shutil.copytree(container[0], bad)
    (bad / "layer_0/expert_3.bin").unlink()
    (bad / "layer_1/router.bin").write_bytes(b"COLI")
    for line in (["validate", str(bad)], ["run", "--validate", "--model", str(bad)]):
        assert cli.main(line) == 1
        out = capsys.readouterr().out
        assert "expert_3.bin" in out and "router.bin" in out


def test_run_reports_what_it_measured(container, capsys):
    args = ("--model", str(container[0]), "--prompt", "abc abc", "--max-tokens", "6", "--expert_cache_slots", "2")
    data = run_json(capsys, *args, "--temperature", "0", "--no-stop-at-eos")
    assert len(data["tokens"]) == 6 and data["stop_reason"] == "length"
    assert data["settings"]["expert_cache_slots"] == 2 and data["settings"]["threads"] >= 1
    for phase in ("prefill", "decode"):
        assert sum(row["share"] for row in data["stages"] if row["phase"] == phase) == pytest.approx(1, abs=0.01)
    assert sum(row["seconds"] for row in data["stages"]) == pytest.approx(data["wall_s"], rel=0.01)
    hits, misses = (sum(row[name] for row in data["cache"] if row["phase"] == "decode") for name in ("hits", "misses"))
    assert hits + misses == 5 * 3 * 2  # five decoded tokens after the prompt's own, three layers, top-2
    assert data["hit_rate"] == pytest.approx(hits / (hits + misses))
    assert data["memory"]["total_bytes"] == sum(v for k, v in data["memory"].items() if k != "total_bytes")


def test_warmup_leaves_tokens_and_counts_to_the_run_itself(container, capsys):
    args = ("--model", str(container[0]), "--prompt", "abc", "--max-tokens", "4", "--seed", "5", "--no-stop-at-eos")
    cold, warm = run_json(capsys, *args), run_json(capsys, *args, "--warmup", "2")
    assert cold["tokens"] == warm["tokens"]
    asked = [sum(row["hits"] + row["misses"] for row in data["cache"]) for data in (cold, warm)]
    assert asked[0] == asked[1]
    assert sum(row["misses"] for row in warm["cache"]) < sum(row["misses"] for row in cold["cache"])


def test_too_long_a_prompt_is_a_warning_with_counts(container, capsys):
    args = ["--model", str(container[0]), "--prompt", "abcdefgh " * 20, "--max-seq-len", "16", "--max-tokens", "2"]
    assert cli.main(["run", *args]) == 0
    err = capsys.readouterr().err
    assert "colibri: warning:" in err and "kept" in err and "dropped" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "no-such-model", "--prompt", "x"], "no-such-model: no such directory"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "x", "--max-seq-len", "100000"], "max_seq_len must be at most 512"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_1(container, capsys, args, says):
    assert cli.main(["run", "--model", str(container[0]), *args]) == 1
    err = capsys.readouterr().err
    assert "colibri: error: " in err and says in err


def test_ctrl_c_keeps_the_text_so_far_and_exits_130(project):
    command = [sys.executable, "-m", "colibri_lab", "run", "--model", str(project / "data/colibri-tiny"), "--prompt"]
    command += ["In those days", "--max-tokens", "2000", "--no-stop-at-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert first + rest
    assert "(interrupted)" in err and "Traceback" not in err
