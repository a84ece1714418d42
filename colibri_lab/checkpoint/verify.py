"""Is a container what its checkpoint says? A sample of experts compared number by number."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import ContainerError
from . import formats, layout
from .binfile import Tensor
from .container import Container
from .plan import open_source, source_names


def verify_container(output: str | os.PathLike, input: str | os.PathLike, samples: int = 8, seed: int = 0) -> list[str]:
    """Compare `samples` experts of container `output`, drawn by `seed`, and their routers with the source `input`.

    Returns the files looked at. Raises `ContainerError` naming the file, the tensor and the first difference beyond what
    the number format allows, and for a checksum that does not fit. Calibrated weights are not the nearest ones: they must lie
    within a scale's step in the mean, and each within 16.
    """
    box = Container.open(output, allow_fp32=True)
    source, _ = open_source(input)
    names = source_names(source, box.config, box.files)
    experts = [(layer, expert) for layer in box.config.moe_layers for expert in range(box.config.num_experts)]
    drawn = sorted(np.random.default_rng(seed).permutation(len(experts))[:samples])
    wanted: dict[str, set[str]] = {}
    for layer, expert in (experts[i] for i in drawn):
        block = layout.block_path(layer, expert // box.block_size, box.block_size)
        wanted.setdefault(block, set()).update(f"{expert}.{part}" for part in ("gate", "up", "down"))
        wanted[layout.router_path(layer)] = set(box.files[layout.router_path(layer)])
    for file, tensors in wanted.items():
        stored = box.read(file)
        stored.check_crc()
        for name in sorted(tensors):
            values = formats.to_f32(source.rows(names[file][name]))
            _compare(stored.path, stored.tensors[name], values, bool(box.info.get("calibration")))
    return [str(box.dir / file) for file in wanted]


def _compare(path: Path, tensor: Tensor, source: np.ndarray, calibrated: bool) -> None:
    found = tensor.array().reshape(source.shape)
    size = np.abs(source)
    if tensor.kind.scaled:
        scale = tensor.encoded().scale * np.float32(tensor.factor)
        step = formats.spread(scale, tensor.kind, source.shape[1])
        if calibrated:
            return _compare_calibrated(path, tensor, np.abs(found - source) / step)
        # E2M1 has gaps of up to two steps, and what its scale does not reach is cut to six
        allowed = (
            np.maximum(step, size - 6 * step) if tensor.format == "mxfp4" else 0.5 * step + np.spacing(size + step)
        )
    else:
        # half a unit in the last place, and half the least subnormal of fp16
        allowed = {"fp32": 0 * size, "fp16": size * 2.0**-11 + 2.0**-25, "bf16": size * 2.0**-8}[tensor.format]
    bad = ~(np.abs(found - source) <= allowed)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ContainerError(
            f"{path}: tensor {tensor.name} at [{row}, {column}]: expected {source[row, column]:.9g} within "
            f"{allowed[row, column]:.3g}, found {found[row, column]:.9g}; convert again"
        )


def _compare_calibrated(path: Path, tensor: Tensor, steps: np.ndarray) -> None:
    """steps (rows, cols): how far each weight is from the source's, in units of its scale."""
    mean = float(np.sqrt((steps**2).mean()))
    if not (mean <= 1 and steps.max() <= 16):
        raise ContainerError(
            f"{path}: tensor {tensor.name}: calibrated weights must lie within 1 step of the source in the root mean square and "
            f"16 each, found {mean:.3g} and {steps.max():.3g}; convert again"
        )
