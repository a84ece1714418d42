"""Findings of notebook 05: the sentences say what the tables hold, and arithmetic comes out as known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from colibri_lab.errors import SettingError
from colibri_lab.ui import kernel_lessons as lessons


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    monkeypatch.setattr("colibri_lab.workloads.POOL_BYTES", 1_000_000)
    monkeypatch.setattr("colibri_lab.limits.READ_BYTES", 1 << 20)
    monkeypatch.setattr("colibri_lab.limits.ROUNDS", 1000)


def formats(int4_us: float, clean: int = 3, tokens: int = 1) -> pd.DataFrame:
    rows = [("fp16", 4.0e6, 200.0), ("int8", 2.0e6, 110.0), ("int4-g64", 1.0e6, int4_us)]
    return pd.DataFrame(
        [(tokens, n, b, us, 0.9, clean) for n, b, us in rows],
        columns=["tokens", "format", "bytes", "us", "share", "clean"],
    )


@pytest.mark.parametrize(
    ("us", "says"),
    [
        (60, "takes 30 % of its time: time follows the bytes, so they bind"),
        (120, "takes 60 % of its time: time falls less than the bytes"),
        (210, "takes 105 % of its time: operations bind"),
    ],
)
def test_what_binds_follows_from_bytes_and_time(us, says):
    found = lessons.bytes_and_time(formats(us))
    assert "With one row, int4-g64 moves 25 % of the bytes of fp16 and " + says in found.said
    np.testing.assert_allclose(found.frames[0].values, [[100, 100], [55, 50], [us / 2, 25]])
    assert found.png().png().startswith(b"\x89PNG")


def test_samples_without_cores_are_owned_up_to():
    assert "Other work took the cores" not in lessons.bytes_and_time(formats(60)).said
    assert "Other work took the cores" in lessons.bytes_and_time(formats(60, clean=2)).said


def test_formats_are_measured_on_the_same_matrix():
    runs = lessons.format_runs(tokens=(1, 2), formats=("fp16", "int4-g64"), rounds=1)
    assert list(runs.tokens) == [1, 1, 2, 2] and (runs.us > 0).all() and (runs.share > 0).all()
    assert runs.bytes[1] < 0.3 * runs.bytes[0]
    with pytest.raises(SettingError, match="tokens 3 was not measured; known: 1, 2"):
        lessons.bytes_and_time(runs, tokens=3)


def test_threads_are_measured_against_the_limit_of_as_many():
    runs = lessons.thread_runs((1, 2), tokens=(1, 64), rounds=1)
    assert sorted(zip(runs.tokens, runs.threads, strict=True)) == [(1, 1), (1, 2), (64, 1), (64, 2)]
    for tokens, rate in ((1, "GB_per_s"), (64, "GOP_per_s")):
        found = lessons.more_threads(runs, tokens)
        mine = runs[runs.tokens == tokens]
        np.testing.assert_allclose(found.frames[0].values, [mine[rate], mine[f"limit_{rate}"]], rtol=1e-6)
        assert f"{mine[rate].iloc[0]:.1f}" in found.said


def test_orders_of_one_sum_differ_in_the_last_digits_only():
    found = lessons.sum_order(length=4096, orders=50, seed=1)
    sums = found.table["sum"].to_numpy()
    assert 1 < len(np.unique(sums)) <= 50 and f"give {len(np.unique(sums))} different sums" in found.said
    assert np.abs(found.table.error).max() < 1e-6
    assert lessons.sum_order(length=4096, orders=50, seed=1).table.equals(found.table)
    with pytest.raises(SettingError, match="length and orders must be at least 2"):
        lessons.sum_order(length=1)


@pytest.mark.parametrize(("degree", "below", "above"), [(3, 1e-3, 1e-4), (4, 1e-4, 1e-6), (5, 1e-6, 1e-8)])
def test_each_degree_of_the_polynomial_has_its_error(degree, below, above):
    found = lessons.polynomial(degree)
    assert above < found.table.error.max() < below
    assert ("more than the 1e-4" in found.said) == (degree < 4)


def test_degrees_that_make_no_sense_are_refused():
    with pytest.raises(SettingError, match="degree must be 1 to 9, got 0"):
        lessons.polynomial(0)
