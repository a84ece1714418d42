"""Cores of the kernels under AddressSanitizer and UBSan, on the plainest and on the fastest path of this CPU."""

from __future__ import annotations

import pytest

from colibri_lab.kernels import cpu

QUICK = ("-O0", "-g1")  # these compile longer than they run
PATHS = sorted({cpu.supported()[0], cpu.supported()[-1]})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("core", ["gemm", "ffn", "attention", "norm"])
def test_a_core_agrees_with_plain_loops(native, monkeypatch, core, path):
    monkeypatch.setenv("COLIBRI_SIMD", path)
    done = native(core, flags=(*cpu.simd_flags(), *QUICK))
    assert done.returncode == 0, done.stderr


def test_the_router_agrees_with_sorting(native):
    done = native("router")
    assert done.returncode == 0, done.stderr


def test_the_loader_fills_exactly_its_buffers(native, tmp_path):
    done = native("storage", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_decode_step_asks_for_no_memory_after_the_first(native):
    done = native("decode", flags=(*cpu.simd_flags(), *QUICK))
    assert done.returncode == 0, done.stderr
