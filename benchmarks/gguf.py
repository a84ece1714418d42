"""A GGUF file of an OLMoE checkpoint, so that llama.cpp can run the same model; read and written with numpy alone.

    python benchmarks/gguf.py CHECKPOINT FILE.gguf q8_0        f16, q8_0 or q4_0

Format: GGUF version 3 (github.com/ggml-org/ggml, docs/gguf.md): magic, counts, key-value pairs, tensor infos, then the
tensors, each on a multiple of 32 bytes. Norms and routers stay float32; every other matrix takes the type that is asked
for, rounded to nearest as llama.cpp's reference quantisers do. The file has no tokenizer.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from colibri_lab.checkpoint import families
from colibri_lab.checkpoint.files import AtomicFile
from colibri_lab.checkpoint.minifloat import to_f32
from colibri_lab.checkpoint.source import Source
from colibri_lab.errors import ModelError, SettingError, did_you_mean

ALIGN, BLOCK = 32, 32  # bytes between tensors; weights that share a scale
_U32, _F32, _STRING = 4, 6, 8  # types of key-value pairs
ROWS = 1024  # of a matrix in memory at once


@dataclass(frozen=True)
class Type:
    """A tensor type: its number in GGUF, bytes of 32 weights, and rows float32 → bytes."""

    code: int
    block_bytes: int
    encode: Callable[[np.ndarray], np.ndarray]
    file_type: int = 0

    def nbytes(self, count: int) -> int:
        return count // BLOCK * self.block_bytes


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8).reshape(len(values), -1)


def q8_0(values: np.ndarray) -> np.ndarray:
    """Blocks of 32: a float16 scale (largest magnitude / 127) and 32 int8."""
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(blocks * inverse).astype(np.int8).view(np.uint8)
    return np.concatenate([_half(scale), codes], axis=1)


def q4_0(values: np.ndarray) -> np.ndarray:
    """Blocks of 32: a float16 scale (signed extreme / -8) and 16 bytes with weight i low and weight i + 16 high."""
    blocks = values.reshape(-1, BLOCK)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = extreme / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.minimum(15, np.floor(blocks * inverse + np.float32(8.5))).astype(np.uint8)
    return np.concatenate([_half(scale), codes[:, :16] | codes[:, 16:] << 4], axis=1)


TYPES = {
    "f32": Type(0, 128, lambda v: v.astype("<f4").view(np.uint8)),
    "f16": Type(1, 64, lambda v: v.astype("<f2").view(np.uint8), 1),
    "q8_0": Type(8, 34, q8_0, 7),
    "q4_0": Type(2, 18, q4_0, 2),
}


@dataclass(frozen=True)
class Planned:
    """A tensor to write: name, shape (slowest dimension first), type, and the checkpoint tensors it is made of."""

    name: str
    shape: tuple[int, ...]
    type: Type
    parts: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(int(np.prod(self.shape)))


def write_gguf(checkpoint: str | Path, output: str | Path, kind: str, progress: bool = True) -> int:
    """Write an OLMoE checkpoint as GGUF with matrices of `kind`; the bytes that one decoded token reads of it.

    Raises `SettingError` for an unknown kind, `ModelError` for another family or rows that are no multiple of 32.
    """
    if kind not in TYPES or kind == "f32":
        raise SettingError(f"gguf: kind cannot be {kind!r}; {did_you_mean(kind, ['f16', 'q8_0', 'q4_0'])}")
    config, source = families.read_config(checkpoint), Source(checkpoint)
    if config.family != "olmoe":
        raise ModelError(f"{checkpoint}: only olmoe is written as GGUF here, found {config.family}")
    tensors = list(_plan(config, kind))
    for tensor in tensors:
        if tensor.shape[-1] % BLOCK:
            raise ModelError(
                f"{checkpoint}: {tensor.name} has rows of {tensor.shape[-1]}; GGUF needs multiples of {BLOCK}"
            )
    with AtomicFile(output) as file:
        end = 0
        head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(_pairs(config, kind)))]
        head += [_pair(*pair) for pair in _pairs(config, kind)]
        for tensor in tensors:
            dims = tensor.shape[::-1]
            head.append(_text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type.code, end))
            end += -(-tensor.nbytes // ALIGN) * ALIGN
        start = b"".join(head)
        file.write(start + bytes(-len(start) % ALIGN))
        with tqdm(
            total=end, unit="B", unit_scale=True, desc=f"writing {Path(output).name}", disable=not progress
        ) as bar:
            for tensor in tensors:
                for part in tensor.parts:
                    for chunk in _chunks(source, part):
                        encoded = tensor.type.encode(chunk)
                        file.write(encoded)
                        bar.update(encoded.nbytes)
                file.write(bytes(-tensor.nbytes % ALIGN))
    return token_bytes(config, kind)


def token_bytes(config, kind: str) -> int:
    """Bytes of weights that one decoded token reads: all but the embedding, and top-k of each layer's experts."""
    total = 0
    for tensor in _plan(config, kind):
        if tensor.name != "token_embd.weight":
            share = config.top_k / config.num_experts if tensor.name.endswith("_exps.weight") else 1
            total += round(tensor.nbytes * share)
    return total


