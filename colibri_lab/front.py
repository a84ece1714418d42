"""`colibri_lab.open`: from a name or path to an open model, converting a small checkpoint on the way."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from .errors import ModelError

CONVERT_LIMIT = 2 * 10**9  # bytes: larger checkpoints are converted when the user says so, not by surprise


def project_root() -> Path:
    """The checkout this package runs from (or, for an installed package, the folder above it)."""
    return Path(__file__).resolve().parent.parent


def find_model(path: str | os.PathLike) -> Path:
    """A directory as given, or relative to the project, or the name of a model in the project's `data/`."""
    tried = [Path(path), project_root() / path, project_root() / "data" / path]
    for candidate in tried:
        if candidate.is_dir():
            return candidate
    shipped = sorted(p.parent.name for p in (project_root() / "data").glob("*/config.json"))
    raise ModelError(
        f"{path}: no such directory, here or in the project; models that come with it: {', '.join(shipped) or 'none'}"
    )


def container_of(path: str | os.PathLike, progress: bool = True) -> Path:
    """The container to open for `path`: itself, or the converted copy of a checkpoint, made on first use.

    Copies live in `.colibri/containers` of the project (or in the user's cache folder), named by a hash of the source's
    file sizes and times. Raises `ModelError` for a checkpoint too large to convert unasked.
    """
    directory = find_model(path)
    files = sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".json", ".jinja"))
    weights = [p for p in files if p.suffix == ".safetensors"]
    if not weights:
        return directory
    size = sum(p.stat().st_size for p in weights)
    if size > CONVERT_LIMIT:
        raise ModelError(
            f"{directory}: a checkpoint of {size / 1e9:.1f} GB; convert it once with: colibri convert --input {directory} "
            "--output DIR, then open DIR"
        )
    from filelock import FileLock

    from .checkpoint.convert import convert
    from .kernels import cache_root

    stamp = "\n".join(f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files)
    name = f"{directory.resolve().name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    target = cache_root().parent / "containers" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not (target / "config.json").exists():
            convert(directory, target, progress=progress)
    return target


def open_model(path: str | os.PathLike = "colibri-tiny", **settings):
    """Open a model: a container, or a Hugging Face checkpoint of up to 2 GB, which is converted on first use.

        lab = colibri_lab.open("data/colibri-tiny", expert_cache_slots=16, policy="weighted-lru", threads=2)

    Settings are those of scope "open" in `colibri_lab.config.SETTINGS`. Returns a `Lab`; raises as `Lab` does, and
    `ModelError` for a path that is no model.
    """
    from .config import resolve
    from .lab import Lab

    resolve(settings, "open")  # before any work: a typo must not cost a conversion
    return Lab(container_of(path), **settings)
