"""What a conversion will do, settled and checked before anything is written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..config import ModelConfig
from ..engine.tokenizer import fingerprint
from ..errors import ModelError, SettingError, TokenizerError, did_you_mean
from . import binfile, container, families, formats, layout, plan_formats
from .source import FORMAT_OF, ContainerSource, Source

Files = dict[str, dict[str, layout.Spec]]
Names = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Plan:
    """`files`: `.bin` file → its tensors; `names`: `.bin` file → our tensor name → the source's name.

    `formats`: part → its number format or "mixed"; `tensor_formats`: `.bin` file → tensor → format.
    `sizes` bytes of each file; `skipped_bytes` of next-token-prediction layers; `unused` names of other tensors that no
    file takes; `tokenizer` its hash and size; `calibration` what was rounded by; `own_id` an id to go by instead.
    """

    source: Source
    output: Path
    config: ModelConfig
    formats: dict[str, str]
    tensor_formats: dict[str, dict[str, str]]
    block_size: int
    max_seq_len: int | None
    files: Files
    names: Names
    sizes: dict[str, int]
    slot_bytes: int
    skipped_bytes: int
    unused: list[str]
    tokenizer: dict
    calibration: dict | None = None
    own_id: str | None = None

    @property
    def bytes_out(self) -> int:
        return sum(self.sizes.values())

    @property
    def id(self) -> str:
        """Two conversions with the same id write the same files."""
        if self.own_id is not None:
            return self.own_id
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in self.source.files]
        settings = [self.tensor_formats, self.block_size, self.max_seq_len, self.tokenizer, self.calibration]
        data = [self.config.to_json(), settings, files, container.FORMAT_VERSION]
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()

    def config_json(self) -> dict:
        """The container's config.json."""
        info = {
            "format_version": container.FORMAT_VERSION,
            "source": self.source.name_of_model,
            "calibration": self.calibration,
            "expert_block_size": self.block_size,
            "formats": self.formats,
            "tokenizer": self.tokenizer,
            "max_seq_len": self.max_seq_len,
            "slot_bytes": self.slot_bytes,
            "bytes": self.bytes_out,
        }
        return {"colibri": info, "model": self.config.to_json()}

    def text(self) -> str:
        """The plan in a few lines, for the user."""
        c = self.config
        lines = [
            f"{self.source.dir} -> {self.output}",
            f"  {c.family}: {c.num_layers} layers, {len(c.moe_layers)} of them with {c.num_experts} experts, top-{c.top_k}",
            f"  experts {self.formats['expert']}, other matrices {self.formats['dense']}, routers and norms "
            f"{self.formats['float']}",
            f"  {self.block_size} expert(s) in a block of at most {self.slot_bytes} bytes",
            f"  {self.source.nbytes} bytes in, {self.bytes_out} bytes out in {len(self.files)} files",
        ]
        if self.skipped_bytes:
            lines.append(f"  left out: {self.skipped_bytes} bytes of next-token-prediction layers")
        if self.unused:
            more = f" and {len(self.unused) - 5} more" if len(self.unused) > 5 else ""
            lines.append(f"  left out, not known to this version: {', '.join(self.unused[:5])}{more}")
        return "\n".join(lines)


