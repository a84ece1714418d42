"""Container files: `.bin` version 0 and 1, read-only views of the tensors in them.

Version 0: 4 bytes ASCII "COLI", u32 payload bytes, then the payload, a plain stream of fp16. Version 1 keeps these
eight bytes and goes on: u32 version = 1, u32 bytes of the JSON table, u32 payload offset (a multiple of 4096), u32 crc32
of the payload, the table, zeros, and at the offset the payload, every tensor on a multiple of 64 bytes. All integers are
little-endian. The length of the file tells the versions apart.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ContainerError
from . import formats, layout, packing
from .files import AtomicFile, Mismatch, storage_errors

MAGIC, SWAPPED = b"COLI", b"ILOC"
PAGE, ALIGN = 4096, 64
PAYLOAD_LIMIT = 2**32 - 1
_HEAD = struct.Struct("<4sIIIII")
DAMAGED = "the file is damaged or cut short: convert again, or copy it again"


@dataclass(frozen=True, eq=False)
class Tensor:
    """One stored tensor. `data` is its bytes (uint8, one-dimensional, read-only); `offset` counts from the payload.

    `scale` and `zero` are as stored (`packing`), in the types of the format; None where it has none.
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
    def kind(self) -> formats.Format:
        return formats.FORMATS[self.format]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements with their scales and zero points."""
        return sum(part.nbytes for part in (self.data, self.scale, self.zero) if part is not None)

    @property
    def elements(self) -> np.ndarray:
        """The data in its own type and stored order, one-dimensional."""
        return self.data.view(self.kind.dtype)

    def encoded(self) -> formats.Encoded:
        """Values or codes, scales and zero points, row-major: `formats.Encoded` of (rows, cols)."""
        return packing.unpack(self.elements, self.scale, self.zero, self.shape, self.kind, self.layout)

    def array(self) -> np.ndarray:
        """Plain row-major float32 of `shape`."""
        return formats.decode(self.encoded(), self.format, self.factor).reshape(self.shape)

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Rows by number, as an embedding look-up: ids (n,) → float32 (n, cols)."""
        ids = np.asarray(ids)
        rows, cols = self.shape
        if ids.size and not (0 <= ids.min() and ids.max() < rows):
            raise IndexError(f"{self.name}: row numbers must be within [0, {rows}), found {ids.min()} to {ids.max()}")
        picked = packing.pick_rows(self.elements, self.scale, self.zero, self.shape, self.kind, self.layout, ids)
        return formats.decode(picked, self.format, self.factor)


@dataclass(frozen=True)
class BinHeader:
    """What is known of a `.bin` file before its payload is touched; `table` is None for version 0."""

    path: Path
    version: int
    payload_offset: int
    payload_bytes: int
    crc32: int | None
    table: tuple[dict, ...] | None


@dataclass(frozen=True, eq=False)
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
            raise Mismatch(self.path, f"payload checksum {self.header.crc32:08x}", f"{found:08x}", DAMAGED)


def plan_table(specs: dict[str, layout.Spec], number_formats: dict[str, str]) -> tuple[list[dict], int]:
    """Where each tensor goes: table entries in order, and the payload's bytes. `number_formats`: tensor → format."""
    table, end = [], 0

    def take(nbytes: int) -> int:
        nonlocal end
        start = -(-end // ALIGN) * ALIGN
        end = start + nbytes
        return start

    for name, spec in specs.items():
        format = number_formats[name]
        nbytes, scale_bytes, zero_bytes = packing.part_sizes(spec.shape, format, spec.layout)
        entry = dict(
            name=name, format=format, shape=list(spec.shape), layout=spec.layout, offset=take(nbytes), bytes=nbytes
        )
        entry["scale"] = [take(scale_bytes), scale_bytes] if scale_bytes else None
        entry["zero"] = [take(zero_bytes), zero_bytes] if zero_bytes else None
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
    with storage_errors(path), open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(PAGE)
        if len(head) < 8:
            raise Mismatch(path, "at least 8 bytes", str(size), DAMAGED)
        if head[:4] == SWAPPED:
            warnings.warn(f"{path}: the magic is byte-swapped ({SWAPPED.decode()}); read all the same", stacklevel=2)
        elif head[:4] != MAGIC:
            raise Mismatch(path, f"the magic {MAGIC!r}", repr(head[:4]), "this is not a container file")
        payload = int.from_bytes(head[4:8], "little")
        if size == 8 + payload:
            return BinHeader(path, 0, 8, payload, None, None)
        if len(head) < _HEAD.size or size < PAGE + payload:
            sizes = f"{8 + payload} bytes (version 0) or at least {PAGE + payload} (version 1)"
            raise Mismatch(path, f"{sizes} for a payload of {payload}", f"{size} bytes", DAMAGED)
        _, _, version, length, offset, crc = _HEAD.unpack(head[: _HEAD.size])
        if version != 1:
            raise Mismatch(path, "version 0 or 1", str(version), "a newer colibri-lab may read it")
        if offset % PAGE or not _HEAD.size + length <= offset or size != offset + payload:
            sizes = f"header of {_HEAD.size + length} bytes, payload of {payload} at {offset}, file of {size}"
            raise Mismatch(path, "header, payload offset and payload to fit the file", sizes, DAMAGED)
        head += file.read(max(0, _HEAD.size + length - len(head)))
    table = _check_table(path, head[_HEAD.size : _HEAD.size + length], payload)
    return BinHeader(path, 1, offset, payload, crc, table)


def _check_table(path: Path, text: bytes, payload: int) -> tuple[dict, ...]:
    """The tensor table, every byte range inside the payload and of the size its shape and format call for."""
    try:
        table = json.loads(text)
        names = [entry["name"] for entry in table]
        if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
            raise Mismatch(path, "a tensor table of different names", str(names), DAMAGED)
        for entry in table:
            _check_entry(path, entry, payload)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ContainerError):
            raise
        raise Mismatch(path, "a tensor table", f"{type(error).__name__}: {error}", DAMAGED) from None
    return tuple(table)


