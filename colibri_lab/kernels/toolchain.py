"""The compiler: finding it, describing it, and saying how to get one when there is none."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from colibri_lab.errors import ColibriError, MissingTool

from .cpu import cpu_features, simd_flags

# -ffp-contract=off: only an explicit fma is fused, so every SIMD path rounds where its source says it does.
BASE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-pthread",
]
# Environment variables that setuptools adds to its compile and link lines.
FLAG_VARIABLES = ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "ARCHFLAGS")

_HOW_TO_GET = """\
  Debian, Ubuntu   sudo apt install g++
  Fedora           sudo dnf install gcc-c++
  macOS            xcode-select --install
  conda            conda install -c conda-forge cxx-compiler
  anywhere         pip install ziglang    (a whole C++ compiler, found and used by itself)"""
_PYTHON_HEADERS = """\
the C headers of this Python ({include}/Python.h) are missing. Get them with
  Debian, Ubuntu   sudo apt install python3-dev
  Fedora           sudo dnf install python3-devel
  conda            use the environment's own python, which brings them"""


def find_compiler() -> list[str]:
    """The C++ compiler as an argument list: `$CXX`, else c++, g++ or clang++ on PATH, else the ziglang package.

    Raises MissingTool, saying how to get one.
    """
    if asked := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(asked[0]):
            return asked
        raise MissingTool(
            f"CXX={os.environ['CXX']!r}: no such program. Unset CXX or point it at a C++17 compiler:\n{_HOW_TO_GET}"
        )
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise MissingTool(
        f"no C++ compiler (c++, g++ or clang++) on PATH. Kernels are compiled on first use; get one with\n{_HOW_TO_GET}"
    )


@functools.cache
def _version_of(command: tuple[str, ...], path: str) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120)
    except OSError as error:
        raise MissingTool(
            f"{shlex.join(command)} --version: {error}. Get a C++17 compiler with\n{_HOW_TO_GET}"
        ) from error
    if done.returncode or not done.stdout.strip():
        said = (done.stderr or done.stdout).strip()[-500:]
        raise MissingTool(f"{shlex.join(command)} --version failed: {said}. Get a C++17 compiler with\n{_HOW_TO_GET}")
    return done.stdout.strip()


def compiler_version(command: list[str]) -> str:
    """What `command --version` prints, asked once per process. Raises MissingTool when it does not run."""
    return _version_of(tuple(command), os.environ.get("PATH", ""))


def launcher() -> list[str]:
    """`["ccache"]` when it is on PATH and not switched off by `COLIBRI_CCACHE=0`, else nothing."""
    if os.environ.get("COLIBRI_CCACHE", "1") != "0" and (found := shutil.which("ccache")):
        return [found]
    return []


def compile_flags(command: list[str]) -> list[str]:
    """Flags of every kernel. Raises SettingError when COLIBRI_SIMD asks for what the CPU lacks."""
    # gcc would make some template statics unique in the whole process, so a new version would share an old one's data.
    unique = [] if "clang" in compiler_version(command) else ["-fno-gnu-unique"]
    return [*BASE_FLAGS, *unique, *simd_flags()]


def identity(command: list[str], flags: list[str]) -> str:
    """Everything outside the sources that decides what machine code comes out; part of every build key."""
    import nanobind

    parts = (
        [shlex.join(command), compiler_version(command), *flags],
        [sys.version, sysconfig.get_config_var("EXT_SUFFIX"), nanobind.__version__, platform.machine()],
        sorted(cpu_features()),
        [f"{name}={os.environ.get(name, '')}" for name in FLAG_VARIABLES],
    )
    return repr(parts)


def environment(command: list[str]) -> dict[str, str]:
    """Environment of a compiler process: CC and CXX name the compiler, and ccache hits from any checkout of this CPU."""
    line = shlex.join([*launcher(), *command])
    cpu = hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest()[:16]
    # -march=native means different code on different CPUs and ccache cannot see that; the namespace tells it.
    return {
        **os.environ,
        "CC": line,
        "CXX": line,
        "CCACHE_NAMESPACE": f"colibri-{cpu}",
        "CCACHE_NOHASHDIR": "1",
        "LC_ALL": "C",
    }


def missing_header(log: str) -> MissingTool | None:
    """The error to raise when a compiler log says that Python.h is not there."""
    if "Python.h" in log and ("No such file" in log or "file not found" in log):
        return MissingTool(_PYTHON_HEADERS.format(include=sysconfig.get_paths()["include"]))
    return None


def preflight() -> list[str]:
    """What keeps kernels from compiling here, one complete sentence or more each; empty when three lines compile."""
    problems = [
        f"the Python package {name} is missing: pip install {name}"
        for name in ("cppimport", "nanobind", "filelock", "setuptools")
        if not importlib.util.find_spec(name)
    ]
    try:
        command = find_compiler()
        flags = compile_flags(command)
    except ColibriError as error:
        return [*problems, str(error)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "three_lines.cpp")
        source.write_text("#include <Python.h>\n#include <thread>\nint main() { return std::thread().joinable(); }\n")
        include = f"-I{sysconfig.get_paths()['include']}"
        asked = [*command, *flags, include, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment(command))
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        problems.append(
            str(
                missing_header(said)
                or f"{shlex.join(command)} cannot compile three lines of C++17: {said[-800:]}\n{_HOW_TO_GET}"
            )
        )
    return problems
