from __future__ import annotations

import filecmp
import json
import os
import shutil
import tracemalloc
from collections import namedtuple

import filelock
import numpy as np
import pytest

from colibri_lab.checkpoint import convert as convert_module
from colibri_lab.checkpoint import formats
from colibri_lab.checkpoint.binfile import read_bin
from colibri_lab.checkpoint.container import Container
from colibri_lab.checkpoint.convert import MARKER, convert
from colibri_lab.checkpoint.plan import make_plan
from colibri_lab.checkpoint.validate import validate
from colibri_lab.checkpoint.verify import verify_container
from colibri_lab.errors import ContainerError, ModelError, SettingError, StorageError, TokenizerError


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def quiet(input, output, **arguments):
    return convert(input, output, progress=False, **arguments)


def same_tree(a, b):
    """The same names, empty directories included, and the same bytes."""
    names, others = (sorted(p.relative_to(d).as_posix() for p in d.rglob("*")) for d in (a, b))
    files = [name for name in names if (a / name).is_file()]
    return names == others and filecmp.cmpfiles(a, b, files, shallow=False)[0] == files


@pytest.mark.parametrize("format", ["auto", "fp16", "bf16", "int8", "fp32"])
def test_every_tensor_is_that_of_the_checkpoint_within_its_format(format, family, converted, oracle, read_safetensors):
    source = read_safetensors(oracle / family)
    directory = converted(family, quantize=format)
    box = Container.open(directory, allow_fp32=True)
    names = make_plan(oracle / family, "unused").names
    seen = set()
    for file, own in names.items():
        for tensor in read_bin(directory / file).tensors.values():
            wanted = source[own[tensor.name]]
            seen.add(own[tensor.name])
            found = tensor.array()
            assert found.shape == wanted.shape
            assert tensor.format == box.info["formats"][box.files[file][tensor.name].part]
            if tensor.format == "int8":
                step = (tensor.scale * np.float32(tensor.factor))[: len(wanted), None]
                assert (np.abs(found - wanted) <= step / 2 + np.spacing(np.abs(wanted) + step)).all()
            elif tensor.format == "fp16":
                assert np.array_equal(found, wanted.astype(np.float16))
            elif tensor.format == "bf16":
                assert (np.abs(found - wanted) <= np.abs(wanted) * 2.0**-8).all()
            else:
                assert np.array_equal(found, wanted)
    assert seen == source.keys()


def test_auto_keeps_bf16_exactly_and_makes_fp16_of_fp32(converted):
    assert Container.open(converted("glm4_moe")).info["formats"]["expert"] == "bf16"
    assert Container.open(converted("olmoe")).info["formats"] == {"expert": "fp16", "dense": "fp16", "float": "fp32"}


def test_int8_is_for_experts_or_for_every_matrix(converted):
    experts = Container.open(converted("glm4_moe", quantize="int8"))
    assert experts.info["formats"] == {"expert": "int8", "dense": "bf16", "float": "fp32"}
    everything = Container.open(converted("glm4_moe", quantize="int8", tensors="all"))
    assert everything.info["formats"] == {"expert": "int8", "dense": "int8", "float": "fp32"}
    layer = everything.dense("layer_1").tensors
    assert {layer[name].format for name in ("q", "o", "shared_up")} == {"int8"}
    assert {layer[name].format for name in ("q_bias", "q_norm", "input_norm")} == {"fp32"}


def test_every_expert_keeps_its_own_scales(oracle, checkpoint, converted, out):
    """Experts stored in another order are the same experts, each with its factor and scales."""
    for old, new in ((b"2", b"X"), (b"6", b"2"), (b"X", b"6")):
        rename(checkpoint / "model.safetensors", b".1.mlp.experts.%s." % old, b".1.mlp.experts.%s." % new)
    quiet(checkpoint, out, quantize="int8")
    swapped, original = Container.open(out), Container.open(converted("glm4_moe", quantize="int8"))
    for expert, other in ((2, 6), (6, 2), (3, 3)):
        for part in ("gate", "up", "down"):
            ours = swapped.block(1, expert).tensors[f"{expert}.{part}"]
            theirs = original.block(1, other).tensors[f"{other}.{part}"]
            assert ours.factor == theirs.factor
            for field in ("data", "scale", "zero"):
                assert np.array_equal(getattr(ours, field), getattr(theirs, field))


