"""What number formats cost on the shipped model: bytes, bits per byte, divergence, routing, decode speed.

    python benchmarks/formats.py [--tokens 32768] [--speed 5] [--keep DIR] [--only WORD …] [--output benchmarks/results]

Every format and granularity on the routed experts, the main ones on all matrices but the routers, with and without
calibration, and mixtures; activations rounded to int8, as is the default, and a few rows with float32 ones. All models read the same windows: source files of Python's standard library, of the half that
calibration does not see, and the texts of six domains in data/. `change` is of the bits per byte on the library, against
bf16, with a 95 % bootstrap interval over windows; losses on the short texts of the domains are too few for intervals.

--speed N times 64 decoded tokens of each model N times, interleaved; leave it out on a machine that does something else.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

import colibri_lab as cl
from colibri_lab.checkpoint.convert import quantize
from colibri_lab.checkpoint.formats import FORMATS
from colibri_lab.checkpoint.plan_formats import hot_cold
from colibri_lab.front import container_of
from colibri_lab.kernels import simd
from colibri_lab.quality.calibration_texts import write_calibration
from colibri_lab.quality.logits import Comparison, compare_all
from colibri_lab.quality.texts import prompt_texts, stdlib_texts, windows
from colibri_lab.quality.weights import compare_matrices
from colibri_lab.ui import quality_plots

ROOT = Path(__file__).resolve().parent.parent
BF16 = "bf16"
SCALED = [name for name, kind in FORMATS.items() if kind.scaled]
WHOLE = ["int8", "int8-g64", "int8-tensor", "int4-g32", "int4-g64", "int4-g64-sym", "int4-g128", "int4-row", "mxfp4"]
CALIBRATED = [
    ("int4-g64", "experts"),
    ("int4-row", "experts"),
    ("int4-g64", "all"),
    ("int4-g32", "all"),
    ("int8", "all"),
]
FLOAT_ACTIVATIONS = [("int8", "experts"), ("int4-g64", "experts"), ("int8", "all"), ("int4-g64", "all")]


def rows() -> list[dict]:
    """What to measure: matrices, format, calibrated, and settings to open with."""
    found = [dict(matrices="experts", format=name) for name in ("fp16", *SCALED)]
    found += [dict(matrices="all", format=name) for name in WHOLE]
    found += [dict(matrices=tensors, format=name, calibrated=True) for name, tensors in CALIBRATED]
    found += [dict(matrices=t, format=f, calibrated=True, open=dict(router_calib=False)) for f, t in CALIBRATED[2:]]
    found += [dict(matrices="experts", format="a quarter int8, others int4-g64")]
    found += [dict(matrices=t, format=name, open=dict(activations="fp32")) for name, t in FLOAT_ACTIVATIONS]
    return [dict(calibrated=False, open={}) | row for row in found]


def title(row: dict) -> str:
    extra = {"fp32": ", fp32 activations", False: " but the routers"}
    return row["format"] + ", calibrated" * row["calibrated"] + "".join(extra[value] for value in row["open"].values())


def make(row: dict, bf16: Path, directory: Path, calibration: Path, plan: dict) -> Path:
    """The container of a row, made unless it is there."""
    name = f"{row['matrices']}-{row['format'].split(' ')[0]}{'-calibrated' * row['calibrated']}"
    out = directory / name
    if not (out / "config.json").exists():
        print("making", out.name, flush=True)
        options = dict(tensors=row["matrices"], calibration_data=calibration if row["calibrated"] else None)
        if row["format"] in FORMATS:
            quantize(bf16, out, row["format"], progress=False, **options)
        else:
            quantize(bf16, out, "int4", plan=plan, progress=False)
    return out


def usage(lab, cut) -> np.ndarray:
    """How often each expert was chosen, (moe layers, experts)."""
    counts = np.zeros((len(lab.config.moe_layers), lab.config.num_experts), np.int64)
    for window in cut:
        table = lab.routes(window.ids)
        for index, layer in enumerate(lab.config.moe_layers):
            counts[index] += np.bincount(table.expert[table.layer == layer], minlength=lab.config.num_experts)
    return counts


def bits_per_weight(box) -> float:
    """Of the routed experts, with scales and zero points."""
    tensors = [
        t for layer in box.config.moe_layers for b in range(box.blocks) for t in box.block(layer, b).tensors.values()
    ]
    return 8 * sum(t.nbytes for t in tensors) / sum(np.prod(t.shape) for t in tensors)


def measured(row: dict, lab, reference, library: Comparison, domains: Comparison) -> dict:
    low, high = library.change_interval()
    layers = {None, *range(lab.config.num_layers)}
    _, blocks = compare_matrices(lab.container, reference.container, lambda file, name: None, layers, progress=False)
    by_domain = domains.windows.groupby(domains.windows.text.str.split(":").str[0])[
        ["bytes", "nll", "reference_nll"]
    ].sum()
    return {
        "matrices": row["matrices"],
        "format": title(row),
        "bits_per_weight": bits_per_weight(lab.container),
        "bytes": sum(path.stat().st_size for file in lab.container.files for path in lab.container.find(file)),
        "bits_per_byte": library.bits_per_byte,
        "reference_bits_per_byte": library.reference_bits_per_byte,
        "change": library.change, "low": low, "high": high, "kl": library.kl,
        "router_agreement": library.router_agreement,
        "frequency_distance": float(library.layers.frequency_distance.mean()), "lost_blocks": int(blocks.lost.sum()),
        "domains": {d: float(r.nll / np.log(2) / r.bytes) for d, r in by_domain.iterrows()},
        "domains_change": domains.change, "domains_kl": domains.kl,
    }  # fmt: skip


def speeds(labs: list, repeats: int) -> list[list[float]]:
    """Decoded tokens per second of each model, `repeats` times, one after the other so that all see the same weather."""
    found: list[list[float]] = [[] for _ in labs]
    for repeat in range(repeats + 1):
        for lab, samples in zip(labs, found, strict=True):
            run = lab.generate("import os", max_tokens=64, temperature=0.0, stop_at_eos=False)
            if repeat:  # the first fills the cache
                samples.append(run.decode_tokens_per_s)
    return found


def markdown(table: pd.DataFrame, facts: dict) -> str:
    """The tables and what they were measured on."""
    reference = float(table.reference_bits_per_byte.iloc[0])
    domains = list(table.domains.iloc[0])
    lines = [
        "# Number formats: bytes against quality",
        "",
        f"colibri-tiny, `python benchmarks/formats.py`; {facts['library_tokens']} tokens of {facts['library_texts']} source "
        f"files of Python {facts['python']}'s standard library ({reference:.4f} bits per byte in bf16) and "
        f"{facts['domain_texts']} short texts of {len(domains)} domains; windows of 256. {facts['machine']}. Calibration: GPTQ on "
        f"{facts['calibration_texts']} texts (the other half of the library, and the model's own continuations of short texts of "
        "six domains). `change`: of bits per byte on the library, with its 95 % interval. `lost`: column blocks of 64 of which 90 % "
        "became exactly zero.",
        "",
        "| matrices | format | bits/weight | MB | bits/byte | change | 95 % interval | KL, nats/token | router agreement | "
        "frequency distance | lost | decode tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table.itertuples():
        speed = (
            "not measured"
            if not row.speed
            else f"{np.median(row.speed):.0f} [{min(row.speed):.0f}, {max(row.speed):.0f}]"
        )
        lines.append(
            f"| {row.matrices} | {row.format} | {row.bits_per_weight:.3f} | {row.bytes / 1e6:.2f} | {row.bits_per_byte:.4f} | "
            f"{100 * row.change:+.3f} % | {100 * row.low:+.3f} to {100 * row.high:+.3f} % | {row.kl:.5f} | "
            f"{100 * row.router_agreement:.2f} % | {row.frequency_distance:.5f} | {row.lost_blocks} | {speed} |"
        )
    lines += ["", "Bits per byte by domain, and the change over all of them:", ""]
    lines += [f"| matrices | format | {' | '.join(domains)} | change | KL |", "|---" * (len(domains) + 4) + "|"]
    for row in table.itertuples():
        values = " | ".join(f"{row.domains[name]:.3f}" for name in domains)
        lines.append(
            f"| {row.matrices} | {row.format} | {values} | {100 * row.domains_change:+.2f} % | {row.domains_kl:.4f} |"
        )
    return "\n".join([*lines, "", "![bytes against bits per byte](formats.png)", ""])


def picture(table: pd.DataFrame) -> bytes:
    """PNG of bytes against bits per byte, without symmetric twins, float32 activations and uncalibrated routers."""
    shown = table[~table.format.str.contains("sym|fp32 activations|but the routers|fp16")]
    names = shown.format.where(shown.matrices == "none", shown.matrices + " " + shown.format)
    bounds = {side: shown.reference_bits_per_byte * (1 + shown[side]) for side in ("low", "high")}
    return quality_plots.pareto(shown.assign(format=names, **bounds)).png()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--speed", type=int, default=0, metavar="N")
    parser.add_argument("--keep", metavar="DIR")
    parser.add_argument("--only", nargs="*", metavar="WORD")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*without router calibration")
    work = Path(args.keep or tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    bf16 = container_of("colibri-tiny")
    reference = cl.open(bf16, expert_cache_slots=32)
    calibration = work / "calibration.json"
    if not calibration.exists():
        seeds = prompt_texts(ROOT / "data" / "texts.json")
        write_calibration(calibration, lab=reference, prompts=seeds)
    library = windows(stdlib_texts(), reference.tokenizer, tokens=args.tokens)
    domains = windows(prompt_texts(ROOT / "data" / "prompts.json"), reference.tokenizer)
    plan = hot_cold(usage(reference, library[::8]), reference.config.moe_layers)
    chosen = [
        row for row in rows() if not args.only or any(word in f"{row['matrices']} {title(row)}" for word in args.only)
    ]
    labs = [cl.open(make(row, bf16, work, calibration, plan), expert_cache_slots=32, **row["open"]) for row in chosen]
    found = []
    compared = (compare_all(labs, reference, cut) for cut in (library, domains))
    for row, lab, *pair in zip(chosen, labs, *compared, strict=True):
        found.append(measured(row, lab, reference, *pair))
    plain = dict(matrices="none", format=BF16)
    found.insert(0, measured(plain | {"calibrated": False, "open": {}}, reference, reference, *(
        compare_all([reference], reference, cut)[0] for cut in (library, domains))))  # fmt: skip
    table = pd.DataFrame(found)
    table["speed"] = speeds([reference, *labs], args.speed) if args.speed else [[] for _ in found]
    facts = {
        "library_tokens": sum(len(w.ids) for w in library), "library_texts": len({w.text for w in library}),
        "domain_texts": len({w.text for w in domains}), "python": platform.python_version(),
        "calibration_texts": len(json.loads(calibration.read_text())),
        "machine": f"{reference.settings['threads']} threads, SIMD path {simd()}",
    }  # fmt: skip
    out = Path(args.output)
    out.mkdir(parents=True, exist_ok=True)
    (out / "formats.md").write_text(markdown(table, facts), encoding="utf-8")
    (out / "formats.json").write_text(json.dumps({"facts": facts, "rows": table.to_dict("records")}, indent=1))
    (out / "formats.png").write_bytes(picture(table))
    print(markdown(table, facts))
    if not args.keep:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
