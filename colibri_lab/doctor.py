"""`colibri doctor` and `cl.about()`: what this installation and this machine are, and what is wrong with them.

`examine` looks and never raises for what it finds; a thing that could not be found is None in the report.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from . import __version__, machine, preflight
from .errors import ColibriError

SHOWN = ("numpy", "pandas", "matplotlib", "jupyterlab", "ipykernel", "ipywidgets", "ipympl", "anywidget", "nanobind")
EXTENSIONS = {  # what each prebuilt JupyterLab extension is for, and the package that brings it
    "@jupyter-widgets/jupyterlab-manager": ("sliders and buttons", "jupyterlab_widgets"),
    "anywidget": ("live plots", "anywidget"),
    "jupyter-matplotlib": ("interactive figures", "ipympl"),
}
CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "asimd",
    "asimddp",
)
LEAST_DISK, LEAST_RAM = 10**9, 2 * 2**30  # kernels and a converted colibri-tiny; model, notebook and browser together


@dataclass
class Report:
    """`sections`: title -> {label: text, or None for "not found"}. `problems`: sentences that say what to do."""

    sections: dict[str, dict[str, str | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for title, facts in self.sections.items():
            lines.append(title)
            lines += [f"  {label:<22} {'not found' if text is None else text}" for label, text in facts.items()]
        lines.append("what is wrong" if self.problems else "nothing is wrong")
        for problem in self.problems:
            first, *rest = problem.splitlines()
            lines += [f"  - {first}", *(f"    {line}" for line in rest)]
        return "\n".join(lines)

    def to_json(self) -> dict:
        return {"sections": self.sections, "problems": self.problems, "ok": not self.problems}


def version(package: str) -> str | None:
    """Installed version of a distribution; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def colibri_version() -> str:
    """Version of colibri-lab, and the commit when it runs from a Git checkout."""
    root = Path(__file__).resolve().parent.parent
    text = __version__
    if (root / ".git").exists() and shutil.which("git"):
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode == 0:
            text += f" at {done.stdout.strip()}"
    return text


def dependencies() -> list[str]:
    """Names of the packages colibri-lab needs, from its own metadata; a few known ones where that is not installed."""
    try:
        needed = metadata.requires("colibri-lab") or []
    except metadata.PackageNotFoundError:
        return ["numpy", "pandas", "jupyterlab", "ipywidgets", "anywidget", "ipympl", "cppimport", "nanobind"]
    return [re.match(r"[\w.-]+", line)[0] for line in needed if "extra ==" not in line]


def jupyter_extensions() -> dict[str, str]:
    """JupyterLab's prebuilt extensions that are installed and enabled: name -> version."""
    try:
        from jupyter_core.paths import jupyter_config_path, jupyter_path
    except ImportError:
        return {}
    found = {}
    for folder in map(Path, jupyter_path("labextensions")):
        for package in [*folder.glob("*/package.json"), *folder.glob("@*/*/package.json")]:
            name = package.parent.relative_to(folder).as_posix()
            found.setdefault(name, _json(package).get("version", "unknown version"))
    for folder in map(Path, jupyter_config_path()):
        disabled = _json(folder / "labconfig" / "page_config.json").get("disabledExtensions", {})
        for name in disabled if isinstance(disabled, list) else [key for key, off in disabled.items() if off]:
            found.pop(name, None)
    return found


def _json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def examine() -> Report:
    """Look at everything. Slow parts: the compiler's version and three lines compiled, about half a second."""
    report = Report()
    report.sections["versions"] = {
        "colibri-lab": colibri_version(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        **{name: version(name) for name in SHOWN},
    }
    missing = [name for name in dependencies() if version(name) is None]
    if missing:
        report.problems.append(f"packages missing from this Python: pip install {' '.join(missing)}")
    _examine_machine(report)
    _examine_kernels(report)
    _examine_jupyter(report)
    return report


def _examine_machine(report: Report) -> None:
    physical, logical = machine.cores()
    total, available = machine.memory()
    free = shutil.disk_usage(Path.cwd()).free
    report.sections["machine"] = {
        "system": platform.platform(),
        "CPU": machine.cpu_name(),
        "cores": f"{physical} physical, {logical} logical",
        "RAM": f"{total / 2**30:.1f} GiB, {available / 2**30:.1f} GiB available",
        "disk": f"{free / 1e9:.1f} GB free at {Path.cwd()}",
    }
    if total < LEAST_RAM:
        report.problems.append(
            f"{total / 2**30:.1f} GiB of RAM; the notebooks with a browser want {LEAST_RAM / 2**30:.0f} GiB"
        )
    if free < LEAST_DISK:
        report.problems.append(
            f"{free / 1e9:.2f} GB free at {Path.cwd()}; {LEAST_DISK / 1e9:.0f} GB are needed: free some"
        )


def _examine_kernels(report: Report) -> None:
    facts: dict[str, str | None] = {}
    report.sections["kernels"] = facts
    try:
        from . import kernels
    except ImportError as error:
        report.problems.append(f"the kernels cannot be loaded: {error}")
        return
    features = kernels.cpu_features()
    facts["CPU features"] = " ".join(name for name in CPU_FEATURES if name in features) or None
    try:
        facts["SIMD path"] = kernels.simd()
    except ColibriError as error:
        facts["SIMD path"] = None
        report.problems.append(str(error))
    command = preflight.compiler()
    facts["compiler"] = _first_line([*command, "--version"]) if command else None
    facts["Python.h"] = preflight.header() if os.path.exists(preflight.header()) else None
    facts["ccache"] = shutil.which("ccache") or "not found (optional: repeated builds are faster with it)"
    try:
        facts["cache folder"] = str(kernels.cache_root())
    except ColibriError as error:
        facts["cache folder"] = None
        report.problems.append(str(error))
    report.problems += kernels.preflight()


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def _examine_jupyter(report: Report) -> None:
    extensions = jupyter_extensions()
    facts: dict[str, str | None] = {name: extensions.get(name) for name in EXTENSIONS}
    facts.update({name: text for name, text in extensions.items() if name not in EXTENSIONS})
    facts["browser for tests"] = preflight.browser() or "not found (only the tests need a Chromium)"
    report.sections["JupyterLab extensions"] = facts
    for name, (purpose, package) in EXTENSIONS.items():
        if name not in extensions:
            report.problems.append(
                f"JupyterLab extension {name} ({purpose}) is missing or disabled: pip install --force-reinstall {package}, "
                f"or jupyter labextension enable {name}"
            )


class Text(str):
    """A string that a notebook shows as it prints, line by line."""

    __repr__ = str.__str__


def about() -> Text:
    """Versions, machine, threads and SIMD path in three lines, for the first cell of a notebook."""
    from . import kernels

    physical, logical = machine.cores()
    total, _ = machine.memory()
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "jupyterlab", "ipywidgets") if version(name))
    return Text(
        f"colibri-lab {colibri_version()}, Python {platform.python_version()}, {packages}\n"
        f"{machine.cpu_name()}, {physical} physical and {logical} logical cores, {total / 2**30:.1f} GiB of RAM\n"
        f"{physical} compute threads by default, SIMD path {kernels.simd()}"
    )
