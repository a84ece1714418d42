"""Bytes against quality, live: choose formats, a copy of the model is made and read beside it, and the points stay. And one
matrix in few bits, where everything follows its sliders at once.

Callbacks may come on any thread: one lock guards the widgets and what they show, and is never held while a copy is made.
"""

from __future__ import annotations

import html
import threading
from pathlib import Path

import ipywidgets as W
import numpy as np
import pandas as pd

from .. import rounding
from ..checkpoint import formats
from ..errors import ColibriError
from ..rounding import Measured, Survey
from . import quality_frames as frames
from .live import live_plot
from .newest import Newest
from .plots import Picture, draw
from .theme import CSS, bytes_text

AS_IS = "as it is"
CHOICES = ("int8", "int8-g64", "int4-g32", "int4-g64", "int4-g128", "int4-row", "int4-tensor")
ROUTERS = ("fp32", "int8", "int4-row")
HOT = ("none", "25 %", "50 %", "75 %")
MATRIX_FORMATS = ("int4-tensor", "int4-row", "int4-g128", "int4-g64", "int4-g32", "int8-tensor", "int8", "int8-g64")
WIDE = {"layout": W.Layout(width="auto"), "style": {"description_width": "92px"}}


def quality_explorer(report: Survey, live: str = "auto") -> QualityExplorer:
    """What formats cost: `report` is a `rounding.Survey`, with whatever it has measured. Moving a control measures another
    copy, which takes seconds for a small model. `live` is "auto", "canvas" or "png"; `MissingTool` as in `run_monitor`."""
    return QualityExplorer(report, live)


def matrix_explorer(w: np.ndarray, live: str = "auto") -> MatrixExplorer:
    """One matrix w (rows, cols) in few bits: codes, scales, error by column block, bits against error."""
    return MatrixExplorer(w, live)


class _View(W.VBox):
    """Panels beside controls, a verdict and a message below them; what both views share."""

    def _build(self, title: str, controls: list[W.Widget], live: str) -> None:
        self._lock = threading.RLock()
        self._panels = [live_plot(live) for _ in range(4)]
        self._verdict, self._message = (W.HTML(layout=W.Layout(margin="0", width="auto")) for _ in range(2))
        grid = W.Layout(grid_template_columns="minmax(0, 1.2fr) minmax(0, 1fr)", grid_gap="6px 10px", width="100%")
        left = W.VBox(controls, layout=W.Layout(flex="0 0 292px", width="292px", margin="0 12px 0 0"))
        right = W.Box(
            [W.GridBox(self._panels, layout=grid)], layout=W.Layout(flex="1 1 0", min_width="0", width="auto")
        )
        head = W.HTML(f"<p><b>{title}</b></p>", layout=W.Layout(margin="0", width="auto"))
        style = W.HTML(CSS, layout=W.Layout(display="none"))
        super().__init__(
            [style, head, W.HBox([left, right]), self._verdict, self._message],
            layout=W.Layout(width="100%", max_width="1250px"),
        )
        self.add_class("colibri")

    def _show(self, shown, said: str) -> None:
        """The lock is held."""
        for panel, frame in zip(self._panels, shown, strict=True):
            panel.show(frame)
        self._verdict.value = f'<p class="colibri-verdict">{html.escape(said)}</p>'

    def _enter(self, state: str, text: str) -> None:
        with self._lock:
            self.state = state
            look = "colibri-error" if state == "error" else ""
            self._message.value = f'<p class="{look}" role="status">{html.escape(text)}</p>'

    def _picture(self, shown, said: str, path: str | Path | None) -> Picture:
        figure = Picture((9.6, 6.4))
        for axes, frame in zip(figure.subplots(2, 2, width_ratios=(1.2, 1)).flat, shown, strict=True):
            draw(axes, frame)
        figure.supxlabel("\n".join(wrapped(said)), x=0.01, ha="left", fontsize=9)
        if path is not None:
            figure.savefig(path)
        return figure


