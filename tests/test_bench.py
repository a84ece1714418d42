"""`colibri bench` and the work it times."""

from __future__ import annotations

import json

import numpy as np
import pytest

import colibri_lab as cl
from colibri_lab import bench, cli, kernels
from colibri_lab.checkpoint.formats import FORMATS
from colibri_lab.checkpoint.packing import part_sizes
from colibri_lab.errors import SettingError, StorageError
from colibri_lab.workloads import WORKLOADS, workload

COLUMNS = ["what", "case", "threads", "unit", "median", "low", "high", "bound", "share", "samples", "clean"]


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    """Little memory and little work: what is tested here is not speed."""
    monkeypatch.setattr("colibri_lab.workloads.POOL_BYTES", 1_000_000)
    monkeypatch.setattr("colibri_lab.limits.READ_BYTES", 1 << 20)
    monkeypatch.setattr("colibri_lab.limits.ROUNDS", 1000)
    monkeypatch.setattr(bench, "WORKING_SETS", (1 << 14, 1 << 16))
    monkeypatch.setattr(bench, "TOKENS", (1, 3))


@pytest.mark.parametrize("format", FORMATS)
def test_products_do_the_work_they_are_named_after(format):
    work = workload("gemm", format=format, tokens=3, rows=64, cols=128)
    assert work.operations == 2 * 3 * 64 * 128
    stored = sum(part_sizes((64, 128), format, "rows16"))
    assert work.bytes == pytest.approx(stored + 4 * 3 * (64 + 128))
    result = work.call()()
    assert result.shape == (3, 64) and np.isfinite(result).all() and 0.2 < result.std() < 5


@pytest.mark.parametrize("kernel", [name for name in WORKLOADS if name not in ("gemm", "ffn")])
def test_other_kernels_have_work_that_gives_finite_numbers(kernel):
    work = workload(kernel, tokens=3)
    assert work.operations > 0 and work.bytes > 0
    assert np.isfinite(work.call()()).all()


def test_the_result_does_not_depend_on_threads():
    work = workload("gemm", format="int8", tokens=2, rows=80, cols=96)
    first = work.call(threads=1)().copy()
    np.testing.assert_array_equal(work.call(threads=3)(), first)


@pytest.mark.parametrize("format", bench.WEIGHTS)
def test_where_experts_lie_does_not_change_what_they_compute(format):
    """Slots, copied side by side, and all gate matrices together: the same bits."""
    shape = {"format": format, "tokens": 4, "hidden": 48, "width": 32, "k": 2, "experts": 5}
    slots = workload("ffn", **shape).call()().copy()
    np.testing.assert_array_equal(workload("ffn", layout="gathered", **shape).call()(), slots)
    np.testing.assert_array_equal(workload("ffn", layout="stacked", **shape).call()(), slots)
    assert len(np.unique(slots)) > 100  # not the same expert five times


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gem", {}, "did you mean 'gemm'"),
        ("gemm", {"format": "int9"}, "unknown number format 'int9'"),
        ("gemm", {"format": "bf16", "int8_activations": True}, "are for weights of integers with scales, not for bf16"),
        ("ffn", {"layout": "heap"}, "layout cannot be 'heap'"),
    ],
)
def test_work_that_does_not_exist_is_refused(name, options, says):
    with pytest.raises(ValueError, match=says):
        workload(name, **options)


def test_a_report_has_a_row_for_every_case_and_its_bound():
    report = bench.bench(("gemm", "bandwidth"), threads=[1], number_formats=["int8"], rounds=1, progress=False)
    table = report.table
    assert list(table.columns[: len(COLUMNS)]) == COLUMNS
    gemm = table[table.what == "gemm"]
    assert len(gemm) == 2 * 2  # 1 and 3 tokens; float32 and int8 activations
    np.testing.assert_allclose(gemm.share, gemm.bound / gemm["median"])
    assert (table["median"] >= table.low).all() and (table["median"] <= table.high).all()
    assert {"compiler", "simd", "machine"} <= set(report.facts)
    for case in table.case:
        assert case in str(report)


def test_decode_and_prefill_run_with_every_expert_resident():
    report = bench.bench(("decode", "prefill"), threads=[1], rounds=1, progress=False)
    assert list(report.table.what) == ["decode", "prefill"]
    assert (report.table.unit == "tokens/s").all() and (report.table["median"] > 0).all()


def test_bytes_of_a_token_are_those_of_the_tensors_it_reads():
    lab = cl.open("colibri-tiny")
    c, wide = lab.config, 2  # bf16
    hidden, heads = c.hidden_size, c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    experts = c.top_k * 3 * hidden * c.expert_intermediate_size
    shared, dense = 3 * hidden * c.shared_intermediate_size, 3 * hidden * c.dense_intermediate_size
    router = 4 * c.num_experts * hidden
    moe = len(c.moe_layers)
    needed = (
        wide * (c.num_layers * heads * hidden + moe * (experts + shared) + dense + c.vocab_size * hidden) + moe * router
    )
    assert bench.token_bytes(lab) == pytest.approx(needed, rel=0.01)  # norms, biases and padding are the rest
    assert (
        bench.token_bytes(lab, 10) - bench.token_bytes(lab) == 10 * 2 * 4 * c.num_layers * c.num_kv_heads * c.head_dim
    )


def test_disk_rows_come_from_reads_of_a_file_that_is_gone_afterwards(tmp_path, monkeypatch):
    report = bench.bench(("disk",), rounds=1, path=str(tmp_path), progress=False)
    assert len(report.rows) == 6 and (report.table["median"] > 0).all()
    assert list(tmp_path.iterdir()) == []


def test_wrong_parts_folders_and_rounds_are_refused(tmp_path):
    with pytest.raises(SettingError, match="did you mean 'decode'"):
        bench.bench(("decod",))
    with pytest.raises(SettingError, match="rounds must be at least 1, got 0"):
        bench.bench(("gemm",), rounds=0)
    with pytest.raises(StorageError, match="choose another folder"):
        bench.bench(("disk",), path=str(tmp_path / "none"), progress=False)


def test_the_command_prints_json(capsys):
    assert cli.main(["bench", "gemm", "--formats", "int8", "--thread-counts", "1", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"facts", "limits", "rows"}
    assert found["facts"]["simd"].startswith(kernels.simd())
    assert found["rows"][0]["unit"] == "us"


def test_the_command_prints_a_table(capsys):
    assert cli.main(["bench", "bandwidth", "--thread-counts", "1", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert "compiler" in out and "reading 16 KiB a thread" in out and "GB/s" in out


def test_the_command_refuses_what_it_does_not_know(capsys):
    assert cli.main(["bench", "gem"]) == 1
    assert "did you mean 'gemm'" in capsys.readouterr().err
