"""Sizes in bytes, read and written. GB is 10^9 and GiB is 2^30; a bare "G" is refused, since it could mean either."""

from __future__ import annotations

import re
from fractions import Fraction

from .errors import SettingError

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {name.lower(): value for name, value in {**_DECIMAL, **_BINARY}.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(value: int | str, name: str = "size") -> int:
    """Bytes from a whole number of bytes or a text such as "4 GiB", "4000MiB", "1.5GB" or "4096".

    A fraction of a byte is dropped. Raises `SettingError` naming `name` for a negative size, a number without meaning
    and a unit that is unknown or ambiguous.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise SettingError(f"{name} must not be negative, got {value} bytes")
        return value
    if not isinstance(value, str):
        raise SettingError(f'{name} must be bytes or a text such as "2 GiB", got {value!r} ({type(value).__name__})')
    found = _SIZE.fullmatch(value)
    if not found:
        raise SettingError(f'{name} must be a number and a unit, such as "2 GiB" or "500 MB", got {value!r}')
    number, unit = found[1], found[2].lower() or "b"
    if unit in ("k", "m", "g", "t"):
        decimal, binary = ("k" if unit == "k" else unit.upper()) + "B", unit.upper() + "iB"
        raise SettingError(
            f"{name} {value!r} could be powers of 1000 or of 1024: write {number} {decimal} or {number} {binary}"
        )
    if unit not in _UNITS:
        known = ", ".join(dict.fromkeys((*_DECIMAL, *_BINARY)))
        raise SettingError(f"{name}: unknown unit {found[2]!r} in {value!r}. Known: {known}")
    return int(Fraction(number.rstrip(".")) * _UNITS[unit])


def format_size(size: float, binary: bool = False) -> str:
    """`14.2 MB`, or `13.5 MiB` when `binary`: three digits, for people; give bytes to programs."""
    units = _BINARY if binary else _DECIMAL
    name, value = next((n, v) for n, v in [*units.items()][::-1] if abs(size) >= v or v == 1)
    shown = size / value
    return f"{shown:.0f} {name}" if value == 1 or abs(shown) >= 1000 else f"{shown:.3g} {name}"


def parse_rate(value: int | float | str, name: str = "rate") -> float:
    """Bytes per second from a number or a text such as "500 MB/s". Raises `SettingError` as `parse_size`, and for 0."""
    if isinstance(value, str):
        size, slash, second = value.strip().rpartition("/")
        if not slash or second.strip() != "s":
            raise SettingError(f'{name} must be bytes per second, such as "500 MB/s", got {value!r}')
        value = parse_size(size, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise SettingError(f"{name} must be a positive number of bytes per second, got {value!r}")
    return float(value)
