"""What this CPU can execute, and which instruction set the kernels are compiled for."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

from colibri_lab.errors import SettingError, did_you_mean

# Each path, from plainest to fastest: the CPU flags it needs and the compiler flags that allow it.
# `scalar` and the x86 paths start from the x86-64 baseline, so a path never uses more than it names.
_X86 = ("-march=x86-64", "-mtune=native")
_AVX2 = (*_X86, "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_PATHS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "scalar": (set(), ()),
    "neon": ({"asimd"}, ()),
    "avx2": ({"avx2", "fma", "f16c", "bmi1", "bmi2", "popcnt"}, _AVX2),
    "avx512": ({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}, _AVX512),
    "avx512vnni": (
        {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
        (*_AVX512, "-mavx512vnni"),
    ),
}


def is_x86() -> bool:
    """Whether this is an x86-64 machine (as opposed to arm64)."""
    return platform.machine().lower() in ("x86_64", "amd64")


@functools.cache
def cpu_features() -> frozenset[str]:
    """Instruction-set flags of this CPU in the spelling of Linux: `avx2`, `avx512_vnni`, `asimd`."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    if platform.machine() == "arm64":  # every 64-bit Apple CPU has it
        return frozenset({"asimd"})
    if platform.system() == "Darwin":
        asked = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
        words = subprocess.run(asked, capture_output=True, text=True).stdout.lower().split()
        return frozenset(word.replace("avx512vnni", "avx512_vnni") for word in words)
    return frozenset()


def supported() -> list[str]:
    """The SIMD paths this CPU can run, plainest first."""
    return [path for path, (needs, _) in _PATHS.items() if needs <= cpu_features()]


def simd() -> str:
    """The SIMD path kernels are compiled for: `COLIBRI_SIMD`, or with `auto` (the default) the fastest this CPU has.

    Raises SettingError for a name that is not a path, and for a path this CPU cannot execute.
    """
    asked = os.environ.get("COLIBRI_SIMD", "auto") or "auto"
    able = supported()
    if asked == "auto":
        return able[-1]
    if asked not in _PATHS:
        raise SettingError(f"COLIBRI_SIMD={asked!r} is not a SIMD path; {did_you_mean(asked, ['auto', *_PATHS])}")
    if asked not in able:
        missing = ", ".join(sorted(_PATHS[asked][0] - cpu_features()))
        raise SettingError(
            f"COLIBRI_SIMD={asked}: this CPU lacks {missing}. It supports {', '.join(able)}; set one of them or auto"
        )
    return asked


def simd_flags() -> list[str]:
    """Compiler flags for `simd()`: the macro `COLIBRI_SIMD_<PATH>` and what lets the compiler emit its instructions."""
    path = simd()
    macro = f"-DCOLIBRI_SIMD_{path.upper()}"
    if (os.environ.get("COLIBRI_SIMD") or "auto") == "auto":
        return [macro, "-march=native" if is_x86() else "-mcpu=native"]
    return [macro, *(_PATHS[path][1] or (_X86 if is_x86() else ()))]
