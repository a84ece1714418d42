"""Runs in its own process: `python child.py FILE.cpp` builds one mirrored kernel with cppimport and loads it once.

A compiler error, a SystemExit or a module that crashes as it loads ends this process and no other.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from pathlib import Path


def _die_with_parent() -> None:
    """The parent holds the other end of stdin. When it is gone, so must be this build and the compiler it started."""
    os.read(0, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Build and load the kernel named by the first argument; the exit code says whether both worked."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # The kernel's cfg block imports colibri_lab.kernels. A bare package serves it without the rest of colibri_lab,
    # whose modules may want the very kernel that is being built.
    here = Path(__file__).resolve().parent
    package = types.ModuleType("colibri_lab")
    package.__path__ = [str(here.parent)]
    sys.modules["colibri_lab"] = package
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]

    import cppimport

    cppimport.build_filepath(sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
