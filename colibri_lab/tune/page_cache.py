"""What of a model's files the system's page cache holds, and how to empty or fill it.

Nothing here can see a cache below the system: a disk controller or the host of a virtual machine may still answer from
memory what this system believes to be cold.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

SAMPLE = 256  # files looked at when there are more


def share(paths: Iterable[str | os.PathLike], seed: int = 0) -> float | None:
    """Share of the files' bytes that the page cache holds, 0 to 1; of `SAMPLE` seeded picks when there are more files.

    None where the system does not tell (anything but Linux) or there is nothing to look at.
    """
    files = [Path(path) for path in paths]
    if len(files) > SAMPLE:
        files = random.Random(seed).sample(files, SAMPLE)
    counted = [pages for path in files if (pages := _pages(path)) is not None]
    total = sum(pages for _, pages in counted)
    return sum(present for present, _ in counted) / total if total else None


def _pages(path: Path) -> tuple[int, int] | None:
    """(pages present, pages) of one file; None where that cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        mincore = libc.mincore
    except (OSError, AttributeError):
        return None
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return None
            region = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError:
        return None
    view = np.frombuffer(region, np.uint8)
    present = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    failed = mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(present.ctypes.data))
    del view
    region.close()
    return None if failed else (int((present & 1).sum()), len(present))


def evict(paths: Iterable[str | os.PathLike]) -> bool:
    """Ask the system to drop the files from its page cache; whether asking was possible. Dirty pages are written first."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def warm(paths: Iterable[str | os.PathLike]) -> None:
    """Read the files once, so that the page cache holds as much of them as it has room for."""
    buffer = bytearray(1 << 22)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
