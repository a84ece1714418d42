"""C++ programs under AddressSanitizer and UBSan: `native("block_map")` builds and runs `block_map_main.cpp` of this
folder.

A program takes the words it is given, checks a kernel's core without Python, prints nothing and returns 0. One
program per core; builds are kept for the whole session.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from colibri_lab.kernels import toolchain

HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


@pytest.fixture(scope="session")
def native(tmp_path_factory, project):
    """native(name, *words, flags=()) → CompletedProcess of the program, built with the sanitizers on first use."""
    built: dict[tuple, Path] = {}
    folder = tmp_path_factory.mktemp("native")
    command = toolchain.find_compiler()

    def run(name: str, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        program = built.get((name, flags))
        if program is None:
            program = folder / f"{name}-{len(built)}"
            source = [f"-I{project / 'cpp'}", str(HERE / f"{name}_main.cpp"), "-o", str(program)]
            done = subprocess.run([*command, *FLAGS, *SANITIZE, *flags, *source], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            built[name, flags] = program
        options = {"ASAN_OPTIONS": "abort_on_error=0:detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        return subprocess.run([str(program), *words], env={**os.environ, **options}, capture_output=True, text=True)

    return run