def test_the_plan_comes_first_and_its_bytes_are_those_written(oracle, out, capsys):
    report = convert(oracle / "glm4_moe/published", out, expert_block_size=2)
    printed = capsys.readouterr().err
    assert f"{report.bytes_in} bytes in, {report.bytes_out} bytes out" in printed
    assert printed.index("glm4_moe: 3 layers, 2 of them with 8 experts, top-3") < printed.index("%|")
    assert report.bytes_out == sum(p.stat().st_size for p in out.rglob("*.bin"))
    assert report.ratio == report.bytes_out / report.bytes_in
    assert report.skipped_bytes > 0 and report.unused == []
    assert f"left out: {report.skipped_bytes} bytes of next-token-prediction layers" in printed


def test_skipped_bytes_are_those_of_the_extra_layer(oracle, out, read_safetensors):
    report = quiet(oracle / "glm4_moe/published", out)
    path = oracle / "glm4_moe/published/model.safetensors"
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    spans = [item["data_offsets"] for name, item in header.items() if name.startswith("model.layers.3.")]
    assert report.skipped_bytes == sum(end - start for start, end in spans)


def test_bf16_to_fp16_costs_no_more_than_a_tenth_of_the_size(tmp_path, big_checkpoint):
    report = quiet(big_checkpoint, tmp_path / "out", quantize="fp16")
    assert 1.0 <= report.ratio <= 1.1


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory, oracle, write_safetensors):
    """A mixtral of one layer whose embedding and head have 12.8 MB each in bf16."""
    directory = tmp_path_factory.mktemp("big")
    fields = json.loads((oracle / "mixtral/config.json").read_text())
    fields |= dict(vocab_size=100_000, num_hidden_layers=1, intermediate_size=512)
    (directory / "config.json").write_text(json.dumps(fields))
    shutil.copy(oracle / "mixtral/tokenizer.json", directory)
    layer, experts = "model.layers.0.", "model.layers.0.block_sparse_moe.experts."
    shapes = {f"{name}.weight": (100_000, 64) for name in ("model.embed_tokens", "lm_head")}
    norms = ("model.norm", layer + "input_layernorm", layer + "post_attention_layernorm")
    shapes |= {f"{name}.weight": (64,) for name in norms}
    attention = dict(q=(96, 64), k=(48, 64), v=(48, 64), o=(64, 96))
    shapes |= {f"{layer}self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    shapes[layer + "block_sparse_moe.gate.weight"] = (8, 64)
    for name, shape in dict(w1=(512, 64), w3=(512, 64), w2=(64, 512)).items():
        shapes |= {f"{experts}{e}.{name}.weight": shape for e in range(8)}
    rng = np.random.default_rng(0)
    tensors = {n: ("BF16", formats.f32_to_bf16(rng.normal(size=s).astype("f4"))) for n, s in shapes.items()}
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def test_peak_memory_stays_below_twice_the_largest_tensor(big_checkpoint, tmp_path):
    """And so does not depend on the model's size: 12.8 MB is the largest tensor, the file holds 27 MB."""
    tracemalloc.start()
    try:
        quiet(big_checkpoint, tmp_path / "out", quantize="int8", tensors="all")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 12_800_000


def interrupt_after(monkeypatch, calls, error=KeyboardInterrupt):
    """The encoder raises `error` at its `calls`-th use: in the middle of a file."""
    original, count = formats.encode, iter(range(1, 10**9))

    def encode(*arguments, **named):
        if next(count) == calls:
            raise error
        return original(*arguments, **named)

    monkeypatch.setattr(convert_module.formats, "encode", encode)


@pytest.mark.parametrize("calls", [1, 20, 60])
def test_an_interrupted_conversion_goes_on_and_ends_the_same(calls, oracle, converted, out, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, calls)
        quiet(oracle / "glm4_moe", out)
    assert not (out / "config.json").exists() and not list(out.rglob("*.tmp"))
    with pytest.raises(ContainerError, match="conversion was not finished"):
        Container.open(out)
    (out / "dense/embed.bin.tmp").parent.mkdir(exist_ok=True)
    (out / "dense/embed.bin.tmp").write_bytes(b"left by a killed process")
    done = len(list(out.rglob("*.bin")))
    report = quiet(oracle / "glm4_moe", out)
    assert report.files_kept == done and report.files_kept + report.files_written == len(Container.open(out).files)
    (out / "dense/embed.bin.tmp").unlink(missing_ok=True)
    assert same_tree(out, converted("glm4_moe"))


def test_unfinished_files_and_those_of_another_plan_are_not_kept(oracle, converted, out, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 40)
        quiet(oracle / "glm4_moe", out)
    with pytest.raises(ContainerError, match="unfinished conversion with other settings"):
        quiet(oracle / "glm4_moe", out, quantize="int8")
    os.truncate(out / "dense/embed.bin", 5000)
    quiet(oracle / "glm4_moe", out)
    assert same_tree(out, converted("glm4_moe"))


def test_overwriting_an_unfinished_conversion_starts_over(oracle, converted, out, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 40)
        quiet(oracle / "mixtral", out)
    assert quiet(oracle / "glm4_moe", out, overwrite=True).files_kept == 0
    assert same_tree(out, converted("glm4_moe"))


def test_a_container_is_replaced_only_on_request(container, oracle, converted):
    before = (container / "layer_1/expert_0.bin").read_bytes()
    with pytest.raises(ContainerError, match="a container is already there; overwrite"):
        quiet(oracle / "glm4_moe", container, quantize="int8")
    assert (container / "layer_1/expert_0.bin").read_bytes() == before
    quiet(oracle / "glm4_moe", container, quantize="int8", expert_block_size=2, overwrite=True)
    assert validate(container) == []
    assert same_tree(container, converted("glm4_moe", quantize="int8", expert_block_size=2))


def test_overwriting_leaves_files_of_the_user_alone(container, oracle):
    (container / "layer_1/notes.txt").write_text("mine")
    quiet(oracle / "mixtral", container, overwrite=True)
    assert (container / "layer_1/notes.txt").read_text() == "mine"
    assert [fault.file for fault in validate(container)] == [str(container / "layer_1/notes.txt")]


def test_two_conversions_into_one_directory_do_not_mix(oracle, out):
    out.mkdir()
    with filelock.FileLock(out / "convert.lock"):
        with pytest.raises(ContainerError, match="another process is converting into this directory"):
            quiet(oracle / "glm4_moe", out)
    quiet(oracle / "glm4_moe", out)
    assert validate(out) == []


def test_a_bad_request_destroys_nothing(container, oracle, checkpoint, edit_json):
    """Whatever is wrong with the input is found before the old container is touched, --overwrite or not."""
    edit_json(checkpoint / "config.json", lambda c: c.update(vocab_size=257))
    with pytest.raises(ModelError):
        quiet(checkpoint, container, overwrite=True)
    with pytest.raises(SettingError):
        quiet(oracle / "glm4_moe", container, quantize="int9", overwrite=True)
    assert validate(container) == []


def test_directories_of_other_things_are_left_alone(oracle, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ContainerError, match="not empty, and not a container"):
            quiet(oracle / "glm4_moe", tmp_path, overwrite=overwrite)
    with pytest.raises(ContainerError, match="thesis.txt: expected a directory, found a file"):
        quiet(oracle / "glm4_moe", tmp_path / "thesis.txt")
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_the_checkpoint_itself_is_no_output(checkpoint):
    with pytest.raises(SettingError, match="is the input itself"):
        quiet(checkpoint, checkpoint, overwrite=True)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (dict(quantize="int9"), "quantize cannot be 'int9'; did you mean 'int8'"),
        (dict(tensors="expert"), "tensors cannot be 'expert'; did you mean 'experts'"),
        (dict(expert_block_size=0), "expert_block_size must be from 1 to 8 experts, got 0"),
        (dict(expert_block_size=9), "expert_block_size must be from 1 to 8 experts, got 9"),
        (dict(expert_block_size=2.0), "expert_block_size must be from 1 to 8 experts, got 2.0"),
        (dict(max_seq_len=513), "max_seq_len must be from 1 to 512, .*, got 513"),
        (dict(max_seq_len=0), "max_seq_len must be from 1"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(arguments, match, oracle, out):
    with pytest.raises(SettingError, match=match):
        quiet(oracle / "glm4_moe", out, **arguments)
    assert not out.exists()


def test_max_seq_len_is_kept_for_the_engine(converted):
    assert Container.open(converted("glm4_moe", max_seq_len=128)).info["max_seq_len"] == 128


Usage = namedtuple("Usage", "total used free")


def test_a_disk_too_small_is_told_before_anything_is_written(oracle, out, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 5000, 5000))
    with pytest.raises(
        StorageError, match=r"out: the disk is too small: \d+ bytes needed, 5000 free; nothing was written"
    ):
        quiet(oracle / "glm4_moe", out)
    assert not out.exists()


def test_a_disk_that_fills_up_on_the_way_names_the_file_and_leaves_a_resumable_directory(oracle, converted, container):
    """An unfinished container whose next file goes to /dev/full, which answers every write as a full disk does."""
    (container / "config.json").unlink()
    (container / "layer_1/expert_3.bin").unlink()
    (container / "layer_1/expert_3.bin.tmp").symlink_to("/dev/full")
    (container / MARKER).write_text(json.dumps({"plan": make_plan(oracle / "glm4_moe", container).id}))
    with pytest.raises(StorageError, match=r"expert_3.bin: cannot be written: No space left .* needed, \d+ free"):
        quiet(oracle / "glm4_moe", container)
    assert quiet(oracle / "glm4_moe", container).files_written == 1
    assert same_tree(container, converted("glm4_moe"))


def test_an_unwritable_output_is_a_storage_error(oracle, tmp_path):
    with pytest.raises(StorageError, match="File name too long"):
        quiet(oracle / "glm4_moe", tmp_path / ("long" * 100))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="loop"):
        quiet(oracle / "glm4_moe", tmp_path / "loop")


