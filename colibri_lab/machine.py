"""Facts about this machine as this process may use it: CPU, cores, memory. Affinity and container limits count."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")


def _words(path: Path) -> list[str]:
    """The words of a small system file; empty where there is no such file."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def cpu_name() -> str:
    """The CPU's model name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        if done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine()


def cores() -> tuple[int, int]:
    """(physical, logical) cores this process may run on, each at least 1: those of the machine, less what its affinity
    mask and its control group's CPU quota take away."""
    logical = psutil.cpu_count(logical=True) or 1
    physical = psutil.cpu_count(logical=False) or logical
    if hasattr(os, "sched_getaffinity"):
        mine = os.sched_getaffinity(0)
        logical = len(mine)
        siblings = [_words(CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") for cpu in mine]
        if all(siblings):
            physical = len({tuple(words) for words in siblings})
    allowed = max(1, math.floor(_quota() or logical))
    return min(physical, logical, allowed), min(logical, allowed)


def _quota() -> float | None:
    """CPUs' worth of time the control group grants (version 2, then version 1); None without a limit."""
    words = _words(CGROUP / "cpu.max") or [
        *_words(CGROUP / "cpu" / "cpu.cfs_quota_us"),
        *_words(CGROUP / "cpu" / "cpu.cfs_period_us"),
    ]
    if len(words) == 2 and words[0] not in ("max", "-1"):
        return float(words[0]) / float(words[1])
    return None


def memory() -> tuple[int, int]:
    """(total, available) bytes of RAM for this process; a control group's limit counts as the total when it is lower."""
    ram = psutil.virtual_memory()
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        words = _words(CGROUP / limit)
        if words and words[0] != "max" and int(words[0]) < ram.total:
            total = int(words[0])
            return total, min(ram.available, total - int(_words(CGROUP / used)[0]))
    return ram.total, ram.available
