"""Container files: `.bin` version 0 and 1, read-only views of the tensors in them.

Version 0: 4 bytes ASCII "COLI", u32 payload bytes, then the payload, a plain stream of fp16. Version 1 keeps these
eight bytes and goes on: u32 version = 1, u32 bytes of the JSON table, u32 payload offset (a multiple of 4096), u32 crc32
of the payload, the table, zeros, and at the offset the payload, every tensor on a multiple of 64 bytes. All integers are
little-endian. The length of the file tells the versions apart.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import shutil
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ContainerError, StorageError
from . import formats, layout

MAGIC, SWAPPED = b"COLI", b"ILOC"
PAGE, ALIGN = 4096, 64
PAYLOAD_LIMIT = 2**32 - 1
_HEAD = struct.Struct("<4sIIIII")


@dataclass(frozen=True)
class Tensor:
    """One stored tensor. `data` is its bytes (uint8, one-dimensional, read-only); `offset` counts from the payload.

    `scale` float32 and `zero` int8 have a number per stored row (padded with zeros to 16 in layout "rows16").
    """

    name: str
    format: str
    shape: tuple[int, ...]
    layout: str
    data: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None
    factor: float = 1.0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the elements with their scales and zero points."""
        return sum(part.nbytes for part in (self.data, self.scale, self.zero) if part is not None)

    @property
    def elements(self) -> np.ndarray:
        """The data in its own type and stored order, one-dimensional."""
        return self.data.view(formats.FORMATS[self.format].dtype)

    def array(self) -> np.ndarray:
        """Plain row-major float32 of `shape`."""
        rows, cols = self.shape if len(self.shape) == 2 else (1, self.shape[0])
        if self.layout == "rows16":
            data = formats.unpack_rows16(self.elements, rows, cols, formats.FORMATS[self.format].k_group)
        else:
            data = self.elements.reshape(rows, cols)
        return self._decode(data, slice(0, rows)).reshape(self.shape)

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Rows by number, as an embedding look-up: ids (n,) → float32 (n, cols)."""
        ids = np.asarray(ids)
        rows, cols = self.shape
        if ids.size and not (0 <= ids.min() and ids.max() < rows):
            raise IndexError(f"{self.name}: row numbers must be within [0, {rows}), found {ids.min()} to {ids.max()}")
        if self.layout == "rows":
            return self._decode(self.elements.reshape(rows, cols)[ids], ids)
        full_rows, full_cols = formats.padded(rows, cols)
        group, block = formats.FORMATS[self.format].k_group, formats.ROW_BLOCK
        stored = self.elements.reshape(full_rows // block, full_cols // group, block, group)
        return self._decode(stored[ids // block, :, ids % block].reshape(len(ids), full_cols)[:, :cols], ids)

    def _decode(self, data: np.ndarray, rows) -> np.ndarray:
        scale = None if self.scale is None else self.scale[rows]
        zero = None if self.zero is None else self.zero[rows]
        return formats.decode(formats.Encoded(data, scale, zero), self.format, self.factor)


@dataclass(frozen=True)
class BinHeader:
    """What is known of a `.bin` file before its payload is touched; `table` is None for version 0."""

    path: Path
    version: int
    payload_offset: int
    payload_bytes: int
    crc32: int | None
    table: tuple[dict, ...] | None


@dataclass(frozen=True)
class BinFile:
    """A mapped file and the tensors in it; arrays are views of the read-only mapping."""

    header: BinHeader
    payload: np.ndarray
    tensors: dict[str, Tensor]

    @property
    def path(self) -> Path:
        return self.header.path

    def check_crc(self) -> None:
        """Reads the whole payload. Raises `ContainerError` when it is not what was written."""
        found = zlib.crc32(self.payload)
        if self.header.crc32 is not None and found != self.header.crc32:
            raise ContainerError(
                f"{self.path}: checksum of the payload: expected {self.header.crc32:08x}, found {found:08x}; "
                "the file is damaged, convert again"
            )


def plan_table(specs: dict[str, layout.Spec], number_formats: dict[str, str]) -> tuple[list[dict], int]:
    """Where each tensor goes: table entries in order, and the payload's bytes. `number_formats`: part → format."""
    table, end = [], 0

    def take(nbytes: int) -> int:
        nonlocal end
        start = -(-end // ALIGN) * ALIGN
        end = start + nbytes
        return start

    for name, spec in specs.items():
        format = number_formats[spec.part]
        rows, _ = formats.stored_shape(spec.shape, spec.layout)
        nbytes = formats.stored_bytes(spec.shape, format, spec.layout)
        entry = dict(
            name=name, format=format, shape=list(spec.shape), layout=spec.layout, offset=take(nbytes), bytes=nbytes
        )
        scaled = formats.FORMATS[format].scaled
        entry["scale"] = [take(4 * rows), 4 * rows] if scaled else None
        entry["zero"] = [take(rows), rows] if scaled else None
        entry["factor"] = 1.0
        table.append(entry)
    return table, -(-end // ALIGN) * ALIGN


def header_page(table: list[dict], payload_bytes: int, crc32: int = 0, path: str | os.PathLike = "file") -> bytes:
    """The bytes of a version-1 file before its payload."""
    if payload_bytes > PAYLOAD_LIMIT:
        raise ContainerError(
            f"{path}: would hold {payload_bytes} bytes; a .bin file holds at most {PAYLOAD_LIMIT}: use a smaller expert "
            "block size or number format"
        )
    text = json.dumps(table, separators=(",", ":")).encode()
    offset = -(-(_HEAD.size + len(text)) // PAGE) * PAGE
    head = _HEAD.pack(MAGIC, payload_bytes, 1, len(text), offset, crc32) + text
    return head + bytes(offset - len(head))


def read_header(path: str | os.PathLike) -> BinHeader:
    """The header of a `.bin` file, checked against the file's size. Raises `ContainerError`, `StorageError`."""
    path = Path(path)
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(PAGE)
            if len(head) < 8:
                raise ContainerError(f"{path}: expected at least 8 bytes, found {size}")
            if head[:4] == SWAPPED:
                warnings.warn(
                    f"{path}: the magic is byte-swapped ({SWAPPED.decode()}); read all the same", stacklevel=2
                )
            elif head[:4] != MAGIC:
                raise ContainerError(f"{path}: expected the magic {MAGIC!r}, found {head[:4]!r}; not a container file")
            payload = int.from_bytes(head[4:8], "little")
            if size == 8 + payload:
                return BinHeader(path, 0, 8, payload, None, None)
            if len(head) < _HEAD.size or size < PAGE + payload:
                raise ContainerError(
                    f"{path}: payload of {payload} bytes: expected a file of {8 + payload} bytes (version 0) or at least "
                    f"{PAGE + payload} (version 1), found {size}; the file is cut short or damaged"
                )
            _, _, version, length, offset, crc = _HEAD.unpack(head[: _HEAD.size])
            if version != 1:
                raise ContainerError(f"{path}: expected version 0 or 1, found {version}")
            if offset % PAGE or not _HEAD.size + length <= offset or size != offset + payload:
                raise ContainerError(
                    f"{path}: header of {_HEAD.size + length} bytes, payload of {payload} bytes at {offset}: impossible in "
                    f"a file of {size} bytes"
                )
            head += file.read(max(0, _HEAD.size + length - len(head)))
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    table = _check_table(path, head[_HEAD.size : _HEAD.size + length], payload)
    return BinHeader(path, 1, offset, payload, crc, table)


def _check_table(path: Path, text: bytes, payload: int) -> tuple[dict, ...]:
    """The tensor table, every byte range inside the payload and of the size its shape and format call for."""
    try:
        table = json.loads(text)
        seen = set()
        for entry in table:
            name, shape = entry["name"], entry["shape"]
            where = f"{path}: tensor {name!r}"
            if not isinstance(name, str) or name in seen:
                raise ContainerError(f"{where} is named twice or not by a string")
            seen.add(name)
            good_shape = len(shape) in (1, 2) and all(type(n) is int and 0 < n < 2**31 for n in shape)
            if (
                not good_shape
                or entry["layout"] not in ("rows", "rows16")
                or (entry["layout"] == "rows16" and len(shape) != 2)
            ):
                raise ContainerError(f"{where}: impossible shape {shape} in layout {entry['layout']!r}")
            kind = formats.find_format(entry["format"], where)
            rows, _ = formats.stored_shape(shape, entry["layout"])
            ranges = [(entry["offset"], entry["bytes"], formats.stored_bytes(shape, kind.name, entry["layout"]))]
            if kind.scaled:
                ranges += [(*entry["scale"], 4 * rows), (*entry["zero"], rows)]
            for start, nbytes, wanted in ranges:
                if type(start) is not int or nbytes != wanted or start % ALIGN or not 0 <= start <= payload - nbytes:
                    raise ContainerError(
                        f"{where}: {wanted} bytes are wanted on a multiple of {ALIGN} inside a payload of {payload}, found "
                        f"{nbytes} bytes at {start}"
                    )
            if not (isinstance(entry["factor"], float) and math.isfinite(entry["factor"])):
                raise ContainerError(f"{where}: expected a finite factor, found {entry['factor']!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ContainerError):
            raise
        raise ContainerError(f"{path}: damaged tensor table: {error!r}") from None
    return tuple(table)


def read_bin(path: str | os.PathLike, specs: dict[str, layout.Spec] | None = None) -> BinFile:
    """Map a file read-only. A version-0 file has no table: `specs` says which tensors its fp16 stream holds, in order,
    row-major; without them it is one tensor "payload". Raises `ContainerError`, `StorageError`.
    """
    header = read_header(path)
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    payload = np.frombuffer(mapped, np.uint8)[header.payload_offset :][: header.payload_bytes]
    table = header.table if header.version else _version0_table(header, specs)
    return BinFile(header, payload, {entry["name"]: tensor_view(payload, entry) for entry in table})


def _version0_table(header: BinHeader, specs: dict[str, layout.Spec] | None) -> list[dict]:
    shapes = {name: spec.shape for name, spec in specs.items()} if specs else {"payload": (header.payload_bytes // 2,)}
    wanted = sum(2 * math.prod(shape) for shape in shapes.values())
    if wanted != header.payload_bytes:
        raise ContainerError(
            f"{header.path}: expected {wanted} bytes of fp16 for {shapes}, found {header.payload_bytes}"
        )
    table, offset = [], 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        table.append(
            dict(name=name, format="fp16", shape=list(shape), layout="rows", offset=offset, bytes=nbytes, factor=1.0)
        )
        offset += nbytes
    return table


def tensor_view(payload: np.ndarray, entry: dict) -> Tensor:
    """The tensor of a checked table entry in a payload (uint8): views, no copies."""

    def part(start: int, nbytes: int) -> np.ndarray:
        return payload[start : start + nbytes]

    scale, zero = entry.get("scale"), entry.get("zero")
    return Tensor(
        name=entry["name"],
        format=entry["format"],
        shape=tuple(entry["shape"]),
        layout=entry["layout"],
        data=part(entry["offset"], entry["bytes"]),
        scale=part(*scale).view("<f4") if scale else None,
        zero=part(*zero).view(np.int8) if zero else None,
        factor=entry["factor"],
        offset=entry["offset"],
    )


def write_v0(path: str | os.PathLike, values: np.ndarray) -> None:
    """Write values as a version-0 file: fp16, row-major."""
    data = np.ascontiguousarray(values, "<f2").tobytes()
    with AtomicFile(path) as file:
        file.write(MAGIC + struct.pack("<I", len(data)) + data)


def read_v0(path: str | os.PathLike) -> np.ndarray:
    """The values of a version-0 file: float16, one-dimensional, read-only."""
    file = read_bin(path)
    if file.header.version:
        raise ContainerError(f"{path}: expected version 0, found version {file.header.version}")
    return file.payload.view("<f2")


class AtomicFile:
    """A file written beside its final name, forced to disk and renamed when complete; a failure leaves nothing behind.

    The system's errors become `StorageError` with the file's name, the bytes it needs (if told) and those free.
    """

    def __init__(self, path: str | os.PathLike, need: int | None = None):
        self.path, self.need = Path(path), need
        self.temporary = self.path.with_name(self.path.name + ".tmp")

    def __enter__(self):
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.temporary, "w+b")
        except OSError as error:
            raise self._storage_error(error) from error
        return self.file

    def __exit__(self, kind, error, trace):
        try:
            try:
                if kind is None:
                    self.file.flush()
                    os.fsync(self.file.fileno())
            finally:
                self.file.close()
            if kind is None:
                os.replace(self.temporary, self.path)
        except OSError as late:
            error = error or late
        finally:
            self.temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise self._storage_error(error) from error

    def _storage_error(self, error: OSError) -> StorageError:
        what = f"{self.path}: cannot be written: {error.strerror}"
        if error.errno == errno.ENOSPC:
            need = "" if self.need is None else f"{self.need} bytes needed, "
            what += f": {need}{shutil.disk_usage(self.path.parent).free} free; make room and repeat the command"
        return StorageError(what)
