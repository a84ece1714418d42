"""Writing a container as planned, a few rows at a time: peak memory does not grow with the model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from ..errors import ContainerError, StorageError
from . import binfile, container, formats, packing
from .files import AtomicFile, read_object, storage_errors
from .plan import Plan
from .source import Source

CHUNK_VALUES = 1 << 18  # values of a tensor in memory at once
MARKER, LOCK = "convert.partial.json", "convert.lock"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Encoder:
    """How rows become codes: here each number to the nearest. `calibrate.Calibration` knows better."""

    def stretches(self, plan: Plan, files: list[str]) -> Iterable[list[str]]:
        """The files in the order, and in the portions, in which they are best written."""
        return [files]

    def encode(self, file: str, tensor: str, values: np.ndarray, entry: dict, name: str, bounds) -> formats.Encoded:
        """Some rows of a tensor; `entry` its line in the table, `name` what errors call it, `bounds` its extremes."""
        return formats.encode(values, entry["format"], entry["factor"], name, bounds)


def write_container(plan: Plan, encoder: Encoder, overwrite: bool = False, progress: bool = True) -> set[str]:
    """Write all files of a plan, or those that an interrupted run of the same plan left to do; returns those kept.

    Raises `ContainerError` for what is at the output already, `StorageError` when the disk is too small or fails.
    """
    if progress:
        print(plan.text(), file=sys.stderr)
    out = plan.output
    with storage_errors(out, "cannot be used for the container"):
        check_output(plan, overwrite)  # refuses before anything is made
        out.mkdir(parents=True, exist_ok=True)
        with _only_writer(out):
            kept = check_output(plan, overwrite)
            if not kept:
                _clear(out)
            _write_json(out / MARKER, {"plan": plan.id})
            _write_files(plan, encoder, [file for file in plan.files if file not in kept], progress)
            _write_json(out / "config.json", plan.config_json())
            (out / MARKER).unlink()
    return kept


def check_output(plan: Plan, overwrite: bool) -> set[str]:
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


def _write_files(plan: Plan, encoder: Encoder, todo: list[str], progress: bool) -> None:
    with tqdm(total=sum(plan.sizes[file] for file in todo), unit="B", unit_scale=True, disable=not progress) as bar:
        for files in encoder.stretches(plan, todo):
            for file in files:
                _write_file(plan, file, encoder)
                bar.update(plan.sizes[file])
    for name in TOKENIZER_FILES:
        if (plan.source.dir / name).exists():
            with AtomicFile(plan.output / name) as file:
                file.write((plan.source.dir / name).read_bytes())


def _write_file(plan: Plan, name: str, encoder: Encoder) -> None:
    """One `.bin` file: header, then tensor after tensor in chunks of rows, then the checksum into the header."""
    specs, names, path = plan.files[name], plan.names[name], plan.output / name
    table, payload = binfile.plan_table(specs, plan.tensor_formats[name])
    bounds = _set_factors(plan.source, names, table)
    crc = end = 0
    with AtomicFile(path, need=plan.sizes[name]) as file:
        file.write(binfile.header_page(table, payload, path=path))
        for start, data in _pieces(plan.source, encoder, name, names, table, bounds):
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
    source: Source, encoder: Encoder, file: str, names: dict[str, str], table: list[dict], bounds: Bounds
) -> Iterator[tuple[int, np.ndarray]]:
    """(offset in the payload, bytes) of everything in a file, in ascending order."""
    for entry in table:
        ours, kind, offset = entry["name"], formats.FORMATS[entry["format"]], entry["offset"]
        rest: list[list[np.ndarray]] = []
        for values in _chunks(source, names[ours]):
            encoded = encoder.encode(file, ours, values, entry, names[ours], bounds.get(ours))
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
