"""Loading, editing and reloading kernels."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings

import psutil
import pytest

from colibri_lab import kernels
from colibri_lab.errors import CompileError, KernelError, SettingError


def test_load_returns_the_same_module_and_reload_too_while_nothing_changes(cpp):
    module = kernels.load("tiny")
    assert kernels.load("tiny") is module
    assert kernels.reload("tiny") is module
    assert module.answer() == 1


def test_after_an_edit_old_and_new_versions_differ_and_both_work(cpp):
    old = kernels.load("tiny")
    counter = old.Counter()
    counter.step()
    loaded = kernels.versions("tiny")
    cpp.edit("tiny_core.hpp", "return 1;", "return 2;")
    cpp.edit("tiny_core.hpp", "+= kStride", "+= 10 * kStride")
    assert kernels.load("tiny") is old  # like an import: only reload looks at the files again
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nanobind warns when a class of that name is known already
        new = kernels.reload("tiny")
    assert kernels.load("tiny") is new
    assert kernels.versions("tiny") == loaded + 1
    assert (old.answer(), new.answer()) == (1, 2)
    assert old.Counter is not new.Counter
    assert (counter.step(), old.Counter().step(), new.Counter().step()) == (2, 1, 10)
    assert old.total(counter) == 2
    with pytest.raises(TypeError, match="incompatible function arguments"):
        new.total(counter)


def test_edit_of_a_header_included_by_a_header_rebuilds(cpp):
    old = kernels.load("tiny")
    cpp.edit("include/stride.hpp", "kStride = 1", "kStride = 7")
    assert kernels.reload("tiny").Counter().step() == 7
    assert old.Counter().step() == 1


def test_edit_of_a_header_the_kernel_does_not_include_rebuilds_nothing(cpp):
    module = kernels.load("tiny")
    cpp.write("other_core.hpp", "#pragma once\n")
    assert kernels.reload("tiny") is module


def test_going_back_to_an_earlier_text_finds_the_earlier_build(cpp, capfd, start):
    old = kernels.load("tiny")
    cpp.edit("tiny_core.hpp", "return 1;", "return 2;")
    kernels.reload("tiny")
    cpp.edit("tiny_core.hpp", "return 2;", "return 1;")
    assert capfd.readouterr().err.count("compiling tiny.cpp") == 2
    assert kernels.reload("tiny") is old
    fresh = start("from colibri_lab import kernels; print(kernels.load('tiny').answer())")
    assert fresh.communicate() == ("1\n", "")
    assert capfd.readouterr().err == ""


def test_compile_error_names_the_users_file_and_the_old_version_stays(cpp):
    old = kernels.load("tiny")
    cpp.edit("tiny_core.hpp", "return 1;", "retrn 1;")
    with pytest.raises(CompileError) as caught:
        kernels.reload("tiny")
    assert str(caught.value).startswith(f"{cpp.folder}/tiny_core.hpp:3:23: ")
    assert "retrn" in str(caught.value)
    assert f"{cpp.folder}/tiny.cpp:4" in caught.value.log  # "In file included from"
    assert "rendered" not in caught.value.log
    assert kernels.load("tiny") is old
    assert old.answer() == 1
    cpp.edit("tiny_core.hpp", "retrn 1;", "return 3;")
    assert kernels.reload("tiny").answer() == 3


def test_load_of_a_kernel_that_never_compiled_raises_each_time(cpp):
    cpp.edit("tiny.cpp", "&answer", "&anwser")
    for _ in range(2):
        with pytest.raises(CompileError, match=rf"^{cpp.folder}/tiny\.cpp:7:\d+: .*anwser"):
            kernels.load("tiny")


def test_cpp_that_a_template_engine_would_eat_compiles_with_its_own_line_numbers(cpp):
    cpp.write(
        "odd.cpp",
        "// cppimport: what Mako takes for its own\n"
        "#include <nanobind/nanobind.h>\n"
        "#define PASTE(a, b) \\\n"
        "    a \\\n"
        "## b\n"
        'constexpr char kText[] = "${nothing}";\n'
        "constexpr int kOdd = 7\n"
        "    % 4;\n"
        "constexpr int kLine = __LINE__;\n"
        'NB_MODULE(odd, m) { m.attr("found") = nanobind::make_tuple(kText, PASTE(k, Odd), kLine); }\n',
    )
    assert kernels.load("odd").found == ("${nothing}", 3, 9)


def test_a_module_that_crashes_as_it_loads_ends_only_the_trial_process(cpp):
    cpp.edit("tiny.cpp", "NB_MODULE(tiny, m) {", "NB_MODULE(tiny, m) {\n    std::abort();")
    with pytest.raises(KernelError, match="compiles, but the process that tried to load it was killed by SIGABRT"):
        kernels.load("tiny")


def test_a_missing_definition_is_reported_when_the_module_is_tried(cpp):
    cpp.edit("tiny_core.hpp", "inline int answer() { return 1; }", "int answer();")
    with pytest.raises(KernelError, match="undefined symbol.*answer|symbol not found.*answer"):
        kernels.load("tiny")


def test_threads_that_load_at_once_compile_once_and_share_the_module(cpp, capfd):
    found = []
    threads = [threading.Thread(target=lambda: found.append(kernels.load("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
    assert capfd.readouterr().err.count("compiling tiny.cpp") == 1


@pytest.mark.parametrize("name", ["tinny", "../tiny", ""])
def test_unknown_kernel_lists_what_there_is(cpp, name):
    with pytest.raises(SettingError, match=r"no kernel .* Known: tiny"):
        kernels.load(name)


@pytest.mark.parametrize(
    "call, end",
    [("load('tiny')", signal.SIGKILL), ("load('tiny')", signal.SIGINT), ("build(progress=False)", signal.SIGINT)],
)
def test_an_ended_build_takes_its_compiler_along_and_the_next_one_works(cpp, tmp_path, start, call, end):
    os.mkfifo(tmp_path / "endless.hpp")  # a compiler that opens it waits for ever
    cpp.edit("tiny.cpp", '#include "tiny_core.hpp"', f'#include "tiny_core.hpp"\n#include "{tmp_path}/endless.hpp"')
    process = start(f"from colibri_lab import kernels; kernels.{call}")
    compiler = _wait_for_compiler(psutil.Process(process.pid))
    process.send_signal(end)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in err) == (end == signal.SIGINT)
    assert psutil.wait_procs(compiler, timeout=60)[1] == []
    cpp.edit("tiny.cpp", f'#include "{tmp_path}/endless.hpp"', "")
    assert kernels.load("tiny").answer() == 1


def _wait_for_compiler(process: psutil.Process) -> list[psutil.Process]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if found := [child for child in process.children(recursive=True) if child.name() in ("cc1plus", "clang")]:
            return found
        time.sleep(0.02)
    raise AssertionError("no compiler was started")


def test_check_compares_with_the_registered_reference(cpp, monkeypatch):
    monkeypatch.setattr(kernels, "_references", {})

    @kernels.reference("tiny")
    def check(module):
        return [("answer", abs(module.answer() - 1), 0.0)]

    assert kernels.check("tiny") == [("answer", 0, 0.0)]
    cpp.edit("tiny_core.hpp", "return 1;", "return 4;")
    kernels.reload("tiny")
    with pytest.raises(KernelError, match="tiny differs from its reference: answer: error 3, tolerance 0"):
        kernels.check("tiny")


@pytest.mark.parametrize("cases", [[("nan", math.nan, 1.0)], []])
def test_check_fails_when_the_error_is_nan_or_nothing_was_compared(cpp, monkeypatch, cases):
    monkeypatch.setattr(kernels, "_references", {"tiny": lambda module: cases})
    with pytest.raises(KernelError, match="error nan|compared nothing"):
        kernels.check("tiny")


def test_check_of_an_unknown_name_suggests_the_nearest(cpp, monkeypatch):
    monkeypatch.setattr(kernels, "_references", {"tiny": lambda module: []})
    with pytest.raises(SettingError, match="no check for kernel 'tinny'; did you mean 'tiny'"):
        kernels.check("tinny")


def test_a_kernel_that_asks_for_it_gets_the_shared_thread_pool(cpp):
    header = "#include <nanobind/nanobind.h>\nnamespace nb = nanobind;\n"
    cpp.write(
        "threads.cpp",
        f"// cppimport\n{header}static int pool = 41;\n"
        'NB_MODULE(threads, m) { m.def("pool", [] { return nb::capsule(&pool, "pool"); }); }\n',
    )
    cpp.write(
        "user.cpp",
        f"// cppimport\n{header}static int* shared = nullptr;\n"
        "NB_MODULE(user, m) {\n"
        '    m.def("_use_pool", [](nb::capsule pool) { shared = static_cast<int*>(pool.data()); });\n'
        '    m.def("next", [] { return ++*shared; });\n}\n',
    )
    assert kernels.load("user").next() == 42
