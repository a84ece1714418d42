"""Sweeps: every point a row, failures included; what is finished is not done again; processes and a cluster agree."""

from __future__ import annotations

import os

import distributed
import pandas as pd
import pytest

import colibri_lab as cl
from colibri_lab.errors import SettingError
from colibri_lab.tune import runs, sweep

GRID = {"policy": ["lru", "arc"], "slots": [8, 16]}


def quiet(*args, **kw) -> pd.DataFrame:
    return sweep.sweep(*args, progress=False, **kw)


@pytest.fixture
def in_this_process(monkeypatch):
    """Points run here, and are noted."""
    seen = []

    def here(task, todo, workers):
        for point in todo:
            seen.append(point)
            yield point, sweep.run_point(task, point)

    monkeypatch.setattr(sweep, "_processes", here)
    return seen


def test_a_replay_sweep_has_the_counts_of_replay(olmoe, in_this_process):
    table = quiet(trace=olmoe, grid=GRID)
    assert len(table) == 4 and table.error.isna().all()
    for _, row in table.iterrows():
        totals = olmoe.replay(policy=row.policy, slots=row.slots).attrs["totals"]
        assert (row.hits, row.misses) == (totals["hits"], totals["misses"])
    kept = runs.load(runs.runs("sweep").id[0])
    assert kept.facts == {"points": 4, "failed": 0}
    assert kept.manifest["trace"]["hash"] == runs.trace_identity(olmoe)["hash"]


def test_rows_reach_the_disk_one_by_one_and_are_not_made_again(olmoe, tmp_path, monkeypatch, in_this_process):
    real, left = sweep.run_point, [2]

    def interrupted(task, point):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(task, point)

    monkeypatch.setattr(sweep, "run_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quiet(trace=olmoe, grid=GRID, out=tmp_path / "s")
    assert len(list((tmp_path / "s" / "rows").glob("*.parquet"))) == 2
    monkeypatch.setattr(sweep, "run_point", real)
    in_this_process.clear()
    table = quiet(trace=olmoe, grid=GRID, out=tmp_path / "s")
    assert len(in_this_process) == 2 and len(table) == 4
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "s" / "sweep.parquet"), table, check_dtype=False)
    in_this_process.clear()
    assert len(quiet(trace=olmoe, grid={**GRID, "slots": [8, 16, 24]}, out=tmp_path / "s")) == 6
    assert len(in_this_process) == 2
    next((tmp_path / "s" / "rows").glob("*.parquet")).write_bytes(b"torn")
    in_this_process.clear()
    assert len(quiet(trace=olmoe, grid=GRID, out=tmp_path / "s")) == 4


def test_a_failing_point_is_a_row_with_its_reason(olmoe, in_this_process):
    table = quiet(trace=olmoe, grid={"policy": ["lru", "gate-weighted"], "slots": [8]})
    assert table.error.isna().tolist() == [True, False]
    assert "gate" in table.error[1] and "TraceError" in table.error[1]
    assert runs.load(runs.runs("sweep").id[0]).facts["failed"] == 1


def test_real_runs_of_a_model(tiny):
    grid = {"expert_cache_slots": [4, 32], "max_tokens": [5], "temperature": [0.0], "stop_at_eos": [False]}
    table = quiet(model=tiny, grid=grid, repeats=1)
    assert table.error.isna().all()
    lab = cl.open(tiny, expert_cache_slots=4)
    lab.warmup()
    lab.reset_cache()
    run = lab.generate(sweep.trial.PROMPT, max_tokens=5, temperature=0.0, stop_at_eos=False)
    assert table.hit_rate[0] == pytest.approx(run.hit_rate)
    assert table.hit_rate[1] > table.hit_rate[0]
    assert (table.tokens_per_s > 0).all()


def die(task, point):
    os._exit(9)


def test_a_process_that_dies_costs_its_point_only(monkeypatch):
    monkeypatch.setattr(sweep, "run_point", die)
    rows = list(sweep._processes({}, [{"slots": 1}], 2))
    assert len(rows) == 1 and "the process died" in rows[0][1]["error"]


def test_a_cluster_of_two_workers_gives_the_same_table(olmoe, tmp_path):
    options = dict(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with distributed.LocalCluster(**options) as cluster:
        table = quiet(trace=olmoe, grid=GRID, dask=cluster.scheduler_address, out=tmp_path / "d")
    plain = quiet(trace=olmoe, grid=GRID, workers=1)
    pd.testing.assert_frame_equal(table, plain)


def test_a_sweep_refuses_what_it_cannot_do(olmoe, tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="give one of them"):
        quiet(grid=GRID)
    with pytest.raises(SettingError, match="at least one value"):
        quiet(trace=olmoe, grid={"slots": []})
    with pytest.raises(SettingError, match="unknown setting 'slot' in the grid; did you mean 'slots'"):
        quiet(trace=olmoe, grid={"slot": [1]})
    monkeypatch.setattr(sweep, "PATIENCE_S", 0.3)
    with pytest.raises(SettingError, match="no Dask scheduler answers at 'tcp://127.0.0.1:1'"):
        quiet(trace=olmoe, grid=GRID, dask="tcp://127.0.0.1:1", out=tmp_path)
