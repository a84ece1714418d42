#!/usr/bin/env python3
"""Reference fixtures: tiny seeded MoE checkpoints and what Hugging Face transformers computes from them.

    make_oracle.py OUT [family ...]            build OUT/<family>/ (all five families by default)
    make_oracle.py --compare DIR [family ...]  rebuild elsewhere and compare with DIR/<family>/; exit 1 on a difference
    make_oracle.py --tiny MODEL_DIR OUT        reference.json and reference.npz of the shipped model

Needs torch and transformers 5 (`pip install -e ".[oracle]"`); the fixtures themselves are read with numpy alone.
README.md beside this file describes every file and array.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from oracle_checkpoints import FAMILIES, SEED, VOCAB, read_json, write_checkpoint
from oracle_reference import by_expert_id, forward, greedy, load, routing_margin
from oracle_tiny import write_tiny
from oracle_tokenizer import EOS_ID, PAD_ID

ROWS, PROMPT_TOKENS, NEW_TOKENS = 2, 24, 16
LEAST_ROUTING_MARGIN, LEAST_GREEDY_GAP, MOST_DRAWS = 5e-4, 2e-2, 200
# Another instruction set (SSE4, AVX2, AVX-512) sums in another order and moves these logits by up to 8e-6.
COMPARE_TOLERANCE = 4e-5


def clear_prompt(name: str, model) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, float, int]:
    """Prompts redrawn until no routing or greedy decision, in prompt or continuation, hangs on a near tie."""
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    kind = FAMILIES[name].router
    for drawn in range(1, MOST_DRAWS + 1):
        ids = torch.from_numpy(rng.integers(EOS_ID + 1, VOCAB, (ROWS, PROMPT_TOKENS)))
        if routing_margin(model, kind, forward(model, ids)[2]) < LEAST_ROUTING_MARGIN:
            continue
        more, gaps = greedy(model, ids, NEW_TOKENS)
        margin = routing_margin(model, kind, forward(model, torch.cat([ids, more], 1))[2])
        if (
            margin >= LEAST_ROUTING_MARGIN
            and gaps.min() >= LEAST_GREEDY_GAP
            and not np.isin(more, [EOS_ID, PAD_ID]).any()
        ):
            return ids, more, gaps, margin, drawn
    raise SystemExit(f"{name}: no prompt without near ties in {MOST_DRAWS} draws; change SEED")


def versions() -> dict:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}


def build(name: str, out: Path) -> dict:
    """Everything of one family in directory `out`; returns the row of facts that also goes into `meta`."""
    if out.exists():
        if not (out / "reference.npz").exists():
            raise SystemExit(f"{out} exists and is no fixture directory (no reference.npz); move it away first")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    write_checkpoint(name, out)
    model = load(out)
    ids, more, gaps, margin, draws = clear_prompt(name, model)
    logits, seen, routes = forward(model, ids)
    ref = {"input_ids": ids.numpy(), "logits": logits.numpy(), "greedy": more.numpy(), "greedy_gap": gaps}
    ref |= {key: value.numpy() for key, value in seen.items()}
    for i, (scores, weights, chosen) in routes.items():
        idx, w = by_expert_id(weights, chosen)
        for key, value in (("idx", idx), ("w", w), ("logits", scores.float().numpy())):
            ref[f"router_{key}_L{i}"] = value.reshape(*ids.shape, -1)
    check_other_spellings(name, out, ids, logits)
    check_cached(model, ids, more)
    noise = float((forward(model.double(), ids)[0] - logits).abs().max())
    meta = {"family": name, "seed": SEED, **versions(), "router": FAMILIES[name].router, "moe_layers": sorted(routes)}
    meta |= {"float64_noise": noise, "routing_margin": margin, "greedy_gap": float(gaps.min()), "prompt_draws": draws}
    np.savez_compressed(out / "reference.npz", **ref, meta=np.array(json.dumps(meta)))
    return meta | {
        "logits_std": float(logits.std()),
        "bytes": sum(f.stat().st_size for f in out.rglob("*") if f.is_file()),
    }


@torch.no_grad()
def check_other_spellings(name: str, out: Path, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """The 4.x config.json, and published/ where there is one, must load to the very same logits."""
    with tempfile.TemporaryDirectory() as scratch:
        legacy = Path(scratch, "legacy")
        shutil.copytree(out, legacy, ignore=shutil.ignore_patterns("published"))
        shutil.move(legacy / "config.legacy.json", legacy / "config.json")
        for path in [legacy] + [out / "published"] * FAMILIES[name].mtp_layer:
            other = load(path)(input_ids=ids, use_cache=False).logits
            assert torch.equal(other, logits), f"{name}: {path.name} config or files give other logits"


@torch.no_grad()
def check_cached(model, ids: torch.Tensor, more: torch.Tensor) -> None:
    """transformers' own generate(), with its KV cache, must continue the prompt the same way."""
    settings = {"max_new_tokens": more.shape[1], "do_sample": False, "eos_token_id": None, "pad_token_id": PAD_ID}
    model.generation_config.eos_token_id = None
    full = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(full[:, ids.shape[1] :], more), "cached and recomputed greedy continuations differ"


