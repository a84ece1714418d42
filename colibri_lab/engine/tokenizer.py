"""Text ↔ token ids, through tokenizer.json and the `tokenizers` library; chat templates through sandboxed jinja2."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers  # noqa: E402  (the variable must be set first)

from ..errors import TokenizerError  # noqa: E402


def fingerprint(directory: str | os.PathLike) -> dict:
    """{"sha256", "vocab_size"} of a directory's tokenizer.json."""
    path = Path(directory) / "tokenizer.json"
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "vocab_size": _load(path).get_vocab_size()}


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise TokenizerError(f"{path}: file is missing")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from None


class Tokenizer:
    """The tokenizer of a container or checkpoint directory."""

    def __init__(self, directory: str | os.PathLike):
        self.dir = Path(directory)
        self._tokenizer = _load(self.dir / "tokenizer.json")
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


class StreamDecoder:
    """Text of tokens as they come. A token may end inside a UTF-8 character: such text is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new
