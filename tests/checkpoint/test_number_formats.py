from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colibri_lab.checkpoint import formats
from colibri_lab.checkpoint.formats import decode, encode, pack_rows16, unpack_rows16
from colibri_lab.errors import ContainerError, ModelError

FLOATS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
MATRICES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=FLOATS)


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
    assert row.scale == pytest.approx([4 / 255], rel=1e-6)
    assert row.zero.tolist() == [-64]
    assert row.data.tolist() == [[-128, -64, 127, 0]]


@given(MATRICES, st.integers(-20, 20))
def test_int8_errs_by_half_a_step_at_most_and_keeps_zero(w, exponent):
    factor = 2.0**exponent
    row = encode(w, "int8", factor)
    step = (row.scale * np.float32(factor))[:, None].astype(np.float64)
    back = decode(row, "int8", factor)
    assert (np.abs(back.astype(np.float64) - w) <= 0.5 * step + np.spacing(np.abs(w) + step.astype(np.float32))).all()
    assert (back[w == 0] == 0).all()


@given(hnp.arrays(np.float32, st.integers(1, 20), elements=FLOATS), st.integers(1, 40), st.integers(-20, 20))
def test_int8_is_exact_for_constant_rows_and_zero_rows(values, cols, exponent):
    w = np.repeat(values[:, None], cols, 1)
    assert np.array_equal(decode(encode(w, "int8", 2.0**exponent), "int8", 2.0**exponent), w)


def test_an_expert_a_hundred_times_larger_has_the_same_relative_error():
    w = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    errors = []
    for scaled in (w, w * 100, w * np.float32(1e-6)):
        factor = formats.expert_factor(float(np.abs(scaled).max()))
        back = decode(encode(scaled, "int8", factor), "int8", factor)
        errors.append(np.abs(back - scaled).max() / np.abs(scaled).max())
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-3)


@pytest.mark.parametrize("largest, factor", [(0, 1), (1, 1), (1.001, 2), (0.5, 0.5), (3, 4), (1e-45, 2.0**-126)])
def test_expert_factor_is_the_power_of_two_above_the_largest_weight(largest, factor):
    assert formats.expert_factor(largest) == factor


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", formats.FORMATS)
def test_numbers_that_are_not_finite_are_refused_by_tensor_and_place(bad, format):
    w = np.zeros((3, 4), np.float32)
    w[2, 1] = bad
    with pytest.raises(ModelError, match=r"layer\.7\.up.*\[2, 1\]"):
        encode(w, format, name="layer.7.up")
    with pytest.raises(ModelError, match=r"layer\.7\.up.*\[2, 1\]"):
        encode(formats.f32_to_bf16(w) if np.isinf(bad) else w.astype(np.float16), format, name="layer.7.up")


def test_values_beyond_fp16_are_refused_by_tensor():
    with pytest.raises(ModelError, match="big: the value 70000 is beyond the range of fp16"):
        encode(np.array([[7e4]], np.float32), "fp16", name="big")
    with pytest.raises(ModelError, match="beyond the range of bf16"):
        encode(np.array([[np.finfo(np.float32).max]], np.float32), "bf16")


def test_unknown_format_is_refused_with_the_nearest_name():
    with pytest.raises(ContainerError, match="int7.*did you mean 'int8'"):
        encode(np.zeros((1, 1), np.float32), "int7")


def slow_pack(a: np.ndarray, group: int) -> list:
    rows, cols = formats.padded(*a.shape)
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
    packed = pack_rows16(a)
    assert packed.dtype == dtype and packed.tolist() == slow_pack(a, group)
    assert packed.nbytes == formats.stored_bytes(shape, {1: "int8", 2: "fp16", 4: "fp32"}[a.itemsize], "rows16")
    assert np.array_equal(unpack_rows16(packed, *shape), a)


@settings(max_examples=50)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from([np.int8, np.float16, np.float32]))
def test_unpacking_undoes_packing(rows, cols, dtype):
    a = np.arange(rows * cols).reshape(rows, cols).astype(dtype)
    assert np.array_equal(unpack_rows16(pack_rows16(a), rows, cols), a)
