"""Checkpoint → container, a few rows at a time: peak memory does not grow with the model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from ..errors import ContainerError, StorageError
from . import binfile, container, formats, packing
from .files import AtomicFile, read_object, storage_errors
from .plan import Plan, make_plan
from .plan_formats import Rule
from .source import Source
from .verify import verify_container

CHUNK_VALUES = 1 << 18  # values of a tensor in memory at once
MARKER, LOCK = "convert.partial.json", "convert.lock"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. `files_kept` were complete from an interrupted run; `ratio` is bytes out / bytes in."""

    output: str
    files_written: int
    files_kept: int
    bytes_in: int
    bytes_out: int
    skipped_bytes: int
    unused: list[str]
    verified_files: list[str]

    @property
    def ratio(self) -> float:
        return self.bytes_out / self.bytes_in

    def to_json(self) -> dict:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        kept = f", {self.files_kept} kept from before" if self.files_kept else ""
        checked = f"; {len(self.verified_files)} files of experts agree with the source" if self.verified_files else ""
        return (
            f"{self.output}: {self.files_written} files written{kept}; {self.bytes_in} bytes in, {self.bytes_out} bytes "
            f"out, ratio {self.ratio:.3f}{checked}"
        )


def convert(
    input: str | os.PathLike,
    output: str | os.PathLike,
    *,
    quantize: str = "auto",
    group_size: int | None = None,
    tensors: str = "experts",
    plan: str | os.PathLike | dict | Rule | None = None,
    expert_block_size: int = 1,
    max_seq_len: int | None = None,
    verify: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Make the container `output` from `input`, a Hugging Face checkpoint directory (or a container, packed anew).

    quantize: the experts' number format, a name of `formats.FORMATS`; "auto" keeps 16-bit formats and MXFP4, makes fp16 of
    fp32 and bf16 of FP8. "int8" has one scale per output channel, "int4" one per 64 columns unless group_size says else.
    group_size: with "int8" or "int4": 32, 64 or 128 columns that share a scale, 0 for one scale per output channel.
    tensors: which matrices a quantised format is for, "experts" or "all". (Other formats are for all matrices.)
    plan: a format for single layers, experts and matrices: file, object or function, see `plan_formats`.
    An interrupted conversion goes on where it stopped when it is called again with the same arguments.

    Raises `SettingError` (arguments), `ModelError` (the checkpoint), `TokenizerError`, `ContainerError` (what is at
    `output` already, or a failed verification), `StorageError` (disk full, or not readable or writable).
    """
    plan = make_plan(
        input, output, quantize=quantize, group_size=group_size, tensors=tensors, plan=plan,
        expert_block_size=expert_block_size, max_seq_len=max_seq_len,
    )  # fmt: skip
    if progress:
        print(plan.text(), file=sys.stderr)
    out = plan.output
    with storage_errors(out, "cannot be used for the container"):
        _completed(plan, overwrite)  # refuses before anything is made
        out.mkdir(parents=True, exist_ok=True)
        with _only_writer(out):
            kept = _completed(plan, overwrite)
            if not kept:
                _clear(out)
            _write_json(out / MARKER, {"plan": plan.id})
            _write_files(plan, [file for file in plan.files if file not in kept], progress)
            _write_json(out / "config.json", plan.config_json())
            (out / MARKER).unlink()
    verified = verify_container(out, input) if verify else []
    return ConvertReport(
        str(out), len(plan.files) - len(kept), len(kept), plan.source.nbytes, plan.bytes_out, plan.skipped_bytes,
        plan.unused, verified,
    )  # fmt: skip


def _completed(plan: Plan, overwrite: bool) -> set[str]:
    """The files at the output that an interrupted run of the same plan completed.

    Raises `ContainerError` for anything there that must not be written over, `StorageError` when the disk is too small.
    """
    out, marker = plan.output, plan.output / MARKER
    if out.exists() and not out.is_dir():
        raise ContainerError(f"{out}: expected a directory, found a file")
    complete = container.is_container(out)
    if complete and not overwrite:
        raise ContainerError(f"{out}: a container is already there; overwrite (--overwrite) replaces it")
    unfinished = not complete and marker.exists()
    if not complete and not unfinished and out.exists() and set(os.listdir(out)) - {LOCK}:
        raise ContainerError(f"{out}: not empty, and not a container; name an empty or a new directory")
    same = unfinished and _marked_plan(marker) == plan.id
    if unfinished and not same and not overwrite:
        raise ContainerError(
            f"{out}: holds an unfinished conversion with other settings or of another checkpoint; repeat that one, or "
            "overwrite (--overwrite) it"
        )
    sizes = {file: (out / file).stat().st_size for file in plan.files if (out / file).is_file()}
    kept = {file for file, size in sizes.items() if same and size == plan.sizes[file]}
    need = plan.bytes_out - sum(sizes.values())
    free = shutil.disk_usage(_existing(out)).free
    if need > free:
        raise StorageError(f"{out}: the disk is too small: {need} bytes needed, {free} free; nothing was written")
    return kept


@contextlib.contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Two conversions into one directory would spoil each other's files: the second is refused."""
    lock = FileLock(out / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ContainerError(f"{out}: another process is converting into this directory; let it finish") from None
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)
        lock.release()


def _existing(path: Path) -> Path:
    """The nearest directory that exists, to ask about the disk."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def _marked_plan(marker: Path) -> str | None:
    try:
        return read_object(marker, ContainerError).get("plan")
    except ContainerError:
        return None


def _clear(out: Path) -> None:
    """Take an old container away, config.json first, so that no mixture ever looks complete."""
    (out / "config.json").unlink(missing_ok=True)
    for folder in (*out.glob("layer_*"), out / "dense"):
        for path in (*folder.glob("*.bin"), *folder.glob("*.npy"), *folder.glob("*.tmp")):
            path.unlink()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    for name in (*TOKENIZER_FILES, MARKER):
        (out / name).unlink(missing_ok=True)


def _write_files(plan: Plan, todo: list[str], progress: bool) -> None:
    with tqdm(total=sum(plan.sizes[file] for file in todo), unit="B", unit_scale=True, disable=not progress) as bar:
        for file in todo:
            _write_file(plan, file)
            bar.update(plan.sizes[file])
    for name in TOKENIZER_FILES:
        if (plan.source.dir / name).exists():
            with AtomicFile(plan.output / name) as file:
                file.write((plan.source.dir / name).read_bytes())


def _write_file(plan: Plan, name: str) -> None:
    """One `.bin` file: header, then tensor after tensor in chunks of rows, then the checksum into the header."""
    specs, names, path = plan.files[name], plan.names[name], plan.output / name
    table, payload = binfile.plan_table(specs, plan.tensor_formats[name])
    bounds = _set_factors(plan.source, names, table)
    crc = end = 0
    with AtomicFile(path, need=plan.sizes[name]) as file:
        file.write(binfile.header_page(table, payload, path=path))
        for start, data in _pieces(plan.source, names, table, bounds):
            for piece in (bytes(start - end), data):
                file.write(piece)
                crc = zlib.crc32(piece, crc)
            end = start + len(data)
        file.write(bytes(payload - end))
        crc = zlib.crc32(bytes(payload - end), crc)
        file.seek(0)
        file.write(binfile.header_page(table, payload, crc, path))


Bounds = dict[str, tuple[float, float]]


def _pieces(
    source: Source, names: dict[str, str], table: list[dict], bounds: Bounds
) -> Iterator[tuple[int, np.ndarray]]:
    """(offset in the payload, bytes) of everything in a file, in ascending order."""
    for entry in table:
        ours, kind, offset = entry["name"], formats.FORMATS[entry["format"]], entry["offset"]
        rest: list[list[np.ndarray]] = []
        for values in _chunks(source, names[ours]):
            encoded = formats.encode(values, kind.name, entry["factor"], names[ours], bounds.get(ours))
            data, *scales = packing.pack(encoded, kind, entry["layout"])
            yield offset, data.view(np.uint8)
            offset += data.nbytes
            rest.append([part for part in scales if part is not None])
        places = [place for place in (entry["scale"], entry["zero"]) if place]
        for (start, _), parts in zip(places, zip(*rest, strict=True), strict=True):
            yield start, np.concatenate(parts).view(np.uint8)


def _set_factors(source: Source, names: dict[str, str], table: list[dict]) -> Bounds:
    """Give every integer tensor of a file the factor of its expert, or its own; tensor → smallest and largest value."""
    bounds: Bounds = {}
    largest: dict[str, float] = {}
    scaled = [entry for entry in table if formats.FORMATS[entry["format"]].kind in ("int8", "int4")]
    for entry in scaled:
        low = high = 0.0
        for values in _chunks(source, names[entry["name"]]):
            wide = formats.to_f32(values)
            low, high = min(low, float(wide.min())), max(high, float(wide.max()))
        bounds[entry["name"]] = low, high
    whose = {entry["name"]: entry["name"].rpartition(".")[0] or entry["name"] for entry in scaled}
    for name, (low, high) in bounds.items():
        largest[whose[name]] = max(largest.get(whose[name], 0.0), -low, high)
    for entry in scaled:
        top = largest[whose[entry["name"]]]
        entry["factor"] = formats.expert_factor(top) if np.isfinite(top) else 1.0
    return bounds


def _chunks(source: Source, name: str) -> Iterator[np.ndarray]:
    """The rows of a tensor, a multiple of 16 at a time, as stored."""
    shape = source.entry(name).shape
    rows, cols = shape if len(shape) == 2 else (1, shape[0])
    step = max(1, CHUNK_VALUES // cols // packing.ROW_BLOCK) * packing.ROW_BLOCK
    for start in range(0, rows, step):
        yield source.rows(name, start, min(start + step, rows))


def _write_json(path: Path, data: dict) -> None:
    with AtomicFile(path) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())
