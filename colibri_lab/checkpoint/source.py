"""Where a conversion reads from, a few rows at a time: the safetensors files of a checkpoint, or a container.

The file format (https://github.com/huggingface/safetensors): u64 little-endian header length, a JSON object
name → {dtype, shape, data_offsets}, then the data; offsets count from the end of the header.

Two kinds of checkpoints are quantised already. FP8: a matrix X of type F8_E4M3 with float32 scales X_scale_inv, one for
each block of 128 × 128 (config.json may say otherwise). MXFP4: X_blocks and X_scales in place of X. Both are read as
float32, and what was MXFP4 fits the format mxfp4 without loss.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ContainerError, ModelError
from .container import Container, Tensor
from .files import read_object, storage_errors
from .minifloat import MX_BLOCK, fp8_to_f32, mxfp4_to_f32

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
QUANTISED = {"F8_E4M3": "_scale_inv", "MXFP4": "_scales"}  # type → where the scales of tensor X are: X + this
FORMAT_OF = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "bf16", "MXFP4": "mxfp4"}  # kept by "auto"
_SIZES = {
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
_HEADER_LIMIT = 100_000_000  # as in the reference reader


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: the file, its dtype by safetensors name, shape, and byte range in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Source:
    """The tensors of a checkpoint directory by name. Only headers are read until `rows` is called.

    `scales`: quantised tensor → the entry of its scales, which is not among `entries`.
    """

    def __init__(self, hf_dir: str | os.PathLike):
        self.dir = Path(hf_dir)
        self.name_of_model = os.path.basename(os.path.realpath(self.dir))
        self.entries: dict[str, Entry] = {}
        self.scales: dict[str, Entry] = {}
        with storage_errors(self.dir):
            self.files = _find_files(self.dir)
        for path in self.files:
            for entry in read_header(path):
                if entry.name in self.entries:
                    raise ModelError(f"{path}: tensor {entry.name} is also in {self.entries[entry.name].path.name}")
                self.entries[entry.name] = entry
        self._check_index()
        self._join_scales()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in (*self.entries.values(), *self.scales.values()))

    def entry(self, name: str) -> Entry:
        """Raises `ModelError` naming the tensor when it is missing or of a type that cannot be read."""
        if name not in self.entries:
            raise ModelError(f"{self.dir}: tensor {name} is missing from the checkpoint")
        entry = self.entries[name]
        if entry.dtype == "F8_E4M3" and name not in self.scales:
            raise ModelError(f"{entry.path}: tensor {name} is F8_E4M3, but its scales {name}_scale_inv are missing")
        if entry.dtype not in DTYPES and entry.dtype not in QUANTISED:
            raise ModelError(
                f"{entry.path}: tensor {name} has type {entry.dtype}, which this version cannot read; "
                f"expected {', '.join(DTYPES)}"
            )
        return entry

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop), (rows, cols): as stored, float32, float16, or bf16 bits in uint16; quantised ones as float32."""
        entry = self.entry(name)
        if entry.dtype in QUANTISED:
            return self._widened(entry, start, entry.shape[0] if stop is None else min(stop, entry.shape[0]))
        count, cols = (1, entry.shape[0]) if len(entry.shape) == 1 else (entry.shape[0], math.prod(entry.shape[1:]))
        stop = count if stop is None else min(stop, count)
        return _read_rows(entry, DTYPES[entry.dtype], start, stop, cols)

    def _widened(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        """Rows of a quantised matrix as float32."""
        scales, byte = self.scales[entry.name], np.dtype("u1")
        if entry.dtype == "MXFP4":
            count = entry.shape[1] // MX_BLOCK
            blocks = _read_rows(entry, byte, start, stop, 16 * count).reshape(stop - start, count, 16)
            return mxfp4_to_f32(blocks, _read_rows(scales, byte, start, stop, count))
        codes = _read_rows(entry, byte, start, stop, entry.shape[1])
        return fp8_to_f32(codes, _read_rows(scales, DTYPES["F32"], 0, *scales.shape), self.fp8_block, start)

    def _join_scales(self) -> None:
        """Take the scales of quantised tensors out of `entries`. Raises `ModelError` where they do not fit."""
        for blocks in [e for e in self.entries.values() if e.name.endswith("_blocks") and e.dtype == "U8"]:
            name = blocks.name.removesuffix("_blocks")
            scales = self.entries.get(f"{name}_scales")
            if scales is None or scales.dtype != "U8" or blocks.shape != (*scales.shape, 16):
                found = "nothing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
                raise ModelError(
                    f"{blocks.path}: tensor {blocks.name} {list(blocks.shape)}: expected MXFP4 with bytes "
                    f"{name}_scales of shape {list(blocks.shape[:-1])}, found {found}"
                )
            shape = (*scales.shape[:-1], MX_BLOCK * scales.shape[-1])
            del self.entries[blocks.name], self.entries[scales.name]
            self.entries[name] = Entry(name, blocks.path, "MXFP4", shape, blocks.start, blocks.nbytes)
            self.scales[name] = scales
        fp8 = [e for e in self.entries.values() if e.dtype == "F8_E4M3" and f"{e.name}_scale_inv" in self.entries]
        if not fp8:
            return
        quantised = read_object(self.dir / "config.json", ModelError).get("quantization_config") or {}
        self.fp8_block = tuple(quantised.get("weight_block_size") or (128, 128))
        for entry in fp8:
            scales = self.entries.pop(f"{entry.name}_scale_inv")
            wanted = tuple(-(-n // block) for n, block in zip(entry.shape, self.fp8_block, strict=False))
            if scales.dtype != "F32" or scales.shape != wanted or len(entry.shape) != 2:
                raise ModelError(
                    f"{scales.path}: tensor {scales.name}: expected F32 {list(wanted)}, one for each block of "
                    f"{self.fp8_block[0]} x {self.fp8_block[1]}, found {scales.dtype} {list(scales.shape)}"
                )
            self.scales[entry.name] = scales

    def _check_index(self) -> None:
        index = self.dir / "model.safetensors.index.json"
        if not index.exists():
            return
        for name, file in _weight_map(index).items():
            if name not in self.entries or self.entries[name].path.name != file:
                raise ModelError(f"{index}: tensor {name} is not in {file} as the index says")


def _read_rows(entry: Entry, dtype: np.dtype, start: int, stop: int, cols: int) -> np.ndarray:
    out = np.empty((stop - start, cols), dtype)
    view = memoryview(out).cast("B")
    with storage_errors(entry.path), open(entry.path, "rb", buffering=0) as file:
        file.seek(entry.start + start * cols * dtype.itemsize)
        while view.nbytes:
            got = file.readinto(view)
            if not got:
                raise ModelError(f"{entry.path}: ends inside tensor {entry.name}")
            view = view[got:]
    return out


def _find_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted({directory / file for file in _weight_map(index).values()})
        for path in files:
            if not path.exists():
                raise ModelError(f"{path}: shard named in {index.name} is missing; download it again")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        other = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".gguf"))
        found = f"found {other[0]}, which is not read here" if other else "found none"
        raise ModelError(f"{directory}: expected .safetensors files, {found}; use the checkpoint's safetensors version")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    names = read_object(index, ModelError).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(v, str) and Path(v).name == v for v in names.values()):
        raise ModelError(f"{index}: expected an object weight_map of tensor names and file names of this directory")
    return names


