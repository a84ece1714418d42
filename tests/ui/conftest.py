from __future__ import annotations

import pytest
from fake_lab import FakeLab

from colibri_lab.telemetry import STAGES, Step
from colibri_lab.ui import run_monitor


@pytest.fixture
def lab():
    return FakeLab()


@pytest.fixture
def monitor(lab):
    """A monitor over a fake model, 40 tokens a run; stopped at the end."""
    view = run_monitor(lab, "def f(x):", max_tokens=40, seed=3)
    yield view
    assert view.stop()


@pytest.fixture
def step():
    """Makes a decode step: hits, misses, milliseconds by stage; what no stage claims is none."""

    def make(hits=0, misses=0, phase="decode", token=7, text="", index=0, bytes_loaded=None, **ms) -> Step:
        assert set(ms) <= set(STAGES)
        return Step(
            index=index,
            phase=phase,
            tokens=1,
            token=token,
            text=text,
            stages={name: value / 1e3 for name, value in ms.items()},
            wall_s=sum(ms.values()) / 1e3,
            hits=hits,
            misses=misses,
            bytes_loaded=1000 * misses if bytes_loaded is None else bytes_loaded,
        )

    return make
