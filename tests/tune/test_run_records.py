"""Run records: what they keep, how they are found again, and that a record is whole or not there."""

from __future__ import annotations

import json

import pandas as pd
import pytest

import colibri_lab as cl
from colibri_lab.errors import SettingError, StorageError
from colibri_lab.tune import runs
from colibri_lab.tune.compare import differences


def test_a_record_gives_back_what_was_saved(own_records):
    table = pd.DataFrame({"slots": [8, 16], "policy": ["lru", None]})
    kept = runs.save("sweep", requested={"slots": [8, 16]}, effective={"threads": 2}, facts={"points": 2},
                     tables={"rows": table}, notes=["by hand"])  # fmt: skip
    again = runs.load(kept.id)
    assert again.path.parent == own_records
    assert again.facts == {"points": 2}
    assert again.manifest["settings"] == {"requested": {"slots": [8, 16]}, "effective": {"threads": 2}}
    assert again.manifest["versions"]["colibri-lab"] == cl.__version__
    assert len(again.manifest["machine"]["fingerprint"]) == 16
    assert again.manifest["page_cache"] == {"before": None, "after": None}
    pd.testing.assert_frame_equal(again.table("rows"), table, check_dtype=False)
    with pytest.raises(SettingError, match="has no table 'row'; did you mean 'rows'"):
        again.table("row")


def test_runs_lists_and_filters():
    assert runs.runs().empty
    runs.save("generate", requested={}, effective={"policy": "lru", "threads": 2}, facts={"tokens_per_s": 10.0})
    runs.save("generate", requested={}, effective={"policy": "arc", "threads": 2}, facts={"tokens_per_s": 12.0})
    runs.save("compare", requested={"n": 5}, facts={"winner": "b"})
    assert runs.runs().kind.tolist().count("generate") == 2
    assert runs.runs(policy="arc").tokens_per_s.tolist() == [12.0]
    assert runs.runs("compare").winner.tolist() == ["b"]
    assert runs.runs(since="2999-01-01").empty
    with pytest.raises(SettingError, match="no record has a column 'polcy'; did you mean 'policy'"):
        runs.runs(polcy="arc")
    with pytest.raises(SettingError, match="record kind 'genrate'"):
        runs.runs("genrate")


def test_a_broken_off_record_leaves_nothing_and_foreign_folders_are_passed_over(own_records, monkeypatch):
    runs.save("compare", requested={}, facts={})
    (own_records / "not-a-record").mkdir()
    (own_records / "half").mkdir()
    (own_records / "half" / "manifest.json").write_text('{"kind": "gen')

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(StorageError, match="cannot store the record.*No space left.*COLIBRI_RUNS"):
        runs.save("sweep", requested={}, tables={"rows": pd.DataFrame({"a": [1]})})
    assert sorted(path.name[-1:] for path in own_records.iterdir() if path.name.startswith(".")) == []
    assert len(runs.runs()) == 1


def test_a_record_is_found_by_either_end_of_its_id_and_ambiguity_is_an_error():
    first, second = (runs.save("plan", requested={}) for _ in range(2))
    assert runs.load(first.id[-8:]).id == first.id
    assert runs.load(second.path).id == second.id
    with pytest.raises(SettingError, match="0 records match 'nothing'"):
        runs.load("nothing")
    with pytest.raises(SettingError, match="2 records match"):
        runs.load(first.id[:8])


def test_a_run_saves_itself_with_its_model_and_settings(tiny):
    lab = cl.open(tiny, expert_cache_slots=6, policy="arc")
    run = lab.generate("def add(a, b):", max_tokens=6, temperature=0.0, stop_at_eos=False)
    kept = run.save(lab, notes=["kept by a test"])
    assert kept.facts["tokens_per_s"] == pytest.approx(run.decode_tokens_per_s)
    assert kept.facts["total_bytes"] == lab.memory()["total_bytes"]
    requested = kept.manifest["settings"]["requested"]
    assert requested == {
        "expert_cache_slots": 6,
        "policy": "arc",
        "max_tokens": 6,
        "temperature": 0.0,
        "stop_at_eos": False,
    }
    assert kept.manifest["settings"]["effective"]["loader_threads"] == lab.settings["loader_threads"]
    assert len(kept.table("steps")) == len(run.steps)
    assert cl.runs(expert_cache_slots=6).id.tolist() == [kept.id]
    assert kept.manifest["history"] == "0 experts resident at the start"
    warm = lab.generate("def add(a, b):", max_tokens=6, temperature=0.0, stop_at_eos=False).save(lab)
    assert [each for each in differences(kept, warm) if "history" in each] != []
    assert kept.manifest["model"]["hash"] == runs.model_identity(tiny)["hash"]


def test_a_model_has_another_hash_when_a_file_of_it_changes(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    before = runs.model_identity(tmp_path / "m")["hash"]
    assert runs.model_identity(tmp_path / "m")["hash"] == before
    (tmp_path / "m" / "config.json").write_text("[]")
    assert runs.model_identity(tmp_path / "m")["hash"] != before


def test_a_trace_is_known_by_its_rows_whatever_file_they_are_in(olmoe, tmp_path):
    olmoe.save(tmp_path / "copy.parquet")
    assert runs.trace_identity(tmp_path / "copy.parquet")["hash"] == runs.trace_identity(olmoe)["hash"]
    assert runs.trace_identity(olmoe.select(steps=slice(10)))["hash"] != runs.trace_identity(olmoe)["hash"]


def test_a_manifest_is_plain_json(own_records):
    kept = runs.save("plan", requested={"policy": print}, facts={"rate": float("nan")})
    manifest = json.loads((own_records / kept.id / "manifest.json").read_text())
    assert manifest["facts"]["rate"] is None
    assert manifest["settings"]["requested"]["policy"].startswith("<built-in")
