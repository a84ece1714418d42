"""Memory: allocation latency, the plan against what a process really grows by, paging, and a run under a hard limit.

    python benchmarks/memory.py [--large DIR] [--output benchmarks/results]

Writes memory.md, memory.json and memory_latency.png. The large model (4.8 GB of experts) is made in DIR, or in a
temporary folder, converted, and removed again; it needs 10 GB of disk for some minutes. Without --large and
--with-large only the shipped model is measured.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pandas as pd

import colibri_lab as cl
from colibri_lab import machine
from colibri_lab.engine.sizes import kv_bytes
from colibri_lab.front import container_of
from colibri_lab.kernels import toolchain
from colibri_lab.tune.capped import run_child
from colibri_lab.ui.memory_plots import latency_picture
from colibri_lab.units import format_size

ROOT = Path(__file__).resolve().parent.parent
TEXT = "the quick brown fox jumps over the lazy dog "
GREEDY = dict(temperature=0.0, stop_at_eos=False)
LARGE = dict(hidden=2048, layers=4, experts=96, top_k=8, expert_width=1024, vocab=1024)
GRIDS = {
    "colibri-tiny": [
        dict(expert_cache_slots=4, max_seq_len=128),
        dict(expert_cache_slots=16, max_seq_len=256),
        dict(expert_cache_slots=32, max_seq_len=512),
        dict(expert_cache_slots=16, max_seq_len=512, kv_cache_type="naive", kv_dtype="fp16"),
        dict(expert_cache_slots=24, max_seq_len=256, max_batch_size=4),
        dict(memory="32 MiB", max_seq_len=256),
    ],
    "large": [
        dict(expert_cache_slots=2, max_seq_len=128, prefill_chunk=32),
        dict(expert_cache_slots=16, max_seq_len=256),
        dict(expert_cache_slots=16, max_seq_len=1024, kv_dtype="fp16"),
        dict(memory="1 GiB", max_seq_len=256),
        dict(memory="2 GB", max_seq_len=256, scope="global"),
    ],
}


def latency(folder: Path) -> pd.DataFrame:
    """Columns allocator, bytes, occupancy, median_ns, p99_ns, n."""
    command, program = toolchain.find_compiler(), folder / "latency"
    source = [f"-I{ROOT / 'cpp'}", str(ROOT / "benchmarks" / "memory_latency.cpp"), "-o", str(program)]
    subprocess.run([*command, "-std=c++17", "-O3", "-march=native", *source], check=True)
    return pd.read_csv(io.StringIO(subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout))


def compare_plan(model: Path, grid: list[dict]) -> pd.DataFrame:
    """A row per setting: planned, allocated by our counters, and how much the child process grew."""
    rows = []
    for settings in grid:
        run = run_child(
            model,
            TEXT,
            settings={**settings, "prefault": True},
            generate={**GREEDY, "max_tokens": settings["max_seq_len"] // 2},
        )
        if run.reason:
            raise SystemExit(f"{settings}: {run.reason}")
        shown = ", ".join(f"{name} {value}" for name, value in settings.items())
        rows.append(
            {"settings": shown, "planned": run.plan["total_bytes"], "counted": run.memory["total_bytes"],
             "process": run.resident - run.base, "error_percent": 100 * run.error,
             "scratch_ratio": cl.memory_plan(model, check=False, **settings).scratch_ratio}
        )  # fmt: skip
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def capped(model: Path, experts: int) -> dict:
    """The model under plan + 5 %, as a row."""
    settings = dict(expert_cache_slots=1, max_seq_len=128, prefill_chunk=16)
    start = time.perf_counter()
    run = run_child(model, "Once upon a time", settings=settings, generate={**GREEDY, "max_tokens": 16}, limited=True)
    return {
        "experts": experts, "plan": run.plan["total_bytes"], "process_before": run.base, "limit": run.limit, "peak": run.peak,
        "experts_over_limit": experts / run.limit, "tokens": len(run.tokens), "killed": run.reason,
        "tokens_per_s": run.decode_tokens_per_s, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def paging(model: Path) -> list[dict]:
    """KV bytes of a mix of lengths, paged by several page sizes and naive: computed, and held by an engine."""
    lengths = [2000, *range(20, 305, 20)]
    rows = []
    for kind, page in (("naive", 256), ("paged", 256), ("paged", 64), ("paged", 16)):
        lab = cl.open(model, kv_cache_type=kind, page_size=page, max_seq_len=2048, max_batch_size=len(lengths))
        for request, length in zip(lab.engine.requests, lengths, strict=True):
            request.kv.reserve(length)
        held = lab.memory()["kv_cache_bytes"]
        rows.append(
            {"cache": kind, "page": page, "computed": kv_bytes(lab.config, lengths, lab.settings), "held": held}
        )
    naive = rows[0]["held"]
    return [{**row, "saved_percent": 100 * (1 - row["held"] / naive)} for row in rows]


def make_large(folder: Path) -> tuple[Path, int]:
    """The large container and the bytes of its experts."""
    cl.make_model(folder / "hf", "olmoe", **LARGE)
    cl.convert(folder / "hf", folder / "box")
    shutil.rmtree(folder / "hf")
    return folder / "box", sum(p.stat().st_size for p in (folder / "box").glob("layer_*/expert_*.bin"))


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown, numbers as they are."""
    head = [f"| {' | '.join(table.columns)} |", f"|{'---|' * len(table.columns)}"]
    shown = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row] for row in table.itertuples(index=False)]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in shown])


