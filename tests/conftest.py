"""What every test shares: a display-free matplotlib, the project's root, and one worker for whatever starts Jupyter."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time and no clock: what fails has been changed, not slowed down by a neighbour.
# `--hypothesis-profile=explore` looks for new examples.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("repeatable")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore Ctrl-C
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def project() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Notebook and browser tests run one after another on one xdist worker: kernels that start together time out."""
    for item in items:
        if item.get_closest_marker("browser") or item.get_closest_marker("notebook"):
            item.add_marker(pytest.mark.xdist_group("jupyter"))
