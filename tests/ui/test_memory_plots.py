"""The picture of allocation latencies."""

from __future__ import annotations

import pandas as pd
import pytest

from colibri_lab.errors import SettingError
from colibri_lab.ui.memory_plots import latency_picture


def test_latencies_are_drawn_for_every_size():
    rows = [("pool", b, o, 40.0, 50.0) for b in (4096, 65536) for o in (0.1, 0.9)]
    table = pd.DataFrame(rows, columns=["allocator", "bytes", "occupancy", "median_ns", "p99_ns"])
    picture = latency_picture(table)
    assert [ax.get_title() for ax in picture.axes] == ["4 KiB", "64 KiB"]
    with pytest.raises(SettingError, match="no latencies to draw"):
        latency_picture(table[:0])