class QualityExplorer(_View):
    """See `quality_explorer`. `state` is "ready", "running" or "error" (then `error` is the exception and the last picture
    stays); `row` is the copy on show and `kept` the one in grey; `report` holds all of them."""

    def __init__(self, report: Survey, live: str = "auto"):
        self.report, self.state, self.error = report, "ready", None
        self._newest = Newest(self._serve, "colibri-quality")
        self._quiet = False
        self.row: Measured = list(report.rows.values())[-1]
        self.kept: Measured | None = None
        self.format = W.Dropdown(
            options=[AS_IS, *CHOICES],
            description="format",
            tooltip="how the weights are stored; g64: a scale per 64 columns",
            **WIDE,
        )
        self.matrices = W.Dropdown(
            options=[("routed experts", "experts"), ("all but routers", "all")], description="of",
            tooltip="which matrices take this format; routers never do", **WIDE,
        )  # fmt: skip
        self.hot = W.SelectionSlider(
            options=HOT,
            description="hot in int8",
            tooltip="share of each layer's experts, the most used ones, that stay int8",
            **WIDE,
        )
        self.router = W.Dropdown(
            options=ROUTERS, description="router", tooltip="round the routers too: see what it costs", **WIDE
        )
        self._cost, self._code = W.HTML(), W.Textarea(rows=5, layout=W.Layout(width="100%", display="none"))
        self.buttons = {}
        for name, action, icon, tip in (
            ("Keep", self.keep, "thumb-tack", "keep this copy in grey, to compare others with it"),
            ("Copy settings", self._on_copy, "copy", "this copy as a command line and as Python"),
        ):
            self.buttons[name] = W.Button(
                description=name, icon=icon, tooltip=tip, layout=W.Layout(width="auto", flex="1 1 auto")
            )
            self.buttons[name].on_click(action)
        controls = [
            self.format,
            self.matrices,
            self.hot,
            self.router,
            self._cost,
            W.HBox(list(self.buttons.values())),
            self._code,
        ]
        self._build(f"What fewer bits cost: {report.container.info['source']}", controls, live)
        self._follow_format()
        for control in (self.format, self.matrices, self.hot, self.router):
            control.observe(self._on_control, "value")
        self._paint()

    def measure(self, **controls) -> Measured:
        """Set controls (format, matrices, hot, router), measure that copy now, in this thread, and show it.

        Raises `ColibriError` for a control or a value that there is not, and what making and running the copy raises.
        """
        with self._lock:
            self._quiet = True
            try:
                for name, value in controls.items():
                    self._set(name, value)
            finally:
                self._quiet = False
            for name, usual in (("hot", HOT[0]), ("matrices", "experts")):
                if controls.get(name, usual) != usual and getattr(self, name).disabled:
                    raise ColibriError(
                        f"quality_explorer: {name} has no effect on weights in format {self.format.value!r}; choose "
                        "another format, or leave it out"
                    )
            wanted = self._wanted()
        return self._newest.run(wanted)

    def keep(self, _=None) -> None:
        """Make the copy on show the grey one."""
        with self._lock:
            self.kept = self.row
            self._paint()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being measured. True when that is so."""
        return self._newest.wait(timeout_s)

    def close(self) -> None:
        """Drop what waits, let what runs end, and free the widgets."""
        self._newest.stop(60)
        super().close()

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`copies`: a row per measured copy. Of the one on show `domains`, `layers` (share of choices that stayed) and
        `experts` (relative error of the gate matrix)."""
        with self._lock:
            row = self.row
        layers = list(self.report.config.moe_layers)
        experts = pd.DataFrame(row.errors, index=pd.Index(layers, name="layer")).rename_axis("expert", axis=1)
        return {
            "copies": self.report.table,
            "domains": pd.DataFrame({"domain": list(row.by_domain()), "kl_mnat": list(row.by_domain().values())}),
            "layers": pd.DataFrame({"layer": layers, "router_agreement": row.agreement}),
            "experts": experts.stack().rename("relative_error").reset_index(),
        }

    def code(self) -> str:
        """The copy on show as a command line and as Python."""
        with self._lock:
            row = self.row
        options = {k: v for k, v in row.options.items() if k != "router"}
        source = str(self.report.container.info["source"])
        flags = [] if "plan" in options else [f"--{k.replace('_', '-')} {v}" for k, v in options.items()]
        line = " ".join([f"colibri convert --input {source} --output DIR", *flags]) + " --plan plan.json" * (
            "plan" in options
        )
        given = "".join(f", {k}={v if k != 'plan' else 'survey.hot_cold(…)'!r}" for k, v in options.items())
        return f"{line}\n\nimport colibri_lab as cl\ncl.convert({source!r}, 'DIR'{given})"

    def png(self, path: str | Path | None = None) -> Picture:
        """The view as a static picture with its verdict, written to `path` if given."""
        with self._lock:
            return self._picture(self._frames(), frames.verdict(self.report, self.row), path)

    def _set(self, name: str, value) -> None:
        control = {"format": self.format, "matrices": self.matrices, "hot": self.hot, "router": self.router}.get(name)
        if control is None:
            raise ColibriError(f"quality_explorer has no control {name!r}; there are format, matrices, hot and router")
        known = [o[1] if isinstance(o, tuple) else o for o in control.options]
        if value not in known:
            raise ColibriError(f"quality_explorer: {name} cannot be {value!r}; it is one of {', '.join(known)}")
        control.value = value

    def _wanted(self) -> tuple[str, dict, str]:
        """What the controls say: the copy's name, its options for `Survey.measure`, and its hot share."""
        format, matrices, hot, router = self.format.value, self.matrices.value, self.hot.value, self.router.value
        if format == AS_IS:
            name, options = self.report.name, {}
        else:
            name, options = f"{format}{' everywhere' * (matrices == 'all')}", {"quantize": format}
            options |= {"tensors": "all"} if matrices == "all" else {}
        if self.hot.disabled:
            hot = HOT[0]
        if hot != HOT[0]:
            name, options = f"{name}, hot {hot} int8", options | {"plan": None}
        if router != "fp32":
            name, options = f"{name}, router {router}", options | {"router": router}
        return name, options, hot

    def _follow_format(self) -> None:
        """What the format leaves nothing to choose of cannot be chosen."""
        self.matrices.disabled = self.format.value == AS_IS
        self.hot.disabled = self.matrices.disabled or self.format.value == "int8"

    def _on_control(self, _) -> None:
        with self._lock:
            self._follow_format()
            if self._quiet:
                return
            wanted = self._wanted()
        known = self.report.rows.get(wanted[0])
        if known is not None:
            self._newest.stop(0)
            self._arrived(known)
        else:
            self._enter("running", f"making and reading {wanted[0]} …")
            self._newest.submit(wanted)

    def _on_copy(self, _) -> None:
        code = self.code()
        with self._lock:
            self._code.value = code
            self._code.layout.display = "none" if self._code.layout.display is None else None
            self._panels[0].copy(code)

    def _serve(self, wanted, stale) -> Measured:
        name, options, hot = wanted
        self._enter("running", f"making and reading {name} …")
        try:
            if "plan" in options:
                share, cold = float(hot.split()[0]) / 100, str(options["quantize"])
                options = {**options, "plan": self.report.hot_cold(share, "int8", cold)}
            row = self.report.rows.get(name) or self.report.measure(name, **options)
        except BaseException as error:
            what = str(error) if isinstance(error, ColibriError) else f"{type(error).__name__}: {error}"
            with self._lock:
                self.error = error
                self._enter("error", f"{what} – the last picture stays. Change a control to try again.")
            raise
        if not stale():
            self._arrived(row)
        return row

    def _arrived(self, row: Measured) -> None:
        with self._lock:
            self.error, self.row = None, row
            self._paint()
            self._enter(
                "ready",
                f"{len(self.report.rows)} copies measured on {self.report.tokens} tokens of {_domains(row)} domains",
            )

    def _frames(self):
        rows, layers = list(self.report.rows.values()), self.report.config.moe_layers
        top = max(max(r.by_domain().values()) for r in (self.row, self.kept) if r is not None)
        empty = "nothing measured yet: choose a format" if len(rows) < 2 else ""
        return (
            frames.trade(rows, self.row, empty),
            frames.domains(self.row, self.kept, top),
            frames.agreement(self.row, self.kept, layers),
            frames.errors(self.row, layers),
        )

    def _paint(self) -> None:
        """Show the row. The lock is held."""
        row = self.row
        slots = f"a slot takes {bytes_text(row.slot_bytes)}"
        if "plan" in row.options:
            slots += ", as much as the hottest expert"
        self._cost.value = f"<p>experts {bytes_text(row.bytes['expert'])}, {row.bits:.3g} bits per weight; {slots}</p>"
        self._show(self._frames(), frames.verdict(self.report, row))


