"""Texts to calibrate on where no others are at hand: Python's standard library, and what the model itself writes.

A model knows more kinds of text than source code, and experts that only those kinds reach would be rounded blindly. Its own
continuations of a few prompts reach them. (Williams, Chrysostomou, Aletras: Self-calibration for Language Model Quantization
and Pruning, arXiv:2410.17170.)
"""

from __future__ import annotations

import json
import os

import numpy as np
from tqdm import tqdm

from ..checkpoint.files import AtomicFile
from ..errors import SettingError
from .texts import Text, stdlib_texts

PIECE = 600  # characters of source code in one text
CONTINUATION = dict(max_tokens=160, temperature=1.0, top_p=0.95, stop_at_eos=False)


def write_calibration(
    path: str | os.PathLike,
    number: int = 1024,
    *,
    lab=None,
    prompts: list[Text] | None = None,
    own: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> int:
    """Write a calibration file of `number` texts to `path`; returns how many there are.

    With a `lab` and prompts, `own` of them are its continuations of the prompts in turn; the others are pieces of the standard
    library, of the half that quality reports do not read, evenly spread. Raises `SettingError`, `StorageError`.
    """
    if (lab is None) != (not prompts):
        raise SettingError("continuations need both a model and prompts")
    if number < 1 or own < 1:
        raise SettingError(f"texts and own must be at least 1, got {number} and {own}")
    texts = []
    for i in tqdm(range(min(own, number) if lab else 0), desc="continuations", disable=not progress):
        prompt = prompts[i % len(prompts)].text
        texts.append(prompt + lab.generate(prompt, seed=seed + i, **CONTINUATION).text)
    pieces = [t.text[i : i + PIECE] for t in stdlib_texts("calibration") for i in range(0, len(t.text), PIECE)]
    pieces = [piece for piece in pieces if piece.strip()]
    left = min(number - len(texts), len(pieces))
    texts += [pieces[i] for i in np.linspace(0, len(pieces) - 1, left).astype(int)] if left else []
    with AtomicFile(path) as file:
        file.write(json.dumps([{"text": text} for text in texts], ensure_ascii=False, indent=0).encode())
    return len(texts)
