"""References of the shipped model: one prompt per domain, its routing, its last logits, its greedy continuation.

The checkpoint's 16-bit weights are widened to float32 and all arithmetic is float32, which is what the engine does.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from oracle_reference import by_expert_id, forward, greedy, load, routing_margin

NEW_TOKENS = 32
PROMPTS = {
    "code": 'def read_lines(path):\n    """Return the lines of a file."""\n',
    "verse": "And it came to pass in those days, that the king",
    "dictionary": "lantern, n.",
    "english": "The database file is locked when",
    "german": "Wählen Sie im Menü",
    "chinese": "选择要使用的",
}


def write_tiny(model_dir: Path, out: Path, versions: dict) -> None:
    """reference.json (text, ids, gaps, checksums) and reference.npz (logits, routing) of the model in `model_dir`.

    Arrays, for each domain: `{domain}.logits` float32 (vocab,) of the last prompt token; `{domain}.router_idx` int32
    and `{domain}.router_w` float32, both (MoE layers, prompt tokens, k), expert ids ascending.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    model = load(model_dir)
    rows, arrays = [], {}
    for domain, prompt in PROMPTS.items():
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        ids = torch.tensor([prompt_ids])
        more, gaps = greedy(model, ids, NEW_TOKENS)
        logits, _, routes = forward(model, ids)
        last = logits[0, -1].numpy()
        chosen = [by_expert_id(weights, idx) for _, (_, weights, idx) in sorted(routes.items())]
        arrays[f"{domain}.logits"] = last
        arrays[f"{domain}.router_idx"] = np.stack([idx for idx, _ in chosen])
        arrays[f"{domain}.router_w"] = np.stack([w for _, w in chosen])
        row = {"domain": domain, "prompt": prompt, "prompt_ids": prompt_ids, "greedy_ids": more[0].tolist()}
        row |= {"greedy_text": tokenizer.decode(row["greedy_ids"]), "greedy_gap": [round(float(g), 6) for g in gaps[0]]}
        row |= {
            "logits_sum": float(last.sum(dtype=np.float64)),
            "logits_abs_sum": float(np.abs(last).sum(dtype=np.float64)),
        }
        row["routing_margin"] = routing_margin(model, "sigmoid_group", routes)
        whole = forward(model, torch.cat([ids, more], 1))[2]
        row["greedy_routing_margin"] = routing_margin(model, "sigmoid_group", whole)
        rows.append(row)
        print(
            f"{domain:10} {len(prompt_ids):3} tokens  gap {gaps.min():.1e}  margin {row['routing_margin']:.1e}",
            flush=True,
        )
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "reference.npz", **arrays)
    meta = {**versions, "moe_layers": sorted(routes), "arithmetic": "float32"}
    text = json.dumps({"meta": meta, "prompts": rows}, indent=1, ensure_ascii=False)
    (out / "reference.json").write_text(text + "\n", encoding="utf-8")
