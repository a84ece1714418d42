"""What a machine must have before anything is installed: Python, venv, a C++ compiler, Python.h and, for tests, a browser.

Runs alone, on any Python >= 3.7 and its standard library: `python3 -I colibri_lab/preflight.py [--browser] [--zig]`
prints what is missing and how to get it, and exits 1. The Makefile calls it first; `colibri doctor` shows the same.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST_PYTHON = (3, 10)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROBE = "#include <Python.h>\n#include <vector>\nint probe() { return static_cast<int>(std::vector<int>(3).size()); }\n"

# What each package manager calls the thing; "" is the advice where none of them is found.
COMPILER = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "pacman": "pacman -S gcc",
    "zypper": "zypper install gcc-c++",
    "apk": "apk add g++",
    "brew": "xcode-select --install",
    "": "install g++ or clang++ (macOS: xcode-select --install; conda: conda install -c conda-forge cxx-compiler)",
}
HEADERS = {
    "apt-get": "apt-get install python3-dev",
    "dnf": "dnf install python3-devel",
    "zypper": "zypper install python3-devel",
    "apk": "apk add python3-dev",
    "": "install the development headers of this Python, or use a Python that has them (conda, pyenv, python.org)",
}
VENV = {
    "apt-get": "apt-get install python3-venv",
    "": "install the venv and ensurepip modules of this Python",
}
BROWSER = {
    "apt-get": "apt-get install chromium",
    "dnf": "dnf install chromium",
    "pacman": "pacman -S chromium",
    "zypper": "zypper install chromium",
    "apk": "apk add chromium",
    "brew": "brew install --cask chromium",
    "": "install Chromium or Chrome, or set CHROMIUM to its path",
}


def advice(remedies: dict[str, str]) -> str:
    """The remedy for the first package manager found on PATH."""
    return next((remedy for manager, remedy in remedies.items() if manager and shutil.which(manager)), remedies[""])


def compiler() -> list[str] | None:
    """The C++ compiler as the start of a command line: $CXX, c++, g++, clang++, or the ziglang wheel; None without one."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def browser() -> str | None:
    """Path of a Chromium: $CHROMIUM, else the first known name on PATH; None without one."""
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, BROWSERS)), None)


def header() -> str:
    """Path at which this Python's own Python.h should lie."""
    return os.path.join(sysconfig.get_path("include"), "Python.h")


def compile_fault(command: list[str]) -> str | None:
    """Why `command` cannot compile and link three lines that include Python.h; None when it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.cpp")
        with open(source, "w") as file:
            file.write(PROBE)
        line = [*command, "-std=c++17", "-fPIC", "-shared", "-I", os.path.dirname(header())]
        if sys.platform == "darwin":
            line += ["-undefined", "dynamic_lookup"]
        line += [source, "-o", os.path.join(folder, "probe.so")]
        try:
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
    if done.returncode == 0:
        return None
    lines = [text for text in done.stdout.splitlines() if "error" in text.lower()] or done.stdout.splitlines()
    return lines[0].strip() if lines else f"exit code {done.returncode}"


def problems(needs_browser: bool = False, zig_follows: bool = False) -> list[str]:
    """One sentence per missing thing: what, why it is needed, how to get it. Empty on a machine that is ready.

    `zig_follows`: the ziglang wheel is about to be installed, so no other compiler is needed.
    """
    if sys.version_info < OLDEST_PYTHON:
        oldest, here = (".".join(map(str, version[:2])) for version in (OLDEST_PYTHON, sys.version_info))
        return [
            f"Python {oldest} or newer; {sys.executable} is {here}. Name a newer one: make lab PYTHON=python{oldest}"
        ]
    found = []
    if not importlib.util.find_spec("ensurepip"):
        found.append(f"Python's venv module with pip, to make the environment: {advice(VENV)}")
    command = compiler()
    if not os.path.exists(header()):
        found.append(f"Python.h, which the kernels include (looked for {header()}): {advice(HEADERS)}")
    elif command and "ziglang" not in command:
        fault = compile_fault(command)
        if fault:
            found.append(
                f"a C++ compiler that works; {' '.join(command)} says: {fault}. {advice(COMPILER)}, or set CXX"
            )
    if not command and not zig_follows:
        found.append(
            "a C++ compiler (c++, g++ or clang++), since kernels are compiled for this machine on first use: "
            f"{advice(COMPILER)}. Without the rights to install one: make lab ZIG=1 fetches a compiler as a Python "
            "package (about 400 MB on disk)"
        )
    if needs_browser and not browser():
        found.append(f"a Chromium browser, in which the notebooks are tested: {advice(BROWSER)}")
    return found


def main() -> int:
    found = problems(needs_browser="--browser" in sys.argv, zig_follows="--zig" in sys.argv)
    for text in found:
        print(f"colibri: missing: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
