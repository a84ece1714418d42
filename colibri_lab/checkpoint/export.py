"""One file to hand on: a container as a tar archive, never without its tokenizer."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from ..engine.tokenizer import Tokenizer
from ..errors import StorageError
from .container import Container
from .files import AtomicFile


def export(directory: str | os.PathLike, archive: str | os.PathLike, overwrite: bool = False) -> list[str]:
    """Write the container `directory` to the tar file `archive`; returns the names inside, which start with its name.

    Raises `ContainerError` when files are missing, `TokenizerError` when the tokenizer is missing or another model's,
    `StorageError` when the archive is there already or cannot be written.
    """
    if Path(archive).exists() and not overwrite:
        raise StorageError(f"{archive}: there is a file already; choose another name or give --overwrite")
    box = Container.open(directory, allow_fp32=True)
    Tokenizer(box.dir)
    top = box.dir.resolve().name
    extra = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "router_calib.bin",
        "README.md",
    )
    paths = [box.dir / name for name in extra if (box.dir / name).exists()]
    paths += [path for name in box.files for path in box.find(name)]
    with AtomicFile(archive) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in paths:
            tar.add(path, arcname=f"{top}/{Path(path).relative_to(box.dir).as_posix()}")
    return [f"{top}/{path.relative_to(box.dir).as_posix()}" for path in paths]
