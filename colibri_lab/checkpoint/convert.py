"""Checkpoint → container, and container → quantised container."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace

from ..errors import ModelError, SettingError, did_you_mean
from . import container, formats, router_calib
from .calibrate import Calibration
from .files import AtomicFile, read_object
from .plan import Plan, make_plan
from .plan_formats import Rule
from .verify import verify_container
from .writer import MARKER, Encoder, check_output, write_container

__all__ = ["MARKER", "STAGES", "ConvertReport", "convert", "quantize"]

STAGES = ("all", "repack", "quantize", "together")


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. `files_kept` were complete from an interrupted run; `ratio` is bytes out / bytes in."""

    output: str
    files_written: int
    files_kept: int
    bytes_in: int
    bytes_out: int
    skipped_bytes: int
    unused: list[str]
    verified_files: list[str]

    @property
    def ratio(self) -> float:
        return self.bytes_out / self.bytes_in

    def to_json(self) -> dict:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        kept = f", {self.files_kept} kept from before" if self.files_kept else ""
        checked = f"; {len(self.verified_files)} files of experts agree with the source" if self.verified_files else ""
        return (
            f"{self.output}: {self.files_written} files written{kept}; {self.bytes_in} bytes in, {self.bytes_out} bytes "
            f"out, ratio {self.ratio:.3f}{checked}"
        )


