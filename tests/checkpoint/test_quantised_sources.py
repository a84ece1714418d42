"""Checkpoints that are quantised already: FP8 with block scales, MXFP4 blocks."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from colibri_lab.checkpoint import formats, minifloat
from colibri_lab.checkpoint.container import Container
from colibri_lab.checkpoint.convert import convert
from colibri_lab.checkpoint.families import read_config
from colibri_lab.checkpoint.source import Source
from colibri_lab.errors import ModelError

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def slow_e4m3(code: int) -> float:
    """Value of an E4M3 byte, bit by bit."""
    sign, exponent, fraction = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2 ** (exponent - 7))


def test_every_e4m3_code():
    assert np.array_equal(minifloat.E4M3, np.float32([slow_e4m3(c) for c in range(256)]), equal_nan=True)
    assert np.nanmax(minifloat.E4M3) == 448 and minifloat.E4M3[1] == 2.0**-9


def random_fp8(rng, rows, cols):
    """Codes without NaN, scales of their 128 x 128 blocks, and the matrix they stand for, element by element."""
    codes = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
    codes[codes & 127 == 127] = 3
    scales = rng.uniform(0.5, 2, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
    values = np.empty((rows, cols), np.float32)
    for r, c in np.ndindex(rows, cols):
        values[r, c] = minifloat.E4M3[codes[r, c]] * scales[r // 128, c // 128]
    return codes, scales, values


@pytest.mark.parametrize("shape", [(128, 128), (192, 300), (1, 129), (257, 64)])
def test_fp8_blocks_are_cut_at_the_end_of_the_matrix(shape, tmp_path, write_safetensors):
    codes, scales, values = random_fp8(np.random.default_rng(0), *shape)
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scales)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    source = Source(tmp_path)
    assert np.array_equal(source.rows("w"), values)
    assert np.array_equal(source.rows("w", shape[0] // 2), values[shape[0] // 2 :])
    assert list(source.entries) == ["w"] and source.nbytes == codes.nbytes + scales.nbytes


def test_fp8_without_fitting_scales_is_refused(tmp_path, write_safetensors):
    (tmp_path / "config.json").write_text("{}")
    codes = ("F8_E4M3", np.zeros((192, 64), np.uint8))
    write_safetensors(tmp_path / "model.safetensors", {"w": codes})
    with pytest.raises(ModelError, match="w is F8_E4M3, but its scales w_scale_inv are missing"):
        Source(tmp_path).rows("w")
    for scales in (("F32", np.ones((1, 1), np.float32)), ("BF16", np.ones((2, 1), np.uint16))):
        write_safetensors(tmp_path / "model.safetensors", {"w": codes, "w_scale_inv": scales})
        with pytest.raises(
            ModelError, match=r"w_scale_inv: expected F32 \[2, 1\], one for each block of 128 x 128, found"
        ):
            Source(tmp_path)


@pytest.fixture
def fp8_checkpoint(oracle, tmp_path, write_safetensors, read_safetensors):
    """A qwen3_moe checkpoint with all matrices but router, embeddings and head in FP8, and the arrays that it holds."""
    directory = tmp_path / "fp8"
    shutil.copytree(oracle / "qwen3_moe", directory, ignore=shutil.ignore_patterns("*.safetensors", "published"))
    rng, stored, values = np.random.default_rng(1), {}, read_safetensors(oracle / "qwen3_moe")
    for name, array in values.items():
        if array.ndim == 2 and "proj" in name:
            codes, scales, values[name] = random_fp8(rng, *array.shape)
            scales *= 1e-3
            values[name] = minifloat.fp8_to_f32(codes, scales)
            stored |= {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scales)}
        else:
            stored[name] = ("F32", array)
    write_safetensors(directory / "model.safetensors", stored)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return directory, values


def test_fp8_checkpoint_becomes_a_bf16_container_of_its_values(fp8_checkpoint, tmp_path):
    directory, values = fp8_checkpoint
    report = convert(directory, tmp_path / "out", verify=True, progress=False)
    assert not report.unused
    box = Container.open(tmp_path / "out")
    assert box.info["formats"] == {"expert": "bf16", "dense": "bf16", "float": "fp32"}
    layer = box.config.moe_layers[0]
    for ours, wanted in (
        (box.expert(layer, 3)["down"], values[f"model.layers.{layer}.mlp.experts.3.down_proj.weight"]),
        (box.dense(f"layer_{layer}").tensors["q"].array(), values[f"model.layers.{layer}.self_attn.q_proj.weight"]),
    ):
        assert np.array_equal(ours, formats.bf16_to_f32(formats.f32_to_bf16(wanted)))


def test_a_nan_in_fp8_is_refused_by_name(fp8_checkpoint, tmp_path):
    directory, _ = fp8_checkpoint
    path = directory / "model.safetensors"
    source = Source(directory)
    entry = source.entry("model.layers.1.mlp.experts.0.up_proj.weight")
    raw = bytearray(path.read_bytes())
    raw[entry.start + 5] = 127
    path.write_bytes(raw)
    with pytest.raises(
        ModelError, match=r"experts\.0\.up_proj\.weight: expected finite numbers, found nan at \[0, 5\]"
    ):
        convert(directory, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    "given",
    [{"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4}, {"quant_method": "fp8", "weight_block_size": [0, 1]}],
)
def test_other_quantised_checkpoints_are_refused(given, oracle, tmp_path):
    config = json.loads((oracle / "qwen3_moe/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    with pytest.raises(ModelError, match=rf"already quantised \({given['quant_method']}\)"):
        read_config(tmp_path)


def random_mxfp4(rng, rows, blocks):
    """Bytes of a checkpoint, exponents around 1, and the matrix they stand for, element by element."""
    packed = rng.integers(0, 256, (rows, blocks, 16)).astype(np.uint8)
    exponents = rng.integers(117, 131, (rows, blocks)).astype(np.uint8)
    size = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    values = np.empty((rows, 32 * blocks), np.float32)
    for r, b, i in np.ndindex(packed.shape):
        for half, code in enumerate((packed[r, b, i] & 15, packed[r, b, i] >> 4)):
            sign = -1 if code & 8 else 1
            values[r, 32 * b + 2 * i + half] = sign * size[code & 7] * 2.0 ** (int(exponents[r, b]) - 127)
    return packed, exponents, values


def test_mxfp4_blocks_are_read_as_the_numbers_they_are_and_encoded_without_loss(tmp_path, write_safetensors):
    packed, exponents, values = random_mxfp4(np.random.default_rng(2), 37, 3)
    exponents[0, 0], exponents[1, 1] = 0, 254
    packed[0, 0], packed[1, 1] = 0x21, 0x10
    values[0, :32], values[1, 32:64] = np.tile([0.5, 1], 16) * 2.0**-127, np.tile([0, 0.5], 16) * 2.0**127
    tensors = {"w_blocks": ("U8", packed), "w_scales": ("U8", exponents)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    source = Source(tmp_path)
    assert source.entry("w").shape == (37, 96) and list(source.entries) == ["w"]
    assert np.array_equal(source.rows("w"), values) and np.array_equal(source.rows("w", 16, 32), values[16:32])
    encoded = formats.encode(values, "mxfp4")
    assert np.array_equal(formats.decode(encoded, "mxfp4"), values)


def test_mxfp4_with_scales_that_do_not_fit_is_refused(tmp_path, write_safetensors):
    blocks = ("U8", np.zeros((4, 2, 16), np.uint8))
    for tensors, found in (
        ({}, "found nothing"),
        ({"w_scales": ("U8", np.zeros((4, 3), np.uint8))}, r"found U8 \[4, 3\]"),
    ):
        write_safetensors(tmp_path / "model.safetensors", {"w_blocks": blocks, **tensors})
        with pytest.raises(
            ModelError, match=rf"w_blocks \[4, 2, 16\]: expected MXFP4 with bytes w_scales of shape \[4, 2\], {found}"
        ):
            Source(tmp_path)


def test_mxfp4_experts_keep_every_value_through_a_container(oracle, tmp_path, write_safetensors, read_safetensors):
    directory = tmp_path / "mx"
    shutil.copytree(oracle / "qwen3_moe", directory, ignore=shutil.ignore_patterns("*.safetensors", "published"))
    rng, stored, values = np.random.default_rng(1), {}, read_safetensors(oracle / "qwen3_moe")
    for name, array in values.items():
        if ".experts." in name and array.shape[1] % 32 == 0:  # not down, which has 48 columns
            packed, exponents, values[name] = random_mxfp4(rng, array.shape[0], array.shape[1] // 32)
            stored |= {f"{name}_blocks": ("U8", packed), f"{name}_scales": ("U8", exponents)}
        else:
            stored[name] = ("F32", array)
    write_safetensors(directory / "model.safetensors", stored)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    convert(directory, tmp_path / "out", verify=True, progress=False)
    convert(tmp_path / "out", tmp_path / "blocks", expert_block_size=2, verify=True, progress=False)
    for out in ("out", "blocks"):
        box = Container.open(tmp_path / out)
        assert box.info["formats"] == {"expert": "mixed", "dense": "bf16", "float": "fp32"}
        formats_of = {name.split(".")[1]: tensor.format for name, tensor in box.block(1, 0).tensors.items()}
        assert formats_of == {"gate": "mxfp4", "up": "mxfp4", "down": "bf16"}
        for layer in box.config.moe_layers:
            for expert in range(box.config.num_experts):
                for part, found in box.expert(layer, expert).items():
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                    wanted = values[name] if part != "down" else formats.bf16_to_f32(formats.f32_to_bf16(values[name]))
                    assert np.array_equal(found, wanted)


def test_ties_between_e2m1_numbers_go_to_the_even_code():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.75, -5, 0.26, 5.01])
    wanted = [0, 1, 1, 2, 2, 4, 4, 6, -1, -4, 0.5, 6]
    assert minifloat.E2M1[minifloat.nearest_e2m1(x)].tolist() == wanted
