"""Every kernel against its slow numpy twin, on each SIMD path this CPU has, and what the kernels refuse."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab import kernels
from colibri_lab.kernels.cpu import supported

COMPUTE = ["attention", "ffn", "gemm", "norm", "router"]


@pytest.mark.parametrize("name", [*COMPUTE, "storage", "threads"])
def test_kernel_equals_its_reference(name):
    assert len(kernels.check(name)) >= 3


@pytest.mark.parametrize("path", [p for p in supported() if p not in ("auto", "avx512vnni")])
@pytest.mark.parametrize("name", ["attention", "ffn", "gemm"])
def test_every_simd_path_equals_the_reference(name, path, monkeypatch):
    monkeypatch.setenv("COLIBRI_SIMD", path)
    assert kernels.check(name)
    if hasattr(kernels.load(name), "simd"):
        assert kernels.load(name).simd == path


def f32(*shape):
    return np.zeros(shape, np.float32)


def test_gemm_refuses_what_does_not_fit():
    matmul = kernels.load("gemm").matmul
    memory, place = np.zeros(16 * 8 * 4, np.uint8), np.array([16, 8, 0, 0, 0, 0, 0], np.int64)
    matmul(f32(2, 8), memory, place, 1.0, None, f32(2, 16))
    for change, message in (
        (dict(x=f32(2, 7)), r"x.shape\[1\] must be 8 \(columns of the weight\), got 7"),
        (dict(out=f32(3, 16)), r"out.shape\[0\] must be 2 \(tokens of x\), got 3"),
        (dict(bias=f32(15)), r"bias.shape\[0\] must be 16"),
        (dict(memory=memory[:-1]), "matrix data at offset 0 with 512 bytes does not fit a region of 511"),
        (dict(place=place[:5]), r"descriptor.shape\[0\] must be 7"),
        (dict(place=np.array([16, 8, 9, 0, 0, 0, 0], np.int64)), "matrix descriptor"),
        (dict(place=np.array([16, 8, 0, -4, 0, 0, 0], np.int64)), "offset -4"),
        (dict(place=np.array([2**40, 8, 0, 0, 0, 0, 0], np.int64)), "matrix descriptor"),
        (dict(place=np.array([16, 8, 4, 0, 64, -1, 48], np.int64)), "group is 48; expected 0"),
        (dict(place=np.array([16, 8, 5, 0, 64, -1, 64], np.int64)), "group is 64; expected 0"),
        (dict(place=np.array([16, 8, 4, 0, 512, -1, 32], np.int64)), "scales at offset 512 with 32 bytes"),
        (dict(place=np.array([16, 8, 4, 0, 64, 500, 32], np.int64)), "zero points at offset 500 with 16 bytes"),
        (dict(threads=0), "threads must be 1 to 256, got 0"),
        (dict(block_size=8), "block_size must be at least 16, got 8"),
    ):
        given = {
            "x": f32(2, 8),
            "memory": memory,
            "place": place,
            "bias": None,
            "out": f32(2, 16),
            "threads": 1,
            "block_size": 64,
        }
        given |= change
        with pytest.raises(ValueError, match=message):
            matmul(
                given["x"],
                given["memory"],
                given["place"],
                1.0,
                given["bias"],
                given["out"],
                given["threads"],
                given["block_size"],
            )


@pytest.mark.parametrize("x", [np.zeros((2, 8)), np.zeros((8, 2), np.float32).T, np.zeros(8, np.float32)])
def test_wrong_types_and_strides_are_refused_and_never_copied(x):
    memory, place = np.zeros(512, np.uint8), np.array([16, 8, 0, 0, 0, 0, 0], np.int64)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        kernels.load("gemm").matmul(x, memory, place, 1.0, None, f32(2, 16))


def test_attention_refuses_pages_that_do_not_exist():
    attend = kernels.load("attention").attend
    q, k = f32(2, 4, 8), f32(3, 4, 2, 8)
    attend(q, k, k, np.array([0, 2], np.int32), 5, 0, 1.0, f32(2, 4, 8))
    for pages, past, message in (
        ([0, 3], 5, "page 3 of 3 does not exist"),
        ([0], 5, "page table has 1 pages, 2 are needed"),
        ([0, 1], -1, "past must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(q, k, k, np.array(pages, np.int32), past, 0, 1.0, f32(2, 4, 8))
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        attend(f32(2, 3, 8), k, k, np.array([0, 1], np.int32), 0, 0, 1.0, f32(2, 3, 8))


def test_router_refuses_nan_and_impossible_k():
    route = kernels.load("router").route
    logits = f32(2, 8)
    with pytest.raises(ValueError, match=r"k must be 1 to 8 \(experts that may be chosen\), got 9"):
        route(logits, 0, None, 1, 1, False, 1.0, np.zeros((2, 9), np.uint16), f32(2, 9))
    with pytest.raises(ValueError, match="k must be 1 to 4"):
        route(logits, 2, None, 4, 2, False, 1.0, np.zeros((2, 5), np.uint16), f32(2, 5))
    logits[1, 3] = np.nan
    with pytest.raises(ValueError, match="token 1, expert 3 is not finite"):
        route(logits, 0, None, 1, 1, False, 1.0, np.zeros((2, 2), np.uint16), f32(2, 2))


def test_ffn_refuses_experts_and_buffers_that_do_not_exist():
    ffn = kernels.load("ffn")
    with pytest.raises(ValueError, match="local has 2, only 2 experts are active"):
        ffn.fill_buckets(
            np.array([[2]], np.int32),
            np.zeros(3, np.int32),
            np.zeros(1, np.int32),
            np.zeros((1, 1), np.int32),
            np.zeros(2, np.int32),
            2,
        )
    zero = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="buffer 0 of 0 does not exist"):
        ffn.experts(f32(1, 8), np.zeros((0, 64), np.uint8), zero, zero, np.zeros((1, 3, 7), np.int64), np.ones((1, 3), np.float32),
                    np.array([0, 1], np.int32), zero, f32(1, 8), f32(1, 8))  # fmt: skip


def test_storage_reports_the_file_and_the_reason(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 10)
    memory = np.zeros((2, 64), np.uint8)
    paths = [str(tmp_path / "short"), str(tmp_path / "absent"), str(tmp_path)]
    loader = kernels.load("storage").BlockLoader(paths, [0] * 3, [64] * 3, "pread", 2, memory)
    faults = sorted(loader.wait(loader.submit([0, 1, 2], [0, 1, 0])))
    assert any("short: file has 10 bytes, 64 expected" in f for f in faults)
    assert any("absent: No such file" in f for f in faults)
    assert len(faults) == 3
    assert loader.wait([]) == []
    with pytest.raises(ValueError, match="buffer 2 of 2 does not exist"):
        loader.submit([0], [2])
    with pytest.raises(ValueError, match="needs 65 bytes, a buffer holds 64"):
        kernels.load("storage").BlockLoader(paths[:1], [0], [65], "pread", 1, memory)
