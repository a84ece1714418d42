"""The probe: what it measures, how it labels what it cannot be sure of, and that machines are not mixed."""

from __future__ import annotations

import json

import pytest

from colibri_lab.errors import SettingError, StorageError
from colibri_lab.tune import page_cache, probe
from colibri_lab.tune.probe import Probe, read_rate


@pytest.fixture
def few(monkeypatch):
    """A probe of a few cells, quick."""
    monkeypatch.setattr(probe, "BLOCKS", (1 << 16, 1 << 20))
    monkeypatch.setattr(probe, "DEPTHS", (1, 2))
    monkeypatch.setattr(probe, "MEASURED", ("int8",))


def test_a_probe_measures_every_part_with_its_spread(few, tmp_path):
    found = probe.probe(tmp_path, seconds=0.5, file_bytes=8 << 20, save=False, progress=False)
    assert list(tmp_path.iterdir()) == []
    assert [(row["block_bytes"], row["depth"]) for row in found.disk] == [
        (1 << 16, 1),
        (1 << 16, 2),
        (1 << 20, 1),
        (1 << 20, 2),
    ]
    rows = [*found.disk, *found.page_cache, *found.memory]
    assert all(0 < row["low"] <= row["bytes_per_s"] <= row["high"] and row["n"] >= 3 for row in rows)
    assert {row["how"] for row in found.disk} <= {"direct", "evicted", "cached"}
    assert {(row["format"], row["tokens"]) for row in found.kernels} == {("int8", 1), ("int8", 64)}
    assert found.layer_s["seconds"] > 0
    assert found.fingerprint in str(found)
    again = Probe.load(found.save(tmp_path / "probe.json"))
    assert again.to_json() == found.to_json()


def test_another_machines_probe_is_refused_here_and_welcome_in_a_plan(probe_of, tmp_path):
    path = probe_of.save(tmp_path / "p.json")
    assert Probe.load(path).disk == probe_of.disk
    data = json.loads(path.read_text())
    data["machine"] |= {"fingerprint": "0" * 16, "cpu": "Another CPU"}
    path.write_text(json.dumps(data))
    with pytest.raises(
        SettingError, match=r"p.json: measured on another machine \(Another CPU.*colibri probe.*--machine"
    ):
        Probe.load(path)
    assert Probe.load(path, here=False).machine["cpu"] == "Another CPU"
    path.write_text("{}")
    with pytest.raises(StorageError, match="p.json: not a probe"):
        Probe.load(path)


class Refusing:
    """Loader threads on a file system without O_DIRECT."""

    def __init__(self, real):
        self.real = real

    def BlockLoader(self, paths, offsets, sizes, mode, lanes, memory):
        return self.real.BlockLoader(paths, offsets, sizes, "pread" if mode == "direct" else mode, lanes, memory)


@pytest.mark.parametrize(("share", "label"), [(0.0, "evicted"), (1.0, "cached"), (None, "cached")])
def test_reads_that_may_come_from_memory_are_labelled(share, label, tmp_path, monkeypatch):
    file = tmp_path / "f"
    file.write_bytes(bytes(1 << 20))
    real = probe.kernels.load("storage")
    monkeypatch.setattr(probe.kernels, "load", lambda name: Refusing(real))
    monkeypatch.setattr(page_cache, "share", lambda paths: share)
    assert read_rate(file, 1 << 20, 1 << 16, 2, 0.0)["how"] == label


def test_the_page_cache_is_seen_emptied_and_filled(tmp_path):
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(b"x" * (1 << 18))
    page_cache.warm(files)
    if page_cache.share(files) is not None:  # the system tells
        assert page_cache.share(files) == 1.0
    assert page_cache.share([]) is None
    assert page_cache.evict(files) in (True, False)
    assert page_cache.share([tmp_path / "missing"]) is None


def test_a_folder_that_is_not_there_or_too_full_is_said(few, tmp_path, monkeypatch):
    with pytest.raises(StorageError, match="no such folder; --path names one"):
        probe.probe(tmp_path / "nowhere", progress=False)
    with pytest.raises(SettingError, match="seconds must be positive"):
        probe.probe(tmp_path, seconds=0)
    found = Probe({"fingerprint": "", "cpu": ""}, "", 0, 0)
    probe._disk(found, tmp_path, 1 << 20, 1.0)
    assert "disk not measured" in found.notes[0]
