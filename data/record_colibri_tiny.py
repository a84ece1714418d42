"""How colibri_tiny_six_domains.parquet was recorded: python data/record_colibri_tiny.py OUTPUT.parquet

Six texts in sequence, one per domain, each the domain's reference prompt and 128 sampled tokens; one cache for all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import colibri_lab as cl

DATA = Path(__file__).resolve().parent


def main(output: str) -> None:
    prompts = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    lab = cl.open(DATA / "colibri-tiny", expert_cache_slots=8, policy="lru", threads=2)
    with lab.record() as recording:
        recording.header |= {"domains": list(prompts), "seed": 1}
        recording.header["sampling"] = {"temperature": 0.7, "top_p": 0.95, "seed": 1, "max_tokens": 128}
        for texts in prompts.values():
            lab.generate(texts[0]["text"], max_tokens=128, temperature=0.7, top_p=0.95, seed=1, stop_at_eos=False)
    recording.save(output)


if __name__ == "__main__":
    main(sys.argv[1])
