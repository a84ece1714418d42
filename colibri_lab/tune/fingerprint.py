"""Which machine this is, so that no measurement of one is taken for another's."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

import psutil

from .. import machine


@cache
def machine_facts() -> dict:
    """fingerprint, cpu, physical and logical cores, RAM and system of the machine this process runs on.

    The fingerprint hashes all of them and the system's own id where it has one. Cores and RAM are those this process may
    use, since a container with half of them is another machine to a measurement.
    """
    physical, logical = machine.cores()
    total, _ = machine.memory()
    facts = {
        "cpu": machine.cpu_name(),
        "physical_cores": physical,
        "logical_cores": logical,
        "ram_bytes": total,
        "system": platform.system(),
    }
    try:
        own = Path("/etc/machine-id").read_text().strip()
    except OSError:
        own = platform.node()
    # A few MB of RAM come and go with the kernel's own reservations.
    told = {**facts, "ram_bytes": round(total / 2**28), "id": own}
    text = "\n".join(f"{name} {value}" for name, value in told.items())
    return {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16], **facts}


def swap_bytes() -> int:
    """Bytes of swap space that exist."""
    return psutil.swap_memory().total
