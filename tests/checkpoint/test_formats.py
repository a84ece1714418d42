from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colibri_lab.checkpoint import formats, packing
from colibri_lab.checkpoint.formats import FORMATS, decode, encode
from colibri_lab.errors import ContainerError, ModelError, SettingError

FLOATS = st.floats(-1e4, 1e4, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
MATRICES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=FLOATS)
INTEGER = [name for name, kind in FORMATS.items() if kind.kind in ("int8", "int4")]
ROWS = [name for name in INTEGER if not FORMATS[name].group and not FORMATS[name].shared]


def own_factor(w) -> float:
    return formats.expert_factor(float(np.abs(w).max(initial=0)))


def test_bf16_bits_of_known_numbers():
    """Bits by hand: 1, -2.5, pi, 1/3, and two ties that go to the even neighbour."""
    bits = np.array([0x3F800000, 0xC0200000, 0x40490FDB, 0x3EAAAAAB, 0x3F808000, 0x3F818000], np.uint32)
    expected = [0x3F80, 0xC020, 0x4049, 0x3EAB, 0x3F80, 0x3F82]
    assert formats.f32_to_bf16(bits.view(np.float32)).tolist() == expected


@given(MATRICES)
def test_sixteen_bit_formats_err_by_half_a_unit_at_most(w):
    assert np.array_equal(decode(encode(w, "fp32"), "fp32"), w)
    assert (np.abs(decode(encode(w, "bf16"), "bf16") - w) <= np.abs(w) * 2.0**-8).all()
    assert (np.abs(decode(encode(w, "fp16"), "fp16") - w) <= np.abs(w) * 2.0**-11 + 2.0**-25).all()


def test_int8_row_worked_by_hand():
    """Range -1 to 3: step 4/255, zero point round(-128 + 1/step) = round(-64.25) = -64."""
    row = encode(np.array([[-1, 0, 3, 1]], np.float32), "int8")
    assert row.scale == pytest.approx(np.array([[4 / 255]]), rel=1e-6)
    assert row.zero.tolist() == [[-64]]
    assert row.data.tolist() == [[-128, -64, 127, 0]]


def test_int4_groups_worked_by_hand():
    """First group of 32: range -1 to 2, step 1/5, zero 5. Second, short group: range 0 to 30, step 2, zero 0."""
    w = np.zeros((1, 35), np.float32)
    w[0, [0, 1, 2, 32, 33]] = -1, 2, 0.5, 30, 5
    group = encode(w, "int4-g32")
    assert group.scale[0] == pytest.approx([0.2, 2], rel=2**-10) and (group.scale[0] >= [0.2, 2]).all()
    assert group.zero.tolist() == [[5, 0]]
    assert group.data[0, [0, 1, 2, 3, 32, 33, 34]].tolist() == [0, 15, 7, 5, 15, 2, 0]


def test_symmetric_int4_row_worked_by_hand():
    """-8 needs a step of 1 below the middle, 6 a step of 6/7 above it: the larger step wins."""
    row = encode(np.array([[-8, 6, 0, 2.4]], np.float32), "int4-row-sym")
    assert row.scale.tolist() == [[1]] and row.zero is None
    assert row.data.tolist() == [[0, 14, 8, 10]]


@settings(max_examples=60)
@given(MATRICES, st.integers(-20, 20), st.sampled_from(INTEGER))
def test_integers_err_by_half_a_step_at_most_and_keep_zero(w, exponent, format):
    factor = own_factor(w) * 2.0**exponent if exponent > 0 else own_factor(w)
    encoded = encode(w, format, factor)
    step = formats.spread((encoded.scale * np.float32(factor)).astype(np.float64), FORMATS[format], w.shape[1])
    back = decode(encoded, format, factor)
    assert (np.abs(back.astype(np.float64) - w) <= 0.5 * step + np.spacing(np.abs(w) + step.astype(np.float32))).all()
    assert (back[w == 0] == 0).all()


@settings(max_examples=60)
@given(
    hnp.arrays(np.float32, st.integers(1, 20), elements=FLOATS), st.integers(1, 40), st.integers(-20, 20),
    st.sampled_from(ROWS),
)  # fmt: skip
def test_constant_rows_and_zero_rows_are_exact(values, cols, exponent, format):
    w = np.repeat(values[:, None], cols, 1)
    assert np.array_equal(decode(encode(w, format, 2.0**exponent), format, 2.0**exponent), w)


