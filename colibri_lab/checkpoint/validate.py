"""Everything that is wrong with a container, found in one pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..engine.tokenizer import fingerprint
from ..errors import ColibriError, ContainerError
from . import formats, layout, packing
from .binfile import Tensor, read_bin, read_header
from .container import Container, config_faults, is_container, read_container_config
from .files import Mismatch, read_object

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
    path = directory / "config.json"
    try:
        config, info = read_container_config(directory)
    except ColibriError as error:
        data = read_object(path, ContainerError) if is_container(directory) else {}
        return [_fault(path, e) for e in (config_faults(path, data) if data else [error])]
    box = Container(directory, config, info)
    faults: list[Fault] = []
    for name in tqdm(box.files, unit="file", disable=not progress):
        faults += _file_faults(box, name)
    faults += _calibration_faults(box)
    faults += _tokenizer_faults(box)
    faults += _extra_faults(box)
    return faults


def format_faults(faults: list[Fault]) -> str:
    """A line for each fault and a count."""
    lines = [f"{fault.file}: expected {fault.expected}, found {fault.found}" for fault in faults]
    return "\n".join([*lines, f"{len(faults)} fault{'' if len(faults) == 1 else 's'}"])


def _fault(path: Path, error: ColibriError) -> Fault:
    if isinstance(error, Mismatch):
        return Fault(error.file, error.expected, error.found)
    return Fault(str(path), "a sound file", str(error).removeprefix(f"{path}: "))


def _file_faults(box: Container, name: str) -> Iterator[Fault]:
    path = box.dir / name
    try:
        stored = box.find(name)[0]
        header = read_header(stored) if stored.suffix == ".bin" else None
        if header is not None and header.version:
            yield from map(partial(_fault, path), box.header_faults(name, header))
            file = read_bin(path)
        else:
            file = box.read(name)
            if "/expert_" in name:
                yield Fault(str(path), "version 1, which can be read into a slot", "version 0 or .npy")
    except ColibriError as error:
        yield _fault(path, error)
        return
    try:
        file.check_crc()
    except ColibriError as error:
        yield _fault(path, error)
    for tensor in file.tensors.values():
        yield from _number_faults(path, tensor)


def _number_faults(path: Path, tensor: Tensor) -> Iterator[Fault]:
    if tensor.scale is not None:
        scale = packing.scale_values(tensor.scale, tensor.kind)
        if not (np.isfinite(scale).all() and (scale >= 0).all()):
            yield Fault(
                str(path), f"tensor {tensor.name!r} with finite scales", "one that is negative, NaN or infinite"
            )
    elif not _all_finite(tensor):
        yield Fault(str(path), f"tensor {tensor.name!r} of finite numbers", "NaN or infinity")


def _all_finite(tensor: Tensor, chunk: int = 1 << 20) -> bool:
    elements = tensor.elements
    return all(
        np.isfinite(formats.to_f32(elements[start : start + chunk])).all() for start in range(0, len(elements), chunk)
    )


def _calibration_faults(box: Container) -> Iterator[Fault]:
    if box.router_calibration_path.exists():
        try:
            box.router_calibration()
        except ColibriError as error:
            yield _fault(box.router_calibration_path, error)


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
    known = {box.dir / name for name in (*box.files, *_OWN_FILES)} | {box.router_calibration_path}
    for name, specs in box.files.items():
        known |= {box.dir / layout.npy_path(name, tensor) for tensor in specs}
    for path in sorted(box.dir.rglob("*")):
        if path.is_file() and path not in known:
            yield Fault(str(path), "no such file in this container", f"{path.stat().st_size} bytes")
