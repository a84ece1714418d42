"""The kernel bench: measure a kernel under this machine's roofline, edit it, and see old and new side by side.

Callbacks may come on any thread. Work is done on one thread at a time, outside the lock that guards what is shown.
"""

from __future__ import annotations

import html
import threading

import ipywidgets as W
import pandas as pd
from traitlets import TraitError

from .. import machine
from ..bench import WEIGHTS, compare_with_limits
from ..errors import ColibriError, SettingError, did_you_mean
from ..kernels.draft import Draft
from ..limits import Limits
from ..trial import Trial, compare, workloads
from ..workloads import WORKLOADS, Workload
from .plots import Picture
from .roofline import roofline
from .theme import CSS

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EMPTY = "nothing measured yet: press Measure, or replace a text of the kernel and press Try"
CONTROLS = ("kernel", "format", "int8_activations", "tokens", "threads")
_WITH_FORMAT = ("gemm", "ffn")
COLUMNS = ["kernel", "case", "version", "threads", "median_us", "GB_per_s", "GOP_per_s", "share_of_bound", "clean"]


def kernel_bench(kernel: str = "gemm", **options) -> KernelBench:
    """A bench for kernels; see `KernelBench`. `options` set its controls: format, tokens, threads, int8_activations.

    Raises `SettingError` for a control that does not exist or a value that it cannot have.
    """
    return KernelBench(kernel, **options)


