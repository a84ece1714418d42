"""Sizes are exact, and decimal and binary units never meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.errors import SettingError
from colibri_lab.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "bytes_wanted"),
    [
        ("4 GiB", 4294967296),
        ("4GB", 4000000000),
        ("4000MiB", 4194304000),
        ("1.5 GiB", 1610612736),
        ("1.1 GB", 1100000000),
        ("0.1 GiB", 107374182),  # 107374182.4: the fraction of a byte is dropped
        ("512 kB", 512000),
        ("512 KiB", 524288),
        ("2 tib", 2199023255552),
        ("4096", 4096),
        ("4096 B", 4096),
        (".5 MB", 500000),
        ("3. MB", 3000000),
        (7, 7),
        (0, 0),
    ],
)
def test_sizes_are_exact(text, bytes_wanted):
    assert parse_size(text) == bytes_wanted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4G", r"memory '4G' could be powers of 1000 or of 1024: write 4 GB or 4 GiB"),
        ("4 k", r"write 4 kB or 4 KiB"),
        ("4 GBit", r"memory: unknown unit 'GBit' in '4 GBit'. Known: B, kB, MB"),
        ("-1 GB", r"a number and a unit"),
        ("a lot", r"memory must be a number and a unit.*got 'a lot'"),
        ("", r"a number and a unit"),
        ("nan GB", r"a number and a unit"),
        ("1e3 GB", r"a number and a unit"),
        (-1, r"must not be negative, got -1 bytes"),
        (True, r"got True \(bool\)"),
        (2.5, r"got 2.5 \(float\)"),
        (None, r"got None"),
    ],
)
def test_what_is_not_a_size_is_refused_by_name(value, message):
    with pytest.raises(SettingError, match=message):
        parse_size(value, "memory")


@given(st.integers(0, 2**60))
def test_a_number_of_bytes_reads_back(size):
    assert parse_size(str(size)) == parse_size(f"{size} B") == size


@pytest.mark.parametrize(
    ("size", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1024, "1.02 kB", "1 KiB"),
        (14_155_776, "14.2 MB", "13.5 MiB"),
        (2**30, "1.07 GB", "1 GiB"),
        (10**9, "1 GB", "954 MiB"),
        (1023 * 2**20, "1.07 GB", "1023 MiB"),
    ],
)
def test_sizes_are_shown_in_one_system(size, decimal, binary):
    assert format_size(size) == decimal
    assert format_size(size, binary=True) == binary
