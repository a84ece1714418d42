"""The tuner: only safe knobs, within the budget, confirmed or not recommended; and the settings file it ends with."""

from __future__ import annotations

import json

import pytest

import colibri_lab as cl
from colibri_lab import cli
from colibri_lab.config import SETTINGS
from colibri_lab.errors import MemoryPlanError, SettingError, StorageError
from colibri_lab.tune import runs, tuner
from colibri_lab.tune.tuner import parse_duration, read_settings, safe_settings, write_settings


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (20, 20), ("7", 7), ("2 min", 120)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "ten", "-5s", "0", "5 days", True])
def test_durations_that_are_none(text):
    with pytest.raises(SettingError, match="time must be"):
        parse_duration(text)


def test_no_safe_knob_changes_tokens():
    assert not any(SETTINGS[name].changes_tokens for name in safe_settings())
    assert {"expert_cache_slots", "policy", "storage", "threads"} <= set(safe_settings())


def test_a_settings_file_comes_back_checked(tmp_path):
    path = write_settings(tmp_path / "s.json", {"expert_cache_slots": 8, "policy": "arc"}, confirmed=True)
    assert read_settings(path) == {"expert_cache_slots": 8, "policy": "arc"}
    path.write_text(json.dumps({"threads": 1}))
    assert read_settings(path) == {"threads": 1}
    path.write_text(json.dumps({"settings": {"polcy": "arc"}}))
    with pytest.raises(SettingError, match="s.json: unknown setting 'polcy'; did you mean 'policy'"):
        read_settings(path)
    path.write_text("[1]")
    with pytest.raises(SettingError, match="s.json: expected a JSON object"):
        read_settings(path)
    with pytest.raises(StorageError, match="missing.json: not a settings file"):
        read_settings(tmp_path / "missing.json")


def test_a_short_search_ends_with_settings_that_fit_and_open(tiny, monkeypatch):
    monkeypatch.setattr(tuner, "RUNGS", (2, 4, 6))
    result = tuner.tune(tiny, budget="40 MB", time_s=60, trials=5, confirm=3, settings={"threads": 1}, progress=False)
    assert len(result.trials) == 5
    assert set(result.trials.state) <= {"complete", "pruned", "refused"}
    refused = result.trials[result.trials.state == "refused"]
    assert all("needs" in reason or "take" in reason for reason in refused.reason)
    lab = cl.open(tiny, **result.settings)
    assert lab.settings["threads"] == 1
    assert lab.memory()["total_bytes"] <= 40_000_000
    if not result.confirmed:
        assert "the defaults stay" in result.reason
    kept = runs.load(result.record)
    assert len(kept.table("trials")) == 5 and kept.facts["confirmed"] == result.confirmed


def test_knobs_that_change_tokens_and_budgets_that_hold_nothing_are_refused(tiny):
    with pytest.raises(SettingError, match="cannot vary 'sigmoid': it changes tokens"):
        tuner.tune(tiny, knobs=["sigmoid"], time_s=1)
    with pytest.raises(SettingError, match="cannot vary 'slots': did you mean 'expert_cache_slots'"):
        tuner.tune(tiny, knobs=["slots"], time_s=1)
    with pytest.raises(MemoryPlanError, match="do not hold .* with one slot per layer"):
        tuner.tune(tiny, budget="1 MB", time_s=1)


def test_the_command_writes_the_file_that_run_reads(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuner, "RUNGS", (2, 3))
    out = tmp_path / "tuned.json"
    args = ["tune", "--model", str(tiny), "--time", "20s", "--trials", "2", "--knobs", "expert_cache_slots,policy", "--out",
            str(out), "--json"]  # fmt: skip
    assert cli.main(args) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"] == read_settings(out)
    assert (
        cli.main(
            ["run", "--model", str(tiny), "--settings", str(out), "--prompt", "def", "--max-tokens", "2", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["stop_reason"] in ("length", "eos")