def make_plan(
    input: str | os.PathLike,
    output: str | os.PathLike,
    *,
    quantize: str = "auto",
    group_size: int | None = None,
    tensors: str = "experts",
    plan: str | os.PathLike | dict | plan_formats.Rule | None = None,
    expert_block_size: int = 1,
    max_seq_len: int | None = None,
    calibration: dict | None = None,
) -> Plan:
    """The plan of a conversion; arguments and errors as in `convert`. Nothing is written."""
    wanted = formats.format_name(quantize, group_size)
    if tensors not in ("experts", "all"):
        raise SettingError(f"tensors cannot be {tensors!r}; {did_you_mean(str(tensors), ('experts', 'all'))}")
    if os.path.realpath(output) == os.path.realpath(input):
        raise SettingError(f"output {output} is the input itself; name another directory")
    source, config = open_source(input)
    if type(expert_block_size) is not int or not 1 <= expert_block_size <= config.num_experts:
        raise SettingError(
            f"expert_block_size must be from 1 to {config.num_experts} experts, got {expert_block_size!r}"
        )
    longest = config.max_position_embeddings
    if max_seq_len is not None and not (type(max_seq_len) is int and 1 <= max_seq_len <= longest):
        raise SettingError(
            f"max_seq_len must be from 1 to {longest}, what the model was trained for, got {max_seq_len!r}"
        )
    tokenizer = fingerprint(source.dir)
    if tokenizer["vocab_size"] > config.vocab_size:
        raise TokenizerError(
            f"{source.dir / 'tokenizer.json'}: {tokenizer['vocab_size']} tokens for a model of {config.vocab_size}; "
            "this is the tokenizer of another model"
        )
    files = layout.container_files(config, expert_block_size)
    names = source_names(source, config, files)
    _check_shapes(source, files, names)
    default = _default_formats(source, files, names, wanted, tensors)
    chosen = plan_formats.choose_formats(files, default, plan_formats.find_rule(plan, config))
    sizes, slot = {}, 0
    for file, specs in files.items():
        table, payload = binfile.plan_table(specs, chosen[file])
        sizes[file] = len(binfile.header_page(table, payload, path=file)) + payload
        if "/expert_" in file:
            slot = max(slot, -(-payload // binfile.PAGE) * binfile.PAGE)
    rest = set(source.entries) - {theirs for own in names.values() for theirs in own.values()}
    mtp = {name for name in rest if families.is_mtp(config, name)}
    return Plan(
        source=source, output=Path(output), config=config, formats=plan_formats.summary(files, chosen),
        tensor_formats=chosen, block_size=expert_block_size,
        max_seq_len=max_seq_len, files=files, names=names, sizes=sizes, slot_bytes=slot,
        skipped_bytes=sum(source.entries[name].nbytes for name in mtp), unused=sorted(rest - mtp), tokenizer=tokenizer,
        calibration=calibration,
    )  # fmt: skip


def open_source(input: str | os.PathLike) -> tuple[Source, ModelConfig]:
    """A Hugging Face checkpoint, or a container to be packed anew."""
    if container.is_container(input):
        box = container.Container.open(input, allow_fp32=True)
        return ContainerSource(box), box.config
    config = families.read_config(input)
    return Source(input), config


def source_names(source: Source, config: ModelConfig, files: Files) -> Names:
    """`.bin` file → our tensor name → the name it has in the source."""
    if isinstance(source, ContainerSource):
        return {file: {ours: source.name(file, ours) for ours in specs} for file, specs in files.items()}
    top = families.tensor_names(config)
    layers = [families.tensor_names(config, layer) for layer in range(config.num_layers)]
    names: Names = {}
    for file, specs in files.items():
        layer = layout.layer_of(file)
        if layer is None:
            names[file] = {ours: top[ours] for ours in specs}
        elif "/expert_" in file:
            names[file] = {}
            for ours in specs:
                expert, part = ours.split(".")
                names[file][ours] = families.expert_names(config, layer, int(expert))[part]
        else:
            names[file] = {ours: layers[layer][ours] for ours in specs}
    return names


def _check_shapes(source: Source, files: Files, names: Names) -> None:
    for file, specs in files.items():
        for ours, spec in specs.items():
            theirs = names[file][ours]
            fused = theirs.partition(".experts.")[0] + ".experts.gate_up_proj"
            if theirs not in source.entries and fused in source.entries:
                raise ModelError(
                    f"{source.dir}: {fused} holds all experts of a layer in one tensor, which this version cannot read; "
                    "save the checkpoint with one tensor per expert and matrix"
                )
            entry = source.entry(theirs)
            if entry.shape != spec.shape:
                raise ModelError(
                    f"{entry.path}: tensor {theirs}: expected shape {list(spec.shape)} by config.json, found "
                    f"{list(entry.shape)}"
                )


def _default_formats(
    source: Source, files: Files, names: Names, quantize: str, tensors: str
) -> Callable[[str, str], str]:
    """(file, tensor) → number format. 16-bit matrices go by the first expert's type: fp16 of fp32, bf16 of FP8 and MXFP4.
    "auto" leaves each MXFP4 tensor as it is."""
    first = next(theirs for file, own in names.items() if "/expert_" in file for theirs in own.values())
    kept = FORMAT_OF[source.entry(first).dtype]
    plain = {"fp32": "fp16", "mxfp4": "bf16"}.get(kept, kept)
    scaled = quantize != "auto" and formats.FORMATS[quantize].scaled

    def default(file: str, tensor: str) -> str:
        part = files[file][tensor].part
        if part == "float":
            return "fp32"
        if quantize == "auto":
            return "mxfp4" if source.entry(names[file][tensor]).dtype == "MXFP4" else plain
        return plain if part == "dense" and scaled and tensors == "experts" else quantize

    return default
