"""Texts to measure a model on: the user's, or Python's own standard library, which is present wherever this runs.

A text becomes windows of consecutive tokens, each of which is a context of its own. Every token but a window's first is
predicted, and knows how many bytes of the text it stands for, so that losses can be given per byte.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..checkpoint.files import read_object, storage_errors
from ..engine.tokenizer import Tokenizer
from ..errors import ModelError, SettingError

SKIPPED = {"test", "tests", "idlelib", "turtledemo", "lib-dynload", "pydoc_data", "encodings", "lib2to3", "site-packages",
           "dist-packages", "__pycache__", "__phello__"}  # fmt: skip
HALVES = ("held-out", "calibration")


@dataclass(frozen=True)
class Text:
    """One document and where it comes from."""

    name: str
    text: str


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive tokens of a text. ids int64 (tokens,); bytes_of int64 (tokens,): bytes of the text that each stands for."""

    text: str
    ids: np.ndarray
    bytes_of: np.ndarray

    @property
    def predicted_bytes(self) -> int:
        """Bytes of all tokens but the first, which nothing predicts."""
        return int(self.bytes_of[1:].sum())


def stdlib_texts(half: str = "held-out") -> list[Text]:
    """Source files of Python's standard library, tests and data tables left out, in an order that only their names decide.
    The two halves have no file in common: what is calibrated on one is measured on the other."""
    if half not in HALVES:
        raise SettingError(f"half must be one of {', '.join(HALVES)}, got {half!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not SKIPPED & set(name.parts) and not name.name.startswith("_sysconfigdata"):
            key = hashlib.sha256(name.as_posix().encode()).digest()
            if key[0] % 2 == HALVES.index(half):
                found.append((key, name.as_posix(), path))
    texts = []
    for _, name, path in sorted(found):
        try:
            texts.append(Text(name, path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError):
            continue  # not readable on this installation
    if not texts:
        raise ModelError(f"{root}: no source files of the standard library here; give a text file instead")
    return texts


def file_text(path: str | os.PathLike) -> list[Text]:
    """One text file in UTF-8. Raises `ModelError` naming the file when it is not, or is empty."""
    path = Path(path)
    with storage_errors(path):
        data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: expected text in UTF-8: {error}") from None
    if not text.strip():
        raise ModelError(f"{path}: expected text, found an empty file")
    return [Text(path.name, text)]


def prompt_texts(path: str | os.PathLike) -> list[Text]:
    """The prompts of a file like `data/prompts.json`, {domain: [{"name", "text"}]}; names are "domain: name".

    Raises `ModelError` naming the file and the domain that is something else.
    """
    texts = []
    for domain, prompts in read_object(Path(path), ModelError).items():
        if not isinstance(prompts, list) or not all(
            isinstance(p, dict) and isinstance(p.get("name"), str) and isinstance(p.get("text"), str) for p in prompts
        ):
            raise ModelError(f"{path}: {domain}: expected a list of objects with a name and a text")
        texts += [Text(f"{domain}: {prompt['name']}", prompt["text"]) for prompt in prompts]
    if not texts:
        raise ModelError(f"{path}: expected prompts, found none")
    return texts


def windows(texts: list[Text], tokenizer: Tokenizer, width: int = 256, tokens: int | None = None) -> list[Window]:
    """Texts cut into windows of up to `width` tokens, at least two each; of these as many as make up `tokens`, evenly spread
    over all. Raises `ModelError` when there is nothing to predict."""
    cut: list[Window] = []
    for text in texts:
        ids, bytes_of = tokenizer.encode_bytes(text.text)
        for start in range(0, len(ids) - 1, width):
            cut.append(Window(text.name, ids[start : start + width], bytes_of[start : start + width]))
    if not cut:
        raise ModelError("the text has fewer than two tokens: nothing to predict")
    total = sum(len(window.ids) for window in cut)
    if tokens is None or total <= tokens:
        return cut
    number = max(1, round(len(cut) * tokens / total))
    return [cut[i] for i in np.linspace(0, len(cut) - 1, number).round().astype(int)]
