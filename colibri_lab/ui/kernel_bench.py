"""The kernel bench: measure a kernel under this machine's roofline, edit it, and see old and new side by side."""

from __future__ import annotations

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
from .newest import Newest
from .plots import Picture
from .roofline import nothing, roofline, roofs, sentence
from .view import View, beside, labelled

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
EMPTY = "nothing measured yet: press Measure"
BEGIN = f"{EMPTY}, or replace a text of the kernel and press Try"
CONTROLS = ("kernel", "format", "int8_activations", "tokens", "threads")
_WITH_FORMAT = ("gemm", "ffn")
COLUMNS = ["kernel", "case", "version", "threads", "median_us", "GB_per_s", "GOP_per_s", "share_of_bound", "clean"]


def kernel_bench(kernel: str = "gemm", **options) -> KernelBench:
    """A bench for kernels; see `KernelBench`. `options` set its controls (format, tokens, threads, int8_activations), `rounds`
    of each measurement, and `live` ("auto", "canvas" or "png").

    Raises `SettingError` for a control that does not exist or a value that it cannot have.
    """
    return KernelBench(kernel, **options)


class KernelBench(View):
    """Controls, a roofline with every point measured at this number of threads, and the last verdict.

    `state` is "empty", "running", "done" or "error"; `data` holds the points; `trial` is the last edit that was taken.
    """

    _tag = "pre"  # compilers speak in lines

    def __init__(self, kernel: str = "gemm", rounds: int = 5, live: str = "auto", **options):
        super().__init__(Newest(self._serve, "colibri-kernel-bench"), [320], live)
        self.rounds, self.trial = rounds, None
        self._told = BEGIN  # of the last work
        self._rows: list[dict] = []
        self._works: dict[str, Workload] = {}
        self._limits: dict[int, Limits] = {}
        self._make_controls(kernel, options)
        self._draw()

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
        with self._lock, self._silently():
            self._set(changes)
            kernel, threads, options = self._wanted()
        return self._worker.run(lambda: self._measure(workloads(kernel, **options), threads))

    def try_edit(self, edits: dict[str, str], **changes) -> Trial:
        """Try an edit, now and in this thread; raises as `colibri_lab.try_edit` does, and then nothing has changed."""
        with self._lock, self._silently():
            self._set(changes)
            kernel, threads, options = self._wanted()
        return self._worker.run(lambda: self._try(kernel, edits, threads, options))

    def png(self) -> Picture:
        """The roofline with the points of this number of threads, and where the work on the controls meets it.

        `ColibriError` before any measurement.
        """
        with self._lock:
            shown = self._shown()
        if shown is None:
            raise ColibriError("kernel_bench: nothing to draw yet; press Measure or call measure()")
        return roofline(*shown)

    def _shown(self) -> tuple | None:
        """What the roofline is made of: limits, points, their work, and the work on the controls; None before any point."""
        kernel, threads, options = self._wanted()
        rows = [row for row in self._rows if row["threads"] == threads and row["kernel"] == kernel]
        if not rows:
            return None
        table = pd.DataFrame(rows)
        works = [self._works[case] for case in table.case.unique()]
        try:
            (chosen,) = workloads(kernel, **options | {"tokens": self.tokens.value})
        except SettingError:  # as int8 activations for weights without scales, which Measure will refuse
            chosen = None
        return self._limits[threads], table, works, chosen

    # The work

    def _serve(self, work, stale):
        self._enter("running", "compiling, checking and measuring …")
        try:
            result = work()
        except BaseException as error:
            self._failed(error, "\nNothing was changed.")
            raise
        self._enter("done", "")
        return result

    def _measure(self, works: list[Workload], threads: int) -> pd.DataFrame:
        timings, limits = compare_with_limits(works, threads, self.rounds)
        rows = [_row(work, "", timing, limits) for work, timing in zip(works, timings, strict=True)]
        self._add(works, rows, limits)
        self._draw("")
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
        self._draw(trial.verdict)
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
        cores = machine.cores()[1]
        self.kernel = W.Dropdown(options=list(WORKLOADS), **labelled("kernel", "what is measured", 72))
        self.format = W.Dropdown(
            options=WEIGHTS, value="int8", **labelled("format", "number format of the weights", 72)
        )
        about = "round the activations to int8 as well"
        self.int8_activations = W.Checkbox(False, indent=False, **labelled("int8 activations", about, 0))
        about = "rows that meet the same weights"
        self.tokens = W.SelectionSlider(options=TOKENS, value=1, **labelled("tokens", about, 72))
        self.threads = W.IntSlider(1, 1, max(2, cores), **labelled("threads", "threads that compute", 72))
        self.old = W.Textarea(rows=2, **labelled("text", "a text that is in the kernel once", 72))
        self.new = W.Textarea(rows=2, **labelled("becomes", "what stands there instead", 72))
        measure = self._row({"Measure": (self._on_measure, "tachometer", "measure the kernel as it is")})
        about = "compile the edit, check it, and time old against new"
        edit = self._row({"Try": (self._on_try, "flask", about)})
        self._set({"kernel": kernel, **options})
        for name in CONTROLS:
            getattr(self, name).observe(self._on_control, "value")
        given = [self.kernel, self.format, self.int8_activations, self.tokens, self.threads]
        self._fill([beside([*given, measure, self.old, self.new, edit], self._panels)])
        self.layout.max_width = "1000px"
        self._title("Kernel bench")

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

    def _on_control(self, _) -> None:
        with self._lock:
            if not self._quiet:
                self._draw()

    def _on_measure(self, _) -> None:
        self._press(lambda kernel, threads, options: self._measure(workloads(kernel, **options), threads))

    def _on_try(self, _) -> None:
        edits = {self.old.value: self.new.value}
        self._press(lambda kernel, threads, options: self._try(kernel, edits, threads, options))

    def _press(self, work) -> None:
        """Do `work` with what the controls say in the background; errors are shown, not raised."""
        with self._lock:
            self._many = None
            wanted = self._wanted()
        self._worker.submit(lambda: work(*wanted))

    # Showing

    def _enter(self, state: str, text: str) -> None:
        with self._lock:
            super()._enter(state, text)
            for button in self.buttons.values():
                button.disabled = state == "running"

    def _draw(self, told: str | None = None) -> None:
        """Show what there is; `told` by the work that has just been done."""
        with self._lock:
            self._told = self._told if told is None else told
            shown = self._shown()
            self._show([roofs(*shown) if shown else nothing(EMPTY)])
            self._say([*self._told.split("\n"), sentence(shown[1]) if shown else ""])


def _row(work: Workload, version: str, timing, limits: Limits) -> dict:
    median = timing.median_s
    return {
        "kernel": work.kernel, "case": work.label, "version": version, "threads": limits.threads, "median_us": 1e6 * median,
        "GB_per_s": 1e-9 * work.bytes / median, "GOP_per_s": 1e-9 * work.operations / median,
        "share_of_bound": limits.bound_s(work) / median, "clean": timing.clean,
    }  # fmt: skip