def convert(
    input: str | os.PathLike,
    output: str | os.PathLike,
    *,
    quantize: str = "auto",
    group_size: int | None = None,
    tensors: str = "experts",
    plan: str | os.PathLike | dict | Rule | None = None,
    calibration_data: str | os.PathLike | None = None,
    calibration_tokens: int = 65536,
    stage: str = "all",
    expert_block_size: int = 1,
    max_seq_len: int | None = None,
    verify: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Make the container `output` from `input`, a Hugging Face checkpoint directory (or a container, packed anew).

    quantize: the experts' number format, a name of `formats.FORMATS`; "auto" keeps 16-bit formats and MXFP4, makes fp16 of
    fp32 and bf16 of FP8. "int8" has one scale per output channel, "int4" one per 64 columns unless group_size says else.
    group_size: with "int8" or "int4": 32, 64 or 128 columns that share a scale, 0 for one scale per output channel.
    tensors: which matrices a quantised format is for, "experts" or "all". (Other formats are for all matrices.)
    plan: a format for single layers, experts and matrices: file, object or function, see `plan_formats`.
    calibration_data: a JSON file of texts to round by, see `calibrate`; of them up to `calibration_tokens` are used.
    stage: a quantised format takes two stages, repack (to OUTPUT.repacked, removed in the end) and quantize. "repack" does
    the first alone, to `output`; "quantize" the second alone, of a container; "together" both in one pass, without the copy
    in between and without calibration. The weights come out the same.
    An interrupted conversion goes on where it stopped when it is called again with the same arguments.

    Raises `SettingError` (arguments), `ModelError` (the checkpoint), `TokenizerError`, `ContainerError` (what is at
    `output` already, or a failed verification), `StorageError` (disk full, or not readable or writable).
    """
    if stage not in STAGES:
        raise SettingError(f"stage cannot be {stage!r}; {did_you_mean(str(stage), STAGES)}")
    if calibration_data is not None and stage in ("repack", "together"):
        raise SettingError(
            f"calibration_data cannot go with stage {stage!r}: it takes a container to run the model from"
        )
    if stage == "quantize" and not container.is_container(input):
        raise ModelError(f"{input}: not a container; make one with stage repack")
    shape = dict(expert_block_size=expert_block_size, max_seq_len=max_seq_len)
    how = dict(quantize=quantize, group_size=group_size, tensors=tensors, plan=plan)
    calibration = None if calibration_data is None else Calibration(calibration_data, calibration_tokens, progress)
    final = make_plan(
        input, output, **({} if stage == "repack" else how), **shape, calibration=calibration and calibration.info
    )
    quantises = any(
        formats.FORMATS[name].scaled and final.source.entry(final.names[file][tensor]).dtype != "MXFP4"
        for file, chosen in final.tensor_formats.items()
        for tensor, name in chosen.items()
    )
    if calibration and not quantises:
        raise SettingError("calibration_data: nothing is quantised; name a format, as in quantize='int4'")
    if not quantises or stage != "all" or container.is_container(input):
        kept = _write(final, final, calibration, overwrite, progress)
    else:
        if not _only_routers_left(final):
            check_output(final, overwrite)  # what is there is refused before the first stage takes its time
        between = final.output.with_name(final.output.name + ".repacked")
        _say(progress, "stage 1 of 2: repack")
        _repack(make_plan(input, between, quantize=_lossless(final), **shape), overwrite, progress)
        _say(progress, "stage 2 of 2: quantize")
        second = make_plan(between, output, **how, **shape, calibration=final.calibration)
        kept = _write(final, second, calibration, overwrite, progress)
        shutil.rmtree(between)
    return ConvertReport(
        str(final.output), len(final.files) - kept, kept, final.source.nbytes, final.bytes_out, final.skipped_bytes,
        final.unused, verify_container(final.output, input) if verify else [],
    )  # fmt: skip


def quantize(
    directory: str | os.PathLike,
    output: str | os.PathLike,
    quant_type: str = "int8",
    *,
    group_size: int | None = None,
    tensors: str = "experts",
    plan: str | os.PathLike | dict | Rule | None = None,
    calibration_data: str | os.PathLike | None = None,
    calibration_tokens: int = 65536,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Make the quantised container `output` from the 16-bit container `directory`; expert blocks stay as they are.

    Arguments and errors as in `convert`; `quant_type` is "int8", "int4" or another name of `formats.FORMATS`.
    """
    box = container.Container.open(directory, allow_fp32=True)
    return convert(
        directory, output, quantize=quant_type, group_size=group_size, tensors=tensors, plan=plan,
        calibration_data=calibration_data, calibration_tokens=calibration_tokens, stage="quantize",
        expert_block_size=box.block_size, max_seq_len=box.info.get("max_seq_len"), overwrite=overwrite, progress=progress,
    )  # fmt: skip


def _write(final: Plan, plan: Plan, calibration: Calibration | None, overwrite: bool, progress: bool) -> int:
    """Write `plan`, which stands for `final` where it goes by its id; the number of files kept from an earlier try."""
    plan = replace(plan, own_id=final.id)
    if calibration is None:
        return len(write_container(plan, Encoder(), overwrite, progress))
    with calibration.opened(plan.source.dir):
        kept = plan.files if _only_routers_left(plan) else write_container(plan, calibration, overwrite, progress)
        calibration.calibrate_router(plan.output)
    return len(kept)


def _only_routers_left(plan: Plan) -> bool:
    """Whether an earlier try wrote the weights of a calibrated container and was interrupted before its routers' part."""
    if plan.calibration is None or not container.is_container(plan.output):
        return False
    _, info = container.read_container_config(plan.output)
    same = (info.get("calibration"), info["formats"]) == (plan.calibration, plan.formats)
    return same and not (plan.output / router_calib.FILE).exists()


def _repack(plan: Plan, overwrite: bool, progress: bool) -> None:
    """The first stage, unless it was completed by an earlier try: then the directory says by which plan."""
    mark = plan.output / "repacked.json"
    if container.is_container(plan.output) and mark.exists() and read_object(mark, ModelError).get("plan") == plan.id:
        return
    write_container(plan, Encoder(), overwrite, progress)
    with AtomicFile(mark) as file:
        file.write(json.dumps({"plan": plan.id}).encode())


def _lossless(plan: Plan) -> str:
    """The format between the stages: that of the source where all matrices are of one 16-bit type, else float32."""
    kinds = {
        plan.source.entry(plan.names[file][tensor]).dtype
        for file, specs in plan.files.items()
        for tensor, spec in specs.items()
        if spec.part != "float"
    } - {"MXFP4"}  # fmt: skip
    return "auto" if kinds in ({"BF16"}, {"F16"}) else "fp32"


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr)