def read_header(path: Path) -> list[Entry]:
    """The tensor table of one safetensors file. Raises `ModelError` when it does not fit the file."""
    with storage_errors(path), open(path, "rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ModelError(f"{path}: not a safetensors file: header of {length} bytes in a file of {size} bytes")
        header = file.read(length)
    try:
        table = json.loads(header)
        table.pop("__metadata__", None)
        entries = [_entry(path, name, item, 8 + length) for name, item in table.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: damaged safetensors header: {error}") from None
    for e in entries:
        wanted = math.prod(e.shape) * _SIZES.get(e.dtype, 0)
        if e.start < 8 + length or e.start + e.nbytes > size or e.nbytes < 0 or (wanted and e.nbytes != wanted):
            raise ModelError(
                f"{path}: tensor {e.name} ({e.dtype} {list(e.shape)}) claims bytes {e.start} to {e.start + e.nbytes} "
                f"of a file of {size} bytes; the file is cut short or damaged"
            )
    return entries


def _entry(path: Path, name: str, item: dict, base: int) -> Entry:
    begin, end = (int(x) for x in item["data_offsets"])
    shape = tuple(int(n) for n in item["shape"])
    if min((begin, *shape), default=0) < 0:
        raise ValueError(f"negative numbers in the entry of {name}")
    return Entry(name, path, str(item["dtype"]), shape, base + begin, end - begin)


class ContainerSource(Source):
    """A container as the source of another: to quantise it, to change its block size, or to pack .npy and version 0.

    Tensors are named "file:tensor", experts as in blocks of one. Refuses containers that are quantised already.
    """

    def __init__(self, box: Container):
        self.dir, self.entries, self.scales, self._box = box.dir, {}, {}, box
        self.files = [box.dir / "config.json"]
        self.name_of_model = str(box.info["source"])
        self._open_file: tuple[str, dict[str, Tensor]] = ("", {})
        for file in box.files:
            self.files += box.find(file)
            for tensor in box.read(file).tensors.values():
                if tensor.scale is not None and tensor.format != "mxfp4":
                    raise ContainerError(
                        f"{box.dir / file}: {tensor.name} is {tensor.format} already; quantising twice only loses: convert "
                        "from the 16-bit container or the checkpoint"
                    )
                name = self.name(file, tensor.name)
                kind = next(dtype for dtype, format in FORMAT_OF.items() if format == tensor.format)
                self.entries[name] = Entry(name, box.dir / file, kind, tensor.shape, 0, tensor.data.nbytes)

    @staticmethod
    def name(file: str, tensor: str) -> str:
        return f"{file.rpartition('_')[0]}:{tensor}" if "/expert_" in file else f"{file}:{tensor}"

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) as float32 (rows, cols)."""
        file = self.entries[name].path.relative_to(self.dir).as_posix()
        if self._open_file[0] != file:
            self._open_file = (file, self._box.read(file).tensors)
        tensor = self._open_file[1][name.rpartition(":")[2]]
        if len(tensor.shape) == 1:
            return tensor.array()[None]
        return tensor.gather(np.arange(tensor.shape[0])[start:stop])