class MatrixExplorer(_View):
    """See `matrix_explorer`. `rounded` is the `rounding.Rounded` on show; `state` is always "ready"."""

    def __init__(self, w: np.ndarray, live: str = "auto"):
        self.w, self.state = np.ascontiguousarray(w, np.float32), "ready"
        self._table: tuple = (None, None)
        self.format = W.SelectionSlider(
            options=MATRIX_FORMATS, value="int4-row", description="format", tooltip="who shares a scale: matrix, row, or a group of columns",
            **WIDE,
        )  # fmt: skip
        self.shrink = W.SelectionSlider(
            options=(1, 3, 10, 30, 100),
            description="left half ÷",
            tooltip="make the left half so many times smaller",
            **WIDE,
        )
        self.shown_row = W.IntSlider(
            0, 0, len(self.w) - 1, description="row", tooltip="the row whose codes are drawn", **WIDE
        )
        self._cost = W.HTML()
        self._build("One matrix in few bits", [self.format, self.shrink, self.shown_row, self._cost], live)
        for control in (self.format, self.shrink, self.shown_row):
            control.observe(self._on_control, "value")
        self._follow()

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`blocks`: error and zeros by column block. `formats`: bits and error of every format. `scales`: of the row on show."""
        with self._lock:
            rounded, row, table = self.rounded, self.shown_row.value, self._front()
        scales = pd.DataFrame({"scale": rounded.scale[row], "zero": rounded.zero[row]})
        return {"blocks": rounded.column_blocks(), "formats": table, "scales": scales}

    def look(self, format: str | None = None, shrink: float | None = None, row: int | None = None) -> rounding.Rounded:
        """Set controls and return what is on show. Raises traitlets' error for a value that a control does not have."""
        with self._lock:
            for control, value in ((self.format, format), (self.shrink, shrink), (self.shown_row, row)):
                if value is not None:
                    control.value = value
            return self.rounded

    def png(self, path: str | Path | None = None) -> Picture:
        """The view as a static picture with its verdict, written to `path` if given."""
        with self._lock:
            return self._picture(self._frames(), frames.matrix_verdict(self.rounded), path)

    def _on_control(self, _) -> None:
        self._follow()

    def _follow(self) -> None:
        with self._lock:
            w = rounding.shrink_left(self.w, self.shrink.value)
            self.rounded = rounding.round_matrix(w, self.format.value)
            sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.rounded.parts.items() if size)
            self._cost.value = f"<p>{self.rounded.bits_per_weight:.4g} bits per weight: {sizes}</p>"
            self._show(self._frames(), frames.matrix_verdict(self.rounded))

    def _front(self) -> pd.DataFrame:
        if self._table[0] != self.shrink.value:
            names = [n for n in formats.FORMATS if formats.FORMATS[n].kind in ("int4", "int8")]
            self._table = (self.shrink.value, rounding.front(rounding.shrink_left(self.w, self.shrink.value), names))
        return self._table[1]

    def _frames(self):
        table = self._front()
        return (
            frames.codes(self.rounded, self.shown_row.value),
            frames.column_error(self.rounded),
            frames.bits_front(table[~table.format.str.endswith("-sym")], self.rounded),
            frames.histogram(self.rounded),
        )


def _domains(row: Measured) -> int:
    return len(set(row.domain.tolist()))


def wrapped(text: str, width: int = 132) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
