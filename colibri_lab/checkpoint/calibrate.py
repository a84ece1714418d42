"""Calibration: texts that show which errors matter, and what is done with them.

A calibration file is a JSON array of objects with a field "text". With it, matrices are rounded by GPTQ (gptq.py) against
the inputs that they meet on these texts, and the routers get a correction (router_calibration.py). Large models are
calibrated a few layers at a time, one pass over the texts for each, so that the moments fit into memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..errors import ModelError
from . import formats, layout
from .files import storage_errors
from .gptq import Rounding
from .moments import Moments
from .plan import Plan
from .writer import Encoder

FULL_SIZE = 1024  # texts; a file with fewer is enough for small models only
MOMENT_BYTES = 2 * 10**9


def read_calibration(path: str | os.PathLike) -> list[str]:
    """The texts of a calibration file. Fewer than 1024 are warned about.

    Raises `ModelError` naming the file and the first entry that is no object with a text, `StorageError`.
    """
    path = Path(path)
    with storage_errors(path):
        data = path.read_bytes()
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ModelError(f'{path}: expected a JSON array of {{"text": …}}, found {type(entries).__name__}')
    if not entries:
        raise ModelError(f"{path}: expected at least one text, found an empty array")
    for number, entry in enumerate(entries):
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text.strip():
            found = entry if not isinstance(entry, dict) else {"text": text} if "text" in entry else sorted(entry)
            raise ModelError(f"{path}: entry {number}: expected an object with a text, found {str(found)[:80]}")
    if len(entries) < FULL_SIZE:
        warnings.warn(f"{path}: {len(entries)} texts; {FULL_SIZE} or more are advised", stacklevel=2)
    return [entry["text"] for entry in entries]


class Calibration(Encoder):
    """Rounds against what a 16-bit container of the model computes on the texts of a file.

    `info` goes into config.json: what was rounded by, and how much of it. Use `opened` around the writing.
    """

    def __init__(self, path: str | os.PathLike, tokens: int = 65536, progress: bool = True):
        self.texts, self.tokens, self.progress = read_calibration(path), tokens, progress
        digest = hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()
        self.info = {"method": "gptq", "texts": len(self.texts), "most_tokens": tokens, "sha256": digest}
        self._last: tuple[tuple, Rounding] | None = None

    @contextlib.contextmanager
    def opened(self, container: Path) -> Iterator[None]:
        """Open the 16-bit container to calibrate with."""
        from ..lab import Lab
        from ..quality.texts import Text, windows

        self.lab = Lab(container, allow_fp32=True)
        texts = [Text(str(number), text) for number, text in enumerate(self.texts)]
        self.windows = windows(texts, self.lab.tokenizer, min(256, self.lab.settings["max_seq_len"]), self.tokens)
        yield

    def stretches(self, plan: Plan, files: list[str]) -> Iterator[list[str]]:
        """Files of as many layers at a time as there is room for moments, each after a pass over the texts."""
        room = max(1, MOMENT_BYTES // Moments.bytes_per_layer(plan.config))
        by_layer: dict[int | None, list[str]] = {}
        for file in files:
            by_layer.setdefault(layout.layer_of(file), []).append(file)
        rest = by_layer.pop(None, [])
        layers = sorted(by_layer)
        for first in range(0, max(len(layers), 1), room):
            chosen = [*rest, *(file for layer in layers[first : first + room] for file in by_layer[layer])]
            self._collect(plan, chosen)
            yield chosen
            rest = []

    def _collect(self, plan: Plan, files: list[str]) -> None:
        from ..engine.taps import tapped

        scaled = [
            (file, tensor)
            for file in files
            for tensor, name in plan.tensor_formats[file].items()
            if formats.FORMATS[name].scaled
        ]
        self._moments, self._last = Moments(self.lab.container, scaled), None
        if not scaled:
            return
        with tapped(self.lab.engine, self._moments):
            for window in tqdm(self.windows, desc="calibrating", unit="window", disable=not self.progress):
                self.lab.logits(window.ids)
        self._moments.finish()

    def encode(self, file: str, tensor: str, values: np.ndarray, entry: dict, name: str, bounds) -> formats.Encoded:
        kind = formats.FORMATS[entry["format"]]
        if not kind.scaled:
            return super().encode(file, tensor, values, entry, name, bounds)
        wide = formats.to_f32(values)
        formats.check_finite(wide, name)
        return self._rounding(self._moments.site(file, tensor), wide.shape[1]).encode(
            wide, kind, entry["factor"], bounds
        )

    def _rounding(self, site: tuple | None, cols: int) -> Rounding:
        """For what reads this site; where nothing is known, as of an embedding, all columns count alike. The last one is kept,
        since a matrix comes in portions and neighbours read the same."""
        if self._last is None or self._last[0] != (site, cols):
            moment = None if site is None else self._moments.at(site)
            self._last = (site, cols), Rounding(np.eye(cols) if moment is None else moment)
        return self._last[1]

    def calibrate_router(self, directory: Path) -> None:
        """Write the routers' correction beside the quantised weights."""
        from ..lab import Lab
        from .router_calibration import calibrate_router

        calibrate_router(Lab(directory, router_calib=False), self.lab, self.windows, self.progress)
