"""A byte-level BPE tokenizer of 256 entries, written out by hand: no training, the same file every time.

Ids: 0 `<|endoftext|>`, 1 `<|pad|>`, 2.. every byte that can occur in UTF-8 (ascending), then one entry per merge.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_ID, PAD_ID = 0, 1
SPECIALS = ["<|endoftext|>", "<|pad|>"]
MERGES = [("t", "h"), ("Ġ", "th"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("o", "n"), ("Ġth", "e"), ("e", "n")]
MERGES += [("Ã", "¤"), ("Ġ", "Ġ"), ("r", "e")]  # "Ġ" is a space, "Ã¤" are the two bytes of "ä"


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte 0-255, as GPT-2's byte-level BPE defines it, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(hidden)}
    return [stand_in[b] for b in range(256)]


def in_utf8(byte: int) -> bool:
    return byte not in (0xC0, 0xC1) and byte < 0xF5


def write_tokenizer(out: Path) -> None:
    """tokenizer.json and tokenizer_config.json in `out`."""
    symbols = SPECIALS + [s for b, s in enumerate(byte_symbols()) if in_utf8(b)] + [a + b for a, b in MERGES]
    assert len(symbols) == len(set(symbols)) == 256, len(symbols)
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"eos_token": SPECIALS[0], "pad_token": SPECIALS[1], "add_bos_token": False, "model_max_length": 512}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