def rename(path, old: bytes, new: bytes):
    raw = path.read_bytes()
    assert old in raw and len(old) == len(new)
    path.write_bytes(raw.replace(old, new))


def test_a_missing_tensor_is_named(checkpoint, out):
    rename(checkpoint / "model.safetensors", b"layers.2.mlp.experts.5.up_proj", b"layers.2.mlp.experts.5.UP_proj")
    with pytest.raises(ModelError, match="tensor model.layers.2.mlp.experts.5.up_proj.weight is missing"):
        quiet(checkpoint, out)
    assert not out.exists()


def test_tensors_nobody_asked_for_are_reported(checkpoint, out, write_safetensors, capsys):
    extra = {"model.layers.1.surprise": ("F32", np.zeros(3, "f4")), "mtp.head": ("F32", np.zeros(5, "f4"))}
    write_safetensors(checkpoint / "extra.safetensors", extra)
    report = convert(checkpoint, out)
    assert report.unused == ["model.layers.1.surprise"] and report.skipped_bytes == 20
    assert "not known to this version: model.layers.1.surprise" in capsys.readouterr().err


def test_fused_experts_are_refused_by_name(checkpoint, out, write_safetensors):
    rename(checkpoint / "model.safetensors", b"layers.1.mlp.experts.", b"layers.1.mlp.Experts.")
    fused = {"model.layers.1.mlp.experts.gate_up_proj": ("F32", np.zeros((8, 2, 3), "f4"))}
    write_safetensors(checkpoint / "extra.safetensors", fused)
    with pytest.raises(ModelError, match="model.layers.1.mlp.experts.gate_up_proj holds all experts of a layer"):
        quiet(checkpoint, out)


