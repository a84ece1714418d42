"""Bytes against quality, live: choose formats, a copy of the model is made and read beside it, and the points stay. And one
matrix in few bits, where everything follows its sliders at once.
"""

from __future__ import annotations

from pathlib import Path

import ipywidgets as W
import numpy as np
import pandas as pd

from .. import rounding
from ..checkpoint import formats
from ..errors import ColibriError
from ..rounding import Measured, Survey
from . import quality_frames as frames
from .newest import Newest
from .plots import Picture, page
from .theme import bytes_text
from .view import View, labelled, line

AS_IS = "as it is"
CHOICES = ("int8", "int8-g64", "int4-g32", "int4-g64", "int4-g128", "int4-row", "int4-tensor")
ROUTERS = ("fp32", "int8", "int4-row")
HOT = ("none", "25 %", "50 %", "75 %")
MATRIX_FORMATS = ("int4-tensor", "int4-row", "int4-g128", "int4-g64", "int4-g32", "int8-tensor", "int8", "int8-g64")
LABEL_PX = 92


def quality_explorer(report: Survey, live: str = "auto") -> QualityExplorer:
    """What formats cost: `report` is a `rounding.Survey`, with whatever it has measured. Moving a control measures another
    copy, which takes seconds for a small model. `live` is "auto", "canvas" or "png"; `MissingTool` as in `run_monitor`."""
    return QualityExplorer(report, live)


def matrix_explorer(w: np.ndarray, live: str = "auto") -> MatrixExplorer:
    """One matrix w (rows, cols) in few bits: codes, scales, error by column block, bits against error."""
    return MatrixExplorer(w, live)


class QualityExplorer(View):
    """See `quality_explorer`. `state` is "ready", "running" or "error" (then `error` is the exception and the last picture
    stays); `row` is the copy on show and `kept` the one in grey; `report` holds all of them."""

    _remedy = "Change a control to try again."

    def __init__(self, report: Survey, live: str = "auto"):
        super().__init__(Newest(self._serve, "colibri-quality"), [230] * 4, live, "ready")
        self.report = report
        self.row: Measured = list(report.rows.values())[-1]
        self.kept: Measured | None = None
        about = "how the weights are stored; g64: a scale per 64 columns"
        self.format = W.Dropdown(options=[AS_IS, *CHOICES], **labelled("format", about, LABEL_PX))
        self.matrices = W.Dropdown(
            options=[("routed experts", "experts"), ("all but routers", "all")],
            **labelled("of", "which matrices take this format; routers never do", LABEL_PX),
        )
        about = "share of each layer's experts, the most used ones, that stay int8"
        self.hot = W.SelectionSlider(options=HOT, **labelled("hot in int8", about, LABEL_PX))
        about = "round the routers too: see what it costs"
        self.router = W.Dropdown(options=ROUTERS, **labelled("router", about, LABEL_PX))
        self._cost = line()
        buttons = {
            "Keep": (self.keep, "thumb-tack", "keep this copy in grey, to compare others with it"),
            "Copy settings": (self._on_copy, "copy", "this copy as a command line and as Python"),
        }
        controls = [self.format, self.matrices, self.hot, self.router, self._cost]
        self._arrange([*controls, self._row(buttons)])
        self._title("What fewer bits cost", str(report.container.info["source"]))
        self._follow_format()
        for control in (self.format, self.matrices, self.hot, self.router):
            control.observe(self._on_control, "value")
        self._paint()

    def measure(self, **controls) -> Measured:
        """Set controls (format, matrices, hot, router), measure that copy now, in this thread, and show it.

        Raises `ColibriError` for a control or a value that there is not, and what making and running the copy raises.
        """
        with self._lock:
            with self._silently():
                for name, value in controls.items():
                    self._set(name, value)
            for name, usual in (("hot", HOT[0]), ("matrices", "experts")):
                if controls.get(name, usual) != usual and getattr(self, name).disabled:
                    raise ColibriError(
                        f"quality_explorer: {name} has no effect on weights in format {self.format.value!r}; choose "
                        "another format, or leave it out"
                    )
            wanted = self._wanted()
        return self._worker.run(wanted)

    def keep(self, _=None) -> None:
        """Make the copy on show the grey one."""
        with self._lock:
            self.kept = self.row
            self._paint()

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
            return page(self._frames(), [frames.verdict(self.report, self.row)], path)

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
            self._worker.stop(0)
            self._arrived(known)
        else:
            self._enter("running", f"making and reading {wanted[0]} …")
            self._worker.submit(wanted)

    def _serve(self, wanted, stale) -> Measured:
        name, options, hot = wanted
        self._enter("running", f"making and reading {name} …")
        try:
            if "plan" in options:
                share, cold = float(hot.split()[0]) / 100, str(options["quantize"])
                options = {**options, "plan": self.report.hot_cold(share, "int8", cold)}
            row = self.report.rows.get(name) or self.report.measure(name, **options)
        except BaseException as error:
            self._failed(error)
            raise
        if not stale():
            self._arrived(row)
        return row

    def _arrived(self, row: Measured) -> None:
        with self._lock:
            self.row = row
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
        self._show(self._frames())
        self._say([frames.verdict(self.report, row)])


class MatrixExplorer(View):
    """See `matrix_explorer`. `rounded` is the `rounding.Rounded` on show; `state` is always "ready"."""

    def __init__(self, w: np.ndarray, live: str = "auto"):
        super().__init__(None, [230] * 4, live, "ready")
        self.w = np.ascontiguousarray(w, np.float32)
        self._table: tuple = (None, None)
        about = "who shares a scale: matrix, row, or a group of columns"
        self.format = W.SelectionSlider(options=MATRIX_FORMATS, value="int4-row", **labelled("format", about, LABEL_PX))
        about = "make the left half so many times smaller"
        self.shrink = W.SelectionSlider(options=(1, 3, 10, 30, 100), **labelled("left half ÷", about, LABEL_PX))
        about = "the row whose codes are drawn"
        self.shown_row = W.IntSlider(0, 0, len(self.w) - 1, **labelled("row", about, LABEL_PX))
        self._cost = line()
        self._arrange([self.shown_row, self.format, self.shrink, self._cost])
        self._title("One matrix in few bits")
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
            return page(self._frames(), [frames.matrix_verdict(self.rounded)], path)

    def _on_control(self, _) -> None:
        self._follow()

    def _follow(self) -> None:
        with self._lock:
            w = rounding.shrink_left(self.w, self.shrink.value)
            self.rounded = rounding.round_matrix(w, self.format.value)
            sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.rounded.parts.items() if size)
            self._cost.value = f"<p>{self.rounded.bits_per_weight:.4g} bits per weight: {sizes}</p>"
            self._show(self._frames())
            self._say([frames.matrix_verdict(self.rounded)])

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