def differences(want: Path, got: Path) -> list[str]:
    """Named differences between a committed fixture directory and a rebuilt one."""
    files = [{str(f.relative_to(d)) for f in d.rglob("*") if f.is_file()} for d in (want, got)]
    found = [
        f"{name}: only in {'committed' if name in files[0] else 'rebuilt'}" for name in sorted(files[0] ^ files[1])
    ]
    for name in sorted(files[0] & files[1]):
        a, b = want / name, got / name
        if name.endswith(".json"):
            pair = [{k: v for k, v in read_json(f).items() if k != "transformers_version"} for f in (a, b)]
            found += [
                f"{name}: {k!r} differs"
                for k in sorted(pair[0].keys() | pair[1].keys())
                if pair[0].get(k) != pair[1].get(k)
            ]
        elif name.endswith(".safetensors"):
            found += tensor_differences(name, load_file(a), load_file(b))
        else:
            with np.load(a) as x, np.load(b) as y:
                found += array_differences(name, dict(x), dict(y))
    return found


def tensor_differences(file: str, a: dict, b: dict) -> list[str]:
    found = [f"{file}: tensor {k} is on one side only" for k in sorted(a.keys() ^ b.keys())]
    for k in sorted(a.keys() & b.keys()):
        if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k]):
            found.append(
                f"{file}: tensor {k} differs ({a[k].dtype} {tuple(a[k].shape)}, {b[k].dtype} {tuple(b[k].shape)})"
            )
    return found


def array_differences(file: str, a: dict, b: dict) -> list[str]:
    found = [f"{file}: array {k} is on one side only" for k in sorted(a.keys() ^ b.keys())]
    for k in sorted((a.keys() & b.keys()) - {"meta"}):
        if a[k].shape != b[k].shape or a[k].dtype != b[k].dtype:
            found.append(f"{file}: array {k} is {a[k].dtype} {a[k].shape}, rebuilt {b[k].dtype} {b[k].shape}")
        elif a[k].dtype.kind == "f":
            worst = float(np.abs(a[k] - b[k]).max())
            if not worst <= COMPARE_TOLERANCE:
                found.append(f"{file}: array {k} differs by {worst:.1e}, allowed {COMPARE_TOLERANCE:.0e}")
        elif not np.array_equal(a[k], b[k]):
            found.append(f"{file}: array {k} differs at {np.argwhere(a[k] != b[k])[0].tolist()}")
    return found


def compare(root: Path, families: list[str]) -> int:
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in families:
            if not (root / name / "reference.npz").exists():
                found.append(f"{name}: {root / name / 'reference.npz'} is missing")
                continue
            build(name, Path(scratch, name))
            here = [f"{name}: {line}" for line in differences(root / name, Path(scratch, name))]
            print(f"{name}: {f'{len(here)} differences' if here else 'same'}", flush=True)
            found += here
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="rebuild and compare with the fixtures in OUT")
    parser.add_argument("--tiny", type=Path, metavar="MODEL_DIR", help="write the references of this model instead")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("family", nargs="*", help=f"of {', '.join(FAMILIES)}; default all")
    args = parser.parse_args(argv)
    families = args.family or list(FAMILIES)
    if unknown := [name for name in families if name not in FAMILIES]:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if args.tiny:
        write_tiny(args.tiny, args.out, versions())
        return 0
    if args.compare:
        return compare(args.out, families)
    print(f"{'family':10} {'bytes':>9} {'logits std':>10} {'f64 noise':>9} {'margin':>8} {'gap':>8} {'draws':>5}")
    for name in families:
        row = build(name, args.out / name)
        print(
            f"{name:10} {row['bytes']:9,} {row['logits_std']:10.2f} {row['float64_noise']:9.1e} "
            f"{row['routing_margin']:8.1e} {row['greedy_gap']:8.1e} {row['prompt_draws']:5}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
