"""Predicted beside measured: decode speed, hit rate and memory at five slot counts and two ways of reading.

    python benchmarks/predict.py                              colibri-tiny, then an OLMoE-shaped model that is made for this
    python benchmarks/predict.py --model colibri-tiny
    python benchmarks/predict.py --made DIR --layers 8 --format int8

Calibration runs at a slot count that is not among the five, on another prompt, once in every round; the one that other
programs disturbed least counts. The measured text's routing is recorded once;
the engine then runs it at every slot count in turn, round after round, each time from a cold expert cache. A step that lost
a core to another program is left out of both sides where enough others remain: `clean` tells how many of how many count.
The last part needs no engine: the bytes and I/O times of a recorded Qwen3-30B-A3B run, bandwidth fitted to its first half.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

import colibri_lab as cl
from colibri_lab import machine
from colibri_lab.timing import CLEAN, Stopwatch
from colibri_lab.trace import load_trace
from colibri_lab.tune import page_cache, predict, runs
from colibri_lab.tune.calibrate import calibrate
from colibri_lab.tune.served import serve
from colibri_lab.tune.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
CALIBRATION = "class Tree:\n    def insert(self, key):\n        "
PROMPT = "def read_lines(path):\n    "


def made(directory: Path, layers: int, format: str, experts: int = 64) -> Path:
    """A container of OLMoE's shape, an expert of the real size: hidden 2048, width 1024, random weights."""
    target = directory / f"olmoe-{layers}x{experts}-{format}"
    if not (target / "config.json").exists():
        source = directory / "source"
        from colibri_lab.checkpoint.make_model import make_model

        make_model(
            source, "olmoe", hidden=2048, expert_width=1024, layers=layers, experts=experts, seed=1, overwrite=True
        )
        cl.convert(source, target, quantize=format, tensors="all")
        shutil.rmtree(source)
    return target


def timed_run(lab, tokens: int) -> tuple[list, list[float]]:
    """(steps, share of their threads' time that each held a core) of a run from a cold expert cache."""
    lab.reset_cache()
    stream = lab.stream(PROMPT, max_tokens=tokens + 1, temperature=1.0, seed=7, stop_at_eos=False)
    held = []
    while True:
        with Stopwatch(lab.settings["threads"]) as watch:
            step = next(stream, None)
        if step is None:
            return lab.last_run.steps, held
        held.append(watch.held)


