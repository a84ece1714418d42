"""Pools, policies, replay and curves under the sanitizers."""

from __future__ import annotations


def test_the_ways_through_the_cache_agree(native):
    done = native(
        "cache", flags=("-O0", "-g0")
    )  # twenty policies, each with its own loops: optimising them takes a minute
    assert done.returncode == 0, done.stderr
