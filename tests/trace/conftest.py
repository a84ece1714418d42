from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def traces() -> Path:
    """The recorded traces that the project ships."""
    return Path(__file__).parents[2] / "data" / "traces"