def _plan(config, kind: str) -> Iterator[Planned]:
    c, matrix, plain = config, TYPES[kind], TYPES["f32"]
    hidden, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    width, top = c.expert_intermediate_size, families.tensor_names(c)
    yield Planned("token_embd.weight", (c.vocab_size, hidden), matrix, (top["embed"],))
    yield Planned("output_norm.weight", (hidden,), plain, (top["norm"],))
    yield Planned("output.weight", (c.vocab_size, hidden), matrix, (top["embed" if c.tied_embeddings else "head"],))
    own = (
        ("attn_norm", "input_norm", (hidden,), plain), ("ffn_norm", "post_norm", (hidden,), plain),
        ("attn_q_norm", "q_norm", (q,), plain), ("attn_k_norm", "k_norm", (kv,), plain),
        ("attn_q", "q", (q, hidden), matrix), ("attn_k", "k", (kv, hidden), matrix),
        ("attn_v", "v", (kv, hidden), matrix), ("attn_output", "o", (hidden, q), matrix),
        ("ffn_gate_inp", "router", (c.num_experts, hidden), plain),
    )  # fmt: skip
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    for i in range(c.num_layers):
        names = families.tensor_names(c, i)
        for theirs, ours, shape, type in own:
            yield Planned(f"blk.{i}.{theirs}.weight", shape, type, (names[ours],))
        for part, shape in shapes.items():
            parts = tuple(families.expert_names(c, i, e)[part] for e in range(c.num_experts))
            yield Planned(f"blk.{i}.ffn_{part}_exps.weight", (c.num_experts, *shape), matrix, parts)


def _pairs(config, kind: str) -> list[tuple[str, int | float | str]]:
    c = config
    numbers = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size, "block_count": c.num_layers,
        "feed_forward_length": c.expert_intermediate_size, "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads, "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.freq_base": float(c.rope.theta), "expert_count": c.num_experts, "expert_used_count": c.top_k,
        "vocab_size": c.vocab_size,
    }  # fmt: skip
    return [
        ("general.architecture", "olmoe"), ("general.name", "benchmark"), ("general.file_type", TYPES[kind].file_type),
        ("general.quantization_version", 2), *((f"olmoe.{name}", value) for name, value in numbers.items()),
        ("tokenizer.ggml.model", "no_vocab"),
    ]  # fmt: skip


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pair(key: str, value: int | float | str) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _STRING) + _text(value)
    kind, layout = (_F32, "<If") if isinstance(value, float) else (_U32, "<II")
    return _text(key) + struct.pack(layout, kind, value)


def _chunks(source: Source, name: str) -> Iterator[np.ndarray]:
    """Rows of a checkpoint tensor as float32, a stretch at a time."""
    shape = source.entry(name).shape
    rows = shape[0] if len(shape) > 1 else 1
    for start in range(0, rows, ROWS):
        yield to_f32(source.rows(name, start, start + ROWS))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    read = write_gguf(*sys.argv[1:4])
    print(f"{sys.argv[2]}: {Path(sys.argv[2]).stat().st_size / 1e6:.0f} MB, {read / 1e6:.1f} MB a decoded token")
