from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.errors import MissingTool
from colibri_lab.ui import frames, live
from colibri_lab.ui.runner import Ticker


@pytest.fixture
def frame(lab):
    return frames.hit_rate(list(lab.stream("x", max_tokens=20)))


def test_canvas_gets_float32_and_its_description(frame):
    panel = live.live_plot("canvas")
    panel.show(frame)
    np.testing.assert_array_equal(np.frombuffer(panel.data, "<f4").reshape(panel.spec["shape"]), frame.values)
    assert panel.spec["title"] == "Expert cache hit rate"


def test_canvas_state_survives_for_a_second_display(frame):
    panel = live.live_plot("canvas")
    panel.show(frame)
    state = panel.get_state()
    assert bytes(state["data"]) == frame.values.tobytes() and state["spec"]["kind"] == "lines"


def test_numbers_and_labels_travel_in_one_message(frame, monkeypatch):
    panel = live.live_plot("canvas")
    sent = []
    monkeypatch.setattr(panel, "send_state", lambda key=None: sent.append(set(key)))
    panel.show(frame)
    assert len(sent) == 1 and set(sent[0]) == {"spec", "data"}


def test_without_anywidget_the_panel_is_a_png(frame, monkeypatch):
    monkeypatch.setattr(live, "anywidget", None)
    panel = live.live_plot()
    panel.show(frame)
    assert isinstance(panel, live.PngPlot) and bytes(panel.value).startswith(b"\x89PNG")
    with pytest.raises(MissingTool, match='pip install anywidget, or use live="png"'):
        live.live_plot("canvas")


def test_png_can_be_chosen(frame):
    assert isinstance(live.live_plot("png"), live.PngPlot)
    assert isinstance(live.live_plot(), live.LivePlot)


def test_ticker_raises_what_drawing_raised():
    def draw():
        raise ValueError("cannot draw this")

    with pytest.raises(ValueError, match="cannot draw this"), Ticker(draw, 0.001) as ticker:
        ticker._thread.join(5)


def test_ticker_keeps_the_error_of_the_block():
    def draw():
        raise ValueError("from the painter")

    with pytest.raises(KeyError, match="from the block"), Ticker(draw, 0.001) as ticker:
        ticker._thread.join(5)
        raise KeyError("from the block")
