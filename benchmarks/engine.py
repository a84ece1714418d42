"""The engine beside llama.cpp (and transformers) on one model, in turn, against the bandwidth measured in the same run.

    pip install -e ".[bench]"
    python benchmarks/engine.py --dir FOLDER                      makes the model there (about 16 GB), then measures
    python benchmarks/engine.py --dir FOLDER --hf-python PYTHON   transformers too, with the Python that has torch
    python benchmarks/engine.py --dir FOLDER --json               one JSON object: ratios, bound_share, …
    python benchmarks/engine.py --picture FILE                    products under the roofline

The model has the layer shape of OLMoE-1B-7B (hidden 2048, 64 experts of width 1024, top-8), 4 layers and seeded random
weights. Ours in fp16, int8 and int4 meets GGUF in F16, Q8_0 and Q4_0; first both must compute the same logits.

Every engine is a process of its own (peers.py), and they are asked one after the other, round after round. A sample
counts when its threads held their cores for 95 % of the time (colibri_lab.timing); the others are counted as dropped.
A ratio is of medians, the less favourable of the thread counts; without 3 clean samples on both sides it is null. The
bound is read bandwidth divided by the bytes that a token must read. Prefill meets the best of all formats and peers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pandas as pd
from peers import CONTEXT, Peer
from tqdm import tqdm

import colibri_lab as cl
from colibri_lab import bench, kernels, workloads
from colibri_lab.checkpoint import families
from colibri_lab.checkpoint.container import is_container
from colibri_lab.checkpoint.make_model import make_model
from colibri_lab.errors import ColibriError, SettingError
from colibri_lab.limits import LimitWork
from colibri_lab.timing import Sample, Timing, race
from colibri_lab.ui.roofline import roofline

SHAPE = dict(hidden=2048, layers=4, heads=16, experts=64, top_k=8, expert_width=1024, vocab=8192)
PAIRS = {"fp16": "f16", "int8": "q8_0", "int4": "q4_0"}
ALIKE = {"fp16": 0.9999, "int8": 0.99, "int4": 0.85}  # least correlation of both sides' logits
CHECKED = 48  # tokens whose logits are compared


def prepare(folder: Path, sizes: dict, formats: list[str], progress: bool) -> None:
    """Checkpoint, containers and GGUF files in `folder`; what is there already is kept."""
    checkpoint = folder / "checkpoint"
    if not (checkpoint / "config.json").exists():
        make_model(checkpoint, "olmoe", seed=0, progress=progress, **sizes)
    config = families.read_config(checkpoint)
    found = {name: getattr(config, field) for name, field in _FIELDS.items()}
    for name, value in sizes.items():
        if name in found and found[name] != value:
            raise SettingError(
                f"{checkpoint} has {name} {found[name]}, asked for {value}: choose another --dir or delete it"
            )
    for ours in formats:
        if not is_container(folder / ours):
            cl.convert(checkpoint, folder / ours, quantize=ours, tensors="all", progress=progress)
        file = folder / f"{PAIRS[ours]}.gguf"
        if not file.exists():
            gguf.write_gguf(checkpoint, file, PAIRS[ours], progress)


_FIELDS = {
    "hidden": "hidden_size", "layers": "num_layers", "experts": "num_experts", "top_k": "top_k",
    "expert_width": "expert_intermediate_size", "vocab": "vocab_size",
}  # fmt: skip


class Run:
    """One measurement of everything. `rows` has a row per engine, format, phase and thread count."""

    def __init__(self, args, progress: bool):
        self.args, self.progress, self.folder = args, progress, Path(args.dir)
        self.rows: list[dict] = []
        self.limits: list[dict] = []
        self.alike: dict[str, dict] = {}
        self.about: dict[str, dict] = {}
        self.streaming: list[dict] = []

    def ours(self, ours: str, threads: int, **settings) -> Peer:
        return self._peer("colibri", self.folder / ours, threads, settings={**self.args.set, **settings} or {})

    def theirs(self, ours: str, threads: int) -> Peer:
        return self._peer("llama", self.folder / f"{PAIRS[ours]}.gguf", threads)

    def torch(self, threads: int) -> Peer:
        return self._peer("torch", self.folder / "checkpoint", threads, python=self.args.hf_python)

    def _peer(self, kind: str, path: Path, threads: int, **options) -> Peer:
        peer = Peer(kind, path, threads=threads, prompt=self.args.prompt, tokens=self.args.tokens, **options)
        self.about[f"{peer.name}, {threads} threads"] = peer.about
        return peer

    def verify(self) -> None:
        """Both sides of every pair must compute the same model. Raises `ColibriError` when they do not."""
        for ours in self.args.formats:
            with (
                self.ours(ours, 2, activations="fp32") as mine,
                self.theirs(ours, 2) as peer,
                tempfile.TemporaryDirectory() as tmp,
            ):
                found = []
                for side, engine in enumerate((mine, peer)):
                    engine.ask("logits", count=CHECKED, path=f"{tmp}/{side}.npy")
                    found.append(np.load(f"{tmp}/{side}.npy"))
            same = float((found[0].argmax(1) == found[1].argmax(1)).mean())
            alike = float(np.corrcoef(found[0].ravel(), found[1].ravel())[0, 1])
            self.alike[ours] = {"correlation": alike, "argmax_agreement": same}
            if alike < ALIKE[ours]:
                raise ColibriError(
                    f"{ours} and {PAIRS[ours]} are not the same model: their logits correlate by {alike:.4f}, "
                    f"{ALIKE[ours]} is expected; delete {self.folder} and prepare it again"
                )

    def decode(self) -> None:
        for threads in self.args.threads:
            for ours in self.args.formats:
                with ExitStack() as stack:
                    enter = stack.enter_context
                    engines = {ours: enter(self.ours(ours, threads)), PAIRS[ours]: enter(self.theirs(ours, threads))}
                    limits = enter(Peer("limits", "-", threads=threads))
                    found = self._turns(
                        engines, limits, f"decode {ours}, {threads} threads", "decode", tokens=self.args.tokens
                    )
                    self._record(
                        "decode",
                        threads,
                        found,
                        {ours: engines[ours].about["token_bytes"], PAIRS[ours]: self._gguf_bytes(ours)},
                    )

    def prefill(self) -> None:
        threads = max(self.args.threads)
        with ExitStack() as stack:
            enter = stack.enter_context
            engines = {ours: enter(self.ours(ours, threads)) for ours in self.args.formats}
            engines |= {PAIRS[ours]: enter(self.theirs(ours, threads)) for ours in self.args.formats}
            found = self._turns(engines, enter(Peer("limits", "-", threads=threads)), "prefill", "prefill")
            self._record("prefill", threads, found, {})
        if self.args.hf_python:  # apart: float32 weights of everything at once would not fit
            with self.torch(threads) as engine, Peer("limits", "-", threads=threads) as limits:
                self._record(
                    "prefill", threads, self._turns({"torch fp32": engine}, limits, "prefill, torch", "prefill"), {}
                )

    def stream(self) -> None:
        """Slots for a quarter of the experts: is waiting hidden behind computing?"""
        experts = families.read_config(self.folder / "checkpoint").num_experts
        for ours in self.args.formats:
            for storage in ("pread", "direct"):
                with self.ours(
                    ours, max(self.args.threads), expert_cache_slots=max(1, experts // 4), storage=storage
                ) as engine:
                    engine.ask("stream", tokens=self.args.tokens)  # until the cache is warm
                    for _ in range(max(3, self.args.rounds // 2)):
                        s = engine.ask("stream", tokens=self.args.tokens)
                        least = max(s["service_s"] / s["lanes"], s["compute_s"])
                        self.streaming.append(
                            {"format": ours, "storage": storage, **s, "wall_over_least": s["wall_s"] / least}
                        )

    def _turns(self, engines: dict[str, Peer], limits: Peer, title: str, command: str, **options) -> dict[str, Timing]:
        """Ask everyone in turn, every other round backwards, with the limits before each round."""
        found: dict[str, list[Sample]] = {name: [] for name in (*engines, "read", "fma", "dots")}
        names = list(engines)
        for number in tqdm(range(self.args.rounds), title, disable=not self.progress, unit=" round"):
            for name, samples in limits.ask("measure").items():
                found[name] += [Sample(*sample) for sample in samples]
            for name in names if number % 2 == 0 else reversed(names):
                found[name] += [Sample(*sample) for sample in engines[name].ask(command, **options)]
        return {name: Timing(tuple(samples)) for name, samples in found.items() if samples}

    def _record(self, phase: str, threads: int, found: dict[str, Timing], token_bytes: dict[str, int]) -> None:
        rates = {name: 1 / found[name].median_s for name in ("read", "fma", "dots") if name in found}
        clean = min(found[name].clean for name in rates)
        self.limits.append(
            {"phase": phase, "threads": threads, "clean": clean, **{f"{n}_per_s": r for n, r in rates.items()}}
        )
        for name, timing in found.items():
            if name in rates:
                continue
            bound = rates["read"] / token_bytes[name] if name in token_bytes else None
            speed = 1 / timing.median_s
            self.rows.append({
                "phase": phase, "format": name, "threads": threads, "tokens_per_s": speed, "low": 1 / timing.high_s,
                "high": 1 / timing.low_s, "samples": len(timing.samples), "clean": timing.clean,
                "dropped": timing.dropped,
                "bytes_per_token": token_bytes.get(name), "bound": bound, "share": bound and speed / bound,
                "bound_clean": clean,
            })  # fmt: skip

    def _gguf_bytes(self, ours: str) -> int:
        config = families.read_config(self.folder / "checkpoint")
        behind = CONTEXT + self.args.tokens // 2
        cache = behind * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2  # in float16
        return gguf.token_bytes(config, PAIRS[ours]) + cache

    def result(self) -> dict:
        """Everything measured, with ratios of medians; null where either side lacks clean samples."""
        ratios, shares = {}, {}
        for ours in self.args.formats:
            pairs = [(self._row("decode", ours, t), self._row("decode", PAIRS[ours], t)) for t in self.args.threads]
            if all(mine and peer for mine, peer in pairs):
                good = [_ratio(mine, peer) if self._good(mine) and self._good(peer) else None for mine, peer in pairs]
                ratios[f"decode_{ours}"] = self._least(good)
                shares[f"decode_{ours}"] = self._least(
                    [
                        mine["share"] if self._good(mine) and (self.args.unclean or mine["bound_clean"] >= 3) else None
                        for mine, _ in pairs
                    ]
                )
        threads = max(self.args.threads)
        others = [r for r in self.rows if r["phase"] == "prefill" and r["format"] not in PAIRS and self._good(r)]
        for ours in self.args.formats:
            mine = self._row("prefill", ours, threads)
            if mine:
                best = max(others, key=lambda r: r["tokens_per_s"], default=None)
                ratios[f"prefill_{ours}"] = _ratio(mine, best) if best and self._good(mine) else None
        return {
            "ratios": ratios, "bound_share": shares, "alike": self.alike, "rows": self.rows, "limits": self.limits,
            "streaming": self.streaming, "facts": bench.facts(), "engines": self.about,
            "settings": {k: v for k, v in vars(self.args).items() if k not in ("json", "dir", "hf_python")},
        }  # fmt: skip

    def _row(self, phase: str, format: str, threads: int) -> dict | None:
        wanted = (phase, format, threads)
        return next((r for r in self.rows if (r["phase"], r["format"], r["threads"]) == wanted), None)

    def _good(self, row: dict) -> bool:
        return self.args.unclean or row["clean"] >= 3

    def _least(self, values: list[float | None]) -> float | None:
        return None if None in values else min(values)


def _ratio(mine: dict, peer: dict) -> float | None:
    return mine["tokens_per_s"] / peer["tokens_per_s"]


def text(result: dict) -> str:
    """The result as tables in Markdown."""

    def number(value, form: str, scale: float = 1) -> str:
        return "" if value is None else form.format(scale * value)

    head = [f"{name}: {value}  " for name, value in result["facts"].items()]
    head += [f"{name}: {about['engine']}  " for name, about in result["engines"].items() if "engine" in about]
    speeds = [
        (
            r["phase"], r["format"], r["threads"], f"{r['tokens_per_s']:.1f}", f"{r['low']:.1f} to {r['high']:.1f}",
            f"{r['clean']} of {r['samples']}", number(r["bytes_per_token"], "{:.0f}", 1e-6),
            number(r["bound"], "{:.1f}"), number(r["share"], "{:.0f} %", 100),
        )
        for r in result["rows"]
    ]  # fmt: skip
    ratios = [
        (name, number(ratio, "{:.2f}") or "not measured", number(result["bound_share"].get(name), "{:.0f} %", 100))
        for name, ratio in result["ratios"].items()
    ]
    limits = [
        (
            r["phase"], r["threads"], f"{r['read_per_s'] / 1e9:.1f}", f"{r['fma_per_s'] / 1e9:.0f}",
            number(r.get("dots_per_s"), "{:.0f}", 1e-9), r["clean"],
        )
        for r in result["limits"]
    ]  # fmt: skip
    streams = []
    for key in dict.fromkeys((s["format"], s["storage"]) for s in result["streaming"]):
        mine = [s for s in result["streaming"] if (s["format"], s["storage"]) == key]
        m = {k: statistics.median(s[k] for s in mine) for k in mine[0] if k not in ("format", "storage")}
        ms = (m["wall_s"], m["wait_s"], m["compute_s"], m["service_s"] / m["lanes"])
        rest = f"{m['hit_rate']:.2f}", f"{m['wall_over_least']:.2f}"
        streams.append((*key, *(f"{1e3 * s:.1f}" for s in ms), *rest))
    alike = [
        (name, f"{a['correlation']:.5f}", f"{100 * a['argmax_agreement']:.0f} %") for name, a in result["alike"].items()
    ]
    return "\n\n".join(
        [
            "\n".join(head),
            _table("what", "ours over the peer", "share of the bound", rows=ratios),
            _table("phase", "format", "threads", "tokens/s", "spread", "clean", "MB a token", "bound", "share",
                   rows=speeds),
            _table("limits", "threads", "read GB/s", "float32 GFLOP/s", "int8 GOP/s", "clean", rows=limits),
            _table("streaming", "storage", "ms a token", "waiting", "compute", "loader service / lanes", "hit rate",
                   "wall / least", rows=streams),
            _table("same model?", "correlation of logits", "same argmax", rows=alike),
        ]
    )  # fmt: skip


def picture(file: str, threads: int, rounds: int) -> None:
    """Products of int8 matrices with 1 to 512 rows of rounded activations under the roofline of the same minute."""
    works = [workloads.gemm("int8", tokens, int8_activations=True) for tokens in (1, 4, 16, 64, 512)]
    limit = LimitWork(threads)
    calls = {work.label: work.call(threads=threads) for work in works}
    timings = race({**limit.contenders, **calls}, rounds=rounds, threads=threads)
    limits = limit.limits(timings)
    rows = [
        {"case": w.label, "version": "", "GOP_per_s": w.operations / timings[w.label].median_s / 1e9,
         "share_of_bound": limits.bound_s(w) / timings[w.label].median_s}
        for w in works
    ]  # fmt: skip
    Path(file).write_bytes(roofline(limits, pd.DataFrame(rows), works).png())


def _table(*header: str, rows: list[tuple]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) if rows else f"{header[0]}: not measured"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--dir", default=str(kernels.cache_root().parent / "bench"), help="where the model is, or is made"
    )
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--formats", type=lambda t: t.split(","), default=list(PAIRS), help="of fp16, int8, int4")
    parser.add_argument(
        "--threads", type=lambda t: [int(n) for n in t.split(",")], default=[1, 2], help="thread counts"
    )
    parser.add_argument("--parts", type=lambda t: t.split(","), default=["decode", "prefill", "stream"])
    parser.add_argument("--rounds", type=int, default=6, help="turns of every engine")
    parser.add_argument("--tokens", type=int, default=32, help="decoded in a turn")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of prefill")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of our engine")
    parser.add_argument("--hf-python", metavar="PYTHON", help="interpreter with torch and transformers, for prefill")
    parser.add_argument("--picture", metavar="FILE", help="draw products under the roofline, and measure nothing else")
    parser.add_argument("--prepare", action="store_true", help="make the files and stop")
    parser.add_argument(
        "--unclean", action="store_true", help="ratios even without clean samples, to try the program out"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the tables")
    args = parser.parse_args(argv)
    unknown = [name for name in (*args.formats, *args.parts) if name not in (*PAIRS, "decode", "prefill", "stream")]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; formats are {', '.join(PAIRS)}, parts decode, prefill, stream")
    args.set = dict(item.split("=", 1) for item in args.set)
    args.set = {name: int(value) if value.isdigit() else value for name, value in args.set.items()}
    return args


def main() -> int:
    args = parse()
    if args.picture:
        picture(args.picture, max(args.threads), args.rounds)
        return 0
    sizes = {name: getattr(args, name) for name in SHAPE}
    progress = not args.json
    prepare(Path(args.dir), sizes | {"kv_heads": args.heads}, args.formats, progress)
    if args.prepare:
        return 0
    run = Run(args, progress)
    run.verify()
    for part in args.parts:
        getattr(run, part)()
    result = run.result()
    print(json.dumps(result) if args.json else text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