@pytest.mark.parametrize("format", [name for name in INTEGER if FORMATS[name].group])
def test_constant_groups_of_sixteen_bit_numbers_are_exact(format):
    values = np.random.default_rng(3).normal(size=(20, 1)).astype(np.float16).astype(np.float32)
    values[0] = 0
    w = np.repeat(values, 200, 1)
    assert np.array_equal(decode(encode(w, format, own_factor(w)), format, own_factor(w)), w)


@pytest.mark.parametrize("format", [*INTEGER, "mxfp4"])
def test_an_expert_a_hundred_times_larger_has_the_same_relative_error(format):
    w = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    errors = []
    for scaled in (w, w * 128, w * np.float32(100), w * np.float32(1e-6)):
        factor = own_factor(scaled) if format != "mxfp4" else 1.0
        back = decode(encode(scaled, format, factor), format, factor)
        errors.append(np.linalg.norm(back - scaled) / np.linalg.norm(scaled))
    assert errors[1] == pytest.approx(errors[0], rel=1e-6)
    assert errors == pytest.approx([errors[0]] * 4, rel=0.25 if format == "mxfp4" else 0.02)


@pytest.mark.parametrize("largest, factor", [(0, 1), (1, 1), (1.001, 2), (0.5, 0.5), (3, 4), (1e-45, 2.0**-126)])
def test_expert_factor_is_the_power_of_two_above_the_largest_weight(largest, factor):
    assert formats.expert_factor(largest) == factor


def test_one_scale_for_the_matrix_whichever_rows_are_encoded():
    w = np.random.default_rng(2).normal(size=(48, 20)).astype(np.float32)
    whole = encode(w, "int8-tensor")
    assert len(np.unique(whole.scale)) == len(np.unique(whole.zero)) == 1
    part = encode(w[16:32], "int8-tensor", bounds=(float(w.min()), float(w.max())))
    assert np.array_equal(part.data, whole.data[16:32]) and np.array_equal(part.scale, whole.scale[16:32])


def test_a_half_thirty_times_smaller_is_lost_by_row_scales_and_kept_by_groups():
    rng = np.random.default_rng(4)
    w = rng.uniform(-1, 1, (64, 128)).astype(np.float32)
    w[:, :64] /= 30
    back = {name: decode(encode(w, name), name) for name in ("int4-row-sym", "int4-row", "int4-g64", "int8")}
    for name in ("int4-row-sym", "int4-row"):
        assert (back[name][:, :64] == 0).mean() > 0.99
    for name in ("int4-g64", "int8"):
        left = np.linalg.norm(back[name][:, :64] - w[:, :64]) / np.linalg.norm(w[:, :64])
        assert left < 0.12 and (back[name][:, :64] == 0).mean() < 0.2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_that_are_not_finite_are_refused_by_tensor_and_place(bad, format):
    w = np.zeros((3, 4), np.float32)
    w[2, 1] = bad
    with pytest.raises(ModelError, match=r"layer\.7\.up.*\[2, 1\]"):
        encode(w, format, name="layer.7.up")
    with pytest.raises(ModelError, match=r"layer\.7\.up.*\[2, 1\]"):
        encode(formats.f32_to_bf16(w) if np.isinf(bad) else w.astype(np.float16), format, name="layer.7.up")


def test_values_beyond_a_format_are_refused_by_tensor():
    with pytest.raises(ModelError, match="big: the value 70000 is beyond the range of fp16"):
        encode(np.array([[7e4]], np.float32), "fp16", name="big")
    with pytest.raises(ModelError, match="beyond the range of bf16"):
        encode(np.array([[np.finfo(np.float32).max]], np.float32), "bf16")
    with pytest.raises(ModelError, match="big: a scale of .* is beyond float16; give the expert's factor"):
        encode(np.array([[1e8]], np.float32), "int8-g64", name="big")


def test_names_of_formats():
    assert formats.format_name("int8") == "int8" and formats.format_name("int8", 64) == "int8-g64"
    assert formats.format_name("int4") == "int4-g64" and formats.format_name("int4", 0) == "int4-row"
    assert formats.format_name("int4-g32-sym") == "int4-g32-sym" and formats.format_name("auto") == "auto"
    with pytest.raises(SettingError, match="quantize cannot be 'int9'; did you mean 'int8'"):
        formats.format_name("int9")
    with pytest.raises(SettingError, match="group_size must be one of 32, 64, 128 columns, or 0 .* got 48"):
        formats.format_name("int4", 48)
    with pytest.raises(SettingError, match="group_size goes with int8 or int4, not with bf16"):
        formats.format_name("bf16", 64)
    with pytest.raises(ContainerError, match="int7.*did you mean 'int8'"):
        encode(np.zeros((1, 1), np.float32), "int7")


