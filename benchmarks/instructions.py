"""Instructions that the kernels' inner loops take: a check of speed that no other work on the machine can disturb.

    python benchmarks/instructions.py [--paths scalar,avx2] [--json]

Counted by callgrind where valgrind is there and knows the instructions (it knows no AVX-512), else by stepping through a
child process one instruction at a time where the system allows it (x86-64 Linux). On the avx2 path both count the cases
of one row, and must agree. A count is of the whole call, per line of 64 bytes of weights and row of activations, or per
number.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from colibri_lab import kernels
from colibri_lab.engine.linear import KIND_CODES
from colibri_lab.kernels import cpu, toolchain

HERE = Path(__file__).resolve().parent
ROWS, COLS, KEYS, HEAD_DIM = 32, 512, 256, 128  # as in instructions.cpp
NO_VALGRIND = ("avx512", "avx512vnni")
WEIGHTS = {"fp32": (4, 0), "fp16": (2, 0), "bf16": (2, 0), "int8": (1, 0), "int4": (0.5, 64), "mxfp4": (0.5, 32)}


def cases() -> list[tuple[str, str, float]]:
    """(name, argument of the program, units that the count is divided by)."""
    found = []
    for format, (width, group) in WEIGHTS.items():
        lines = ROWS * COLS * width / 64
        for tokens in (1, 12):
            for integer in (0, 1) if format in ("int8", "int4", "mxfp4") else (0,):
                name = f"{format}, {tokens} row{'s' * (tokens > 1)}{', int8 activations' * integer}, per line and row"
                found.append((name, f"gemm {KIND_CODES[format]} {group} {tokens} {integer}", lines * tokens))
    found.append((f"attention, head of {HEAD_DIM}, per key", "attention", KEYS))
    found.append(("norm, per number", "norm", COLS))
    found += [("exact sigmoid, per number", "silu 1", COLS), ("polynomial sigmoid, per number", "silu 0", COLS)]
    return found


def build(path: str, folder: Path) -> Path:
    """The program for one SIMD path, with the flags that kernels are compiled with."""
    program = folder / path
    command = toolchain.find_compiler()
    before = os.environ.get("COLIBRI_SIMD")
    os.environ["COLIBRI_SIMD"] = path
    try:
        flags = toolchain.compile_flags(command)
    finally:
        os.environ.pop("COLIBRI_SIMD") if before is None else os.environ.update(COLIBRI_SIMD=before)
    source = [f"-I{kernels.cpp_dir()}", str(HERE / "instructions.cpp"), "-o", str(program)]
    subprocess.run([*command, *flags, *source], check=True)
    return program


def by_callgrind(program: Path, argument: str, folder: Path) -> int | None:
    """Instructions inside `measured`; None without valgrind."""
    if not shutil.which("valgrind"):
        return None
    out = folder / "callgrind.out"
    options = ["--tool=callgrind", "--toggle-collect=measured*", f"--callgrind-out-file={out}"]
    done = subprocess.run(["valgrind", *options, str(program), argument], capture_output=True, text=True)
    found = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.M) if done.returncode == 0 else None
    return int(found[1]) if found else None


def by_stepping(program: Path, argument: str) -> int | None:
    """The same by single steps; None where that is not allowed."""
    done = subprocess.run([str(program), argument, "step"], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 and int(done.stdout) > 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--paths", type=lambda t: t.split(","), default=cpu.supported())
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    args = parser.parse_args()
    if not shutil.which("valgrind"):
        print("valgrind is not installed: counting by single steps alone", file=sys.stderr)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in args.paths:
            program = build(path, Path(folder))
            for name, argument, units in cases():
                counted = None if path in NO_VALGRIND else by_callgrind(program, argument, Path(folder))
                both = path == "avx2" and ", 1 row" in name
                stepped = by_stepping(program, argument) if counted is None or both else None
                rows.append({"path": path, "case": name, "callgrind": counted, "stepped": stepped, "units": units,
                             "per_unit": (counted or stepped or math.nan) / units})  # fmt: skip
    if args.json:
        print(json.dumps({"rows": rows}))
        return 0
    print("| case | " + " | ".join(args.paths) + " |\n|---|" + "---|" * len(args.paths))
    for name, *_ in cases():
        mine = {row["path"]: row["per_unit"] for row in rows if row["case"] == name}
        shown = ["not counted" if math.isnan(mine[path]) else f"{mine[path]:.2f}" for path in args.paths]
        print(f"| {name} | {' | '.join(shown)} |")
    apart = [abs(r["callgrind"] / r["stepped"] - 1) for r in rows if r["callgrind"] and r["stepped"]]
    if apart:
        print(f"\ncallgrind and single steps, {len(apart)} counts: at most {100 * max(apart):.2f} % apart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
