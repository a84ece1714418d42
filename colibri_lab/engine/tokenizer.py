"""Text ↔ token ids, through tokenizer.json and the `tokenizers` library; chat templates through sandboxed jinja2."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

os.environ.setdefault(
    "TOKENIZERS_PARALLELISM", "false"
)  # read when the library loads; its threads and forks do not mix

import jinja2  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

from ..checkpoint.files import read_object  # noqa: E402
from ..errors import TokenizerError  # noqa: E402

_OTHER_KINDS = ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")


def fingerprint(directory: str | os.PathLike) -> dict:
    """{"sha256": of tokenizer.json, "vocab_size": its highest token id + 1}. Raises `TokenizerError`."""
    path = Path(directory) / "tokenizer.json"
    return {"vocab_size": _vocab_size(_load(path)), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        other = [name for name in _OTHER_KINDS if path.with_name(name).exists()]
        found = f"; found {other[0]}, which is another kind of tokenizer and has to be turned into it" if other else ""
        raise TokenizerError(
            f"{path}: file is missing{found}. With transformers: "
            f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained({str(path.parent)!r})"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower kind
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from None


def _vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


class Tokenizer:
    """The tokenizer of a container, or of a Hugging Face checkpoint directory.

    `eos_ids` the ids that end a text. Raises `TokenizerError` when tokenizer.json is missing, unreadable, or not the one
    whose hash the container's config.json holds.
    """

    def __init__(self, directory: str | os.PathLike):
        self.dir = Path(directory)
        self._tokenizer = _load(self.dir / "tokenizer.json")
        self.vocab_size = _vocab_size(self._tokenizer)
        model = self._read_json("config.json")
        if "colibri" in model:
            self._check(model["colibri"].get("tokenizer", {}))
            eos = model.get("model", {}).get("eos_token_ids")
        else:
            eos = self._read_json("generation_config.json").get("eos_token_id", model.get("eos_token_id"))
        self.eos_ids: tuple[int, ...] = tuple([eos] if isinstance(eos, int) else eos or ())
        self.settings = self._read_json("tokenizer_config.json")
        self.chat_template = self._find_template()

    def _check(self, expected: dict) -> None:
        found = fingerprint(self.dir)
        for key, value in found.items():
            if value != expected.get(key):
                raise TokenizerError(
                    f"{self.dir / 'tokenizer.json'}: not the tokenizer this model was converted with: {key}: expected "
                    f"{expected.get(key)}, found {value}; put the model's own tokenizer.json back"
                )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens are added only on request: chat templates bring their own."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 (tokens,) without special tokens, and int64 (tokens,) how many bytes of the UTF-8 text each
        stands for; together they are all of it. A character that several tokens share counts with the first."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        sizes = np.cumsum([0, *(len(c.encode("utf-8", "surrogatepass")) for c in text)])
        ends = np.array([stop for _, stop in found.offsets], np.int64)
        ends = sizes[np.maximum.accumulate(ends)] if len(ends) else ends
        if len(ends):
            ends[-1] = sizes[-1]
        return np.array(found.ids, np.int64), np.diff(ends, prepend=0)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text. Raises `TokenizerError` for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        if ids and not (0 <= min(ids) and max(ids) < 2**32):
            raise TokenizerError(f"token ids must be within [0, {self.vocab_size}), found {min(ids)} to {max(ids)}")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)

    @property
    def bos_token(self) -> str | None:
        return self._special("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special("eos_token")

    def apply_chat_template(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        **variables,
    ) -> str:
        """The prompt text of a conversation: messages [{"role", "content", …}]; `variables` go to the template.

        The template is untrusted input and runs in jinja2's immutable sandbox. Raises `TokenizerError` when there is
        none, and when it fails or refuses the messages. Encode the result without adding special tokens.
        """
        if self.chat_template is None:
            raise TokenizerError(f"{self.dir}: this model has no chat template; pass it plain text")
        values = dict(messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt)
        try:
            template = _environment().from_string(self.chat_template)
            return template.render(**{"bos_token": self.bos_token, "eos_token": self.eos_token, **values, **variables})
        except TokenizerError as error:
            raise TokenizerError(f"{self.dir}: the chat template refuses these messages: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TokenizerError(f"{self.dir}: the chat template fails: {type(error).__name__}: {error}") from None

    def _read_json(self, name: str) -> dict:
        path = self.dir / name
        return read_object(path, TokenizerError) if path.exists() else {}

    def _find_template(self) -> str | None:
        """chat_template.jinja, else the one in tokenizer_config.json: a string, or a list with one named "default"."""
        path = self.dir / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        given = self.settings.get("chat_template")
        if isinstance(given, list):
            given = next((t["template"] for t in given if t.get("name") == "default"), None)
        return given

    def _special(self, name: str) -> str | None:
        value = self.settings.get(name)
        return value.get("content") if isinstance(value, dict) else value


class StreamDecoder:
    """Text of tokens as they come: what `add` returns, joined, and `finish` at the end, is the text of them all.

    A token may end inside a UTF-8 character, shown as U+FFFD at the end: such text is held back until it is whole. Only
    the tokens since the last piece of text are decoded, with that piece before them for context.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._held.append(int(token))
        return self._take(final=False)

    def finish(self) -> str:
        """What was held back, its unfinished bytes as U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._held)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._before, self._held = self._held, []
        return text[len(before) :]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the answer for training; here it is just its contents."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """jinja2 as Hugging Face's templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value, indent=None, separators=None, sort_keys=False, ensure_ascii=False) -> str:
    return json.dumps(value, indent=indent, separators=separators, sort_keys=sort_keys, ensure_ascii=ensure_ascii)


def _raise_exception(message: str):
    raise TokenizerError(message)