def slow_pack(a: np.ndarray, group: int) -> list:
    rows, cols = packing.padded(*a.shape)
    out = []
    for block in range(0, rows, 16):
        for k in range(0, cols, group):
            for row in range(block, block + 16):
                for column in range(k, k + group):
                    out.append(a[row, column] if row < a.shape[0] and column < a.shape[1] else 0)
    return out


@pytest.mark.parametrize("dtype, group", [(np.int8, 4), (np.float16, 1), (np.uint16, 1), (np.float32, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (16, 4), (17, 5), (31, 64), (48, 3)])
def test_packed_order_is_the_documented_one(dtype, group, shape):
    a = np.random.default_rng(1).integers(-100, 100, shape).astype(dtype)
    packed = packing.pack_rows16(a)
    assert packed.dtype == dtype and packed.tolist() == slow_pack(a, group)
    assert packed.nbytes == packing.stored_bytes(shape, {1: "int8", 2: "fp16", 4: "fp32"}[a.itemsize], "rows16")


@pytest.mark.parametrize("shape", [(1, 1), (16, 8), (17, 13), (31, 64)])
def test_four_bit_order_is_the_documented_one(shape):
    rows, cols = shape
    codes = np.random.default_rng(1).integers(0, 16, shape).astype(np.uint8)
    packed, _, _ = packing.pack(formats.Encoded(codes), FORMATS["int4-row"], "rows16")
    lines = packed.reshape(-(-rows // 16), -(-cols // 8), 16, 4)
    for block, g, row, j in np.ndindex(lines.shape):
        for k, nibble in ((8 * g + j, lines[block, g, row, j] & 15), (8 * g + 4 + j, lines[block, g, row, j] >> 4)):
            there = 16 * block + row < rows and k < cols
            assert nibble == (codes[16 * block + row, k] if there else 0)


@settings(max_examples=60)
@given(st.integers(1, 70), st.integers(1, 150), st.sampled_from(list(FORMATS)), st.sampled_from(["rows", "rows16"]))
def test_unpacking_undoes_packing(rows, cols, format, layout):
    kind = FORMATS[format]
    w = np.random.default_rng(rows).normal(size=(rows, cols)).astype(np.float32)
    encoded = encode(w, format)
    data, scale, zero = packing.pack(encoded, kind, layout)
    back = packing.unpack(data, scale, zero, (rows, cols), kind, layout)
    for found, wanted in ((back.data, encoded.data), (back.scale, encoded.scale), (back.zero, encoded.zero)):
        assert (found is None and wanted is None) or np.array_equal(found, wanted)
    some = np.array([rows - 1, 0])
    picked = packing.pick_rows(data, scale, zero, (rows, cols), kind, layout, some)
    assert np.array_equal(decode(picked, format), decode(encoded, format)[some])


@pytest.mark.parametrize(
    "format, bits", [("int8", 8), ("int4-row", 4), ("int4-g64", 4 + 24 / 64), ("int4-g64-sym", 4 + 16 / 64),
                     ("int8-g32", 8 + 24 / 32), ("int4-g128", 4 + 24 / 128), ("mxfp4", 4 + 8 / 32), ("bf16", 16)]
)  # fmt: skip
def test_sizes_are_the_arithmetic_with_scales(format, bits):
    """A float16 scale and a byte of zero point for a group; per row 4 bytes of scale and one of zero point."""
    rows, cols = 192, 512
    expected = rows * cols * bits / 8 + (0 if FORMATS[format].group or format == "bf16" else rows * 5)
    assert sum(packing.part_sizes((rows, cols), format, "rows16")) == expected
    w = np.random.default_rng(0).normal(size=(rows, cols)).astype(np.float32)
    parts = packing.pack(encode(w, format), FORMATS[format], "rows16")
    assert sum(part.nbytes for part in parts if part is not None) == expected


@pytest.mark.parametrize("shape", [(5, 7), (16, 33), (100, 250)])
def test_int4_bytes_of_odd_shapes(shape):
    """Rows of ceil(cols / 2) bytes, in whole lines of eight codes, sixteen rows at a time."""
    data, scale, zero = packing.part_sizes(shape, "int4-row", "rows16")
    rows = math.ceil(shape[0] / 16) * 16
    assert (data, scale, zero) == (rows * math.ceil(shape[1] / 8) * 4, rows * 4, rows)
    assert packing.part_sizes(shape, "int4-row", "rows")[0] == shape[0] * math.ceil(shape[1] / 8) * 4
