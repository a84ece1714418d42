"""The doctor on a healthy machine and on sick ones: every absence is named with its remedy, and nothing raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from colibri_lab import cli, doctor


def colibri(*args: str, **env: str) -> subprocess.CompletedProcess:
    """The command in a process of its own. `env` overlays the environment without the variables that name tools."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "CHROMIUM")}
    command = [sys.executable, "-m", "colibri_lab", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**inherited, **env})


def test_the_report_has_versions_machine_kernels_and_extensions():
    report = doctor.examine()
    assert list(report.sections) == ["versions", "machine", "kernels", "JupyterLab extensions"]
    assert report.sections["versions"]["numpy"] == __import__("numpy").__version__
    assert "physical" in report.sections["machine"]["cores"]
    assert report.sections["machine"]["RAM"].endswith("available")
    assert {"@jupyter-widgets/jupyterlab-manager", "anywidget"} <= report.sections["JupyterLab extensions"].keys()
    assert str(report).splitlines()[0] == "versions"


def test_an_empty_path_is_a_list_of_what_is_missing_and_exit_code_1(tmp_path):
    done = colibri("doctor", PATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "what is wrong" in done.stdout
    assert "compiler               not found" in done.stdout
    assert "C++ compiler" in done.stdout.split("what is wrong")[1]
    assert "ccache                 not found (optional" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_json_tells_what_was_not_found_as_null(tmp_path):
    done = colibri("doctor", "--json", PATH=str(tmp_path))
    data = json.loads(done.stdout)
    assert data["ok"] is False
    assert data["sections"]["kernels"]["compiler"] is None
    assert done.returncode == 1


def test_a_missing_extension_is_a_problem_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *_: [str(tmp_path)])
    assert doctor.jupyter_extensions() == {}
    problems = "\n".join(doctor.examine().problems)
    assert "JupyterLab extension anywidget (live plots) is missing or disabled: pip install" in problems


def test_a_disabled_extension_counts_as_missing(monkeypatch, tmp_path):
    package = tmp_path / "labextensions" / "@maker" / "thing"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.2.3"}')
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *_: [str(tmp_path / "labextensions")])
    monkeypatch.setattr("jupyter_core.paths.jupyter_config_path", lambda: [str(tmp_path)])
    assert doctor.jupyter_extensions() == {"@maker/thing": "1.2.3"}
    (tmp_path / "labconfig").mkdir()
    (tmp_path / "labconfig" / "page_config.json").write_text('{"disabledExtensions": {"@maker/thing": true}}')
    assert doctor.jupyter_extensions() == {}


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "dependencies", lambda: ["numpy", "no-such-package"])
    assert any("pip install no-such-package" in problem for problem in doctor.examine().problems)


def test_about_is_three_lines_that_a_notebook_shows_as_lines():
    text = doctor.about()
    assert len(text.splitlines()) == 3
    assert repr(text) == str(text)
    assert "SIMD path" in text and "Python" in text


def test_the_command_exits_1_when_something_is_wrong(monkeypatch, capsys):
    report = doctor.Report({"versions": {"numpy": None}}, ["two lines\nof trouble"])
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert cli.main(["doctor"]) == 1
    assert "  - two lines\n    of trouble" in capsys.readouterr().out
