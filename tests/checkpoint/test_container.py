from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from colibri_lab.checkpoint import layout
from colibri_lab.checkpoint.binfile import tensor_view, write_v0
from colibri_lab.checkpoint.container import Container
from colibri_lab.errors import ContainerError, StorageError


def tree(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_tree_of_a_container(converted):
    expected = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    expected += ["dense/embed.bin", "dense/head.bin", "dense/final.bin", *(f"dense/layer_{i}.bin" for i in range(3))]
    expected += [f"layer_{i}/{name}.bin" for i in (1, 2) for name in ("router", *(f"expert_{e}" for e in range(8)))]
    assert tree(converted("glm4_moe")) == sorted(expected)


def test_tied_embeddings_are_stored_once(converted):
    assert "dense/head.bin" not in tree(converted("qwen3_moe"))


def test_blocks_are_named_by_their_first_expert_and_the_last_may_be_short(converted):
    box = Container.open(converted("glm4_moe", expert_block_size=3))
    assert [path.name for path in sorted((box.dir / "layer_2").glob("expert_*"))] == [
        f"expert_{e}.bin" for e in (0, 3, 6)
    ]
    names = [[entry["name"] for entry in box.block_layout(2, b).table] for b in range(box.blocks)]
    parts = ("gate", "up", "down")
    assert names == [[f"{e}.{p}" for e in block for p in parts] for block in ((0, 1, 2), (3, 4, 5), (6, 7))]
    assert box.slot_bytes % 4096 == 0
    assert box.slot_bytes - 4096 < max(box.block_layout(2, b).payload_bytes for b in range(3)) <= box.slot_bytes


def test_a_block_read_into_memory_gives_its_tensors_by_the_layout(converted):
    """What a slot does: payload at a known offset, one read, views by the table."""
    box = Container.open(converted("glm4_moe", quantize="int8", expert_block_size=2))
    header = box.block_layout(1, 2)
    with open(box.block_path(1, 2), "rb") as file:
        file.seek(header.payload_offset)
        slot = np.frombuffer(file.read(header.payload_bytes), np.uint8)
    views = {entry["name"]: tensor_view(slot, entry) for entry in header.table}
    for part, array in box.expert(1, 5).items():
        assert np.array_equal(views[f"5.{part}"].array(), array)


def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_opening_reads_no_weights(converted):
    """Bytes that went through read(): a page of header per file at most, whatever the files hold."""
    directory = converted("glm4_moe", quantize="fp32", expert_block_size=8)
    before = bytes_read()
    box = Container.open(directory, allow_fp32=True)
    for layer in box.config.moe_layers:
        for block in range(box.blocks):
            box.block_layout(layer, block)
    opened = bytes_read() - before
    headers = 4096 * len(box.config.moe_layers) * box.blocks
    assert opened < headers + 3 * (directory / "config.json").stat().st_size
    assert opened < 0.2 * sum(path.stat().st_size for path in directory.rglob("expert_*"))


def test_fp32_is_refused_unless_asked_for(converted):
    directory = converted("glm4_moe", quantize="fp32")
    with pytest.raises(ContainerError, match="expert matrices are fp32.*allow_fp32=True"):
        Container.open(directory)
    assert Container.open(directory, allow_fp32=True).info["formats"]["expert"] == "fp32"


def test_a_checkpoint_is_refused_with_the_command_that_converts_it(oracle, tmp_path):
    with pytest.raises(ContainerError, match="found model.safetensors.*colibri convert --input"):
        Container.open(oracle / "glm4_moe")
    (tmp_path / "weights.pkl").write_bytes(b"")
    with pytest.raises(ContainerError, match="found weights.pkl.*colibri convert --input"):
        Container.open(tmp_path)


def test_directories_that_hold_no_container_are_refused(tmp_path):
    with pytest.raises(ContainerError, match="no such directory"):
        Container.open(tmp_path / "nowhere")
    with pytest.raises(ContainerError, match="config.json is missing"):
        Container.open(tmp_path)
    with pytest.raises(StorageError, match="cannot be read: File name too long"):
        Container.open(tmp_path / ("long" * 100))
    (tmp_path / "convert.partial.json").write_text("{}")
    with pytest.raises(ContainerError, match="conversion was not finished"):
        Container.open(tmp_path)


COLIBRI = ["format_version", "source", "expert_block_size", "formats", "tokenizer", "slot_bytes"]
MODEL = ["family", "ffn", "windows", "router", "rope", "num_layers", "eos_token_ids"]


@pytest.mark.parametrize("path", [("colibri", f) for f in COLIBRI] + [("model", f) for f in MODEL] + [("model",)])
def test_a_field_missing_from_the_config_is_named(path, container, edit_json):
    def remove(data):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    edit_json(container / "config.json", remove)
    with pytest.raises(ContainerError, match=rf"config\.json.*{path[-1]}"):
        Container.open(container)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda d: d["colibri"].update(format_version=9), "expected format_version 1, found 9"),
        (lambda d: d["colibri"].update(expert_block_size="2"), "expert_block_size of type int, found '2'"),
        (lambda d: d["colibri"].update(expert_block_size=0), "expert_block_size from 1 to 8, found 0"),
        (lambda d: d["colibri"]["formats"].update(expert="int3"), "formats.expert one of .*, found 'int3'"),
        (lambda d: d["colibri"]["formats"].pop("dense"), "formats.dense one of .*, found nothing"),
        (lambda d: d.update(colibri=[]), r"object colibri, found \[\]"),
        (lambda d: d["model"].update(num_layers=7), "ffn: expected one valid entry for each of 7 layers"),
        (lambda d: d["model"]["router"].update(kind="magic"), "router.kind: expected one of .*, found 'magic'"),
        (lambda d: d["model"].update(top_k=True), "top_k"),
        (lambda d: d["model"].update(surprise=1), "unknown field 'surprise'"),
    ],
)
def test_a_field_with_an_impossible_value_is_named(change, match, container, edit_json):
    edit_json(container / "config.json", change)
    with pytest.raises(ContainerError, match=match) as refusal:
        Container.open(container)
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize("name", ["dense/embed.bin", "layer_2/expert_7.bin", "layer_1/router.bin"])
def test_a_missing_file_is_named(name, container):
    (container / name).unlink()
    with pytest.raises(ContainerError, match=f"{name}: expected a file, found nothing"):
        Container.open(container)