def one_storage(
    model: Path, storage: str, slots: list[int], tokens: int, rounds: int, calibration_slots: int, known: list
) -> list[dict]:
    """Rows of one way of reading. `known`: calibrations so far; computing costs the same however experts are read, so the
    median of all gives those costs, and the median of this storage what reading costs."""
    lab = cl.open(model, expert_cache_slots=calibration_slots, storage=storage, prefault=True, max_seq_len=512)
    shape = Shape.of_container(lab.container)
    files = runs.expert_files(model)
    if storage != "direct":
        page_cache.warm(files)
    lab.warmup()
    calibrate(lab, CALIBRATION, tokens=12, read_s=0.2)  # everything was touched once before it counts
    with lab.record() as recorder:
        timed_run(lab, tokens)
    calibrations = []
    walls = {count: [] for count in slots}
    held = {count: [] for count in slots}
    facts = {}
    for _ in tqdm(range(rounds), f"{model.name}, {storage}", unit="round"):
        # Calibrating takes its turn in every round, so that it meets the machine as the measured runs do.
        lab.configure(expert_cache_slots=calibration_slots)
        lab.warmup()
        calibrations.append(calibrate(lab, CALIBRATION, tokens=tokens, repeats=3, read_s=0.5))
        for count in slots:
            lab.configure(expert_cache_slots=count)
            lab.warmup()
            steps, share = timed_run(lab, tokens)
            decode = [step.phase == "decode" for step in steps]
            walls[count].append([s.wall_s for s, d in zip(steps, decode, strict=True) if d])
            held[count].append([h for h, d in zip(share, decode, strict=True) if d])
            facts[count] = (lab.last_run.hit_rate, lab.memory(peak=True), page_cache.share(files))
    visits = shape.top_k * len(shape.moe_layers)

    def disturbed(each) -> float:
        return each.costs.step_s + visits * each.costs.expert_s

    def reading(each) -> float:
        device, cached = each.reads
        return each.read_factor / (cached or device).at(shape.block_bytes, 2, lab.settings["loader_threads"])

    found = sorted(calibrations, key=reading)[len(calibrations) // 2]
    known += calibrations
    base = {"storage": storage, "max_seq_len": 512}
    one = predict.calibrated(shape, found, machine.memory()[1], base, recorder.trace)
    one.costs = sorted(known, key=disturbed)[len(known) // 2].costs
    rows = []
    for count in slots:
        prediction = one.at(expert_cache_slots=count)
        seconds = prediction.steps.seconds.to_numpy()
        wall, clean = np.array(walls[count]), np.array(held[count]) >= CLEAN
        # The median over rounds of each step, of its clean samples where it has any.
        ok = np.array([wall[clean[:, i], i] if clean[:, i].any() else wall[:, i] for i in range(wall.shape[1])], object)
        kept = clean.any(axis=0) if clean.any(axis=0).sum() >= wall.shape[1] // 4 else np.ones(wall.shape[1], bool)
        each = np.array([np.median(samples) for samples in ok])
        per_round = [kept.sum() / wall[r][kept].sum() for r in range(len(wall))]
        hit, memory, share = facts[count]
        undisturbed = wall.shape[1] / wall.min(axis=0).sum()
        measured, predicted = kept.sum() / each[kept].sum(), kept.sum() / seconds[kept].sum()
        rows.append(
            {
                "model": model.name, "storage": storage, "slots": count, "predicted": predicted,
                "low": prediction.tokens_per_s.low, "high": prediction.tokens_per_s.high, "measured": measured,
                "error": predicted / measured - 1, "measured_low": min(per_round), "measured_high": max(per_round),
                "undisturbed": undisturbed, "undisturbed_error": len(seconds) / seconds.sum() / undisturbed - 1, "n": rounds, "clean": f"{int(clean.sum())}/{clean.size}", "hit_rate": hit,
                "hit_exact": prediction.hit_rate == hit, "memory": memory["total_bytes"],
                "memory_error": prediction.memory["total_bytes"] / memory["total_bytes"] - 1,
                "bottleneck": prediction.bottleneck, "page_cache": share, "read_factor": found.read_factor,
            }
        )  # fmt: skip
    return rows


def qwen() -> dict:
    """Bytes per token, and I/O time with the bandwidth of the first half, of a run that another engine recorded."""
    trace = load_trace(ROOT / "data" / "traces" / "bigmoe_qwen.route.csv")
    metrics = pd.read_csv(ROOT / "data" / "traces" / "bigmoe_qwen.metrics.csv", comment="#")
    served = serve(trace, "4000 MiB", scope="global", recency="listed")
    # An expert is three reads that start inside a page: each moves one page more than it fills.
    read = served.misses * (trace.expert_bytes[served.layer] + 3 * 4096)
    last = (len(trace.layers) - 1) * trace.num_experts + trace.num_experts - 1
    before = served.per_step(read) == metrics.read_bytes
    read[np.searchsorted(served.ends, np.flatnonzero(served.loaded == last), side="right") - 1] -= (
        512  # end of the file
    )
    predicted, half = served.per_step(read), len(metrics) // 2
    rate = metrics.read_bytes[:half].sum() / metrics.io_ms[:half].sum()
    error = predicted[half:] / rate / metrics.io_ms[half:].to_numpy() - 1
    return {
        "tokens": len(metrics), "bytes_exact": int((predicted == metrics.read_bytes).sum()),
        "bytes_exact_before_the_end_of_the_file": int(before.sum()), "fitted_on": half, "bytes_per_ms": rate,
        "io_error_total": float(predicted[half:].sum() / rate / metrics.io_ms[half:].sum() - 1),
        "io_error_median": float(np.median(np.abs(error))), "io_error_worst": float(np.abs(error).max()),
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", help="one container or shipped model; default colibri-tiny and the made one")
    p.add_argument("--made", type=Path, help="folder for the made model (kept); default a temporary one")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--experts", type=int, default=64)
    p.add_argument("--format", default="int8")
    p.add_argument("--storages", default="pread,direct")
    p.add_argument("--slots", help="five slot counts; default from top-k to all")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--only-qwen", action="store_true")
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    report = {"qwen": qwen()}
    rows = []
    if not args.only_qwen:
        with tempfile.TemporaryDirectory(prefix="colibri-predict-", dir=args.made) as scratch:
            from colibri_lab.front import container_of

            models = [container_of(args.model or "colibri-tiny")]
            if args.model is None:
                models.append(made(args.made or Path(scratch), args.layers, args.format, args.experts))
            for model in models:
                shape = Shape.of_container(cl.open(model, expert_cache_slots=1).container)
                k, blocks = shape.top_k, shape.blocks
                slots = (
                    [int(n) for n in args.slots.split(",")]
                    if args.slots
                    else [k, 2 * k, 3 * k, 4 * k, min(6 * k, blocks)]
                )
                few = next(n for n in range(round(1.5 * k), blocks) if n not in slots)
                known: list = []
                for storage in args.storages.split(","):
                    rows += one_storage(model, storage, slots, args.tokens, args.rounds, few, known)
        report["engine"] = rows
        table = pd.DataFrame(rows)
        runs.save("plan", requested={"benchmark": "predict", "tokens": args.tokens, "rounds": args.rounds},
                  facts={"worst_error": float(table.error.abs().max()), "hits_exact": bool(table.hit_exact.all())},
                  tables={"predicted_and_measured": table})  # fmt: skip
    if args.json:
        print(json.dumps(report, default=str))
        return
    if rows:
        shown = table.drop(columns=["model", "page_cache"])
        for model, part in table.groupby("model"):
            print(f"\n{model}")
            print(shown.loc[part.index].to_string(index=False, float_format="{:.4g}".format))
        print(f"\nworst error {table.error.abs().max():.1%}, median {table.error.abs().median():.1%}; hits exact in "
              f"{int(table.hit_exact.sum())} of {len(table)}; memory within {table.memory_error.abs().max():.2%}")  # fmt: skip
    print("recorded Qwen3-30B-A3B:", report["qwen"], file=sys.stdout)


if __name__ == "__main__":
    main()
