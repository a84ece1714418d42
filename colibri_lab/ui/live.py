"""One live panel: takes a `Frame`, shows it within a few milliseconds, holds nothing else.

`LivePlot` sends the numbers (float32) to the browser, which draws them on a canvas; Python rasterises nothing, so a
panel keeps moving at 15 Hz while a cell computes. `PngPlot` is the same panel as a matplotlib PNG, for front ends
without anywidget. Both may be called from any thread; the caller holds the view's lock.
"""

from __future__ import annotations

import io
from pathlib import Path

import ipywidgets as W
import traitlets as T

from ..errors import MissingTool, SettingError, did_you_mean
from . import plots
from .frames import Frame
from .theme import both

try:
    import anywidget
except ImportError:
    anywidget = None

MODES = ("auto", "canvas", "png")


class PngPlot(W.Image):
    """`ipywidgets.Image` that shows frames drawn by matplotlib (Agg, no pyplot); `height` in CSS pixels."""

    interval_s = 0.25  # rasterising costs tens of ms per panel, which the engine would miss

    def __init__(self, height: int = 230, width: int = 480, **traits):
        super().__init__(format="png", layout=W.Layout(width="100%", min_width="0"), **traits)
        self._inches = (width / 100, height / 100)

    def show(self, frame: Frame) -> None:
        out = io.BytesIO()
        plots.picture(frame, size=self._inches).savefig(out, format="png")
        self.value = out.getvalue()

    def copy(self, text: str) -> None:
        """No clipboard without JavaScript; the view shows the text to select."""


if anywidget is not None:

    class LivePlot(anywidget.AnyWidget):
        """Canvas panel. State lives in the traits, so a view displayed again shows the last picture."""

        _esm = T.Unicode((Path(__file__).parent / "live.js").read_text("utf-8")).tag(sync=True)
        spec = T.Dict().tag(sync=True)
        data = T.Bytes().tag(sync=True)
        height = T.Int(230).tag(sync=True)
        colors = T.Dict({name: both(name) for name in ("ink", "rule", "absent")}).tag(sync=True)

        interval_s = 1 / 15

        def __init__(self, height: int = 230, **traits):
            super().__init__(height=height, layout=W.Layout(width="100%", min_width="0"), **traits)

        def show(self, frame: Frame) -> None:
            with self.hold_sync():
                self.spec = frame.spec()
                self.data = frame.values.astype("<f4").tobytes()

        def copy(self, text: str) -> None:
            """Ask the browser to put `text` on the clipboard."""
            self.send({"copy": text})


def live_plot(live: str = "auto", height: int = 230):
    """A panel. `live`: "canvas" needs anywidget, "png" does not, "auto" takes what there is.

    Raises `SettingError` for another word and `MissingTool` when "canvas" is asked for without anywidget.
    """
    if live not in MODES:
        raise SettingError(f"live cannot be {live!r}; {did_you_mean(live, MODES)}")
    if live == "canvas" and anywidget is None:
        raise MissingTool('live="canvas" needs the anywidget package; pip install anywidget, or use live="png"')
    if live == "png" or anywidget is None:
        return PngPlot(height)
    return LivePlot(height)
