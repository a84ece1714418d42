"""A checkpoint of any supported family at any size, with seeded random weights: real memory and real reads, no
download.

Weights are normal with the standard deviation that such models start training with; the text such a model writes means
nothing. Everything is streamed: memory does not grow with the model. The same arguments write the same bytes, and a
tensor's values depend on the seed and its name alone, not on how the checkpoint is cut into files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import tokenizers
from tqdm import tqdm

from ..config import ModelConfig
from ..errors import ContainerError, ModelError, SettingError, StorageError, did_you_mean
from ..units import parse_size
from . import families, formats, layout
from .files import AtomicFile
from .plan import source_names

STD = 0.02  # Hugging Face's initializer_range
CHUNK = 1 << 20  # values generated at once
SHARD_BYTES = 5 * 10**9
DTYPES = {"bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16"), "fp32": ("F32", "float32")}
EOS = "<|endoftext|>"
VOCABULARY = 257  # one id per byte, and the end of text
FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json")

# Our argument → the field of Hugging Face's config; families that spell it otherwise are listed in _SPELLED.
FIELDS = dict(
    hidden="hidden_size", layers="num_hidden_layers", heads="num_attention_heads", kv_heads="num_key_value_heads",
    head_dim="head_dim", experts="num_experts", top_k="num_experts_per_tok", expert_width="moe_intermediate_size",
    dense_width="intermediate_size", shared_width="shared_expert_intermediate_size", vocab="vocab_size",
    max_seq_len="max_position_embeddings",
)  # fmt: skip
_SPELLED = {
    "mixtral": {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    "olmoe": {"moe_intermediate_size": "intermediate_size"},
    "glm4_moe": {"num_experts": "n_routed_experts"},
}
_PUBLISHED = {
    "qwen3_moe": {"head_dim": 128},
    "glm4_moe": {"head_dim": 128},
}  # where the class default is not what is used
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class MadeModel:
    """What was written: the directory, its weight files and the bytes in them, and the model's settings."""

    output: Path
    files: tuple[str, ...]
    nbytes: int
    config: ModelConfig

    def __str__(self) -> str:
        return f"{self.output}: {self.config.family}, {len(self.files)} files, {self.nbytes} bytes of weights"


def make_model(
    output: str | os.PathLike,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "bf16",
    shard_size: int | str = SHARD_BYTES,
    fields: dict | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **sizes: int,
) -> MadeModel:
    """Write a Hugging Face checkpoint of `family` with random weights to the directory `output`.

        make_model("big", "olmoe", hidden=2048, layers=16, experts=64, seed=1)

    sizes: names of `FIELDS`. A size that is not given is the family's own; heads and widths keep their proportion to
    hidden. `fields` sets any other field of config.json. Weights are cut into files of at most `shard_size` bytes.

    Raises `SettingError` for unknown names, `ModelError` for sizes that contradict each other, `ContainerError` for an
    output that holds something else, `StorageError` when the disk is too small or fails; then nothing of it is left.
    """
    if dtype not in DTYPES:
        raise SettingError(f"dtype cannot be {dtype!r}; {did_you_mean(dtype, DTYPES)}")
    if not isinstance(seed, int) or seed < 0:
        raise SettingError(f"seed must be a whole number of at least 0, got {seed!r}")
    most = parse_size(shard_size, "shard_size")
    output, raw = Path(output), config_fields(family, sizes, fields or {}, DTYPES[dtype][1])
    config = _checked_config(raw)
    tensors = checkpoint_tensors(config, DTYPES[dtype][0])
    total = sum(_nbytes(*tensor) for tensor in tensors.values())
    _make_room(output, total, overwrite)
    shards = list(_shards(tensors, most))
    written = []
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc=f"writing {output.name}", disable=not progress) as bar:
            for i, names in enumerate(shards):
                name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                written.append(name)
                _write_shard(output / name, {n: tensors[n] for n in names}, seed, bar)
        if len(shards) > 1:
            where = {tensor: file for file, names in zip(written, shards, strict=True) for tensor in names}
            _write_json(output / FILES[3], {"metadata": {"total_size": total}, "weight_map": where})
        _write_tokenizer(output)
        _write_json(output / FILES[1], {"eos_token_id": VOCABULARY - 1})
        _write_json(output / FILES[0], raw)
    except BaseException:
        for name in (*written, *FILES):
            (output / name).unlink(missing_ok=True)
        raise
    return MadeModel(output, tuple(written), total, config)


def config_fields(family: str, sizes: dict[str, int], fields: dict, torch_dtype: str) -> dict:
    """config.json as a dict. Raises `SettingError` for names that the family does not have."""
    if family not in families.FAMILIES:
        raise SettingError(f"family cannot be {family!r}; {did_you_mean(family, families.FAMILIES)}")
    spelled = _SPELLED.get(family, {})
    defaults = {**families.default_fields(family), **_PUBLISHED.get(family, {})}
    own = {}
    for name, value in sizes.items():
        if value is None:
            continue
        field = FIELDS.get(name)
        known = [n for n, f in FIELDS.items() if f in defaults or spelled.get(f, f) in defaults]
        if spelled.get("moe_intermediate_size") == "intermediate_size":  # every layer has experts
            known.remove("dense_width")
        if field is None or name not in known:
            raise SettingError(f"{family} has no size {name!r}; {did_you_mean(name, known)}")
        if type(value) is not int or value < 1:
            raise SettingError(f"{name} must be a whole number of at least 1, got {value!r}")
        own[spelled.get(field, field)] = value
    shape = {spelled.get(name, name): value for name, value in defaults.items()}
    raw = {**shape, **_in_proportion(shape, own), **own, **fields}
    raw |= {"architectures": [families.FAMILIES[family].architecture], "model_type": family}
    return raw | {"torch_dtype": torch_dtype, "bos_token_id": None, "eos_token_id": VOCABULARY - 1}