def test_a_shape_that_contradicts_the_config_is_named(checkpoint, out, edit_json):
    edit_json(checkpoint / "config.json", lambda c: c.update(head_dim=32))
    with pytest.raises(ModelError, match=r"q_proj.weight: expected shape \[128, 64\] by config.json, found \[96, 64\]"):
        quiet(checkpoint, out)


def poison(path, name, value):
    """Set the first number of a float32 or bf16 tensor."""
    raw = bytearray(path.read_bytes())
    base = 8 + int.from_bytes(raw[:8], "little")
    item = json.loads(raw[8:base])[name]
    number = np.float32(value).tobytes()
    number = number if item["dtype"] == "F32" else number[2:]
    start = base + item["data_offsets"][0]
    raw[start : start + len(number)] = number
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.4.down_proj.weight"])
@pytest.mark.parametrize("format", ["auto", "int8"])
def test_nan_in_the_checkpoint_is_refused_by_tensor(name, format, checkpoint, out):
    poison(checkpoint / "model.safetensors", name, np.nan)
    with pytest.raises(ModelError, match=rf"{name}: expected finite numbers, found nan at \[0, 0\]"):
        quiet(checkpoint, out, quantize=format)


def test_a_weight_beyond_fp16_is_refused_by_tensor_and_kept_by_bf16(checkpoint, out):
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    poison(checkpoint / "model.safetensors", name, 1e5)
    with pytest.raises(ModelError, match=f"{name}: the value 99840 is beyond the range of fp16; convert to bf16"):
        quiet(checkpoint, out, quantize="fp16")
    quiet(checkpoint, out, overwrite=True)
    assert Container.open(out).expert(1, 4)["down"][0, 0] == 99840


