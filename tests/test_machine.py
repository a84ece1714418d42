"""Cores and memory as this process may use them: affinity and control-group limits, read from made-up system files."""

from __future__ import annotations

import os

import pytest

from colibri_lab import machine


def test_cores_are_never_more_than_the_affinity_mask_allows():
    physical, logical = machine.cores()
    assert 1 <= physical <= logical <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [("cpu.max", "150000 100000", 1), ("cpu.max", "50000 100000", 1), ("cpu/cpu.cfs_quota_us", "100000", 1)],
)
def test_a_cpu_quota_lowers_the_cores(monkeypatch, tmp_path, file, text, expected):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.cores() == (expected, expected)


def test_no_quota_leaves_the_cores_alone(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("max 100000")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.cores()[1] == len(os.sched_getaffinity(0))


def test_a_memory_limit_counts_as_the_total(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.memory() == (1_000_000, 600_000)
