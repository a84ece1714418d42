"""Does transformers compute the same from a quantised container's weights as this engine does from the container?

    python benchmarks/dequantised.py write DIR [--format int4-g64]     in this project's environment
    python benchmarks/dequantised.py check DIR                         where torch and transformers are (make oracle)

`write` quantises all matrices of the shipped model, writes what the codes stand for as a float32 checkpoint in DIR, and beside
it the engine's logits on a text of its own. `check` loads that checkpoint with transformers, compares, and gives the distance
from the unrounded model's logits as the measure of what the format itself does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "data" / "colibri-tiny"
TEXT = 'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as stream:\n        return list(stream)\n'


def write(directory: Path, format: str) -> None:
    import safetensors.numpy

    import colibri_lab as cl
    from colibri_lab.checkpoint.plan import open_source, source_names

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        cl.convert(MODEL, Path(folder) / "container", quantize=format, tensors="all", stage="together", progress=False)
        lab = cl.open(Path(folder) / "container", activations="fp32")
        box, names = lab.container, source_names(open_source(MODEL)[0], lab.config, lab.container.files)
        tensors = {
            names[file][ours]: tensor.array() for file in box.files for ours, tensor in box.read(file).tensors.items()
        }
        ids = np.array(lab.tokenizer.encode(TEXT))
        logits = lab.logits(ids)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text()) | {"dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(MODEL / "generation_config.json", directory)
    original = cl.open("colibri-tiny").logits(ids)
    np.savez(directory / "engine.npz", ids=ids, logits=logits, original=original, format=format)
    print(f"{directory}: {format}, {len(tensors)} tensors, {len(ids)} tokens")


def check(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with np.load(directory / "engine.npz") as file:
        ids, ours, original, format = (file[name] for name in ("ids", "logits", "original", "format"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(ids)[None]).logits[0].numpy()
    distance = np.abs(ours - original)
    print(
        f"{format}: transformers on the dequantised weights against this engine on the container: largest difference "
        f"{np.abs(theirs - ours).max():.2e}, root mean square {np.sqrt(((theirs - ours) ** 2).mean()):.2e}; the format itself moves "
        f"logits by up to {distance.max():.2e}, root mean square {np.sqrt((distance**2).mean()):.2e}; logits have a spread of "
        f"{ours.std():.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--format", default="int4-g64")
    args = parser.parse_args()
    write(args.directory, args.format) if args.action == "write" else check(args.directory)
