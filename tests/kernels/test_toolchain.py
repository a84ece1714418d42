"""Finding a compiler, saying what is missing, and compiling for the instruction set that was asked for."""

from __future__ import annotations

import sys

import pytest

from colibri_lab import kernels
from colibri_lab.errors import MissingTool, SettingError
from colibri_lab.kernels import cpu, toolchain

ALL_PATHS = ["scalar", "neon", "avx2", "avx512", "avx512vnni"]
SERVER = frozenset("avx2 fma f16c bmi1 bmi2 popcnt avx512f avx512bw avx512dq avx512vl avx512_vnni".split())


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler_says_how_to_get_one(cpp, no_compiler):
    with pytest.raises(MissingTool, match=r"no C\+\+ compiler .*install.*pip install ziglang"):
        kernels.load("tiny")
    (problem,) = kernels.preflight()
    assert "pip install ziglang" in problem


def test_a_compiler_from_a_python_package_is_found(tmp_path, no_compiler, monkeypatch):
    monkeypatch.delitem(sys.modules, "ziglang")
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert toolchain.find_compiler() == [sys.executable, "-m", "ziglang", "c++"]


def test_cxx_is_respected_with_its_arguments(monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -x c++")
    assert toolchain.find_compiler() == [sys.executable, "-x", "c++"]


def test_cxx_that_names_no_program_is_not_replaced_silently(cpp, monkeypatch):
    monkeypatch.setenv("CXX", "g++-of-my-dreams")
    with pytest.raises(MissingTool, match="CXX='g\\+\\+-of-my-dreams' names no program"):
        kernels.load("tiny")


def test_a_half_installed_compiler_is_reported_with_what_it_says(cpp, tmp_path, monkeypatch):
    says = "g++: fatal error: cannot execute cc1plus"
    monkeypatch.setenv(
        "CXX", script(tmp_path / "g++", f'[ "$1" = --version ] && echo g++ 12 || {{ echo "{says}" >&2; exit 1; }}')
    )
    monkeypatch.setenv("COLIBRI_CCACHE", "0")
    (problem,) = kernels.preflight()
    assert "cannot compile three lines" in problem
    assert says in problem
    with pytest.raises(MissingTool, match="cannot execute cc1plus"):
        kernels.load("tiny")


def test_missing_python_headers_are_named(cpp, tmp_path, monkeypatch):
    says = "a.cpp:1:10: fatal error: Python.h: No such file or directory"
    monkeypatch.setenv(
        "CXX", script(tmp_path / "g++", f'[ "$1" = --version ] && echo g++ 12 || {{ echo "{says}" >&2; exit 1; }}')
    )
    monkeypatch.setenv("COLIBRI_CCACHE", "0")
    with pytest.raises(MissingTool, match=r"Python's C headers are missing \(looked for .*Python\.h\): .*install"):
        kernels.load("tiny")


def test_preflight_is_empty_where_kernels_compile():
    assert kernels.preflight() == []


@pytest.mark.parametrize("setting, used", [("0", False), ("1", True)])
def test_ccache_is_used_unless_switched_off(tmp_path, monkeypatch, setting, used):
    found = script(tmp_path / "ccache", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLIBRI_CCACHE", setting)
    assert toolchain.launcher() == ([found] if used else [])
    assert toolchain.environment(["g++"])["CXX"] == (f"{found} g++" if used else "g++")


def test_unknown_simd_path_suggests_the_nearest(cpp, monkeypatch):
    monkeypatch.setenv("COLIBRI_SIMD", "avx52")
    with pytest.raises(SettingError, match="COLIBRI_SIMD='avx52' is not a SIMD path; did you mean 'avx512'"):
        kernels.load("tiny")


@pytest.mark.parametrize(
    "features, asked, message",
    [
        (SERVER - {"avx512_vnni"}, "avx512vnni", "lacks avx512_vnni. It supports scalar, avx2, avx512;"),
        ({"sse2"}, "avx2", "It supports scalar;"),
        (SERVER, "neon", "lacks asimd"),
    ],
)
def test_simd_path_the_cpu_lacks_is_refused(cpp, monkeypatch, features, asked, message):
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(features))
    monkeypatch.setenv("COLIBRI_SIMD", asked)
    with pytest.raises(SettingError, match=f"COLIBRI_SIMD={asked}: this CPU .*{message}"):
        kernels.load("tiny")


@pytest.mark.parametrize(
    "features, path",
    [(SERVER, "avx512vnni"), (SERVER - {"avx512vl"}, "avx2"), ({"asimd"}, "neon"), ({"avx2"}, "scalar")],
)
def test_auto_takes_the_fastest_path_the_cpu_has(monkeypatch, features, path):
    monkeypatch.delenv("COLIBRI_SIMD", raising=False)
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(features))
    assert kernels.simd() == path


@pytest.mark.parametrize("path", cpu.supported())
def test_each_path_defines_its_macro_and_uses_no_instruction_above_it(cpp, monkeypatch, path):
    macros = "".join(f'#ifdef COLIBRI_SIMD_{p.upper()}\n    m.attr("path") = "{p}";\n#endif\n' for p in ALL_PATHS)
    levels = "".join(
        f'#ifdef {macro}\n    m.attr("{level}") = true;\n#endif\n'
        for macro, level in [("__AVX2__", "avx2"), ("__AVX512F__", "avx512"), ("__AVX512VNNI__", "avx512vnni")]
    )
    cpp.write(
        "probe.cpp", f"// cppimport\n#include <nanobind/nanobind.h>\nNB_MODULE(probe, m) {{\n{macros}{levels}}}\n"
    )
    monkeypatch.setenv("COLIBRI_SIMD", path)
    module = kernels.load("probe")
    assert module.path == path
    x86 = [level for level in ("avx2", "avx512", "avx512vnni") if hasattr(module, level)]
    assert x86 == ([p for p in ("avx2", "avx512", "avx512vnni") if p <= path] if path.startswith("avx") else [])
