"""Hugging Face checkpoint → container, a few rows at a time: peak memory does not grow with the model."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..config import ModelConfig
from ..errors import ContainerError, ModelError, SettingError, StorageError, TokenizerError, did_you_mean
from . import container, families, formats, layout
from .container import AtomicFile, Container
from .source import FORMAT_OF, Source

CHUNK_VALUES = 1 << 20  # values of a tensor in memory at once
MARKER = "convert.partial.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
QUANTIZE = ("auto", *formats.FORMATS)


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, settled before anything is written."""

    source: Source
    output: Path
    config: ModelConfig
    formats: dict[str, str]
    block_size: int
    max_seq_len: int | None
    files: dict[str, dict[str, layout.Spec]]
    hf_names: dict[str, dict[str, str]]
    sizes: dict[str, int]
    slot_bytes: int
    skipped_bytes: int
    unused: list[str]

    @property
    def bytes_out(self) -> int:
        return sum(self.sizes.values())

    @property
    def id(self) -> str:
        """Two conversions with the same id write the same files."""
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in self.source.files]
        what = [self.config.to_json(), self.formats, self.block_size, self.max_seq_len, files, container.FORMAT_VERSION]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def text(self) -> str:
        c = self.config
        lines = [
            f"{self.source.dir} -> {self.output}",
            f"  {c.family}: {c.num_layers} layers ({len(c.moe_layers)} MoE), {c.num_experts} experts, top-{c.top_k}",
            f"  experts {self.formats['expert']}, other matrices {self.formats['dense']}, "
            f"routers and norms {self.formats['float']}",
            f"  {self.block_size} expert(s) per block, slot of {self.slot_bytes} bytes",
            f"  {self.source.nbytes} bytes in, {self.bytes_out} bytes out",
        ]
        if self.skipped_bytes:
            lines.append(f"  {self.skipped_bytes} bytes of next-token-prediction layers are not used and left out")
        if self.unused:
            more = f" and {len(self.unused) - 5} more" if len(self.unused) > 5 else ""
            lines.append(f"  tensors this version does not know, left out: {', '.join(self.unused[:5])}{more}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. `ratio` is bytes out / bytes in."""

    output: str
    files_written: int
    files_kept: int
    bytes_in: int
    bytes_out: int
    skipped_bytes: int
    unused: list[str] = field(default_factory=list)
    verified_files: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.bytes_out / self.bytes_in

    def to_json(self) -> dict:
        return {**asdict(self), "ratio": self.ratio}


def convert(
    input: str | os.PathLike,
    output: str | os.PathLike,
    *,
    quantize: str = "auto",
    tensors: str = "experts",
    expert_block_size: int = 1,
    max_seq_len: int | None = None,
    verify: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Make the container `output` from the checkpoint directory `input`.

    quantize: "auto" keeps bf16 and fp16 and turns fp32 into fp16; or the number format of experts by name.
    tensors: "experts" quantises experts only, "all" every matrix. (It matters for int8 alone.)
    An interrupted conversion goes on where it stopped when called again with the same arguments.

    Raises `ModelError` (the checkpoint), `SettingError` (the arguments), `ContainerError` (what is at `output`, or a
    failed verification), `TokenizerError`, `StorageError` (disk full or unreadable).
    """
    plan = make_plan(
        input, output, quantize=quantize, tensors=tensors, expert_block_size=expert_block_size, max_seq_len=max_seq_len
    )
    if progress:
        print(plan.text(), file=sys.stderr)
    kept = _prepare(plan, overwrite)
    _check_space(plan, kept)
    todo = [name for name in plan.files if name not in kept]
    _write_json(plan.output / MARKER, {"plan": plan.id})
    with tqdm(total=sum(plan.sizes[n] for n in todo), unit="B", unit_scale=True, disable=not progress) as bar:
        for name in todo:
            _write_file(plan, name)
            bar.update(plan.sizes[name])
    for name in TOKENIZER_FILES:
        if (plan.source.dir / name).exists():
            with AtomicFile(plan.output / name) as file:
                file.write((plan.source.dir / name).read_bytes())
    _write_json(plan.output / "config.json", _config_json(plan))
    (plan.output / MARKER).unlink()
    verified = verify_container(output, input) if verify else []
    return ConvertReport(
        output=str(plan.output), files_written=len(todo), files_kept=len(kept), bytes_in=plan.source.nbytes,
        bytes_out=plan.bytes_out, skipped_bytes=plan.skipped_bytes, unused=plan.unused, verified_files=verified,
    )  # fmt: skip


def make_plan(input, output, *, quantize="auto", tensors="experts", expert_block_size=1, max_seq_len=None) -> Plan:
    """The plan of a conversion; arguments and errors as in `convert`. Nothing is written."""
    if quantize not in QUANTIZE:
        raise SettingError(f"quantize cannot be {quantize!r}; {did_you_mean(str(quantize), QUANTIZE)}")
    if tensors not in ("experts", "all"):
        raise SettingError(f"tensors cannot be {tensors!r}; {did_you_mean(str(tensors), ('experts', 'all'))}")
    source = Source(input)
    config = families.read_config(input)
    if type(expert_block_size) is not int or not 1 <= expert_block_size <= config.num_experts:
        raise SettingError(
            f"expert_block_size must be from 1 to {config.num_experts} experts, got {expert_block_size!r}"
        )
    if max_seq_len is not None and not 1 <= max_seq_len <= config.max_position_embeddings:
        raise SettingError(f"max_seq_len must be from 1 to {config.max_position_embeddings}, got {max_seq_len!r}")
    if Path(output).resolve() == Path(input).resolve():
        raise SettingError(f"output {output} is the checkpoint itself; name another directory")
    _check_tokenizer(source.dir)
    files = layout.container_files(config, expert_block_size)
    hf_names = _hf_names(config, files)
    _check_shapes(source, files, hf_names)
    number_formats = _number_formats(source, hf_names, quantize, tensors)
    sizes, slot = {}, 0
    for name, specs in files.items():
        table, payload = container.plan_table(specs, number_formats)
        sizes[name] = len(container.header_page(table, payload)) + payload
        if any(spec.part == "expert" for spec in specs.values()):
            slot = max(slot, -(-payload // container.PAGE) * container.PAGE)
    rest = set(source.entries) - {theirs for names in hf_names.values() for theirs in names.values()}
    mtp = {name for name in rest if families.is_mtp(config, name)}
    return Plan(
        source=source, output=Path(output), config=config, formats=number_formats, block_size=expert_block_size,
        max_seq_len=max_seq_len, files=files, hf_names=hf_names, sizes=sizes, slot_bytes=slot,
        skipped_bytes=sum(source.entries[name].nbytes for name in mtp), unused=sorted(rest - mtp),
    )  # fmt: skip


def _hf_names(config: ModelConfig, files: dict) -> dict[str, dict[str, str]]:
    """file → our tensor name → Hugging Face name."""
    top = families.tensor_names(config)
    layers = [families.tensor_names(config, i) for i in range(config.num_layers)]
    names = {}
    for file, specs in files.items():
        names[file] = {}
        for ours in specs:
            if ours in top:
                names[file][ours] = top[ours]
            elif "/expert_" in file:
                expert, part = ours.split(".")
                layer = int(file.split("/")[0].removeprefix("layer_"))
                names[file][ours] = families.expert_names(config, layer, int(expert))[part]
            else:
                layer = int(file.removeprefix("dense/").removesuffix(".bin").split("/")[0].removeprefix("layer_"))
                names[file][ours] = layers[layer][ours]
    return names


def _check_shapes(source: Source, files: dict, hf_names: dict) -> None:
    for file, specs in files.items():
        for ours, spec in specs.items():
            theirs = hf_names[file][ours]
            fused = [name for name in (_fused_name(theirs),) if name in source.entries]
            if theirs not in source.entries and fused:
                raise ModelError(
                    f"{source.dir}: {fused[0]} holds all experts fused in one tensor, which this version cannot read; "
                    "save the checkpoint with one tensor per expert"
                )
            found = source.entry(theirs).shape
            if found != spec.shape:
                raise ModelError(
                    f"{source.entry(theirs).path}: tensor {theirs}: expected shape {list(spec.shape)} from config.json, "
                    f"found {list(found)}"
                )


def _fused_name(name: str) -> str:
    head, _, _ = name.partition(".experts.")
    return f"{head}.experts.gate_up_proj"


def _number_formats(source: Source, hf_names: dict, quantize: str, tensors: str) -> dict[str, str]:
    """part → number format. "auto" goes by the type of the first expert."""
    expert = next(theirs for file, names in hf_names.items() if "/expert_" in file for theirs in names.values())
    kept = FORMAT_OF[source.entry(expert).dtype]
    plain = "fp16" if kept == "fp32" else kept
    chosen = plain if quantize == "auto" else quantize
    dense = plain if formats.FORMATS[chosen].scaled and tensors == "experts" else chosen
    return {"expert": chosen, "dense": dense, "float": "fp32"}


def _check_tokenizer(directory: Path) -> None:
    if not (directory / "tokenizer.json").exists():
        other = [name for name in ("tokenizer.model", "vocab.json", "tiktoken.model") if (directory / name).exists()]
        found = f"found only {other[0]}; " if other else ""
        raise TokenizerError(
            f"{directory}: tokenizer.json is missing; {found}make one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )


def _prepare(plan: Plan, overwrite: bool) -> set[str]:
    """Make the output directory; returns the files there that an interrupted run of the same plan completed."""
    out = plan.output
    if out.exists() and not out.is_dir():
        raise ContainerError(f"{out}: expected a directory, found a file")
    marker, complete = out / MARKER, False
    if out.is_dir() and any(out.iterdir()):
        try:
            container.read_container_config(out)
            complete = True
        except ContainerError:
            if not marker.exists():
                raise ContainerError(f"{out}: not empty and not a container; name an empty or new directory") from None
    if complete and not overwrite:
        raise ContainerError(f"{out}: a container is already there; pass overwrite (--overwrite) to replace it")
    same = marker.exists() and json.loads(marker.read_text())["plan"] == plan.id
    if marker.exists() and not same and not overwrite:
        raise ContainerError(
            f"{out}: holds an unfinished conversion with other settings; repeat those, or pass overwrite (--overwrite)"
        )
    if same and not complete:
        return {name for name, size in plan.sizes.items() if _size(out / name) == size}
    if complete or marker.exists():
        _clear(plan)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out}: cannot make the directory: {error.strerror}") from None
    return set()


def _clear(plan: Plan) -> None:
    """Take the old container away, config.json first, so that no mixture ever looks complete."""
    (plan.output / "config.json").unlink(missing_ok=True)
    for pattern in ("layer_*/*.bin", "dense/*.bin", MARKER):
        for path in plan.output.glob(pattern):
            path.unlink()


def _check_space(plan: Plan, kept: set[str]) -> None:
    need = sum(size for name, size in plan.sizes.items() if name not in kept)
    free = shutil.disk_usage(plan.output).free
    if need > free:
        raise StorageError(f"{plan.output}: the disk is too small: {need} bytes needed, {free} free")


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _write_file(plan: Plan, name: str) -> None:
    """One `.bin` file: header, then tensor after tensor in chunks of rows, then the checksum into the header."""
    specs, hf_names = plan.files[name], plan.hf_names[name]
    table, payload = container.plan_table(specs, plan.formats)
    for entry in table:
        if formats.FORMATS[entry["format"]].scaled and specs[entry["name"]].part == "expert":
            entry["factor"] = _factor(plan.source, hf_names, entry["name"])
    path, crc, written = plan.output / name, 0, 0
    try:
        with AtomicFile(path) as file:
            file.write(container.header_page(table, payload))

            def put(data: bytes | np.ndarray, offset: int) -> None:
                nonlocal crc, written
                for piece in (bytes(offset - written), data):
                    crc = zlib.crc32(piece, crc)
                    file.write(piece)
                    written += memoryview(piece).nbytes

            for entry in table:
                _write_tensor(plan.source, hf_names[entry["name"]], entry, put)
            put(b"", payload)
            file.seek(0)
            file.write(container.header_page(table, payload, crc))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        free = shutil.disk_usage(plan.output).free
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise StorageError(f"{path}: {what}: {plan.sizes[name]} bytes needed, {free} free") from None


def _write_tensor(source: Source, theirs: str, entry: dict, put) -> None:
    kind = formats.FORMATS[entry["format"]]
    scales, zeros, offset = [], [], entry["offset"]
    for values in _chunks(source, theirs):
        rows = formats.encode(values, kind.name, entry["factor"], theirs)
        data = formats.pack_rows16(rows.data, kind.k_group) if entry["layout"] == "rows16" else rows.data.reshape(-1)
        data = np.ascontiguousarray(data).view(np.uint8)
        put(data, offset)
        offset += data.nbytes
        if kind.scaled:
            scales.append(rows.scale)
            zeros.append(rows.zero)
    for key, parts, dtype in (("scale", scales, "<f4"), ("zero", zeros, np.int8)):
        if entry[key]:
            start, nbytes = entry[key]
            whole = np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)
            flat = np.concatenate(parts)
            whole[: len(flat)] = flat
            put(whole.view(np.uint8), start)


def _chunks(source: Source, name: str):
    """The rows of a tensor, a multiple of 16 at a time, as stored."""
    shape = source.entry(name).shape
    rows, cols = shape if len(shape) == 2 else (1, shape[0])
    step = max(1, CHUNK_VALUES // cols // formats.ROW_BLOCK) * formats.ROW_BLOCK
    for start in range(0, rows, step):
        yield source.rows(name, start, min(start + step, rows))


def _factor(source: Source, hf_names: dict[str, str], ours: str) -> float:
    """The scale of the expert that tensor `ours` ("<e>.gate") belongs to."""
    expert = ours.split(".")[0]
    largest = 0.0
    for part in ("gate", "up", "down"):
        name = hf_names[f"{expert}.{part}"]
        for values in _chunks(source, name):
            largest = max(largest, float(np.abs(formats.to_f32(values)).max()))
    return formats.expert_factor(largest) if np.isfinite(largest) else 1.0


def _config_json(plan: Plan) -> dict:
    from ..engine.tokenizer import fingerprint

    return {
        "colibri": {
            "format_version": container.FORMAT_VERSION,
            "source": plan.source.dir.resolve().name,
            "expert_block_size": plan.block_size,
            "formats": plan.formats,
            "tokenizer": fingerprint(plan.source.dir),
            "max_seq_len": plan.max_seq_len,
            "slot_bytes": plan.slot_bytes,
            "bytes": plan.bytes_out,
        },
        "model": plan.config.to_json(),
    }


def _write_json(path: Path, data: dict) -> None:
    with AtomicFile(path) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())


def verify_container(output: str | os.PathLike, input: str | os.PathLike, samples: int = 8, seed: int = 0) -> list[str]:
    """Compare `samples` experts of a container, chosen by `seed`, with the checkpoint it came from.

    Returns the files looked at. Raises `ContainerError` naming the file, the tensor and the largest difference.
    """
    box = Container.open(output, allow_fp32=True)
    source = Source(input)
    pairs = [(layer, expert) for layer in box.config.moe_layers for expert in range(box.config.num_experts)]
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:samples]
    seen = []
    for layer, expert in sorted(pairs[i] for i in chosen):
        file = box.block(layer, expert // box.block_size)
        file.check_crc()
        for part, theirs in families.expert_names(box.config, layer, expert).items():
            _compare(file.header.path, file.tensors[f"{expert}.{part}"], formats.to_f32(source.rows(theirs)))
        if str(file.header.path) not in seen:
            seen.append(str(file.header.path))
    return seen


def _compare(path: Path, tensor: container.Tensor, wanted: np.ndarray) -> None:
    difference = np.abs(tensor.array() - wanted)
    size = np.abs(wanted)
    if tensor.scale is not None:
        rows = tensor.scale[: len(wanted)] * np.float32(tensor.factor)
        allowed = 0.5 * rows[:, None] + np.spacing(size) + np.spacing(rows[:, None]) * 128
    else:
        allowed = {"fp32": 0 * size, "fp16": size * 2.0**-11 + 2.0**-25, "bf16": size * 2.0**-8}[tensor.format]
    bad = ~(difference <= allowed)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ContainerError(
            f"{path}: tensor {tensor.name} at [{row}, {column}]: expected {wanted[row, column]:g} within "
            f"{allowed[row, column]:g}, found {tensor.array()[row, column]:g}; convert again"
        )
