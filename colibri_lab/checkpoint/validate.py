"""Everything that is wrong with a container, found in one pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..engine.tokenizer import fingerprint
from ..errors import ColibriError
from . import formats, layout
from .container import Container, Tensor, read_container_config

_OWN_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"}


@dataclass(frozen=True)
class Fault:
    """One thing wrong: the file, what it should be and what it is."""

    file: str
    expected: str
    found: str


def validate(directory: str | os.PathLike, progress: bool = False) -> list[Fault]:
    """All faults of the container in `directory`: missing, short, damaged and extra files, headers, names, shapes and
    number formats that contradict config.json, checksums, NaN and infinity in routers, norms and scales, and a tokenizer
    that is not the model's. Reads every file once. An unusable config.json is reported alone: all else hangs on it.
    """
    directory = Path(directory)
    try:
        config, info = read_container_config(directory)
    except ColibriError as error:
        return [_fault(directory / "config.json", error)]
    box = Container(directory, config, info)
    faults: list[Fault] = []
    for name in tqdm(box.files, unit="file", disable=not progress):
        faults += _file_faults(box, name)
    faults += _tokenizer_faults(box)
    faults += _extra_faults(box)
    return faults


def format_faults(faults: list[Fault]) -> str:
    """A line for each fault and a count."""
    lines = [f"{fault.file}: expected {fault.expected}, found {fault.found}" for fault in faults]
    return "\n".join([*lines, f"{len(faults)} fault{'' if len(faults) == 1 else 's'}"])


def _fault(path: Path, error: ColibriError) -> Fault:
    """A fault from an error, whose message holds the file and often both sides already."""
    text = str(error).removeprefix(f"{path}: ")
    before, expected, rest = text.partition("expected ")
    wanted, found, what = rest.partition(", found ")
    if expected and found:
        return Fault(str(path), f"{before}{wanted}", what)
    return Fault(str(path), "a sound file", text)


def _file_faults(box: Container, name: str) -> Iterator[Fault]:
    path, specs = box.dir / name, box.files[name]
    try:
        file = box.read(name)
        if file.header.version:
            file.check_crc()
    except ColibriError as error:
        yield _fault(path, error)
        return
    for extra in sorted(set(file.tensors) - set(specs)):
        yield Fault(str(path), f"tensors {', '.join(specs)}", f"also {extra!r}")
    if "/expert_" in name:
        yield from _block_faults(box, path, file)
    for tensor, spec in specs.items():
        yield from _tensor_faults(box, path, file.header.version, file.tensors[tensor], spec)


def _block_faults(box: Container, path: Path, file) -> Iterator[Fault]:
    if file.header.version == 0:
        yield Fault(str(path), "version 1, which can be read into a slot", "version 0 or .npy")
    elif file.header.payload_bytes > box.slot_bytes:
        yield Fault(str(path), f"at most {box.slot_bytes} bytes of payload", f"{file.header.payload_bytes} bytes")


def _tensor_faults(box: Container, path: Path, version: int, tensor: Tensor, spec: layout.Spec) -> Iterator[Fault]:
    what = f"tensor {tensor.name}"
    format = box.info["formats"][spec.part]
    if version and (tensor.format, tensor.layout) != (format, spec.layout):
        yield Fault(str(path), f"{what} in {format}, layout {spec.layout}", f"{tensor.format}, layout {tensor.layout}")
    if tensor.scale is not None:
        if not (np.isfinite(tensor.scale).all() and (tensor.scale >= 0).all()):
            yield Fault(str(path), f"{what} with finite scales", "a scale that is negative, NaN or infinite")
    elif not _all_finite(tensor):
        yield Fault(str(path), f"{what} of finite numbers", "NaN or infinity")


def _all_finite(tensor: Tensor, chunk: int = 1 << 20) -> bool:
    elements = tensor.elements
    return all(
        np.isfinite(formats.to_f32(elements[start : start + chunk])).all() for start in range(0, len(elements), chunk)
    )


def _tokenizer_faults(box: Container) -> Iterator[Fault]:
    path = box.dir / "tokenizer.json"
    try:
        found = fingerprint(box.dir)
    except ColibriError as error:
        yield _fault(path, error)
        return
    for key, value in found.items():
        if value != box.info["tokenizer"].get(key):
            yield Fault(str(path), f"{key} {box.info['tokenizer'].get(key)}", str(value))


def _extra_faults(box: Container) -> Iterator[Fault]:
    known = {box.dir / name for name in (*box.files, *_OWN_FILES)}
    for name, specs in box.files.items():
        known |= {box.dir / layout.npy_path(name, tensor) for tensor in specs}
    for path in sorted(box.dir.rglob("*")):
        if path.is_file() and path not in known:
            yield Fault(str(path), "no such file in this container", f"{path.stat().st_size} bytes")
