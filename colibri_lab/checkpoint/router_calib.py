"""`router_calib.bin`: what is added to the router's logits of each MoE layer when the weights are quantised.

A container file of version 1 with a float32 tensor "layer_<L>" of shape (experts,) for every MoE layer.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from ..errors import ContainerError
from . import binfile, layout
from .files import AtomicFile, Mismatch

FILE = "router_calib.bin"


def _specs(config) -> dict[str, layout.Spec]:
    return {f"layer_{layer}": layout.Spec((config.num_experts,), "float", "rows") for layer in config.moe_layers}


def write(directory: Path, biases: dict[int, np.ndarray]) -> None:
    """Write the correction: layer → float32 (experts,), added to the router's logits."""
    specs = {f"layer_{layer}": layout.Spec(bias.shape, "float", "rows") for layer, bias in biases.items()}
    table, nbytes = binfile.plan_table(specs, dict.fromkeys(specs, "fp32"))
    payload = bytearray(nbytes)
    for entry, bias in zip(table, biases.values(), strict=True):
        payload[entry["offset"] : entry["offset"] + entry["bytes"]] = np.ascontiguousarray(bias, "<f4").tobytes()
    with AtomicFile(Path(directory) / FILE) as file:
        file.write(binfile.header_page(table, nbytes, zlib.crc32(payload), FILE) + payload)


def read(directory: Path, config) -> dict[int, np.ndarray]:
    """The correction of a container: layer → float32 (experts,). Raises `ContainerError` when the file does not fit."""
    path = Path(directory) / FILE
    file = binfile.read_bin(path)
    file.check_crc()
    wanted = _specs(config)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    if shapes != {name: spec.shape for name, spec in wanted.items()}:
        raise Mismatch(path, f"{len(wanted)} layers of {config.num_experts} experts", str(shapes), "calibrate again")
    biases = {int(name.removeprefix("layer_")): tensor.array() for name, tensor in file.tensors.items()}
    if not all(np.isfinite(bias).all() for bias in biases.values()):
        raise ContainerError(f"{path}: expected finite numbers, found NaN or infinity; calibrate again")
    return biases
