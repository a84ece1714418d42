"""Files on disk: written whole or not at all, read without surprises, failing with the file's name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import ColibriError, ContainerError, StorageError


class Mismatch(ContainerError):
    """A file that is not what it should be, with both sides for `validate` to list."""

    def __init__(self, file: str | os.PathLike, expected: str, found: str, advice: str = ""):
        super().__init__(f"{file}: expected {expected}, found {found}{'; ' if advice else ''}{advice}")
        self.file, self.expected, self.found = str(file), expected, found


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike, doing: str = "cannot be read") -> Iterator[None]:
    """The system's errors inside become `StorageError` with the file's name."""
    try:
        yield
    except ColibriError:
        raise
    except OSError as error:
        raise StorageError(f"{error.filename or path}: {doing}: {error.strerror or error}") from error


def read_object(path: Path, error: type[ColibriError], hint: str = "") -> dict:
    """The object in a JSON file. Raises `error` naming the file when it is missing (with the hint), not JSON or not an
    object, `StorageError` when it cannot be read."""
    try:
        with storage_errors(path):
            data = json.loads(path.read_bytes())
    except StorageError as reason:
        if isinstance(reason.__cause__, (FileNotFoundError, NotADirectoryError)):
            raise error(f"{path}: no such file{'; ' if hint else ''}{hint}") from None
        raise
    except (ValueError, RecursionError) as reason:
        raise error(f"{path}: not JSON: {reason}") from None
    if not isinstance(data, dict):
        raise error(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


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
