"""The compiler: finding it, describing it, and the flags of every kernel."""

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

from colibri_lab import preflight as machine
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
PACKAGES = ("cppimport", "nanobind", "setuptools")


def _missing_compiler(found: str) -> MissingTool:
    return MissingTool(
        f"{found}. Kernels are compiled for this machine on first use and need a C++17 compiler: "
        f"{machine.advice(machine.COMPILER)}; or `pip install ziglang`, a C++ compiler as a Python package, "
        "which is then used without being asked for"
    )


def find_compiler() -> list[str]:
    """The C++ compiler as an argument list: `$CXX`, else c++, g++ or clang++ on PATH, else the ziglang package.

    Raises MissingTool, saying how to get one.
    """
    command = machine.compiler()
    if not command:
        raise _missing_compiler("no C++ compiler (c++, g++, clang++ or ziglang) was found")
    if not shutil.which(command[0]):
        raise _missing_compiler(f"CXX={os.environ.get('CXX')!r} names no program; correct or unset it")
    return command


@functools.cache
def _version_of(command: tuple[str, ...], path: str) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError as error:
        raise _missing_compiler(f"{shlex.join(command)} does not run ({error.strerror})") from error
    if done.returncode or not done.stdout.strip():
        said = (done.stderr or done.stdout).strip()[-500:]
        raise _missing_compiler(f"`{shlex.join(command)} --version` failed: {said or 'no output'}")
    return done.stdout.strip()


def compiler_version(command: list[str]) -> str:
    """What `command --version` prints, asked once per process. Raises MissingTool when it does not run."""
    return _version_of(tuple(command), os.environ.get("PATH", ""))


def launcher() -> list[str]:
    """Path of ccache in a list when it is on PATH and not switched off by `COLIBRI_CCACHE=0`, else an empty list."""
    found = shutil.which("ccache") if os.environ.get("COLIBRI_CCACHE", "1") != "0" else None
    return [found] if found else []


def compile_flags(command: list[str]) -> list[str]:
    """Flags of every kernel. Raises SettingError when COLIBRI_SIMD asks for what the CPU lacks."""
    # gcc would make some template statics unique in the whole process: a new version would share an old one's data.
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
    """Environment of a compiler process: CC and CXX name the compiler, behind ccache where there is one."""
    line = shlex.join([*launcher(), *command])
    # -march=native means different code on different CPUs and ccache cannot see that; a namespace per CPU tells it.
    cpu = hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest()[:16]
    ours = {"CC": line, "CXX": line, "CCACHE_NAMESPACE": f"colibri-{cpu}", "CCACHE_NOHASHDIR": "1", "LC_ALL": "C"}
    return {**os.environ, **ours}


def missing_header(log: str) -> MissingTool | None:
    """The error to raise when a compiler log says that Python.h is not there, else None."""
    if "Python.h" in log and ("No such file" in log or "file not found" in log):
        return MissingTool(
            f"Python's C headers are missing (looked for {machine.header()}): {machine.advice(machine.HEADERS)}"
        )
    return None


def fault(command: list[str]) -> MissingTool | None:
    """Why `command` cannot compile and link three lines of C++ with the kernels' flags, else None."""
    said = machine.compile_fault([*command, *compile_flags(command)])
    if not said:
        return None
    return missing_header(said) or _missing_compiler(f"{shlex.join(command)} cannot compile three lines: {said}")


def preflight() -> list[str]:
    """What keeps kernels from compiling here, one text each with its remedy; empty when three lines compile."""
    found = [
        f"the Python package {name}: pip install {name}" for name in PACKAGES if not importlib.util.find_spec(name)
    ]
    try:
        problem = fault(find_compiler())
    except ColibriError as error:
        problem = error
    return [*found, str(problem)] if problem else found
