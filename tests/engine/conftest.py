"""Containers that engine tests share: each oracle family in float32, and the shipped model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import colibri_lab as cl

ORACLE = Path(__file__).parents[1] / "oracle"


@pytest.fixture(scope="session")
def family_container(tmp_path_factory):
    """family_container(name, **convert options) → directory of a float32 container made once per session."""
    made = {}

    def get(family: str, source: str = "", **options) -> Path:
        key = (family, source, *sorted(options.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("container") / family
            options = {"quantize": "fp32", "tensors": "all", **options}
            cl.convert(ORACLE / family / source, out, progress=False, **options)
            made[key] = out
        return made[key]

    return get


@pytest.fixture(scope="session")
def reference():
    """reference(family) → the arrays transformers computed in float32."""
    return lambda family: np.load(ORACLE / family / "reference.npz")


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Container of the shipped model."""
    from colibri_lab.front import container_of

    return container_of("colibri-tiny", progress=False)
