"""What is said before anything is installed, on machines that lack something."""

from __future__ import annotations

import sys

import pytest

from colibri_lab import preflight


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No tool on PATH and none named by the environment."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CHROMIUM"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_ready_machine_has_no_problems():
    assert preflight.problems() == []


def test_a_missing_compiler_is_named_with_both_ways_out(bare):
    (problem,) = preflight.problems()
    assert problem.startswith("a C++ compiler (c++, g++ or clang++)")
    assert "ZIG=1" in problem
    assert preflight.problems(zig_follows=True) == []


def test_the_remedy_is_the_one_of_this_systems_package_manager(bare):
    (bare / "dnf").write_text("#!/bin/sh\n")
    (bare / "dnf").chmod(0o755)
    assert "dnf install gcc-c++" in preflight.problems()[0]


def test_a_missing_browser_matters_only_when_it_is_asked_for(bare):
    assert not any("Chromium" in problem for problem in preflight.problems())
    assert any("Chromium" in problem for problem in preflight.problems(needs_browser=True))


def test_missing_python_headers_are_named_with_the_place_looked_at(monkeypatch):
    monkeypatch.setattr(preflight, "header", lambda: "/nowhere/Python.h")
    (problem,) = preflight.problems()
    assert "Python.h" in problem and "/nowhere/Python.h" in problem


def test_a_compiler_that_cannot_compile_is_reported_with_its_own_words(monkeypatch, tmp_path):
    broken = tmp_path / "broken c++"
    broken.write_text("#!/bin/sh\necho \"fatal error: cannot execute 'cc1plus'\"\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{broken}'")
    (problem,) = preflight.problems()
    assert "cannot execute 'cc1plus'" in problem


def test_an_old_python_is_the_only_thing_reported(monkeypatch, bare):
    monkeypatch.setattr(preflight, "OLDEST_PYTHON", (9, 9))
    (problem,) = preflight.problems()
    assert "Python 9.9 or newer" in problem and sys.executable in problem
