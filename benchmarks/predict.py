"""Predicted beside measured: decode speed, hit rate and memory at five slot counts and two ways of reading.

    python benchmarks/predict.py                              colibri-tiny, then an OLMoE-shaped model that is made for this
    python benchmarks/predict.py --model colibri-tiny
    python benchmarks/predict.py --made DIR --layers 8 --format int8

Calibration runs another prompt at four slot counts that are not among the five, once in every round. The measured text's
routing is recorded once; the engine then runs it at every slot count in turn, round after round, each time from a cold
expert cache. Measured are the tokens by the mean time of a run, the slowest and fastest tenth left out, on both sides; the
bounds hold eight of ten runs.
The last part needs no engine: the bytes and I/O times of a recorded Qwen3-30B-A3B run, bandwidth fitted to its first half.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

import colibri_lab as cl
from colibri_lab import machine
from colibri_lab.trace import load_trace
from colibri_lab.tune import page_cache, predict, runs
from colibri_lab.tune.calibrate import Calibrator, trimmed_mean
from colibri_lab.tune.served import serve
from colibri_lab.tune.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
CALIBRATION = "class Tree:\n    def insert(self, key):\n        "
WITHIN = 0.15
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


def one_storage(model: Path, storage: str, slots: list[int], tokens: int, seconds: float) -> list[dict]:
    """Rows of one way of reading, from as many rounds as begin within `seconds`, at least five."""
    lab = cl.open(model, expert_cache_slots=slots[0], storage=storage, prefault=True, max_seq_len=512)
    shape = Shape.of_container(lab.container)
    files = runs.expert_files(model)
    if storage != "direct":
        page_cache.warm(files)
    with lab.record() as recorder:  # also touches everything once before it counts
        measured_run(lab, tokens)
    calibrator = Calibrator(lab, CALIBRATION, tokens)
    seconds_of: dict[int, list[float]] = {count: [] for count in slots}  # decoding, by run
    facts = {}
    end, rounds = time.monotonic() + seconds, 0
    with tqdm(desc=f"{model.name}, {storage}", unit=" round") as bar:
        while rounds < 5 or time.monotonic() < end:
            # Calibrating takes its turn in every round, so that it meets the machine as the measured runs do.
            calibrator.round(0.3)
            for count in slots if rounds % 2 else reversed(slots):
                lab.configure(expert_cache_slots=count)
                lab.warmup()
                decode = [step.wall_s for step in measured_run(lab, tokens) if step.phase == "decode"]
                seconds_of[count].append(sum(decode))
                facts[count] = (lab.last_run.hit_rate, lab.memory(peak=True), page_cache.share(files))
            rounds += 1
            bar.update()
    found = calibrator.result()
    base = {"storage": storage, "max_seq_len": 512}
    one = predict.calibrated(shape, found, machine.memory()[1], base, recorder.trace)
    rows = []
    for count in slots:
        prediction, values = one.at(expert_cache_slots=count), tokens / np.array(seconds_of[count])
        hit, memory, share = facts[count]
        measured = tokens / trimmed_mean(seconds_of[count])
        low, high = np.quantile(values, [0.1, 0.9])
        rows.append(
            {
                "model": model.name, "storage": storage, "slots": count, "predicted": prediction.tokens_per_s.value,
                "low": prediction.tokens_per_s.low, "high": prediction.tokens_per_s.high, "measured": measured,
                "error": prediction.tokens_per_s.value / measured - 1, "measured_low": low, "measured_high": high,
                "n": rounds, "hit_rate": hit, "hit_exact": prediction.hit_rate == hit, "memory": memory["total_bytes"],
                "memory_error": prediction.memory["total_bytes"] / memory["total_bytes"] - 1,
                "bottleneck": prediction.bottleneck, "page_cache": share, "read_factor": found.read_factor,
                "miss_us": 1e6 * found.costs.miss_s, "wait_us": 1e6 * found.costs.wait_s,
            }
        )  # fmt: skip
    return rows


def measured_run(lab, tokens: int) -> list:
    """The steps of the measured text from a cold expert cache."""
    lab.reset_cache()
    list(lab.stream(PROMPT, max_tokens=tokens + 1, temperature=1.0, seed=7, stop_at_eos=False))
    return lab.last_run.steps


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


def keep(report: dict, output: Path) -> None:
    """Add a run to predict.json in `output`; predict.md tells of all runs, and shows the last of each model."""
    data = output / "predict.json"
    kept = json.loads(data.read_text()) if data.exists() else {"models": {}}
    kept["qwen"] = report["qwen"]
    table = pd.DataFrame(report["engine"])
    for model, rows in table.groupby("model"):
        one = kept["models"].setdefault(
            model.rsplit("-", 1)[0] if model.startswith("colibri-tiny") else model, {"runs": []}
        )
        worst = float(rows.error[rows.error.abs().idxmax()])
        storages = list(rows.storage.unique())
        within = int((rows.error.abs() <= WITHIN).sum())
        one["runs"].append({"within": within, "of": len(rows), "worst": worst, "storages": storages})
        others = [row for row in one.get("rows", []) if row["storage"] not in storages]
        one["rows"] = others + rows.drop(columns="model").to_dict("records")
    data.write_text(json.dumps(kept, indent=1, default=float) + "\n")
    (output / "predict.md").write_text(told(kept))


def told(kept: dict) -> str:
    """predict.md: a paragraph and a table for each model."""
    lines = [
        "# Predicted and measured decode speed", "",
        "Written by `python benchmarks/predict.py --output benchmarks/results`: tokens/s on a virtual machine with two cores",
        "whose memory and disk other guests share. What is measured, and how, stands in that file. The range holds eight of ten",
        "runs of the same setting: so far it differs from itself.",
    ]  # fmt: skip
    for model, one in kept["models"].items():
        runs_ = ", ".join(
            f"{run['within']} of {run['of']} (worst {100 * run['worst']:+.1f} %, {' and '.join(run['storages'])})"
            for run in one["runs"]
        )
        lines += [
            "", f"## {model}", "", f"Within {WITHIN:.0%}, run by run: {runs_}. The last run of each way of reading:", "",
            "| storage | slots | predicted | band | measured | range | n | error | hit rate exact | memory error |",
            "|---|--:|--:|---|--:|---|--:|--:|---|--:|",
        ]  # fmt: skip
        lines += [
            f"| {r['storage']} | {r['slots']} | {r['predicted']:.1f} | {r['low']:.1f} to {r['high']:.1f} | {r['measured']:.1f} | "
            f"{r['measured_low']:.1f} to {r['measured_high']:.1f} | {r['n']} | {100 * r['error']:+.1f} % | "
            f"{'yes' if r['hit_exact'] else 'no'} | {100 * r['memory_error']:.2f} % |"
            for r in one["rows"]
        ]
    q = kept["qwen"]
    lines += [
        "", "## Qwen3-30B-A3B, recorded by another engine", "",
        f"Bytes read exact for {q['bytes_exact']} of {q['tokens']} tokens. I/O time with the bandwidth of the first "
        f"{q['fitted_on']} tokens: {100 * q['io_error_total']:+.2f} % in all over the others, median "
        f"{100 * q['io_error_median']:.1f} % a token, worst {100 * q['io_error_worst']:.0f} %.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


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
    p.add_argument("--seconds", type=float, default=60, help="of rounds for each way of reading")
    p.add_argument("--only-qwen", action="store_true")
    p.add_argument("--output", type=Path, help="add this run to predict.json there, and write predict.md anew")
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
                for storage in args.storages.split(","):
                    rows += one_storage(model, storage, slots, args.tokens, args.seconds)
        report["engine"] = rows
        table = pd.DataFrame(rows)
        runs.save("plan", requested={"benchmark": "predict", "tokens": args.tokens, "seconds": args.seconds},
                  facts={"worst_error": float(table.error.abs().max()), "hits_exact": bool(table.hit_exact.all())},
                  tables={"predicted_and_measured": table})  # fmt: skip
    if args.output:
        keep(report, args.output)
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
