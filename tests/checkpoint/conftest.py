from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from colibri_lab.checkpoint.convert import convert

ORACLE = Path(__file__).resolve().parent.parent / "oracle"
FAMILIES = ["qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "glm4_moe"]


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Directory of the tiny reference checkpoints, one directory per family."""
    return ORACLE


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """converted(family, **arguments) → a container made once per session; read it, do not change it."""
    made = {}

    def make(family: str, **arguments) -> Path:
        key = (family, *sorted(arguments.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("container") / family
            convert(ORACLE / family, made[key], progress=False, **arguments)
        return made[key]

    return make


@pytest.fixture
def container(converted, tmp_path) -> Path:
    """A bf16 container of its own to damage."""
    return Path(shutil.copytree(converted("glm4_moe"), tmp_path / "container"))


@pytest.fixture
def checkpoint(oracle, tmp_path) -> Path:
    """A checkpoint of its own to damage."""
    return Path(shutil.copytree(oracle / "glm4_moe", tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def edit_json():
    """edit_json(path, change): apply `change` to the object in a JSON file."""

    def edit(path: Path, change) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit


@pytest.fixture(scope="session")
def write_safetensors():
    """write_safetensors(path, {name: (dtype name, array)}): the format written down a second time."""

    def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        table, offset = {}, 0
        for name, (dtype, array) in tensors.items():
            span = [offset, offset + array.nbytes]
            table[name] = dict(dtype=dtype, shape=list(array.shape), data_offsets=span)
            offset = span[1]
        header = json.dumps(table).encode()
        body = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
        path.write_bytes(struct.pack("<Q", len(header)) + header + body)

    return write


@pytest.fixture(scope="session")
def read_safetensors():
    """read_safetensors(directory) → {name: float32 array}, bf16 widened: independent of the package's reader."""

    def read(directory: Path) -> dict[str, np.ndarray]:
        tensors = {}
        for path in directory.glob("*.safetensors"):
            raw = path.read_bytes()
            base = 8 + struct.unpack("<Q", raw[:8])[0]
            for name, item in json.loads(raw[8:base]).items():
                if name == "__metadata__":
                    continue
                data = raw[base + item["data_offsets"][0] : base + item["data_offsets"][1]]
                if item["dtype"] == "BF16":
                    values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
                else:
                    values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[item["dtype"]]).astype("<f4")
                tensors[name] = values.reshape(item["shape"])
        return tensors

    return read