def report(found: dict) -> str:
    lines = ["# Memory", "", f"{found['machine']}; bytes unless it says otherwise.", ""]
    lines += ["## Allocation and release, ns (1 GiB pool, fragmented)", ""]
    lines += [
        "No row: the fragmented pool has no free run that long, and says so. malloc does not touch what it gives.",
        "",
    ]
    lines += [markdown(pd.DataFrame(found["latency"])), "", "![latency](memory_latency.png)", ""]
    for name, rows in found["plans"].items():
        lines += [f"## Plan against measured: {name}", ""]
        lines += ["`process` is how much the child's resident memory grew; `scratch_ratio` what the arenas reserve over what their "
                  "arrays need at once.", ""]  # fmt: skip
        lines += [markdown(pd.DataFrame(rows)), ""]
    lines += ["## KV cache of 16 sequences: one of 2000 tokens, 15 of 20 to 300, max_seq_len 2048 (colibri-tiny)", ""]
    lines += [markdown(pd.DataFrame(found["paging"])), ""]
    if found["capped"]:
        c = found["capped"]
        lines += ["## Under a hard limit of plan + 5 %", "", markdown(pd.DataFrame([c])), ""]
        lines += [
            f"Experts of {format_size(c['experts'])} are {c['experts_over_limit']:.1f} times the limit of {format_size(c['limit'])} "
            f"({format_size(c['process_before'])} of it the process before the model was opened).", "",
        ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--with-large", action="store_true", help="measure the large model too")
    parser.add_argument("--large", type=Path, metavar="DIR", help="folder to make it in (default: a temporary one)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    tiny = container_of("colibri-tiny")
    found: dict = {"machine": f"{machine.cpu_name()}, {machine.cores()[0]} cores"}
    with tempfile.TemporaryDirectory(dir=args.large) as folder:
        table = latency(Path(folder))
        (args.output / "memory_latency.png").write_bytes(latency_picture(table).png())
        found |= {"latency": table.to_dict("records"), "paging": paging(tiny), "capped": None}
        found["plans"] = {"colibri-tiny": compare_plan(tiny, GRIDS["colibri-tiny"]).to_dict("records")}
        if args.with_large or args.large:
            large, experts = make_large(Path(folder))
            found["plans"]["large"] = compare_plan(large, GRIDS["large"]).to_dict("records")
            found["capped"] = capped(large, experts)
    (args.output / "memory.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (args.output / "memory.md").write_text(report(found), encoding="utf-8")
    print(report(found))


if __name__ == "__main__":
    main()
