"""A container: the directory of `.bin` files and config.json that a model is opened from.

In place of a `.bin` file, its tensors may lie as .npy (names: `layout.npy_path`), or the `.bin` may be of version 0.
Expert blocks cannot be read into slots that way: `colibri convert` with the container as input packs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..config import ModelConfig
from ..errors import ContainerError, ModelError
from . import formats, layout, packing
from .binfile import ALIGN, BinFile, BinHeader, Tensor, plan_table, read_bin, read_header, tensor_view
from .families import check_config
from .files import Mismatch, read_object, storage_errors

__all__ = ["Container", "BinFile", "BinHeader", "Tensor", "read_bin", "read_container_config", "tensor_view"]

FORMAT_VERSION = 1
MIXED = "mixed"  # a part whose matrices differ: each file's own table says which format each has
PLANNED = tuple(name for name in formats.FORMATS if name != "fp32")  # what a mixture may be of
AGAIN = "convert the checkpoint again"
FOREIGN = (".safetensors", ".pt", ".pth", ".pkl", ".gguf")
_FIELDS = {
    "format_version": int, "source": str, "expert_block_size": int, "formats": dict, "tokenizer": dict,
    "slot_bytes": int,
}  # fmt: skip


class Container:
    """A container directory. Opening it reads config.json and looks at file names; weights are mapped on demand.

    `config` ModelConfig; `info` the "colibri" object of config.json; `block_size` experts per block; `blocks` blocks
    per layer; `slot_bytes` bytes of the largest block's payload, rounded up to 4096.
    """

    def __init__(self, directory: Path, config: ModelConfig, info: dict):
        self.dir, self.config, self.info = directory, config, info
        self.block_size: int = info["expert_block_size"]
        self.blocks = layout.blocks_per_layer(config, self.block_size)
        self.slot_bytes: int = info["slot_bytes"]
        self.files = layout.container_files(config, self.block_size)

    @classmethod
    def open(cls, directory: str | os.PathLike, allow_fp32: bool = False) -> Container:
        """Raises `ContainerError` naming what is missing or wrong."""
        directory = Path(directory)
        config, info = read_container_config(directory)
        for part, format in info["formats"].items():
            if format == "fp32" and part != "float" and not allow_fp32:
                raise ContainerError(
                    f"{directory}: {part} matrices are fp32, which is for tests; convert to bf16, fp16 or int8, or open "
                    "with allow_fp32=True"
                )
        box = cls(directory, config, info)
        for name in box.files:
            box.find(name)
        return box

    def find(self, name: str) -> list[Path]:
        """The files that hold the tensors of `.bin` file `name`: itself or its .npy stand-ins.

        Raises `ContainerError` naming what is missing.
        """
        with storage_errors(self.dir / name):
            if (self.dir / name).exists():
                return [self.dir / name]
            paths = [self.dir / layout.npy_path(name, tensor) for tensor in self.files[name]]
            missing = [path for path in paths if not path.exists()]
        if missing:
            found = (
                "nothing"
                if len(missing) == len(paths)
                else f"only some .npy in its place: {missing[0].name} is missing"
            )
            raise Mismatch(self.dir / name, "a file", found, "copy the whole directory or convert again")
        return paths

    def dense(self, name: str) -> BinFile:
        """`name` is "embed", "head" (absent when tied), "final" or "layer_<L>"."""
        return self.read(f"dense/{name}.bin")

    def router(self, layer: int) -> BinFile:
        """ "router" (experts, hidden) and, where the family has one, "correction_bias" (experts,), both float32."""
        return self.read(layout.router_path(layer))

    @property
    def router_calibration_path(self) -> Path:
        """Where the routers' correction is, if it is there (router_calib.py)."""
        return self.dir / "router_calib.bin"

    def router_calibration(self) -> dict[int, np.ndarray]:
        """MoE layer → float32 (experts,), what calibration adds to the router's logits."""
        from .router_calib import read

        return read(self.dir, self.config)

    @property
    def quantised(self) -> bool:
        """Whether weights were rounded to integers here (MXFP4 came so)."""
        return any(name == MIXED or name.startswith("int") for name in self.info["formats"].values())

    def block_path(self, layer: int, block: int) -> Path:
        return self.dir / layout.block_path(layer, block, self.block_size)

    def block_layout(self, layer: int, block: int) -> BinHeader:
        """Payload offset, payload bytes and tensor table of an expert block, without reading the payload.

        `tensor_view(payload, entry)` is the tensor of a table entry once the payload is in a slot.
        """
        path = self.block_path(layer, block)
        header = read_header(path) if os.path.exists(path) else None
        if header is None or not header.version:
            raise ContainerError(
                f"{path}: experts stored as .npy or version 0 cannot be loaded into slots; pack them with: "
                f"colibri convert --input {self.dir} --output DIR"
            )
        for error in self.header_faults(layout.block_path(layer, block, self.block_size), header):
            raise error
        return header

    def block(self, layer: int, block: int) -> BinFile:
        """The block mapped, for looking at its tensors."""
        return self.read(layout.block_path(layer, block, self.block_size))

    def expert(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """ "gate" (width, hidden), "up" (width, hidden), "down" (hidden, width) of one expert, row-major float32."""
        tensors = self.block(layer, expert // self.block_size).tensors
        return {part: tensors[f"{expert}.{part}"].array() for part in ("gate", "up", "down")}

    def read(self, name: str) -> BinFile:
        """A file by its path inside the container, with the tensors and layouts that `layout` calls for.

        A version-1 file is mapped. Version 0 and .npy are copied into memory in that form: fp16 stays fp16, fp32 becomes
        the container's own format for that part (fp16 where that is quantised).
        """
        specs, stored = self.files[name], self.find(name)
        if stored[0].suffix == ".npy":
            values = {tensor: _read_npy(path) for tensor, path in zip(specs, stored, strict=True)}
            file = self._in_memory(name, values)
        else:
            file = read_bin(stored[0], specs)
            for error in self.header_faults(name, file.header) if file.header.version else ():
                raise error
            if file.header.version == 0:
                file = self._in_memory(name, {t.name: t.elements.reshape(t.shape) for t in file.tensors.values()})
        return file

    def header_faults(self, name: str, header: BinHeader) -> Iterator[Mismatch]:
        """Where the table of a version-1 file contradicts config.json."""
        found = {entry["name"]: entry for entry in header.table}
        for tensor, spec in self.files[name].items():
            entry, format = found.pop(tensor, None), self.info["formats"][spec.part]
            wanted = f"tensor {tensor!r} {_described(spec.shape, format, spec.layout)}"
            good = (format,) if format != MIXED else PLANNED
            if entry is None:
                yield Mismatch(header.path, wanted, "no such tensor", AGAIN)
            elif (tuple(entry["shape"]), entry["layout"]) != (spec.shape, spec.layout) or entry["format"] not in good:
                is_so = _described(tuple(entry["shape"]), entry["format"], entry["layout"])
                yield Mismatch(header.path, wanted, is_so, AGAIN)
        for tensor in found:
            yield Mismatch(header.path, f"only tensors {', '.join(self.files[name])}", f"also {tensor!r}", AGAIN)
        if "/expert_" in name and header.payload_bytes > self.slot_bytes:
            yield Mismatch(
                header.path, f"a payload of at most {self.slot_bytes} bytes", str(header.payload_bytes), AGAIN
            )

    def _in_memory(self, name: str, values: dict[str, np.ndarray]) -> BinFile:
        """Plain matrices (float16 or float32) as a file of version 1 would give them."""
        specs = self.files[name]
        for tensor, spec in specs.items():
            if values[tensor].shape != spec.shape:
                raise Mismatch(self.dir / name, f"tensor {tensor!r} of shape {spec.shape}", str(values[tensor].shape))
        chosen = {}
        for tensor, spec in specs.items():
            own = self.info["formats"][spec.part]
            plain = own in formats.FORMATS and not formats.FORMATS[own].scaled
            narrow = own if plain and values[tensor].dtype != np.float16 else "fp16"
            chosen[tensor] = own if spec.part == "float" else narrow
        table, nbytes = plan_table(specs, chosen)
        room = np.zeros(nbytes + ALIGN, np.uint8)
        start = -room.__array_interface__["data"][0] % ALIGN
        payload = room[start : start + nbytes]
        for entry in table:
            encoded = formats.encode(np.atleast_2d(values[entry["name"]]), entry["format"], name=entry["name"])
            data, _, _ = packing.pack(encoded, formats.FORMATS[entry["format"]], entry["layout"])
            payload[entry["offset"] :][: entry["bytes"]] = data.view(np.uint8)
        payload.flags.writeable = False
        header = BinHeader(self.dir / name, 0, 0, nbytes, None, tuple(table))
        return BinFile(header, payload, {entry["name"]: tensor_view(payload, entry) for entry in table})


def _described(shape: tuple[int, ...], format: str, layout: str) -> str:
    return f"of shape {shape} in {format}, layout {layout}"


def _read_npy(path: Path) -> np.ndarray:
    try:
        with storage_errors(path):
            values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ContainerError(f"{path}: not a .npy file of numbers: {error}") from None
    if values.dtype not in (np.dtype("<f2"), np.dtype("<f4")) or values.ndim not in (1, 2):
        raise Mismatch(path, "float16 or float32 of one or two dimensions", f"{values.dtype} {values.shape}")
    return values


def is_container(directory: str | os.PathLike) -> bool:
    """Whether config.json there is a container's, whatever else may be wrong with it."""
    path = Path(directory) / "config.json"
    with storage_errors(path):
        found = path.exists()
    try:
        return found and "colibri" in read_object(path, ContainerError)
    except ContainerError:
        return False


def read_container_config(directory: str | os.PathLike) -> tuple[ModelConfig, dict]:
    """(model settings, the "colibri" object) of a container's config.json. Raises `ContainerError` naming the field."""
    directory = Path(directory)
    path = directory / "config.json"
    with storage_errors(directory):
        if not directory.is_dir():
            raise ContainerError(f"{directory}: no such directory; expected a container")
        names = sorted(os.listdir(directory))
    data = read_object(path, ContainerError) if "config.json" in names else {}
    if "colibri" not in data:
        raise ContainerError(f"{directory}: {_not_a_container(names)}")
    for error in config_faults(path, data):
        raise error
    return ModelConfig.from_json(data["model"], str(path)), data["colibri"]


def config_faults(path: Path, data: dict) -> Iterator[ContainerError]:
    """Everything wrong with the contents of a container's config.json."""
    info, model = data["colibri"], data.get("model")
    if not isinstance(info, dict):
        yield Mismatch(path, "an object colibri", repr(info), AGAIN)
        return
    sound = True
    for field, kind in _FIELDS.items():
        if type(info.get(field)) is not kind:
            sound = False
            yield Mismatch(path, f"field colibri.{field} of type {kind.__name__}", _shown(info, field), AGAIN)
    if sound:
        for part in ("expert", "dense", "float"):
            known = (*formats.FORMATS, MIXED)
            if info["formats"].get(part) not in known:
                wanted = f"field colibri.formats.{part} one of {', '.join(known)}"
                yield Mismatch(path, wanted, _shown(info["formats"], part), AGAIN)
        for field in ("sha256", "vocab_size"):
            if field not in info["tokenizer"]:
                yield Mismatch(path, f"field colibri.tokenizer.{field}", "nothing", AGAIN)
        if info["format_version"] != FORMAT_VERSION:
            yield Mismatch(path, f"format_version {FORMAT_VERSION}", str(info["format_version"]), AGAIN)
    if model is None:
        yield Mismatch(path, "field model", "nothing", AGAIN)
        return
    try:
        config = ModelConfig.from_json(model, f"{path}: model")
        check_config(config)
    except ModelError as error:
        yield ContainerError(str(error) if str(path) in str(error) else f"{path}: model: {error}")
        return
    if sound and not 1 <= info["expert_block_size"] <= config.num_experts:
        wanted = f"field colibri.expert_block_size from 1 to {config.num_experts}"
        yield Mismatch(path, wanted, str(info["expert_block_size"]), AGAIN)


def _shown(fields: dict, name: str) -> str:
    return repr(fields[name]) if name in fields else "nothing"


def _not_a_container(names: list[str]) -> str:
    """Why a directory with files of these names cannot be opened, and what to do."""
    if "convert.partial.json" in names:
        return "its conversion was not finished; repeat the same colibri convert command to go on"
    foreign = next((name for name in names if name.endswith(FOREIGN)), None)
    if foreign:
        found = f"found {foreign}, a checkpoint, which is not opened as it is"
    else:
        found = "config.json has no field colibri" if "config.json" in names else "config.json is missing"
    return f"not a container: {found}; make one with: colibri convert --input CHECKPOINT --output DIR"
