"""The GGUF writer: bytes by hand for both block formats, and a whole file taken apart again."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from colibri_lab.checkpoint import families
from colibri_lab.checkpoint.make_model import make_model
from colibri_lab.checkpoint.minifloat import to_f32
from colibri_lab.checkpoint.source import Source
from colibri_lab.errors import ModelError, SettingError


def half(x: float) -> bytes:
    return np.float16(x).tobytes()


def test_q8_0_blocks_by_hand():
    x = np.zeros((1, 64), np.float32)
    x[0, :3] = 127, -63.4, 0.5
    x[0, 33] = -254
    found = gguf.q8_0(x)
    assert found[0].tobytes() == half(1) + bytes([127, 256 - 63, 0]) + bytes(29)
    assert found[1].tobytes() == half(2) + bytes([0, 256 - 127]) + bytes(30)


def test_q4_0_blocks_by_hand():
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 1], x[0, 16], x[0, 17] = -8, 7, 8, 0.4  # the first of equal magnitudes sets the scale: -8 / -8 = 1
    low = [0, 15, *[8] * 14]
    high = [15, 8, *[8] * 14]
    assert gguf.q4_0(x)[0].tobytes() == half(1) + bytes(a | b << 4 for a, b in zip(low, high, strict=True))


def test_blocks_of_zeros_stay_zeros():
    zeros = np.zeros((1, 32), np.float32)
    assert gguf.q8_0(zeros).tobytes() == bytes(34)
    assert gguf.q4_0(zeros)[0].tobytes() == half(-0.0) + bytes([8 | 8 << 4]) * 16  # 8 stands for 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "checkpoint"
    make_model(
        path, "olmoe", hidden=64, layers=2, heads=2, kv_heads=2, experts=4, top_k=2, expert_width=32, vocab=288, progress=False
    )  # fmt: skip
    return path


def taken_apart(data: bytes) -> tuple[dict, dict]:
    """Key-value pairs, and tensors name → (shape, type code, bytes)."""
    magic, version, tensors, pairs = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)
    at = 24

    def text() -> str:
        nonlocal at
        size = int.from_bytes(data[at : at + 8], "little")
        at += 8 + size
        return data[at - size : at].decode()

    facts, infos = {}, []
    for _ in range(pairs):
        key, kind = text(), int.from_bytes(data[at : at + 4], "little")
        at += 4
        if kind == 8:
            facts[key] = text()
        else:
            facts[key] = struct.unpack_from("<f" if kind == 6 else "<I", data, at)[0]
            at += 4
    for _ in range(tensors):
        name, count = text(), int.from_bytes(data[at : at + 4], "little")
        *dims, code, offset = struct.unpack_from(f"<{count}QIQ", data, at + 4)
        at += 4 + 8 * count + 12
        infos.append((name, tuple(dims[::-1]), code, offset))
    start = -(-at // 32) * 32
    ends = [offset for *_, offset in infos[1:]] + [len(data) - start]
    return facts, {n: (s, c, data[start + o : start + e]) for (n, s, c, o), e in zip(infos, ends, strict=True)}


def test_a_file_holds_the_checkpoints_tensors(checkpoint, tmp_path):
    gguf.write_gguf(checkpoint, tmp_path / "model.gguf", "f16", progress=False)
    facts, tensors = taken_apart((tmp_path / "model.gguf").read_bytes())
    assert facts["general.architecture"] == "olmoe" and facts["tokenizer.ggml.model"] == "no_vocab"
    assert (facts["olmoe.block_count"], facts["olmoe.expert_used_count"], facts["olmoe.vocab_size"]) == (2, 2, 288)
    source, config = Source(checkpoint), families.read_config(checkpoint)
    shape, code, data = tensors["blk.1.ffn_down_exps.weight"]
    assert (shape, code) == ((4, 64, 32), 1)
    experts = [to_f32(source.rows(families.expert_names(config, 1, e)["down"])) for e in range(4)]
    assert data == np.stack(experts).astype("<f2").tobytes()
    shape, code, data = tensors["blk.0.ffn_gate_inp.weight"]
    assert (shape, code) == ((4, 64), 0)
    assert data == to_f32(source.rows(families.tensor_names(config, 0)["router"])).tobytes()
    assert all(len(data) % 32 == 0 for *_, data in tensors.values())


def test_bytes_of_a_token_are_all_matrices_but_the_embedding_and_the_idle_experts(checkpoint, tmp_path):
    read = gguf.write_gguf(checkpoint, tmp_path / "model.gguf", "q8_0", progress=False)
    attention, expert, head, router = 4 * 64 * 64, 3 * 64 * 32, 288 * 64, 4 * 64
    norms = 4 * (2 * 4 * 64 + 64)
    assert read == (2 * (attention + 2 * expert) + head) * 34 // 32 + norms + 2 * 4 * router


def test_what_cannot_be_written_is_refused(checkpoint, tmp_path):
    with pytest.raises(SettingError, match="kind cannot be 'q5_0'"):
        gguf.write_gguf(checkpoint, tmp_path / "x.gguf", "q5_0")
    other = tmp_path / "mixtral"
    make_model(
        other,
        "mixtral",
        hidden=64,
        layers=1,
        heads=2,
        kv_heads=2,
        experts=2,
        expert_width=32,
        vocab=288,
        progress=False,
    )
    with pytest.raises(ModelError, match="only olmoe is written as GGUF here, found mixtral"):
        gguf.write_gguf(other, tmp_path / "x.gguf", "f16", progress=False)
    assert not (tmp_path / "x.gguf").exists()
