"""The build cache: where it is, and files in it that are whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from colibri_lab.errors import StorageError

PACKAGE = Path(__file__).resolve().parent.parent
sources: ContextVar[Path | None] = ContextVar("sources", default=None)  # in place of cpp_dir(), inside sources_at()


@contextmanager
def sources_at(folder: Path) -> Iterator[None]:
    """Until the block ends, in this thread, kernels are those of another source folder."""
    token = sources.set(folder)
    try:
        yield
    finally:
        sources.reset(token)


def cpp_dir() -> Path:
    """Folder of the kernels' sources: `COLIBRI_CPP`, else the wheel's own copy, else `cpp` of the checkout."""
    if here := sources.get():
        return here
    if asked := os.environ.get("COLIBRI_CPP"):
        return Path(asked).resolve()
    shipped = PACKAGE / "_cpp"
    return shipped if shipped.is_dir() else PACKAGE.parent / "cpp"


def cache_root() -> Path:
    """Folder of all builds: `COLIBRI_CACHE`, else `.colibri/kernels` of a writable checkout, else the user's cache.

    It only grows, by the size of a module (about 0.3 MB) an edit, and may be deleted at any time.
    Raises StorageError, naming the folder, when none can be written.
    """
    if asked := os.environ.get("COLIBRI_CACHE"):
        return _writable(Path(asked).resolve())
    if not (PACKAGE / "_cpp").is_dir():
        try:
            return _writable(PACKAGE.parent / ".colibri" / "kernels")
        except StorageError:
            pass  # a checkout that is only lent to us
    return _writable(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colibri-lab" / "kernels")


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ".gitignore").exists():
            (folder / ".gitignore").write_text("*\n")
        reason = None if os.access(folder, os.W_OK) else "not writable"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise StorageError(
            f"{folder}: kernels cannot be cached here ({reason}); set COLIBRI_CACHE to a writable folder"
        )
    return folder


def put(made: Path, built: Path) -> None:
    """Move a finished file into the cache: first the file, then the record of its size and hash, each in one step."""
    built.parent.mkdir(parents=True, exist_ok=True)
    part = built.with_name(f"{built.name}.{os.getpid()}.part")
    shutil.copyfile(made, part)
    data = part.read_bytes()
    os.replace(part, built)
    part.write_text(json.dumps({"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}))
    os.replace(part, _record(built))
    made.unlink()


def intact(built: Path) -> bool:
    """Whether the file is there and is, byte for byte, the one that was put there."""
    try:
        record = json.loads(_record(built).read_bytes())
        data = built.read_bytes()
    except (OSError, ValueError):
        return False
    return record == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _record(built: Path) -> Path:
    return built.with_suffix(".json")
