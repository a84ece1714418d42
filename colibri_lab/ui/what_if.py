"""One question, a few controls, one answer: `what_if(work, slots=range(1, 65))` asks `work` again whenever a control moves.

`work` returns a `Finding`: panels, one sentence made from the numbers, and the table behind them. A finding is a picture by
itself, so the same function serves a reader with a running kernel and one without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap

import ipywidgets as W
import pandas as pd

from ..errors import SettingError, did_you_mean
from . import plots
from .frames import Frame
from .newest import Newest
from .view import WIDTH_PX, View


@dataclass(frozen=True, eq=False)
class Finding:
    """Panels, what they say, and their numbers. Naming it in a cell shows the picture."""

    frames: tuple[Frame, ...]
    said: str
    table: pd.DataFrame = field(repr=False)

    def png(self, path: str | Path | None = None) -> plots.Picture:
        """The panels side by side with the sentence underneath, written to `path` if given."""
        picture = plots.Picture((10.4 if len(self.frames) > 1 else 6.8, 3.7))
        for at, frame in enumerate(self.frames, 1):
            plots.draw(picture.add_subplot(1, len(self.frames), at), frame)
        width = 150 if len(self.frames) > 1 else 98
        picture.supxlabel("\n".join(wrap(self.said, width)), x=0.01, ha="left", fontsize=9)
        if path is not None:
            picture.savefig(path)
        return picture

    def _repr_png_(self) -> bytes:
        return self.png().png()


def what_if(work: Callable[..., Finding], *given, live: str = "auto", height: int = 260, **controls) -> WhatIf:
    """A view of `work(*given, name=value, …)` with a slider for each range, a dropdown for each list and a field for each text.

        what_if(lessons.warm_up, trace, slots=range(8, 65), policy=["lru", "lfu"])

    Controls start at the default of `work`'s argument where it has one and the control offers it, fields at their text; a
    field is read when Enter is pressed or it is left. Raises `SettingError`
    for an argument that `work` does not take, and whatever the first answer raises.
    """
    return WhatIf(work, given, controls, live, height)


class WhatIf(View):
    """See `what_if`. `finding` is what is on show; `state` is "running", "done" or "error" (then `error` is why)."""

    _remedy = "Move a control to go on."

    def __init__(
        self, work, given: tuple, controls: dict[str, range | Sequence | str], live: str = "auto", height: int = 260
    ):
        self._work, self._given = work, given
        self.controls = {name: self._control(name, options) for name, options in controls.items()}
        finding = work(*given, **self._wanted())
        super().__init__(Newest(self._serve, "colibri-what-if"), [height] * len(finding.frames), live, "running")
        self._arrange_plainly(list(self.controls.values()), WIDTH_PX if len(finding.frames) > 1 else 760)
        self._arrived(finding, lambda: False)

    def set(self, **values) -> Finding:
        """Move controls and wait for the answer; needs no front end. Raises what `work` raises."""
        for name, value in values.items():
            if name not in self.controls:
                raise SettingError(f"what_if has no control {name!r}; {did_you_mean(name, self.controls)}")
            control = self.controls[name]
            if isinstance(control, W.IntSlider):
                if not control.min <= value <= control.max:
                    raise SettingError(f"{name} must be {control.min} to {control.max}, got {value!r}")
            elif isinstance(control, W.Dropdown) and value not in control.options:
                raise SettingError(f"{name} cannot be {value!r}; {did_you_mean(str(value), map(str, control.options))}")
        with self._lock:
            with self._silently():
                for name, value in values.items():
                    self.controls[name].value = value
            wanted = self._wanted()
        self._worker.run(wanted)
        return self.finding

    @property
    def data(self) -> pd.DataFrame:
        """The numbers of the finding on show."""
        return self.finding.table

    def png(self, path: str | Path | None = None) -> plots.Picture:
        """The finding on show as a picture."""
        self.wait()
        return self.finding.png(path)

    def _control(self, name: str, options: range | Sequence | str) -> W.IntSlider | W.Dropdown | W.Text:
        parameters = inspect.signature(self._work).parameters
        if name not in parameters:
            raise SettingError(f"what_if: {self._work.__name__} takes no {name!r}; {did_you_mean(name, parameters)}")
        options = options if isinstance(options, (range, str)) else list(options)
        start = parameters[name].default
        if not isinstance(options, str) and start not in options:
            start = options[len(options) // 2 if isinstance(options, range) else 0]
        shown = {"description": name.replace("_", " "), "tooltip": f"{name} of {self._work.__name__}"}
        shown |= {"layout": W.Layout(width="auto", flex="1 1 260px", max_width="420px")}
        shown |= {"style": {"description_width": "initial"}}
        if isinstance(options, str):
            control = W.Text(options, continuous_update=False, **shown)
        elif isinstance(options, range):
            control = W.IntSlider(start, options[0], options[-1], step=options.step, **shown)
        else:
            control = W.Dropdown(options=options, value=start, **shown)
        control.observe(self._on_control, "value")
        return control

    def _wanted(self) -> dict:
        return {name: control.value for name, control in self.controls.items()}

    def _on_control(self, _) -> None:
        with self._lock:
            if self._quiet:
                return
            wanted = self._wanted()
        self._worker.submit(wanted)

    def _serve(self, wanted: dict, stale) -> None:
        try:
            with self._lock:
                self.state = "running"
            finding = self._work(*self._given, **wanted)
            self._arrived(finding, stale)
        except BaseException as error:
            self._failed(error)
            raise

    def _arrived(self, finding: Finding, stale) -> None:
        with self._lock:
            if stale():
                return
            self.finding = finding
            self._show(finding.frames)
            self._say([finding.said])
            self._enter("done", "")
