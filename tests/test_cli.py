"""The command line: spellings, refusals, exit codes and output, against a stand-in for the opened model."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import colibri_lab
from colibri_lab import cli
from colibri_lab.config import SETTINGS
from colibri_lab.errors import ContainerError, did_you_mean
from colibri_lab.telemetry import Recorder, stage_table


def recorded_steps():
    """A prefill and two decode steps of a recorder whose clock ticks a millisecond at a time."""
    ticks = iter(range(0, 10**12, 10**6))
    recorder = Recorder(clock=lambda: next(ticks))
    for phase in ("prefill", "decode", "decode"):
        recorder.begin(phase)
        for stage in ("attention", "router", "expert_load_wait", "expert_compute"):
            with recorder.stage(stage):
                pass
        recorder.end(tokens=1, hits=3, misses=1)
    return recorder.steps


TEXT = ("ein ", "Satz – ", "选择")


class StandIn:
    """What the command needs of an opened model, and a note of how it was asked."""

    path = Path("model-dir")
    config = SimpleNamespace(moe_layers=(1, 2))
    container = SimpleNamespace(blocks=32)
    engine = SimpleNamespace(pool="1 MB of 2 MB used (50%)")
    interrupt_after = None

    def __init__(self, **settings):
        self.opened, self.asked, self.warmups, self.last_run = settings, [], 0, None

    def summary(self):
        return "colibri-lab: 16 slots, AVX2"

    def memory(self):
        return {"slots": 2_000_000, "total_bytes": np.int64(3_000_000)}

    def warmup(self, runs):
        self.warmups += runs

    def stream(self, prompt, **settings):
        self.asked.append((prompt, settings))
        steps = recorded_steps()
        cache = pd.DataFrame(
            [(1, "prefill", 3, 1, 1, 10), (1, "decode", 6, 2, 2, 20)],
            columns=["layer", "phase", "hits", "misses", "loads", "bytes"],
        )
        effective = {"threads": 2, "temperature": 0.7, "top_p": 0.95, "expert_cache_slots": 16, "scope": "layer"}
        self.last_run = run = SimpleNamespace(
            prompt=prompt,
            text="",
            tokens=[np.int32(5), np.int32(6)],
            prompt_tokens=3,
            steps=steps,
            settings={**effective, **settings},
            wall_s=0.5,
            ttft_s=0.1,
            hit_rate=0.75,
            decode_tokens_per_s=None,
            prefill_tokens_per_s=float("nan"),
            stop_reason="interrupted",
            stages=stage_table(steps),
            cache=cache,
        )
        for i, (step, text) in enumerate(zip(steps, TEXT, strict=True)):
            if i == self.interrupt_after:
                raise KeyboardInterrupt
            step.text = text
            run.text += text
            yield step
        run.stop_reason = "length"


@pytest.fixture
def lab(monkeypatch):
    """`colibri_lab.open` replaced: yields the stand-in that the command opened, once it has."""
    opened = SimpleNamespace(lab=None)

    def stand_in(path, **settings):
        opened.lab = StandIn(**settings)
        return opened.lab

    monkeypatch.setattr(colibri_lab, "open", stand_in, raising=False)
    return opened


def refuse(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(colibri_lab, "open", fail, raising=False)


RUN = ["run", "--model", "m", "--prompt", "once"]


def test_help_needs_nothing_heavy():
    code = "import sys; from colibri_lab.cli import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("run", "convert", "validate", "doctor", "kernels"):
        assert command in done.stdout
    for module in ("numpy", "pandas", "matplotlib", "IPython", "nanobind", "cppimport"):
        assert f"'{module}'" not in done.stdout


def test_every_setting_is_a_flag_of_run():
    options = cli.build_parser()._subparsers._group_actions[0].choices["run"]._option_string_actions
    assert {setting.flag for setting in SETTINGS.values()} <= options.keys()


def test_underscores_and_dashes_are_the_same(lab, capsys):
    assert (
        cli.main([*RUN, "--expert_cache_slots", "8", "--kv_cache_type=naive", "--top-p", "0.5", "--max_tokens=7"]) == 0
    )
    assert lab.lab.opened == {"expert_cache_slots": 8, "kv_cache_type": "naive"}
    assert lab.lab.asked == [("once", {"top_p": 0.5, "max_tokens": 7})]
    assert cli.main(["run", "--model_dir", "m", "--prompt", "once"]) == 0


def test_only_what_was_given_is_passed_on(lab):
    cli.main(RUN)
    assert (lab.lab.opened, lab.lab.asked) == ({}, [("once", {})])


def test_switches_can_be_turned_off(lab):
    cli.main([*RUN, "--no-stop_at_eos", "--allow-fp32"])
    assert lab.lab.opened == {"allow_fp32": True}
    assert lab.lab.asked[0][1] == {"stop_at_eos": False}


def test_a_value_may_look_like_an_option(lab):
    cli.main(["run", "--model", "m", "--prompt=--max_tokens"])
    assert lab.lab.asked[0][0] == "--max_tokens"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["run", "--modle", "m"], "unknown option '--modle': did you mean '--model'?"),
        (
            [*RUN, "--expert_cache_slot", "8"],
            "unknown option '--expert-cache-slot': did you mean '--expert-cache-slots'?",
        ),
        ([*RUN, "--slots", "8"], "unknown option '--slots': did you mean '--expert-cache-slots'?"),
        ([*RUN, "--device", "cuda"], "unknown option '--device'"),
        (["rnu"], "unknown command 'rnu': did you mean 'run'?"),
        ([*RUN, "stray"], "unexpected argument 'stray'"),
        (["run"], "required: --model"),
        ([*RUN, "--expert-cache-slots", "0"], "expert_cache_slots must be at least 1, got 0"),
        ([*RUN, "--threads", "many"], "threads must be int, got 'many'"),
        ([*RUN, "--policy", "lruu"], "policy cannot be 'lruu'; did you mean 'lru'?"),
        ([*RUN, "--temperature", "-1"], "temperature must be at least 0.0, got -1.0"),
        ([*RUN, "--warmup", "-1"], "expected a whole number of at least 0, got '-1'"),
        ([*RUN, "--top"], "unknown option '--top'"),
        (["validate"], "one of the arguments"),
        (["kernels", "biuld"], "unknown command 'biuld': did you mean 'build'?"),
    ],
)
def test_a_line_that_cannot_be_understood_exits_2_and_says_why(line, says, capsys):
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("colibri: error: ")
    assert says in captured.err
    assert captured.out == ""


def test_unknown_options_list_the_known_ones(capsys):
    cli.main([*RUN, "--zzz"])
    assert "Known: --activations, --admission" in capsys.readouterr().err


def test_text_goes_to_stdout_and_the_rest_to_stderr(lab, capsys):
    assert cli.main(RUN) == 0
    captured = capsys.readouterr()
    assert captured.out == "ein Satz – 选择\n"
    assert captured.err.splitlines()[0] == "colibri-lab: 16 slots, AVX2"
    assert "decode not measured" in captured.err


def test_json_is_one_object_with_null_for_what_was_not_measured(lab, capsys):
    assert cli.main([*RUN, "--json", "--seed", "3", "--profile"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "model-dir"
    assert data["text"] == "ein Satz – 选择"
    assert data["hit_rate"] == 0.75
    assert data["tokens"] == [5, 6]
    assert data["settings"]["seed"] == 3
    assert data["decode_tokens_per_s"] is None and data["prefill_tokens_per_s"] is None
    assert data["memory"]["total_bytes"] == 3_000_000
    assert {"layer": 1, "phase": "decode", "hits": 6, "misses": 2, "loads": 2, "bytes": 20} in data["cache"]
    shares = [row["share"] for row in data["stages"] if row["phase"] == "decode"]
    assert sum(shares) == pytest.approx(1)
    assert data["advice"]


def test_profile_prints_stages_and_advice(lab, capsys):
    cli.main([*RUN, "--profile"])
    err = capsys.readouterr().err
    assert "expert_load_wait" in err
    assert "Hit rate 75.0% in decode" in err
    assert "Rule in print: below 85%, add slots" in err


def test_verbose_prints_settings_and_memory(lab, capsys):
    cli.main([*RUN, "--verbose"])
    err = capsys.readouterr().err
    assert "temperature          0.7" in err
    assert "total_bytes          3.00 MB" in err
    assert "memory pool: 1 MB of 2 MB used (50%)" in err


def test_warmup_generates_first_and_does_not_count(lab, capsys):
    cli.main([*RUN, "--warmup", "2", "--json"])
    assert lab.lab.warmups == 2
    assert len(lab.lab.asked) == 1
    assert json.loads(capsys.readouterr().out)["warmup"] == 2


def test_a_prompt_can_come_from_a_file(lab, tmp_path):
    (tmp_path / "p.txt").write_text("Wählen Sie", encoding="utf-8")
    assert cli.main(["run", "--model", "m", "--prompt-file", str(tmp_path / "p.txt")]) == 0
    assert lab.lab.asked[0][0] == "Wählen Sie"


def test_no_prompt_and_an_unreadable_prompt_file_are_errors(lab, tmp_path, capsys):
    assert cli.main(["run", "--model", "m"]) == 1
    assert "--prompt TEXT or --prompt-file FILE" in capsys.readouterr().err
    assert cli.main(["run", "--model", "m", "--prompt-file", str(tmp_path / "gone.txt")]) == 1
    assert "gone.txt" in capsys.readouterr().err
    (tmp_path / "latin1.txt").write_bytes(b"\xe4")
    assert cli.main(["run", "--model", "m", "--prompt-file", str(tmp_path / "latin1.txt")]) == 1
    assert "latin1.txt" in capsys.readouterr().err
    assert lab.lab is None


def test_our_errors_exit_1_with_their_message(monkeypatch, capsys):
    refuse(monkeypatch, ContainerError("layer_0/expert_3.bin: expected 12 bytes, found 3"))
    assert cli.main(RUN) == 1
    assert capsys.readouterr().err == "colibri: error: layer_0/expert_3.bin: expected 12 bytes, found 3\n"


def test_other_errors_are_not_hidden(monkeypatch):
    refuse(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(RUN)


def test_ctrl_c_exits_130_with_a_line(monkeypatch, capsys):
    refuse(monkeypatch, KeyboardInterrupt())
    assert cli.main(RUN) == 130
    assert capsys.readouterr().err == "colibri: interrupted\n"


def test_an_interrupted_run_still_prints_its_text_and_exits_130(lab, monkeypatch, capsys):
    monkeypatch.setattr(StandIn, "interrupt_after", 1)
    assert cli.main(RUN) == 130
    captured = capsys.readouterr()
    assert captured.out == "ein \n"
    assert "(interrupted)" in captured.err
    assert cli.main([*RUN, "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["stop_reason"] == "interrupted"


def test_warnings_are_one_plain_line(lab, monkeypatch, capsys):
    def summary(self):
        warnings.warn("kept 40 of 50 tokens", stacklevel=1)
        return "summary"

    monkeypatch.setattr(StandIn, "summary", summary)
    cli.main(RUN)
    assert "colibri: warning: kept 40 of 50 tokens\n" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_not_an_error():
    code = """if True:
        import sys
        from colibri_lab import cli, kernels
        kernels.names = lambda: ["more than a pipe holds"] * 99999
        sys.exit(cli.main(["kernels", "list"]))
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("sources")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_version_names_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("colibri-lab ")


def test_kernels_list_names_the_sources(capsys, project):
    assert cli.main(["kernels", "list"]) == 0
    out = capsys.readouterr().out
    assert str(project / "cpp") in out
    assert "threads" in out.splitlines()


def test_the_part_of_a_name_that_was_typed_finds_the_name():
    assert did_you_mean("slots", ["expert_cache_slots", "seed"]).startswith("did you mean 'expert_cache_slots'?")
    assert did_you_mean("top", ["top_p", "seed"]).startswith("did you mean 'top_p'?")
    assert did_you_mean("zzzz", ["top_p", "seed"]) == "Known: seed, top_p"
