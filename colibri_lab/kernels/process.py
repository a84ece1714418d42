"""Compiler processes: their output, and their end when this process is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess

_running: set[subprocess.Popen] = set()


def run(command: list[str], **options) -> tuple[int, str]:
    """Exit code and merged output of a command that dies, with all it started, when this process is interrupted."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, start_new_session=True, **pipes, **options)
    _running.add(process)
    try:
        # Not communicate(): it closes stdin, which a build takes for the end of this process (child.py).
        output = process.stdout.read()
        return process.wait(), output.decode("utf-8", errors="replace")
    except BaseException:
        _kill(process)
        raise
    finally:
        _running.discard(process)
        process.stdin.close()
        process.stdout.close()


def cancel() -> None:
    """Kill every compiler process that this process has started, from any thread."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