def test_a_file_of_another_model_is_refused(container, converted):
    shutil.copy(converted("mixtral") / "layer_1/router.bin", container / "layer_1/router.bin")
    with pytest.raises(ContainerError, match="router.bin: expected tensor 'correction_bias' .* found no such tensor"):
        Container.open(container).router(1)
    shutil.copy(converted("glm4_moe", quantize="int8") / "layer_1/expert_0.bin", container / "layer_1/expert_0.bin")
    with pytest.raises(ContainerError, match="'0.gate' of shape .* in bf16, layout rows16, found .* in int8"):
        Container.open(container).block_layout(1, 0)


def npy_in_place_of(container, name, dtype=np.float32):
    """Replace a `.bin` file by .npy files of the same values."""
    file = Container.open(container).read(name)
    for tensor in file.tensors.values():
        np.save(container / layout.npy_path(name, tensor.name), tensor.array().astype(dtype))
    (container / name).unlink()


def test_npy_names():
    assert layout.npy_path("layer_3/router.bin", "router") == "layer_3/router.npy"
    assert layout.npy_path("layer_3/router.bin", "correction_bias") == "layer_3/router.correction_bias.npy"
    assert layout.npy_path("dense/layer_0.bin", "q") == "dense/layer_0.q.npy"
    assert layout.npy_path("layer_3/expert_4.bin", "5.gate") == "layer_3/expert_5.gate.npy"


@pytest.mark.parametrize(
    "name", ["dense/embed.bin", "dense/head.bin", "dense/layer_0.bin", "layer_1/router.bin", "layer_1/expert_0.bin"]
)
def test_npy_gives_the_same_arrays_layouts_and_formats(name, container, converted):
    npy_in_place_of(container, name)
    ours, original = Container.open(container).read(name), Container.open(converted("glm4_moe")).read(name)
    for tensor in original.tensors.values():
        stand_in = ours.tensors[tensor.name]
        assert (stand_in.format, stand_in.layout, stand_in.offset) == (tensor.format, tensor.layout, tensor.offset)
        assert np.array_equal(stand_in.data, tensor.data)
    assert ours.payload.__array_interface__["data"][0] % 64 == 0


def test_version_0_gives_the_same_values_to_fp16(container, converted):
    original = Container.open(converted("glm4_moe")).router(1).tensors
    flat = np.concatenate([original[name].array().reshape(-1) for name in ("router", "correction_bias")])
    write_v0(container / "layer_1/router.bin", flat)
    for name, tensor in Container.open(container).router(1).tensors.items():
        assert np.array_equal(tensor.array(), original[name].array().astype(np.float16))
    write_v0(container / "layer_1/router.bin", flat[1:])
    with pytest.raises(ContainerError, match=r"router.bin: expected 1040 bytes of fp16 .* found 1038 bytes"):
        Container.open(container).router(1)


def test_experts_as_npy_cannot_be_loaded_and_say_how_to_pack_them(container):
    npy_in_place_of(container, "layer_1/expert_0.bin")
    with pytest.raises(ContainerError, match="expert_0.bin: experts stored as .npy.*colibri convert --input"):
        Container.open(container).block_layout(1, 0)


def test_a_missing_or_foreign_npy_is_named(container):
    npy_in_place_of(container, "layer_1/router.bin")
    np.save(container / "layer_1/router.npy", np.zeros((8, 64), np.int32))
    with pytest.raises(ContainerError, match="router.npy: expected float16 or float32 .* found int32"):
        Container.open(container).router(1)
    (container / "layer_1/router.npy").write_bytes(b"\x93NUMPY junk")
    with pytest.raises(ContainerError, match="router.npy: not a .npy file"):
        Container.open(container).router(1)
    (container / "layer_1/router.npy").unlink()
    with pytest.raises(
        ContainerError, match="router.bin: expected a file, found only some .npy .*: router.npy is missing"
    ):
        Container.open(container)


def test_npy_with_objects_is_never_unpickled(container):
    npy_in_place_of(container, "layer_1/router.bin")
    np.save(container / "layer_1/router.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ContainerError, match="router.npy: not a .npy file of numbers"):
        Container.open(container).router(1)


def test_the_config_is_readable_json_with_the_model_in_it(converted):
    data = json.loads((converted("glm4_moe") / "config.json").read_text())
    assert data["colibri"]["source"] == "glm4_moe"
    assert data["colibri"]["formats"] == {"expert": "bf16", "dense": "bf16", "float": "fp32"}
    assert data["model"]["num_experts"] == 8