class KernelBench(W.VBox):
    """Controls, a roofline with every point measured at this number of threads, and the last verdict.

    `state` is "empty", "running", "done" or "error"; `data` holds the points; `trial` is the last edit that was taken.
    """

    def __init__(self, kernel: str = "gemm", rounds: int = 5, **options):
        self.rounds = rounds
        self.state, self.trial, self.error = "empty", None, None
        self._lock, self._work = threading.RLock(), threading.Lock()
        self._rows: list[dict] = []
        self._works: dict[str, Workload] = {}
        self._limits: dict[int, Limits] = {}
        self._thread: threading.Thread | None = None
        self._make_controls(kernel, options)
        super().__init__(self._arrange(), layout=W.Layout(width="100%", max_width="1000px"))
        self.add_class("colibri")
        self._show(EMPTY)

    @property
    def data(self) -> pd.DataFrame:
        """A row per point: kernel, case, version ("old" and "new" of an edit, else ""), threads, median_us, GB_per_s,
        GOP_per_s, share_of_bound, clean."""
        with self._lock:
            return pd.DataFrame(self._rows, columns=COLUMNS)

    def measure(self, **changes) -> pd.DataFrame:
        """Measure the kernel as it is, now and in this thread; the new rows.

        `changes` set controls first; tokens may be a tuple. Raises `SettingError` for what they cannot be.
        """
        with self._lock:
            self._set(changes)
            kernel, threads, options = self._wanted()
        return self._run(lambda: self._measure(workloads(kernel, **options), threads))

    def try_edit(self, edits: dict[str, str], **changes) -> Trial:
        """Try an edit, now and in this thread; raises as `colibri_lab.try_edit` does, and then nothing has changed."""
        with self._lock:
            self._set(changes)
            kernel, threads, options = self._wanted()
        return self._run(lambda: self._try(kernel, edits, threads, options))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until what a button started has ended. True when it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def png(self) -> Picture:
        """The roofline with the points of this number of threads. `ColibriError` before any measurement."""
        with self._lock:
            threads = self.threads.value
            rows = [row for row in self._rows if row["threads"] == threads and row["kernel"] == self.kernel.value]
            if not rows:
                raise ColibriError("kernel_bench: nothing to draw yet; press Measure or call measure()")
            table = pd.DataFrame(rows)
            works = [self._works[case] for case in table.case.unique()]
            return roofline(self._limits[threads], table, works)

    # The work

    def _run(self, work):
        with self._work:
            self._enter("running", "compiling, checking and measuring …")
            try:
                result = work()
            except BaseException as error:
                with self._lock:
                    self.error = error
                self._enter("error", _told(error))
                raise
        self._enter("done", "")
        return result

    def _measure(self, works: list[Workload], threads: int) -> pd.DataFrame:
        timings, limits = compare_with_limits(works, threads, self.rounds)
        rows = [_row(work, "", timing, limits) for work, timing in zip(works, timings, strict=True)]
        self._add(works, rows, limits)
        self._show("")
        return pd.DataFrame(rows, columns=COLUMNS)

    def _try(self, kernel: str, edits: dict[str, str], threads: int, options: dict) -> Trial:
        draft, works = Draft(kernel), workloads(kernel, **options)
        for old, new in edits.items():
            draft.edit(old, new)
        trial = compare(draft, works, threads=threads, rounds=self.rounds)
        rows = []
        for work, pair in zip(works, trial.timings, strict=True):
            rows += [_row(work, version, t, trial.limits) for version, t in zip(("old", "new"), pair, strict=True)]
        self._add(works, rows, trial.limits)
        with self._lock:
            self.trial = trial
        self._show(trial.verdict)
        return trial

    def _add(self, works: list[Workload], rows: list[dict], limits: Limits) -> None:
        """A case keeps only its newest point of each version, so that the picture stays readable."""
        with self._lock:
            fresh = {(row["case"], row["threads"], row["version"]) for row in rows}
            self._rows = [r for r in self._rows if (r["case"], r["threads"], r["version"]) not in fresh] + rows
            self._works |= {work.label: work for work in works}
            self._limits[limits.threads] = limits

    # Controls. The lock is held where they are read together.

    def _make_controls(self, kernel: str, options: dict) -> None:
        wide = {"style": {"description_width": "72px"}, "layout": W.Layout(width="auto")}
        cores = machine.cores()[1]
        self.kernel = W.Dropdown(options=list(WORKLOADS), description="kernel", **wide)
        self.format = W.Dropdown(
            options=WEIGHTS, value="int8", description="format", tooltip="number format of the weights", **wide
        )
        self.int8_activations = W.Checkbox(
            False, description="int8 activations", tooltip="round the activations to int8 as well", indent=False,
            layout=W.Layout(width="auto"),
        )  # fmt: skip
        self.tokens = W.SelectionSlider(
            options=TOKENS, value=1, description="tokens", tooltip="rows that meet the same weights", **wide
        )
        self.threads = W.IntSlider(1, 1, max(2, cores), description="threads", **wide)
        self.old = W.Textarea(description="text", rows=2, tooltip="a text that is in the kernel once", **wide)
        self.new = W.Textarea(description="becomes", rows=2, tooltip="what stands there instead", **wide)
        self.buttons = {}
        for name, action, icon, tip in (
            ("Measure", self._on_measure, "tachometer", "measure the kernel as it is"),
            ("Try", self._on_try, "flask", "compile the edit, check it, and time old against new"),
        ):
            button = W.Button(description=name, icon=icon, tooltip=tip, layout=W.Layout(width="auto", flex="0 0 auto"))
            button.on_click(action)
            self.buttons[name] = button
        self._image = W.Image(format="png", layout=W.Layout(width="100%", display="none"))
        self._message, self._verdict = W.HTML(), W.HTML()
        for control in (self.kernel, self.threads):
            control.observe(lambda _: self._show(None), "value")
        self._set({"kernel": kernel, **options})

    def _arrange(self) -> list[W.Widget]:
        left = W.VBox(
            [
                self.kernel, self.format, self.int8_activations, self.tokens, self.threads, self.buttons["Measure"],
                self.old, self.new, self.buttons["Try"],
            ],
            layout=W.Layout(flex="0 0 292px", width="292px", margin="0 12px 0 0"),
        )  # fmt: skip
        right = W.VBox([self._image, self._verdict, self._message], layout=W.Layout(flex="1 1 0", min_width="0"))
        return [W.HTML(CSS, layout=W.Layout(display="none")), W.HBox([left, right])]

    def _set(self, changes: dict) -> None:
        self._many = None
        for name, value in changes.items():
            if name == "tokens" and isinstance(value, (tuple, list)):
                self._many = tuple(value)
            elif name not in CONTROLS:
                raise SettingError(f"kernel_bench has no control {name!r}; {did_you_mean(name, CONTROLS)}")
            else:
                try:
                    getattr(self, name).value = value
                except (TraitError, TypeError) as error:
                    raise SettingError(f"kernel_bench: {name} cannot be {value!r}: {error}") from None

    def _wanted(self) -> tuple[str, int, dict]:
        kernel, options = self.kernel.value, {"tokens": self._many or self.tokens.value}
        if kernel in _WITH_FORMAT:
            options |= {"format": self.format.value, "int8_activations": self.int8_activations.value}
        return kernel, self.threads.value, options

    def _on_measure(self, _) -> None:
        self._many = None
        self._start(self.measure)

    def _on_try(self, _) -> None:
        self._many = None
        self._start(lambda: self.try_edit({self.old.value: self.new.value}))

    def _start(self, work) -> None:
        """Do `work` in the background unless something is being done already; errors are shown, not raised."""

        def body():
            try:
                work()
            except Exception as error:
                self._enter("error", _told(error))

        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=body, name="colibri-kernel-bench", daemon=True)
            self._thread.start()

    # Showing

    def _enter(self, state: str, text: str) -> None:
        with self._lock:
            self.state = state
            look = "colibri-error" if state == "error" else ""
            self._message.value = f'<pre class="{look}" role="status">{html.escape(text)}</pre>' if text else ""
            for button in self.buttons.values():
                button.disabled = state == "running"

    def _show(self, verdict: str | None) -> None:
        """Draw what there is. `verdict` None keeps the sentence on show."""
        with self._lock:
            if verdict is not None:
                self._verdict.value = f'<p class="colibri-verdict">{html.escape(verdict)}</p>'
            try:
                self._image.value = self.png().png()
                self._image.layout.display = None
            except ColibriError:
                self._image.layout.display = "none"


def _row(work: Workload, version: str, timing, limits: Limits) -> dict:
    median = timing.median_s
    return {
        "kernel": work.kernel, "case": work.label, "version": version, "threads": limits.threads, "median_us": 1e6 * median,
        "GB_per_s": 1e-9 * work.bytes / median, "GOP_per_s": 1e-9 * work.operations / median,
        "share_of_bound": limits.bound_s(work) / median, "clean": timing.clean,
    }  # fmt: skip


def _told(error: BaseException) -> str:
    said = str(error) if isinstance(error, (ColibriError, ValueError)) else f"{type(error).__name__}: {error}"
    return f"{said}\nNothing was changed."
