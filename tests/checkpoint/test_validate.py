from __future__ import annotations

import json
import shutil
import struct
import zlib

import numpy as np
import pytest

from colibri_lab.checkpoint.binfile import read_header, write_v0
from colibri_lab.checkpoint.container import Container
from colibri_lab.checkpoint.validate import Fault, format_faults, validate


def test_what_convert_writes_is_sound(family, converted):
    for arguments in (dict(), dict(quantize="int8", tensors="all", expert_block_size=3), dict(quantize="fp32")):
        assert validate(converted(family, **arguments)) == []


def faults(container):
    """{file relative to the container: [fault, …]}"""
    found = {}
    for fault in validate(container):
        found.setdefault(fault.file.removeprefix(f"{container}/"), []).append(fault)
    return found


def patch(path, offset, data, mend_crc=True):
    """Write bytes into the payload of a version-1 file, with a checksum to match."""
    raw, start = bytearray(path.read_bytes()), read_header(path).payload_offset
    raw[start + offset : start + offset + len(data)] = data
    if mend_crc:
        raw[20:24] = struct.pack("<I", zlib.crc32(raw[start:]))
    path.write_bytes(raw)


def test_every_fault_is_found_in_one_pass(container, converted):
    (container / "layer_1/expert_0.bin").unlink()
    (container / "layer_1/expert_1.bin").write_bytes((container / "layer_1/expert_1.bin").read_bytes()[:-1])
    (container / "layer_1/expert_2.bin").write_bytes(b"GGUF" + (container / "layer_1/expert_2.bin").read_bytes()[4:])
    patch(container / "layer_1/expert_3.bin", 10, b"\x12\x34", mend_crc=False)
    shutil.copy(converted("glm4_moe", quantize="int8") / "layer_1/expert_4.bin", container / "layer_1/expert_4.bin")
    write_v0(container / "layer_1/expert_5.bin", np.zeros(3 * 18 * 64, np.float16))
    shutil.copy(container / "layer_1/expert_6.bin", container / "layer_1/expert_8.bin")
    patch(container / "layer_1/router.bin", 0, struct.pack("<f", np.nan))
    patch(container / "layer_2/router.bin", 4, struct.pack("<f", np.inf))
    patch(container / "dense/layer_0.bin", 0, struct.pack("<f", -np.inf))
    patch(container / "layer_2/expert_0.bin", 0, b"\xc0\x7f")
    shutil.copy(converted("mixtral") / "dense/final.bin", container / "dense/head.bin")
    with open(container / "tokenizer.json", "a") as file:
        file.write(" ")
    (container / "notes.txt").write_text("mine")
    found = faults(container)
    expected = {
        "layer_1/expert_0.bin": ("a file", "nothing"),
        "layer_1/expert_1.bin": ("for a payload of", "bytes"),
        "layer_1/expert_2.bin": ("the magic b'COLI'", "b'GGUF'"),
        "layer_1/expert_3.bin": ("payload checksum", ""),
        "layer_1/expert_4.bin": ("in bf16, layout rows16", "in int8"),
        "layer_1/expert_5.bin": ("version 1", "version 0"),
        "layer_1/expert_8.bin": ("no such file", "bytes"),
        "layer_1/router.bin": ("'router' of finite numbers", "NaN"),
        "layer_2/router.bin": ("'router' of finite numbers", "infinity"),
        "dense/layer_0.bin": ("of finite numbers", "NaN or infinity"),
        "layer_2/expert_0.bin": ("'0.gate' of finite numbers", "NaN"),
        "dense/head.bin": ("tensor 'head' of shape (256, 64)", "no such tensor"),
        "tokenizer.json": ("sha256", ""),
        "notes.txt": ("no such file", "4 bytes"),
    }
    assert found.keys() == expected.keys()
    for file, (wanted, is_so) in expected.items():
        assert wanted in found[file][0].expected and is_so in found[file][0].found, found[file]


def test_all_faults_of_one_file_are_listed(container):
    """Three matrices of the wrong format, and a checksum that fits none."""
    path = container / "layer_1/expert_0.bin"
    raw = path.read_bytes()
    length = struct.unpack("<I", raw[12:16])[0]
    text = raw[24 : 24 + length].replace(b'"bf16"', b'"fp16"')
    path.write_bytes(raw[:20] + b"\0\0\0\0" + text + raw[24 + length :])
    listed = faults(container)["layer_1/expert_0.bin"]
    assert [("fp16" in f.found) for f in listed] == [True, True, True, False]
    assert "checksum" in listed[3].expected


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_scales_that_are_no_scales_are_found(scale, converted, tmp_path):
    container = shutil.copytree(converted("glm4_moe", quantize="int8"), tmp_path / "c")
    entry = Container.open(container).block_layout(2, 3).table[1]
    patch(container / "layer_2/expert_3.bin", entry["scale"][0], struct.pack("<f", scale))
    assert [f.expected for f in faults(container)["layer_2/expert_3.bin"]] == ["tensor '3.up' with finite scales"]


def test_all_faults_of_the_config_are_listed(container, edit_json):
    def spoil(data):
        del data["colibri"]["source"], data["colibri"]["slot_bytes"]
        data["model"]["num_heads"] = 5

    edit_json(container / "config.json", spoil)
    text = format_faults(validate(container))
    assert "field colibri.source of type str, found nothing" in text
    assert "field colibri.slot_bytes of type int, found nothing" in text
    assert "5 attention heads cannot share 2" in text
    assert text.endswith("3 faults")


def test_a_directory_that_is_no_container_is_one_fault(tmp_path, oracle):
    for directory in (tmp_path, tmp_path / "nowhere", oracle / "glm4_moe"):
        assert len(validate(directory)) == 1
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in format_faults(validate(tmp_path))


def test_a_missing_tokenizer_is_a_fault(container):
    (container / "tokenizer.json").unlink()
    assert "file is missing" in format_faults(validate(container))


def test_faults_are_printed_a_line_each():
    faults = [Fault("a.bin", "12 bytes", "11"), Fault("b.bin", "a file", "nothing")]
    assert (
        format_faults(faults) == "a.bin: expected 12 bytes, found 11\nb.bin: expected a file, found nothing\n2 faults"
    )
    assert format_faults(faults[:1]).endswith("1 fault")


def test_npy_routers_are_sound_and_checked(container):
    router = Container.open(container).router(1).tensors
    np.save(container / "layer_1/router.npy", router["router"].array())
    np.save(container / "layer_1/router.correction_bias.npy", router["correction_bias"].array())
    (container / "layer_1/router.bin").unlink()
    assert validate(container) == []
    np.save(container / "layer_1/router.npy", np.full((8, 64), np.nan, np.float32))
    assert "router" in json.dumps([f.file for f in validate(container)])
