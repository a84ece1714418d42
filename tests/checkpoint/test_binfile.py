from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.checkpoint import binfile
from colibri_lab.checkpoint.binfile import read_bin, read_header, read_v0, write_v0
from colibri_lab.checkpoint.files import AtomicFile
from colibri_lab.errors import ColibriError, ContainerError, StorageError

GOLDEN_V0 = bytes.fromhex("434f4c49 04000000 003c 00c0")  # "COLI", 4 bytes, 1.0, -2.0 in fp16


def test_version_0_is_the_documented_bytes(tmp_path):
    write_v0(tmp_path / "a.bin", np.array([1, -2], np.float32))
    assert (tmp_path / "a.bin").read_bytes() == GOLDEN_V0
    values = read_v0(tmp_path / "a.bin")
    assert values.dtype == np.float16 and values.tolist() == [1, -2]


def test_byte_swapped_magic_is_read_with_a_warning(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ILOC" + GOLDEN_V0[4:])
    with pytest.warns(UserWarning, match="a.bin: the magic is byte-swapped"):
        assert read_v0(tmp_path / "a.bin").tolist() == [1, -2]


@pytest.mark.parametrize(
    "data, match",
    [
        (b"", "expected at least 8 bytes, found 0"),
        (b"COLI\x04", "expected at least 8 bytes, found 5"),
        (b"GGUF" + GOLDEN_V0[4:], r"expected the magic b'COLI', found b'GGUF'"),
        (GOLDEN_V0[:-1], "expected 12 bytes .* found 11 bytes"),
        (GOLDEN_V0 + b"\0", "expected 12 bytes .* found 13 bytes"),
        (b"COLI\xff\xff\xff\xff" + bytes(100), "expected 4294967303 bytes .* found 108 bytes"),
        (b"COLI\x05\0\0\0" + bytes(5), "expected 4 bytes of fp16 .* found 5 bytes"),
    ],
)
def test_damaged_version_0_is_refused_by_what_is_wrong(data, match, tmp_path):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(ContainerError, match=match) as refusal:
        read_v0(tmp_path / "a.bin")
    assert "a.bin" in str(refusal.value)


@pytest.fixture
def expert(converted):
    """A version-1 file of one int8 expert."""
    return converted("glm4_moe", quantize="int8") / "layer_1/expert_5.bin"


def test_version_1_is_the_documented_layout(expert):
    """Parsed here a second time, from the description."""
    raw = expert.read_bytes()
    magic, payload, version, length, offset, crc = struct.unpack("<4sIIIII", raw[:24])
    assert (magic, version, offset) == (b"COLI", 1, 4096) and len(raw) == offset + payload
    assert not any(raw[24 + length : offset])
    assert zlib.crc32(raw[offset:]) == crc
    table = json.loads(raw[24 : 24 + length])
    assert [entry["name"] for entry in table] == ["5.gate", "5.up", "5.down"]
    end = 0
    for entry, (rows, cols) in zip(
        table, [(32, 64), (32, 64), (64, 20)], strict=True
    ):  # 18 -> 32 rows, 18 -> 20 columns
        for start, nbytes in ((entry["offset"], rows * cols), entry["scale"], entry["zero"]):
            assert start == -(-end // 64) * 64
            end = start + nbytes
        assert (entry["bytes"], entry["scale"][1], entry["zero"][1]) == (rows * cols, 4 * rows, rows)
    assert payload == -(-end // 64) * 64


def test_one_number_found_by_hand_in_the_bytes(expert, converted):
    raw = expert.read_bytes()
    entry = json.loads(raw[24 : 24 + struct.unpack("<I", raw[12:16])[0]])[2]
    row, k = 37, 13
    block = entry["offset"] + (row // 16) * (20 // 4 * 64)
    q = struct.unpack_from("b", raw, 4096 + block + (k // 4) * 64 + (row % 16) * 4 + k % 4)[0]
    scale = struct.unpack_from("<f", raw, 4096 + entry["scale"][0] + 4 * row)[0]
    zero = struct.unpack_from("b", raw, 4096 + entry["zero"][0] + row)[0]
    assert read_bin(expert).tensors["5.down"].array()[row, k] == np.float32((q - zero) * scale * entry["factor"])


def test_gather_takes_rows_in_either_layout(converted):
    ids = np.array([5, 255, 0, 5])
    for family in ("glm4_moe", "qwen3_moe"):  # qwen3_moe is tied: its embedding is packed
        for arguments in (dict(), dict(quantize="int8", tensors="all")):
            embed = read_bin(converted(family, **arguments) / "dense/embed.bin").tensors["embed"]
            assert embed.layout == ("rows16" if family == "qwen3_moe" else "rows")
            assert np.array_equal(embed.gather(ids), embed.array()[ids])
    with pytest.raises(IndexError, match=r"embed: row numbers must be within \[0, 256\), found 0 to 256"):
        embed.gather(np.array([0, 256]))


def test_mapped_arrays_cannot_be_written_from_python(expert):
    file = read_bin(expert)
    tensor = file.tensors["5.up"]
    for array in (file.payload, tensor.data, tensor.elements, tensor.scale, tensor.zero):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError):
            array.flags.writeable = True


def test_a_native_write_to_the_mapping_faults(expert):
    code = (
        "import ctypes, sys; from colibri_lab.checkpoint.binfile import read_bin\n"
        "data = read_bin(sys.argv[1]).payload.__array_interface__['data'][0]\n"
        "ctypes.memmove(data, b'x', 1)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(expert)], capture_output=True, timeout=60)
    assert child.returncode == -signal.SIGSEGV


def test_payload_checksum_finds_a_flipped_bit(container):
    path = container / "layer_1/expert_0.bin"
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ContainerError, match="expert_0.bin: expected payload checksum .* found"):
        read_bin(path).check_crc()


def rewrite(path, change):
    """Change the tensor table of a version-1 file in place."""
    raw = path.read_bytes()
    offset = struct.unpack("<I", raw[16:20])[0]
    table = json.loads(raw[24 : 24 + struct.unpack("<I", raw[12:16])[0]])
    change(table)
    text = json.dumps(table).encode()
    assert 24 + len(text) <= offset
    head = raw[:12] + struct.pack("<I", len(text)) + raw[16:24] + text
    path.write_bytes(head + bytes(offset - len(head)) + raw[offset:])


@pytest.mark.parametrize(
    "field, value, match",
    [
        ("offset", -64, "-64"),
        ("offset", 2**40, "1099511627776"),
        ("offset", 7, "multiple of 64"),
        ("offset", 0.0, "found 4096 at 0.0"),
        ("bytes", 10**12, "1000000000000"),
        ("shape", [18, 10**9], "found"),
        ("shape", [0, 64], "one or two dimensions"),
        ("shape", [18, -64], "one or two dimensions"),
        ("shape", [18, 64, 1], "one or two dimensions"),
        ("shape", "x", "one or two dimensions"),
        ("shape", None, "tensor table"),
        ("format", "int3", "unknown number format 'int3'"),
        ("format", "int8", "tensor table"),
        ("layout", "columns", "layout 'columns'"),
        ("factor", "1", "finite factor"),
        ("name", 5, "different names"),
        ("name", "0.up", "different names"),
    ],
)
def test_hostile_tables_are_refused_before_anything_is_touched(field, value, match, container):
    path = container / "layer_1/expert_0.bin"
    rewrite(path, lambda table: table[0].update({field: value}))
    with pytest.raises(ContainerError, match=match) as refusal:
        read_bin(path)
    assert str(path) in str(refusal.value)


@settings(max_examples=200)
@given(data=st.data())
def test_any_damage_to_the_header_is_an_error_of_ours_or_harmless(data, converted, tmp_path_factory):
    good = (converted("glm4_moe", quantize="int8") / "layer_1/expert_5.bin").read_bytes()
    raw = bytearray(good)
    header = 24 + struct.unpack("<I", good[12:16])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(4, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw), len(raw) - 1, header, 30]))])
    try:
        file = read_bin(path)
    except ColibriError as error:
        assert "damaged.bin" in str(error)
    else:
        for tensor in file.tensors.values():
            assert tensor.array().shape == tensor.shape


def test_a_payload_beyond_4_gib_is_refused_by_file():
    with pytest.raises(ContainerError, match="dense/embed.bin: would hold 4294967296 bytes"):
        binfile.header_page([], 2**32, path="dense/embed.bin")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep/a.bin"
    with pytest.raises(KeyboardInterrupt), AtomicFile(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    with AtomicFile(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole" and len(list(path.parent.iterdir())) == 1


def test_a_full_disk_names_the_file_the_need_and_what_is_free(tmp_path):
    """/dev/full answers every write as a full disk does."""
    (tmp_path / "a.bin.tmp").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"a\.bin: cannot be written: No space left.*: 9000 bytes needed, \d+ free"):
        with AtomicFile(tmp_path / "a.bin", need=9000) as file:
            file.write(bytes(9000))
    assert list(tmp_path.iterdir()) == []


def test_unreadable_files_are_storage_errors_with_the_name(tmp_path):
    (tmp_path / "loop.bin").symlink_to("loop.bin")
    with pytest.raises(StorageError, match="loop.bin: cannot be read: Too many levels"):
        read_header(tmp_path / "loop.bin")
    with pytest.raises(StorageError, match="none.bin: cannot be read: No such file"):
        read_header(tmp_path / "none.bin")
