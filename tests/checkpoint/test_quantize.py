"""Quantised containers: two stages or one pass, the same bytes; the command line; what is refused."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as cl
from colibri_lab import cli
from colibri_lab.checkpoint import convert as module
from colibri_lab.checkpoint import formats, layout, packing
from colibri_lab.checkpoint.container import Container
from colibri_lab.checkpoint.convert import convert, quantize
from colibri_lab.checkpoint.validate import validate
from colibri_lab.errors import ContainerError, ModelError, SettingError

pytestmark = pytest.mark.filterwarnings("ignore:.*without router calibration")


def quiet(*args, **options):
    return convert(*args, **options, progress=False)


def files_of(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def same_files(a: Path, b: Path):
    assert files_of(a) == files_of(b)
    different = [name for name in files_of(a) if not filecmp.cmp(a / name, b / name, shallow=False)]
    assert not different


@pytest.mark.parametrize("source", ["glm4_moe", "olmoe"])  # stored as bf16, and as float32
@pytest.mark.parametrize("tensors", ["experts", "all"])
def test_two_stages_one_pass_and_quantising_apart_give_the_same_files(source, tensors, oracle, tmp_path, capsys):
    options = dict(quantize="int4", group_size=32, tensors=tensors)
    convert(oracle / source, tmp_path / "two", **options)
    said = capsys.readouterr().err
    assert said.index("stage 1 of 2: repack") < said.index("stage 2 of 2: quantize")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two"]
    quiet(oracle / source, tmp_path / "one", stage="together", **options)
    same_files(tmp_path / "two", tmp_path / "one")
    quiet(oracle / source, tmp_path / "repacked", stage="repack", quantize="int4")
    assert not Container.open(tmp_path / "repacked").quantised
    if source == "glm4_moe":
        quantize(tmp_path / "repacked", tmp_path / "apart", "int4", group_size=32, tensors=tensors, progress=False)

        (tmp_path / "apart/config.json").write_bytes((tmp_path / "two/config.json").read_bytes())
        same_files(tmp_path / "two", tmp_path / "apart")


def test_sizes_on_disk_are_the_arithmetic(converted, tmp_path):
    """Payload of an int4 expert: a byte for two codes, 2 bytes of scale and one of zero point for each 32 columns."""
    quantize(converted("qwen3_moe"), tmp_path / "out", "int4", group_size=32, progress=False)
    box = Container.open(tmp_path / "out")
    width, hidden = box.config.expert_intermediate_size, box.config.hidden_size

    def nbytes(rows, cols):
        groups = -(-cols // 32)
        return [rows * -(-cols // 8) * 4, rows * groups * 2, rows * groups]

    assert width % 16 == hidden % 16 == 0
    parts = nbytes(width, hidden) + nbytes(width, hidden) + nbytes(hidden, width)
    payload = sum(-(-n // 64) * 64 for n in parts)
    for layer in box.config.moe_layers:
        for block in range(box.blocks):
            assert box.block_layout(layer, block).payload_bytes == payload
            assert box.block_path(layer, block).stat().st_size == 4096 + payload
    assert box.slot_bytes == -(-payload // 4096) * 4096
    assert validate(tmp_path / "out") == []


def test_router_norms_and_biases_are_never_quantised(oracle, tmp_path):
    quiet(oracle / "qwen2_moe", tmp_path / "out", quantize="int4", tensors="all")
    box = Container.open(tmp_path / "out")
    for file, specs in box.files.items():
        for name, tensor in box.read(file).tensors.items():
            assert tensor.format == ("fp32" if specs[name].part == "float" else "int4-g64")
    names = {name for specs in box.files.values() for name, spec in specs.items() if spec.part == "float"}
    assert {"router", "shared_router", "input_norm", "post_norm", "norm", "q_bias"} <= names


@pytest.mark.parametrize("calls", [5, 30])
def test_an_interrupted_second_stage_goes_on(calls, oracle, tmp_path, monkeypatch):
    quiet(oracle / "glm4_moe", tmp_path / "wanted", quantize="int8", tensors="all")
    original, left = formats.encode, iter(range(calls + 200))

    def encode(values, format, *rest):
        if format == "int8" and next(left) == calls:
            raise KeyboardInterrupt
        return original(values, format, *rest)

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(formats, "encode", encode)
        quiet(oracle / "glm4_moe", out, quantize="int8", tensors="all")
    assert (tmp_path / "out.repacked/config.json").exists()
    with pytest.raises(ContainerError, match="conversion was not finished"):
        Container.open(out)
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_container", lambda plan, *rest: written.append(plan.output) or set())
        patch.setattr(shutil, "rmtree", lambda path: None)
        quiet(oracle / "glm4_moe", out, quantize="int8", tensors="all")
    assert written == [out]  # the first stage is not done again
    report = quiet(oracle / "glm4_moe", out, quantize="int8", tensors="all", verify=True)
    assert report.files_kept > 0 and report.files_written + report.files_kept == len(Container.open(out).files)
    same_files(out, tmp_path / "wanted")
    assert not (tmp_path / "out.repacked").exists()


def test_what_is_at_the_output_is_refused_before_the_first_stage(oracle, converted, tmp_path):
    out = Path(shutil.copytree(converted("glm4_moe"), tmp_path / "out"))
    with pytest.raises(ContainerError, match="a container is already there"):
        quiet(oracle / "qwen3_moe", out, quantize="int4")
    assert not (tmp_path / "out.repacked").exists()
    quiet(oracle / "qwen3_moe", out, quantize="int4", overwrite=True, verify=True)
    assert Container.open(out).config.family == "qwen3_moe"


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(stage="both"), SettingError, "stage cannot be 'both'; Known: all, quantize, repack, together"),
        (dict(quantize="int8", stage="quantize"), ModelError, "glm4_moe: not a container; make one with stage repack"),
        (
            dict(quantize="int8", stage="together", calibration_data="x"),
            SettingError,
            "cannot go with stage 'together'",
        ),
        (dict(quantize="int8", group_size=16), SettingError, "group_size must be one of 32, 64, 128"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, error, message, oracle, tmp_path):
    with pytest.raises(error, match=message):
        quiet(oracle / "glm4_moe", tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


def test_quantising_a_quantised_container_or_a_checkpoint_is_refused(converted, oracle, tmp_path):
    with pytest.raises(ContainerError, match="is int8 already; quantising twice only loses"):
        quantize(converted("glm4_moe", quantize="int8"), tmp_path / "out", "int4", progress=False)
    with pytest.raises(ContainerError, match="not a container"):
        quantize(oracle / "glm4_moe", tmp_path / "out", progress=False)


def test_expert_blocks_and_names_stay(converted, tmp_path):
    source = converted("glm4_moe", expert_block_size=3, max_seq_len=64)
    quantize(source, tmp_path / "out", "int4-g32-sym", progress=False)
    box = Container.open(tmp_path / "out")
    assert box.block_size == 3 and box.info["max_seq_len"] == 64 and box.info["source"] == "glm4_moe"
    assert box.info["formats"] == {"expert": "int4-g32-sym", "dense": "bf16", "float": "fp32"}


def test_command_line(converted, oracle, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"rules": [{"layers": [1], "format": "int8"}]}))
    out = tmp_path / "out"
    args = [
        str(converted("glm4_moe")),
        "--output",
        str(out),
        "--quant-type",
        "int4",
        "--group-size",
        "32",
        "--plan",
        str(plan),
    ]
    assert cli.main(["quantize", *args]) == 0
    assert f"{out}: " in capsys.readouterr().out
    box = Container.open(out)
    assert {t.format for t in box.block(1, 0).tensors.values()} == {"int8"}
    assert {t.format for t in box.block(2, 0).tensors.values()} == {"int4-g32"}
    assert cli.main(["quantize", *args]) == 1
    assert "already there; overwrite (--overwrite)" in capsys.readouterr().err
    assert cli.main(["quantize", *args, "--tensors", "all", "--overwrite"]) == 0
    assert Container.open(out).dense("layer_1").tensors["q"].format == "int4-g32"
    direct = ["--input", str(oracle / "glm4_moe"), "--output", str(tmp_path / "direct"), "--quantize", "int4"]
    assert cli.main(["convert", *direct, "--group-size", "0", "--stage", "together"]) == 0
    assert Container.open(tmp_path / "direct").info["formats"]["expert"] == "int4-row"


def test_scales_that_are_damaged_are_found_by_validate(converted, tmp_path):
    out = Path(shutil.copytree(converted("glm4_moe", quantize="int4"), tmp_path / "c"))
    box = Container.open(out)
    header = box.block_layout(1, 2)
    entry = next(e for e in header.table if e["name"] == "2.up")
    raw = bytearray(header.path.read_bytes())
    start = header.payload_offset + entry["scale"][0]
    raw[start : start + 2] = np.float16(np.nan).tobytes()
    header.path.write_bytes(raw)
    faults = validate(out)
    assert any("'2.up' with finite scales" in fault.expected for fault in faults)


def test_every_format_keeps_its_fields_in_the_table(converted):
    box = Container.open(converted("glm4_moe", quantize="int4-g32-sym", tensors="all"))
    for file in (layout.dense_path(1), "dense/head.bin"):
        for tensor in box.read(file).tensors.values():
            sizes = packing.part_sizes(tensor.shape, tensor.format, tensor.layout)
            assert (tensor.zero is None) and tensor.nbytes == sum(sizes)


def test_package_exports_quantize(converted, tmp_path):
    report = cl.quantize(converted("mixtral"), tmp_path / "out", "int8", progress=False)
    assert report.ratio < 0.9 and Path(report.output) == tmp_path / "out"