def _check_entry(path: Path, entry: dict, payload: int) -> None:
    where, shape, kind = f"tensor {entry['name']!r}", entry["shape"], formats.find_format(entry["format"], str(path))
    good_shape = 1 <= len(shape) <= 2 and all(type(n) is int and 0 < n < 2**31 for n in shape)
    if not good_shape or entry["layout"] not in layout.LAYOUTS or (entry["layout"] == "rows16" and len(shape) == 1):
        raise Mismatch(path, f"{where} of one or two dimensions", f"{shape}, layout {entry['layout']!r}", DAMAGED)
    nbytes, scale_bytes, zero_bytes = packing.part_sizes(shape, kind.name, entry["layout"])
    ranges = [(entry["offset"], entry["bytes"], nbytes)]
    for part, wanted in (("scale", scale_bytes), ("zero", zero_bytes)):
        if wanted:
            ranges.append((*entry[part], wanted))
        elif entry[part] is not None:
            raise Mismatch(path, f"{where} in {kind.name} without a {part}", repr(entry[part]), DAMAGED)
    for start, nbytes, wanted in ranges:
        if type(start) is not int or nbytes != wanted or start % ALIGN or not 0 <= start <= payload - nbytes:
            place = f"{wanted} bytes of {where} on a multiple of {ALIGN} inside a payload of {payload}"
            raise Mismatch(path, place, f"{nbytes} at {start}", DAMAGED)
    if not (isinstance(entry["factor"], float) and math.isfinite(entry["factor"])):
        raise Mismatch(path, f"{where} with a finite factor", repr(entry["factor"]), DAMAGED)


def read_bin(path: str | os.PathLike, specs: dict[str, layout.Spec] | None = None) -> BinFile:
    """Map a file read-only. A version-0 file has no table: `specs` says which tensors its fp16 stream holds, in order,
    row-major; without them it is one tensor "payload". Raises `ContainerError`, `StorageError`.
    """
    header = read_header(path)
    with storage_errors(path), open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    payload = np.frombuffer(mapped, np.uint8)[header.payload_offset :][: header.payload_bytes]
    table = header.table if header.version else _version0_table(header, specs)
    return BinFile(header, payload, {entry["name"]: tensor_view(payload, entry) for entry in table})


def _version0_table(header: BinHeader, specs: dict[str, layout.Spec] | None) -> list[dict]:
    shapes = {name: spec.shape for name, spec in specs.items()} if specs else {"payload": (header.payload_bytes // 2,)}
    wanted = sum(2 * math.prod(shape) for shape in shapes.values())
    if wanted != header.payload_bytes:
        raise Mismatch(header.path, f"{wanted} bytes of fp16 for {shapes}", f"{header.payload_bytes} bytes", DAMAGED)
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

    scale, zero, kind = entry.get("scale"), entry.get("zero"), formats.FORMATS[entry["format"]]
    return Tensor(
        name=entry["name"],
        format=entry["format"],
        shape=tuple(entry["shape"]),
        layout=entry["layout"],
        data=part(entry["offset"], entry["bytes"]),
        scale=part(*scale).view(kind.scale_dtype) if scale else None,
        zero=part(*zero).view(kind.dtype) if zero else None,
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
        raise Mismatch(path, "version 0", f"version {file.header.version}")
    return file.payload.view("<f2")
