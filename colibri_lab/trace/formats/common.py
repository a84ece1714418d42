"""What every importer shares: the first bytes of a file, numbered lines, padded id matrices and one way to complain."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from ...errors import StorageError, TraceError
from ..table import PAD

HEAD_BYTES = 65536


def bad(path, where: str, expected: str, found) -> TraceError:
    """`file: where: expected …, found …`, the one shape of every complaint about a foreign file."""
    return TraceError(f"{path}: {where}: expected {expected}, found {found}")


class Head:
    """The start of a file, enough to tell its format. Raises on a missing or empty file."""

    def __init__(self, path):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self.bytes = file.read(HEAD_BYTES)
        except OSError as error:
            raise StorageError(f"{path}: cannot read trace: {error.strerror or error}") from error
        if not self.bytes:
            raise TraceError(f"{path}: the file is empty (0 bytes); the run that wrote it recorded nothing")

    @cached_property
    def lines(self) -> list[str]:
        """Non-blank text lines of the head, or none when it is binary."""
        if b"\0" in self.bytes:
            return []
        text = self.bytes.decode("utf-8", "replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    @property
    def line(self) -> str:
        return self.lines[0] if self.lines else ""

    @cached_property
    def members(self) -> list[str]:
        """File names inside, when this is a zip archive (npz, torch.save)."""
        if self.bytes[:4] != b"PK\x03\x04":
            return []
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.namelist()
        except zipfile.BadZipFile as error:
            raise TraceError(f"{self.path}: damaged zip archive: {error}") from error


@contextmanager
def whole_file(path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block succeeds. Raises `StorageError` naming `path`."""
    path = Path(path)
    part = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot write trace: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def numbered_lines(path, comment: str | None = None) -> Iterator[tuple[int, str]]:
    """(line number from 1, stripped text) of every line that is not blank or a comment."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if line and not (comment and line.startswith(comment)):
                yield number, line


def pad_rows(rows: list, fill=PAD, dtype=np.uint16) -> np.ndarray:
    """(n, k) from lists of up to k values, the short ones filled up at the end."""
    k = max(map(len, rows))
    out = np.full((len(rows), k), fill, dtype)
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return out


def expert_range(path, largest: int, num_experts: int | None, notes: list[str]) -> int:
    """`num_experts`, checked against the largest id seen, or guessed from it with a note."""
    if num_experts is None:
        notes.append(f"num_experts {largest + 1} is the largest id seen plus one; pass num_experts= if you know it")
        return largest + 1
    if largest >= num_experts:
        raise bad(path, "expert ids", f"below num_experts {num_experts}", largest)
    return num_experts


def descending(weights: np.ndarray) -> bool:
    """Whether every row's weights fall (or stay) from left to right: the sign of ids in rank order."""
    return bool((np.diff(weights, axis=1) <= 1e-6).all())


def drop_dense_layers(ids: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """ids (tokens, layers, k) without the placeholder layers that engines fill with zeros or -1, and those left."""
    k = ids.shape[2]
    empty = (ids < 0).all((0, 2)) | ((ids == 0).all((0, 2)) & (k > 1))
    kept = np.flatnonzero(~empty)
    return ids[:, kept], kept.tolist()
