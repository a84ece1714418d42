"""The house itself: what the documents, the package lists, the Makefile and the wheel promise."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml

import colibri_lab
from colibri_lab import cli, errors
from colibri_lab.config import settings_table

TOOLS = {"python", "pip", "make", "cxx-compiler"}  # in environment.yml, from outside the Python package index


def package_names(text: str, section: str) -> set[str]:
    """Names of the list `section` in pyproject.toml (parsed by hand: tomllib is not in Python 3.10)."""
    body = re.search(rf"^{section} = \[(.*?)^\]", text, re.S | re.M)[1]
    return set(re.findall(r'"([A-Za-z0-9_.-]+)', body))


def code_blocks(project, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (project / "README.md").read_text("utf-8"), re.S | re.M)


def test_conda_and_pip_install_the_same_packages(project):
    environment = yaml.safe_load((project / "environment.yml").read_text("utf-8"))
    listed = {re.match(r"[\w.-]+", line)[0] for line in environment["dependencies"]}
    assert listed - TOOLS == package_names((project / "pyproject.toml").read_text("utf-8"), "dependencies")
    assert listed >= TOOLS
    assert environment["channels"] == ["conda-forge"]


def test_conda_packages_have_lower_bounds_and_no_build_strings(project):
    environment = yaml.safe_load((project / "environment.yml").read_text("utf-8"))
    for line in environment["dependencies"]:
        assert re.fullmatch(r"[\w.-]+(>=[\d.]+)?", line), line


def test_the_readme_shows_the_settings_there_are(project):
    text = (project / "README.md").read_text("utf-8")
    shown = re.search(r"<!-- settings: .*? -->\n(.*?)\n<!-- end of settings -->", text, re.S)[1]
    assert shown == settings_table()


def test_every_command_in_the_readme_can_be_parsed(project):
    lines = [line for block in code_blocks(project, "sh") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("colibri ")]
    assert len(commands) >= 5
    for line in commands:
        assert callable(cli.build_parser().parse_args(shlex.split(line)[1:]).run), line


def test_every_make_target_in_the_readme_exists(project):
    makefile = (project / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", (project / "README.md").read_text("utf-8"))) - {"and"}
    assert {"lab", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_python_examples_of_the_readme_run(project):
    for block in code_blocks(project, "python"):
        done = subprocess.run([sys.executable, "-c", block], cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_every_path_a_document_names_exists(project, document):
    text = (project / document).read_text("utf-8")
    named = re.findall(r"`((?:colibri_lab|cpp|data|notebooks|tests)/[\w./-]*|[\w.]+\.(?:md|yml|toml)|LICENSE)`", text)
    assert len(named) >= 5
    for path in named:
        assert (project / path).exists(), path


def test_no_source_file_is_longer_than_500_lines(project):
    for folder in ("colibri_lab", "cpp", "tests"):
        for path in (project / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".hpp", ".js"):
                assert len(path.read_text("utf-8").splitlines()) <= 500, path


def test_no_two_test_files_share_a_name(project):
    """pytest imports them by name, and cannot collect the second."""
    names = [path.name for path in (project / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_records_that_hold_arrays_compare_by_identity():
    """The == a dataclass writes raises for arrays of more than one element, but only once all fields before are equal."""
    records, words = {}, {}
    for module in pkgutil.walk_packages(colibri_lab.__path__, "colibri_lab."):
        if module.name == "colibri_lab.__main__":
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                records[kind.__name__] = kind
                held = (re.sub(r"Callable\[.*", "", str(field.type)) for field in dataclasses.fields(kind))
                words[kind.__name__] = set(re.findall(r"\w+", " ".join(held)))
    holding = {"ndarray", "DataFrame"}
    while more := {name for name, said in words.items() if said & holding} - holding:
        holding |= more
    holding -= {"ndarray", "DataFrame"}
    assert {"MonitorRun", "Trace", "Source"} <= holding
    assert [name for name in sorted(holding) if records[name].__eq__ is not object.__eq__] == []


def test_the_error_tree_in_the_docstring_is_the_tree_in_the_code():
    def tree(kind):
        return {kind.__name__}.union(*(tree(child) for child in kind.__subclasses__()))

    for name in tree(errors.ColibriError):
        if getattr(errors, name, None):
            assert re.search(rf"\b{name}\b", errors.__doc__), name


def test_the_wheel_carries_the_kernels_and_the_type_marker(project, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(project / "colibri_lab", source / "colibri_lab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(project / "cpp", source / "cpp")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"colibri_lab/py.typed", "colibri_lab/_cpp/gemm.cpp", "colibri_lab/_cpp/include/simd.hpp"} <= names
    kept = {f"colibri_lab/_cpp/{path.relative_to(project / 'cpp')}" for path in (project / "cpp").rglob("*.?pp")}
    assert kept <= names


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with Python and make's own needs, and no compiler or browser."""
    for name in ("make", "uname", "id", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CHROMIUM", "MAKEFLAGS")}
    return {**environment, "PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("lab", ["missing: a C++ compiler", "make lab ZIG=1"]),
        ("test", ["missing: a C++ compiler", "missing: a Chromium browser"]),
    ],
)
def test_make_names_what_is_missing_before_it_does_anything(project, bare_path, tmp_path, target, says):
    copy = tmp_path / "a checkout with spaces"
    (copy / "colibri_lab").mkdir(parents=True)
    shutil.copy(project / "Makefile", copy)
    shutil.copy(project / "pyproject.toml", copy)
    shutil.copy(project / "colibri_lab" / "preflight.py", copy / "colibri_lab")
    done = subprocess.run(["make", target], cwd=copy, env=bare_path, capture_output=True, text=True)
    assert done.returncode != 0
    for words in says:
        assert words in done.stderr
    assert not (copy / ".venv").exists()


def test_make_says_so_when_there_is_no_python(project, bare_path, tmp_path):
    (tmp_path / "python3").unlink()
    done = subprocess.run(["make", "lab"], cwd=project, env=bare_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no python3 on PATH" in done.stderr
