"""Memory pool and arena under the sanitizers, against plain models; and that misuse is caught."""

from __future__ import annotations

import pytest


def test_the_pool_agrees_with_a_plain_array_of_flags(native):
    done = native("memory_pool")
    assert done.returncode == 0, done.stderr


def test_arenas_keep_what_is_written_to_them(native):
    done = native("arena")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("misuse", ["overflow", "unallocated", "after-rewind", "after-reset"])
def test_misuse_of_an_arena_is_caught(native, misuse):
    done = native("arena", misuse)
    assert done.returncode != 0
    assert "AddressSanitizer: use-after-poison" in done.stderr
