"""The build cache: where it lies, what its keys depend on, and that only whole builds are ever loaded from it."""

from __future__ import annotations

import pytest

from colibri_lab import kernels
from colibri_lab.errors import CompileError, StorageError
from colibri_lab.kernels import builder, store, toolchain

ANSWER = "from colibri_lab import kernels; print(kernels.load('tiny').answer())"


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"\0" * len(data), lambda data: b""])
def test_a_damaged_build_is_made_again_and_nothing_outside_the_cache_is_touched(cpp, tmp_path, start, damage):
    kernels.load("tiny")
    _, built = builder.artefact("tiny")
    good = built.read_bytes()
    copy = tmp_path / "copy"  # overwriting the file that this process has mapped would crash it
    copy.write_bytes(damage(good))
    copy.replace(built)
    (tmp_path / "tiny").write_text("a file that happens to be called like the kernel")
    process = start(ANSWER, cwd=tmp_path)
    out, err = process.communicate()
    assert (out, err) == ("1\n", "colibri-lab: compiling tiny.cpp\n")
    assert store.intact(built)
    assert (tmp_path / "tiny").exists()


def test_a_build_whose_record_is_lost_is_made_again(cpp, capfd):
    _, built = builder.artefact("tiny")
    built.with_suffix(".json").unlink()
    builder.artefact("tiny")
    assert capfd.readouterr().err.count("compiling tiny.cpp") == 2


def test_cold_processes_that_start_together_compile_once(cpp, start):
    processes = [start(ANSWER) for _ in range(4)]
    outputs = [process.communicate() for process in processes]
    assert [out for out, _ in outputs] == ["1\n"] * 4
    assert sum("compiling tiny.cpp" in err for _, err in outputs) == 1


def test_another_cpu_compiler_python_or_flag_gives_another_key(cpp, monkeypatch):
    command = toolchain.find_compiler()
    flags = toolchain.compile_flags(command)
    texts = builder.sources("tiny")
    keys = [builder.build_key(texts, command, flags), builder.build_key(texts, command, [*flags, "-O1"])]
    for target, name, value in [
        (toolchain, "cpu_features", lambda: frozenset({"sse2"})),
        (toolchain, "compiler_version", lambda command: "c++ 99.1"),
        (toolchain.sys, "version", "3.99.0"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.append(builder.build_key(texts, command, flags))
    monkeypatch.setenv("CXXFLAGS", "-DOTHER")
    keys.append(builder.build_key(texts, command, flags))
    assert len(set(keys)) == len(keys)


def test_key_depends_on_which_file_holds_a_text(cpp):
    command = toolchain.find_compiler()
    one, other = ({"a.hpp": a, "b.hpp": b} for a, b in [(b"x", b"yz"), (b"xy", b"z")])
    assert builder.build_key(one, command, []) != builder.build_key(other, command, [])


def test_sources_are_the_kernel_and_the_headers_it_reaches(cpp):
    cpp.write("include/unused.hpp", "#pragma once\n")
    cpp.edit("include/stride.hpp", "#pragma once", '#pragma once\n#include "../tiny_core.hpp"\n#include <vector>')
    assert sorted(builder.sources("tiny")) == ["include/stride.hpp", "tiny.cpp", "tiny_core.hpp"]


def test_a_read_only_checkout_builds_in_the_users_cache(cpp, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "colibri_lab").mkdir(parents=True)
    (checkout / ".colibri").write_text("a file, so that no folder can be made here, not even by root")
    monkeypatch.setattr(store, "PACKAGE", checkout / "colibri_lab")
    monkeypatch.delenv("COLIBRI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    root = kernels.cache_root()
    assert root == tmp_path / "home" / "colibri-lab" / "kernels"
    monkeypatch.setenv("COLIBRI_CPP", str(cpp.folder))
    shared = next((tmp_path / "cache").glob("nanobind-*"))
    shared.rename(root / shared.name)
    assert kernels.load("tiny").answer() == 1


def test_a_writable_checkout_keeps_its_builds_and_git_ignores_them(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "colibri_lab")
    monkeypatch.delenv("COLIBRI_CACHE", raising=False)
    assert kernels.cache_root() == tmp_path / ".colibri" / "kernels"
    assert (tmp_path / ".colibri" / "kernels" / ".gitignore").read_text() == "*\n"


def test_an_installed_wheel_has_its_own_sources_and_uses_the_users_cache(tmp_path, monkeypatch):
    (tmp_path / "colibri_lab" / "_cpp").mkdir(parents=True)
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "colibri_lab")
    monkeypatch.delenv("COLIBRI_CACHE", raising=False)
    monkeypatch.delenv("COLIBRI_CPP", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert kernels.cpp_dir() == tmp_path / "colibri_lab" / "_cpp"
    assert kernels.cache_root() == tmp_path / "home" / "colibri-lab" / "kernels"


def test_a_cache_that_cannot_be_written_is_named(cpp, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match=rf"{tmp_path}/file/cache: .*set COLIBRI_CACHE to a writable folder"):
        kernels.load("tiny")


def test_build_compiles_everything_it_can_and_then_reports_what_it_could_not(cpp, capfd):
    cpp.write("broken.cpp", "// cppimport\nint x = ;\n")
    cpp.write("no_kernel.cpp", "int main() {}\n")
    assert kernels.names() == ["broken", "tiny"]
    with pytest.raises(CompileError, match=r"broken\.cpp:2:9: "):
        kernels.build(progress=False)
    assert capfd.readouterr().err == ""
    kernels.load("tiny")
    assert "compiling" not in capfd.readouterr().err


def test_build_shows_progress(cpp, capfd):
    kernels.build(["tiny"])
    assert "compiling kernels: 100%" in capfd.readouterr().err


def test_nanobinds_runtime_is_compiled_once(cache, capfd):
    assert builder.nanobind_object().parent.parent == cache
    assert capfd.readouterr().err == ""