def test_tokenizers_that_cannot_go_along_are_refused(checkpoint, out, edit_json):
    (checkpoint / "tokenizer.json").rename(checkpoint / "tokenizer.model")
    with pytest.raises(TokenizerError, match="tokenizer.json: file is missing; found tokenizer.model.*save_pretrained"):
        quiet(checkpoint, out)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json: not a tokenizer"):
        quiet(checkpoint, out)
    shutil.move(checkpoint / "tokenizer.model", checkpoint / "tokenizer.json")
    token = dict(
        id=256, content="<more>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True
    )
    edit_json(checkpoint / "tokenizer.json", lambda t: t["added_tokens"].append(token))
    with pytest.raises(TokenizerError, match="257 tokens for a model of 256"):
        quiet(checkpoint, out)


def test_verify_looks_at_sampled_experts_by_seed(converted, oracle):
    directory = converted("glm4_moe", quantize="int8")
    few = verify_container(directory, oracle / "glm4_moe", samples=3, seed=1)
    assert few == verify_container(directory, oracle / "glm4_moe", samples=3, seed=1)
    assert few != verify_container(directory, oracle / "glm4_moe", samples=3, seed=2)
    assert sum("expert_" in file for file in few) == 3
    everything = verify_container(directory, oracle / "glm4_moe", samples=99)
    assert sum("expert_" in file for file in everything) == 16


@pytest.mark.parametrize("format", ["auto", "fp16", "int8", "fp32"])
def test_verify_finds_one_changed_number_and_names_the_file(format, oracle, out, monkeypatch):
    """The checksum is made to fit, so that only the comparison can tell."""
    quiet(oracle / "glm4_moe", out, quantize=format)
    path = out / "layer_2/expert_6.bin"
    raw = bytearray(path.read_bytes())
    raw[4096 + 1] ^= 0x40
    path.write_bytes(raw)
    with pytest.raises(ContainerError, match="layer_2/expert_6.bin: expected payload checksum"):
        verify_container(out, oracle / "glm4_moe", samples=99)
    monkeypatch.setattr("colibri_lab.checkpoint.binfile.BinFile.check_crc", lambda file: None)
    with pytest.raises(ContainerError, match=r"layer_2/expert_6.bin: tensor 6.gate at \[\d+, \d+\]: expected .* found"):
        verify_container(out, oracle / "glm4_moe", samples=99)


def test_convert_verifies_on_request(oracle, out):
    report = quiet(oracle / "qwen2_moe", out, verify=True)
    assert len(report.verified_files) > 8 and all(os.path.exists(file) for file in report.verified_files)
    assert "agree with the source" in str(report)
