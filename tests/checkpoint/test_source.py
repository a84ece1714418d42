from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.checkpoint import formats
from colibri_lab.checkpoint.source import Source, read_header
from colibri_lab.errors import ColibriError, ModelError, StorageError


def test_files_of_the_reference_writer_are_read(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"a": rng.normal(size=(5, 7)).astype("f4"), "b": rng.normal(size=9).astype("f2")}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})
    source = Source(tmp_path)
    assert np.array_equal(source.rows("a"), tensors["a"])
    assert np.array_equal(source.rows("a", 2, 4), tensors["a"][2:4])
    assert np.array_equal(source.rows("b"), tensors["b"][None])
    assert source.nbytes == 5 * 7 * 4 + 9 * 2


def test_bf16_comes_as_bits(tmp_path, write_safetensors):
    bits = np.array([[0x3F80, 0xC020]], np.uint16)
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", bits)})
    assert np.array_equal(Source(tmp_path).rows("a"), bits)


def test_a_sharded_checkpoint_is_the_sum_of_its_shards(oracle, read_safetensors):
    source = Source(oracle / "mixtral")
    assert len(source.files) > 1
    expected = read_safetensors(oracle / "mixtral")
    assert source.entries.keys() == expected.keys()
    for name in list(expected)[::50]:
        wanted = expected[name]
        assert np.array_equal(formats.to_f32(source.rows(name)), wanted.reshape(-1, wanted.shape[-1]))


@pytest.fixture
def shards(oracle, tmp_path):
    return shutil.copytree(oracle / "mixtral", tmp_path / "mixtral")


def test_a_missing_shard_is_named(shards):
    next(shards.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match="model-00002-of-00003.safetensors: shard .* is missing"):
        Source(shards)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda index: index.pop("weight_map"), "expected an object weight_map"),
        (lambda index: index["weight_map"].update(a="../elsewhere.safetensors"), "expected an object weight_map"),
        (lambda index: index["weight_map"].update(a=1), "expected an object weight_map"),
        (lambda index: index["weight_map"].update(ghost="model-00001-of-00003.safetensors"), "tensor ghost is not in"),
    ],
)
def test_a_faulty_index_is_refused(change, match, shards, edit_json):
    edit_json(shards / "model.safetensors.index.json", change)
    with pytest.raises(ModelError, match=f"index.json: {match}"):
        Source(shards)


def test_a_tensor_in_two_shards_is_refused(shards):
    (shards / "model.safetensors.index.json").unlink()
    shutil.copy(shards / "model-00001-of-00003.safetensors", shards / "model-00004.safetensors")
    with pytest.raises(ModelError, match="model-00004.safetensors: tensor .* is also in model-00001"):
        Source(shards)


def test_missing_tensors_and_unreadable_types_are_named(tmp_path, write_safetensors):
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F8_E5M2", np.zeros((2, 2), np.uint8))})
    source = Source(tmp_path)
    with pytest.raises(ModelError, match="tensor w has type F8_E5M2, which this version cannot read; expected F32"):
        source.rows("w")
    with pytest.raises(ModelError, match="tensor v is missing from the checkpoint"):
        source.rows("v")


def test_directories_without_safetensors_are_refused_by_what_is_there(tmp_path):
    with pytest.raises(ModelError, match="no such directory"):
        Source(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="expected .safetensors files, found none"):
        Source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="found pytorch_model.bin, which is not read here"):
        Source(tmp_path)
    with pytest.raises(StorageError, match="File name too long"):
        Source(tmp_path / ("long" * 100))


def file_with_header(path, header: bytes, body: bytes = bytes(64)):
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)


@pytest.mark.parametrize(
    "header, match",
    [
        (b"", "damaged safetensors header"),
        (b"[1]", "damaged safetensors header"),
        (b"{" * 9, "damaged safetensors header"),
        (b"[" * 100_000, "damaged safetensors header"),
        (b'{"a": 1}', "damaged safetensors header"),
        (b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}', "negative"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}', "negative"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}', "claims bytes"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}', "claims bytes"),
        (b'{"a": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}', "claims bytes .* cut short"),
    ],
)
def test_hostile_headers_are_refused(header, match, tmp_path):
    file_with_header(tmp_path / "m.safetensors", header)
    with pytest.raises(ModelError, match=match) as refusal:
        read_header(tmp_path / "m.safetensors")
    assert "m.safetensors" in str(refusal.value)


@pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_files_that_are_no_safetensors_are_refused(raw, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match="m.safetensors: not a safetensors file"):
        read_header(tmp_path / "m.safetensors")


@settings(max_examples=200)
@given(st.data())
def test_any_damage_to_a_header_is_an_error_of_ours_or_harmless(tmp_path_factory, data):
    table = {"a": dict(dtype="F32", shape=[2, 4], data_offsets=[0, 32])}
    table["b"] = dict(dtype="F16", shape=[16], data_offsets=[32, 64])
    raw = bytearray(json.dumps(table).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "m.safetensors"
    file_with_header(path, bytes(raw))
    try:
        entries = read_header(path)
    except ColibriError:
        return
    assert all(path.stat().st_size >= entry.start + entry.nbytes for entry in entries)
