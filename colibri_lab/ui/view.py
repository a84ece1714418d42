"""What the views share: controls beside panels, sentences and a message below, and one lock around all of it.

Callbacks may come on any thread, several at a time: JupyterLab delivers them beside a running cell. The lock guards the
widgets and everything they show; it is never held while the engine computes or a thread is joined.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, suppress

import ipywidgets as W

from ..errors import ColibriError
from .frames import Frame
from .live import live_plot
from .theme import CSS, LIGHT

WIDTH_PX = 1250  # of a view with controls beside two columns of panels
STOP_WITHIN_S = 30.0


class View(W.VBox):
    """Base of the views. `worker` is a `Newest` or a `Runner`, None for a view that answers on the spot; `heights` are those of
    the panels in CSS pixels.

    `state` says what the view is doing; in the state "error" `error` is the exception and the last picture stays. A view
    that has `code()` may offer a button for `_on_copy`; one whose buttons include "Stop" colours it while it runs.
    """

    _worker = None  # ipywidgets closes even what was never finished
    _tag = "p"  # of the message
    _remedy = "Change a control or press Start."  # after an error

    def __init__(self, worker, heights: Sequence[int], live: str = "auto", state: str = "empty"):
        self._worker = worker
        self.state, self.error = state, None
        self._lock = threading.RLock()
        self._quiet = False  # True while code, not a reader, moves a control
        self._panels = [live_plot(live, height) for height in heights]
        self._head, self._verdict, self._message = line(), line(), line()
        self._code = W.Textarea(rows=5, layout=W.Layout(width="100%", display="none"))
        self.buttons: dict[str, W.Button] = {}
        super().__init__(layout=W.Layout(width="100%", max_width=f"{WIDTH_PX}px"))
        self.add_class("colibri")

    def stop(self, _=None) -> bool:
        """Drop what waits, end what runs and wait for that. True when nothing runs any more."""
        return self._worker is None or self._worker.stop(STOP_WITHIN_S)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs in the background. True when that is so."""
        return self._worker is None or self._worker.wait(timeout_s)

    def close(self) -> None:
        """Stop, and free the widgets."""
        self.stop()
        super().close()

    @property
    def interval_s(self) -> float:
        """Between two pictures of what moves."""
        return self._panels[0].interval_s

    # Building

    def _row(self, buttons: dict[str, tuple]) -> W.Box:
        """Buttons by name: what they do, their icon, their tooltip."""
        for name, (action, icon, tip) in buttons.items():
            button = W.Button(description=name, icon=icon, tooltip=tip, layout=W.Layout(width="auto", flex="1 1 auto"))
            button.on_click(action)
            self.buttons[name] = button
        shown = [self.buttons[name] for name in buttons]
        return W.Box(shown, layout=W.Layout(display="flex", flex_flow="row wrap", width="auto"))

    def _arrange(
        self, controls: Sequence[W.Widget], above: Sequence[W.Widget] = (), under: Sequence[W.Widget] = (),
        side_px: int = 292, left_column: float = 1.2,
    ) -> None:  # fmt: skip
        """`controls` beside two columns of panels, the left one `left_column` times as wide; `above` goes over both,
        `under` below the panels."""
        grid = W.GridBox(self._panels, layout=_columns(f"minmax(0, {left_column}fr) minmax(0, 1fr)"))
        self._fill([*above, beside(controls, [grid, *under], side_px)])

    def _arrange_plainly(self, controls: Sequence[W.Widget], width_px: int) -> None:
        """`controls` in a row over one row of panels."""
        row = W.HBox(controls, layout=W.Layout(flex_flow="row wrap", width="100%"))
        self._fill([row, W.GridBox(self._panels, layout=_columns(f"repeat({len(self._panels)}, minmax(0, 1fr))"))])
        self.layout.max_width = f"{width_px}px"

    def _fill(self, body: list[W.Widget]) -> None:
        style = W.HTML(CSS, layout=W.Layout(display="none"))
        self.children = [style, self._head, *body, self._verdict, self._message, self._code]

    # Controls

    @contextmanager
    def _silently(self):
        """Move controls without an answer. The lock must be held."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _on_copy(self, _) -> None:
        """Show the settings as code, or hide them again, and put them on the clipboard."""
        code = self.code()
        with self._lock:
            self._code.value = code
            self._code.layout.display = "none" if self._code.layout.display is None else None
            self._panels[0].copy(code)

    # Showing

    def _enter(self, state: str, text: str) -> None:
        with self._lock:
            self.state, self.error = state, None
            if "Stop" in self.buttons:
                style, running = self.buttons["Stop"].style, state == "running"
                style.button_color, style.text_color = (LIGHT["miss"], "white") if running else (None, None)
            look = "colibri-error" if state == "error" else ""
            self._message.value = f'<{self._tag} class="{look}" role="status">{html.escape(text)}&nbsp;</{self._tag}>'

    def _failed(self, error: BaseException, after: str | None = None) -> None:
        """Show `error`; `after` it stands what that means, if not that the last picture stays."""
        after = f" – the last picture stays. {self._remedy}" if after is None else after
        with self._lock, suppress(Exception):  # whoever asked still gets the error itself
            if isinstance(error, KeyboardInterrupt):
                self._enter("stopped", "interrupted")
            else:
                what = str(error) if isinstance(error, ColibriError) else f"{type(error).__name__}: {error}"
                self._enter("error", what + after)
            self.error = error

    def _title(self, name: str, about: str = "") -> None:
        self._head.value = f"<p><b>{html.escape(name)}</b> &nbsp; {html.escape(about)}</p>"

    def _say(self, sentences: Iterable[str]) -> None:
        lines = "".join(f'<p class="colibri-verdict">{html.escape(s)}</p>' for s in sentences if s)
        self._verdict.value = f'<div class="colibri-said">{lines}</div>'

    def _show(self, frames: Iterable[Frame]) -> None:
        for panel, frame in zip(self._panels, frames, strict=True):
            panel.show(frame)


def beside(controls: Sequence[W.Widget], shown: Sequence[W.Widget], side_px: int = 292) -> W.HBox:
    """`controls` in a column `side_px` wide, what they show in the rest."""
    side = W.VBox(controls, layout=W.Layout(flex=f"0 0 {side_px}px", width=f"{side_px}px", margin="0 12px 0 0"))
    return W.HBox([side, W.VBox(shown, layout=W.Layout(flex="1 1 0", min_width="0", width="auto"))])


def line() -> W.HTML:
    """A line of text that takes no more room than it needs."""
    return W.HTML(layout=W.Layout(margin="0", width="auto"))


def labelled(name: str, tooltip: str, width_px: int) -> dict:
    """Arguments of a control: its label, `width_px` wide, and what it tells when pointed at. A layout of its own each time."""
    style = {"description_width": f"{width_px}px"}
    return {"description": name, "tooltip": tooltip, "layout": W.Layout(width="auto"), "style": style}


def _columns(template: str) -> W.Layout:
    return W.Layout(grid_template_columns=template, grid_gap="6px 10px", width="100%")