def _in_proportion(defaults: dict, own: dict) -> dict:
    """Heads and widths for another hidden size or number of heads, where those are not given themselves."""
    hidden, heads = defaults["hidden_size"], defaults["num_attention_heads"]
    head_dim = own.get("head_dim") or defaults.get("head_dim") or hidden // heads
    new_hidden = own.get("hidden_size", hidden)
    new_heads = own.get("num_attention_heads", max(1, heads * new_hidden // hidden))
    shared = heads // (defaults["num_key_value_heads"] or heads)  # query heads to one key/value head
    kv_heads = max(1, new_heads // shared)
    fitted = {
        "num_attention_heads": new_heads,
        "num_key_value_heads": kv_heads if new_heads % kv_heads == 0 else new_heads,
        "head_dim": head_dim if "num_attention_heads" not in own else own.get("head_dim") or new_hidden // new_heads,
    }
    if new_hidden < head_dim and "head_dim" not in own:
        fitted["head_dim"] = new_hidden // new_heads
    for width in _WIDTHS:
        if width in defaults:
            fitted[width] = max(16, round(defaults[width] * new_hidden / hidden / 16) * 16)
    return fitted


def _checked_config(raw: dict) -> ModelConfig:
    """The settings as every reader of the checkpoint will understand them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(raw), encoding="utf-8")
        try:
            config = families.read_config(folder)
        except ModelError as error:
            raise ModelError(
                f"these sizes make no {raw['model_type']}: {str(error).removeprefix(f'{path}: ')}"
            ) from None
    if config.vocab_size < VOCABULARY:
        raise SettingError(
            f"vocab must be at least {VOCABULARY}, an id for every byte and one for the end, got {config.vocab_size}"
        )
    return config


def checkpoint_tensors(config: ModelConfig, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint in the order of writing: its Hugging Face name → (safetensors dtype, shape).

    Correction biases are float32 whatever the weights are, as published.
    """
    files = layout.container_files(config, 1)
    names = source_names(None, config, files)
    return {
        names[file][ours]: ("F32" if ours == "correction_bias" else dtype, spec.shape)
        for file, specs in files.items()
        for ours, spec in specs.items()
    }


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (4 if dtype == "F32" else 2)


def _make_room(output: Path, total: int, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ContainerError(f"{output}: expected a directory, found a file")
    there = set(os.listdir(output)) if output.exists() else set()
    ours = {name for name in there if name in FILES or name.endswith(".safetensors")}
    if there - ours or (there and not overwrite):
        raise ContainerError(
            f"{output}: holds {min(there - ours or there)}; name a new directory"
            + ("" if there - ours else ", or overwrite (--overwrite) the checkpoint there")
        )
    parent = next(p for p in (output.absolute(), *output.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(parent).free + sum((output / name).stat().st_size for name in ours)
    if total > free:
        raise StorageError(f"{output}: the disk is too small: {total} bytes needed, {free} free; nothing was written")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in sorted(ours):  # config.json goes before the weights it describes
            (output / name).unlink()
    except OSError as error:
        raise StorageError(f"{error.filename or output}: {error.strerror}") from None


def _shards(tensors: dict, most: int) -> Iterator[list[str]]:
    """Names of the tensors of each file, none above `most` bytes unless a single tensor is."""
    names, size = [], 0
    for name, (dtype, shape) in tensors.items():
        nbytes = _nbytes(dtype, shape)
        if names and size + nbytes > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _write_shard(path: Path, tensors: dict, seed: int, bar) -> None:
    """One safetensors file: u64 header length, the header, then the tensors one after the other."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with AtomicFile(path, need=8 + len(text) + end) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in tensors.items():
            for values in tensor_values(name, dtype, math.prod(shape), seed):
                file.write(values)
                bar.update(values.nbytes)


def tensor_values(name: str, dtype: str, count: int, seed: int) -> Iterator[np.ndarray]:
    """The values of one tensor, `CHUNK` at a time, as stored (bf16 as uint16 bits): norms 1, biases 0, the rest normal.

    16 random bits pick one of 65536 equally likely normal values from a table, which is faster than any sampler.
    """
    kind = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}[dtype]
    constant = 1.0 if name.endswith("norm.weight") else 0.0 if name.endswith("bias") else None
    random = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    for start in range(0, count, CHUNK):
        n = min(CHUNK, count - start)
        if constant is not None:
            yield formats.encode(np.full((1, n), constant, np.float32), kind).data.reshape(-1)
        else:
            yield _normal_table(kind)[random.random_raw(-(-n // 4)).view(np.uint16)[:n]]


_tables: dict[str, np.ndarray] = {}


def _normal_table(kind: str) -> np.ndarray:
    """(65536,) quantiles of the normal distribution with deviation `STD`, in a stored number format."""
    if kind not in _tables:
        normal = NormalDist(0.0, STD)
        quantiles = np.array([[normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)]], np.float32)
        _tables[kind] = formats.encode(quantiles, kind).data.reshape(-1)
    return _tables[kind]


def _write_tokenizer(output: Path) -> None:
    """A byte-level tokenizer without merges: ids 0-255 are the bytes, 256 ends a text. Larger ids are padding."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([tokenizers.AddedToken(EOS, special=True, normalized=False)])
    with AtomicFile(output / "tokenizer.json") as file:
        file.write(model.to_str().encode())


def _write_json(path: Path, data: dict) -> None:
    with AtomicFile(path) as file:
        file.write((json.dumps(data, indent=1) + "\n").encode())
