"""A kernel in a folder of its own and a cache that is empty but for nanobind's runtime, which takes 10 s to compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_lab import kernels
from colibri_lab.kernels import builder

ROOT = Path(kernels.__file__).resolve().parents[2]

SOURCE = """\
// cppimport: a kernel small enough to compile in a second
#include <nanobind/nanobind.h>

#include "tiny_core.hpp"

NB_MODULE(tiny, m) {
    m.def("answer", &answer);
    nanobind::class_<Counter>(m, "Counter")
        .def(nanobind::init<>())
        .def("step", &Counter::step);
    m.def("total", [](const Counter& counter) { return counter.total; });
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/
"""
CORE = """\
#pragma once
#include "stride.hpp"
inline int answer() { return 1; }
struct Counter {
    int total = 0;
    int step() { return total += kStride; }
};
"""
STRIDE = "#pragma once\ninline constexpr int kStride = 1;\n"


class Sources:
    """A folder of kernel sources with kernel `tiny` in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.write("tiny.cpp", SOURCE)
        self.write("tiny_core.hpp", CORE)
        self.write("include/stride.hpp", STRIDE)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.folder / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    made = builder.nanobind_object().parent  # compiled at most once, in the real cache
    folder = tmp_path / "cache"
    shutil.copytree(made, folder / made.name)
    monkeypatch.setenv("COLIBRI_CACHE", str(folder))
    return folder


@pytest.fixture
def cpp(tmp_path, cache, monkeypatch) -> Sources:
    monkeypatch.setenv("COLIBRI_CPP", str(tmp_path / "cpp"))
    return Sources(tmp_path / "cpp")


@pytest.fixture
def start():
    """Start `python -c code` with the environment of now; its stdout and stderr are pipes."""
    started = []

    def run(code: str, **options) -> subprocess.Popen:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=env, **pipes, **options))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
