"""Where a token's time goes: runs of an open model with other slots, threads, storage or disk, laid over each other.

Waiting for an expert is wall time; the time loader threads (or a modelled disk) spend reading is not, since much of it
happens while experts that are there compute. The view shows both, and never adds them.
"""

from __future__ import annotations

import html
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import wrap

import ipywidgets as W
import pandas as pd

from .. import machine
from ..advice import advise
from ..config import SETTINGS, resolve
from ..engine.generate import Run
from ..errors import ColibriError, SettingError, did_you_mean
from ..telemetry import stage_table, step_table
from ..units import parse_size
from . import frames, plots, profile_frames, runs
from .frames import Frame
from .live import live_plot
from .newest import Newest
from .runs import Job
from .theme import CSS, LIGHT, bytes_text

PROMPT = "def read_lines(path):"
EMPTY = "no run yet: press Start"
DISKS = ("50 MB/s", "100 MB/s", "200 MB/s", "500 MB/s", "1 GB/s", "3 GB/s", "7 GB/s")
ALL = LATENCY, SHARE, READS, RUNS = range(4)  # the panels
OPEN = ("expert_cache_slots", "threads", "storage", "disk_bandwidth", "disk_page_cache")


def profile_view(
    lab, prompt: str = PROMPT, live: str = "auto", rerun_tokens: int | None = None, **generate
) -> ProfileView:
    """A profile of `lab`: press Start, or move a control to run again over the kept run.

    `generate` are settings of scope "generate". `rerun_tokens`: a moved control generates no more than so many tokens, and
    runs are compared over their first so many; None for all. Controls: slots, threads, storage, the bandwidth of a modelled disk, and
    memory: how much slots and page cache have together (0: as much as they like), so that more slots squeeze the page cache.
    Raises `SettingError` for an unknown setting or value.
    """
    return ProfileView(lab, prompt, live, rerun_tokens, **generate)


class ProfileView(W.VBox):
    """See `profile_view`; naming it in a cell shows it.

    `state` is "empty", "running", "done", "stopped" or "error" (then `error` is the exception, and the last picture
    stays). `runs` are the complete runs, oldest first; `run` is on show, `kept` the grey one.
    """

    def __init__(self, lab, prompt: str = PROMPT, live: str = "auto", rerun_tokens: int | None = None, **generate):
        self._worker = Newest(self._serve, "colibri-profile")
        self.lab, self.state, self.error = lab, "empty", None
        self.runs: list[Run] = []
        self.run: Run | None = None
        self.kept: Run | None = None
        self._generate = resolve({"max_tokens": 48, **generate}, "generate")
        self.rerun_tokens = None if rerun_tokens is None else SETTINGS["max_tokens"].check(rerun_tokens)
        self._cuts: dict[int, tuple[Run, Run]] = {}  # by id: a complete run and as much of it as is compared
        self._lock = threading.RLock()
        self._quiet = False
        self._panels = [live_plot(live, 235) for _ in ALL]
        self._make_controls(prompt)
        super().__init__(self._arrange(), layout=W.Layout(width="100%", max_width="1250px"))
        self.add_class("colibri")
        self._paint()

    def start(self, _=None) -> None:
        """Run what the controls say, in the background; the newest request wins."""
        with self._lock:
            wanted = self._wanted()
        self._worker.submit(wanted)

    def stop(self, _=None) -> bool:
        """End the run after its current step and wait for that. True when nothing runs any more."""
        return self._worker.stop(30.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the background run has ended. True when it has."""
        return self._worker.wait(timeout_s)

    def run_once(self, **changes) -> Run:
        """Run now, in this thread, and return the run; the controls follow. `changes` are `slots`, `threads`, `storage`,
        `disk`, `memory_mb`, `prompt` and settings of scope "generate". Raises what the engine raises."""
        self.stop()
        with self._lock:
            self._change(changes)
            wanted = self._wanted()
        self._worker.run(wanted)
        return self.run

    def keep(self, _=None) -> None:
        """Make the run on show the grey one."""
        with self._lock:
            if self.run is not None and self.run.stop_reason != "running":
                self.kept = self.run
                self._paint()

    def close(self) -> None:
        """Stop, and free the widgets."""
        self.stop()
        super().close()

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`runs`: a row per run. Of the run on show `steps` and `stages`."""
        with self._lock:
            done, steps = list(self.runs), list(self.run.steps) if self.run else []
        return {
            "runs": pd.DataFrame([profile_frames.row(r) for r in done]),
            "steps": step_table(steps),
            "stages": stage_table(steps),
        }

    def code(self) -> str:
        """What the controls say as a CLI line and as Python."""
        with self._lock:
            settings, prompt, generate = self._wanted()
        slots = settings["expert_cache_slots"]
        job = Job(prompt, slots, self.lab.settings["policy"], generate)
        model = self.lab.name if Path(self.lab.path).parent.name == "containers" else str(self.lab.path)
        given = dict(self.lab.settings) | settings
        return f"{runs.cli_line(model, job, given)}\n\n{runs.python_lines(model, job, given)}"

    def png(self, path: str | Path | None = None) -> plots.Picture:
        """The view as a static picture, written to `path` if given. `ColibriError` before any run."""
        with self._lock:
            if self.run is None or not self.run.steps:
                raise ColibriError("profile_view: nothing to draw yet; press Start or call run_once()")
            panels, said, title = [self._frame(at) for at in ALL], self._said(), self._title(self.run)
        picture = plots.Picture((10.4, 7.2))
        grid = picture.add_gridspec(2, 2, width_ratios=(1.2, 1))
        for at, frame in enumerate(panels):
            plots.draw(picture.add_subplot(grid[at // 2, at % 2]), frame)
        picture.suptitle(title, x=0.01, ha="left", fontsize=10)
        picture.supxlabel("\n".join(part for s in said for part in wrap(s, 150)), x=0.01, ha="left", fontsize=9)
        if path is not None:
            picture.savefig(path)
        return picture

    # The worker

    def _serve(self, wanted: tuple, stale) -> None:
        settings, prompt, generate = wanted
        lab, before = self.lab, self.run
        try:
            if any(lab.settings[name] != value for name, value in settings.items()):
                lab.configure(**settings)
            lab.reset_cache()  # runs with different settings start alike
            stream = lab.stream(prompt, **generate)
            shown_at = time.monotonic()
            try:
                for step in stream:
                    if step.index == 0:
                        with self._lock:
                            self.run, self.error = lab.last_run, None
                            self._enter("running", "reading the prompt …")
                    if stale():
                        break
                    if time.monotonic() - shown_at > self._panels[0].interval_s:
                        self._paint()
                        shown_at = time.monotonic()
            finally:
                stream.close()
            with self._lock:
                run = self.run = lab.last_run
                if run.stop_reason != "interrupted" and any(s.phase == "decode" for s in run.steps):
                    self.runs.append(run)
                    self.kept = self.kept or run
                self._paint()
                count, asked = len(run.tokens), generate["max_tokens"]
                stopped = run.stop_reason == "interrupted"
                self._enter(
                    "stopped" if stopped else "done",
                    f"{'stopped after' if stopped else 'done:'} {count} of {asked} tokens",
                )
        except BaseException as error:
            with self._lock, suppress(Exception):
                self.error = error
                self.run = self.run if self.run is not None and self.run.steps else before
                what = str(error) if isinstance(error, ColibriError) else f"{type(error).__name__}: {error}"
                self._enter("error", f"{what} – the last picture stays. Change a control or press Start.")
            raise

    # Controls

    def _make_controls(self, prompt: str) -> None:
        lab, settings = self.lab, self.lab.settings
        pools = len(lab.config.moe_layers) if settings.get("scope") == "global" else 1
        cores = machine.cores()[1]

        def shown(name: str, tooltip: str) -> dict:
            return {
                "description": name,
                "tooltip": tooltip,
                "layout": W.Layout(width="auto"),
                "style": {"description_width": "60px"},
            }

        self.controls = {
            "slots": W.IntSlider(
                settings["expert_cache_slots"], 1, lab.config.num_experts * pools,
                **shown("slots", "slots of the expert cache; one slot holds one expert in memory"),
            ),
            "threads": W.IntSlider(
                min(settings["threads"] or 1, 2 * cores), 1, 2 * cores, **shown("threads", f"compute threads; this machine has {cores} cores")
            ),
            "storage": W.Dropdown(
                options=SETTINGS["storage"].choices, value=settings["storage"],
                **shown("storage", "how a missing expert is read: through the page cache, past it, or from a modelled disk"),
            ),
            "disk": W.Dropdown(
                options=list(dict.fromkeys([*DISKS, settings["disk_bandwidth"]])),
                value=settings["disk_bandwidth"], **shown("disk", "bandwidth of the modelled disk"),
            ),
            "memory_mb": W.FloatSlider(
                0.0, min=0.0, max=round(1.2 * lab.slot_bytes * lab.config.num_experts * len(lab.config.moe_layers) / 1e6, 1),
                step=0.1, readout_format=".1f",
                **shown("memory", "MB (10^6 bytes) that slots and page cache of the modelled disk have together; 0: no page cache"),
            ),
        }  # fmt: skip
        self.prompt = W.Textarea(prompt, rows=2, **shown("prompt", "the text to continue"))
        buttons = {
            "Start": (self.start, "play", "run with these settings, from a cold cache"),
            "Stop": (self.stop, "stop", "end the run after its current step"),
            "Keep": (self.keep, "thumb-tack", "keep the run on show in grey, to compare later runs with it"),
            "Copy settings": (self._on_copy, "copy", "these settings as a command line and as Python"),
        }
        self.buttons = {}
        for name, (action, icon, tip) in buttons.items():
            button = W.Button(description=name, icon=icon, tooltip=tip, layout=W.Layout(width="auto", flex="1 1 auto"))
            button.on_click(action)
            self.buttons[name] = button
        self._code = W.Textarea(rows=5, layout=W.Layout(width="100%", display="none"))
        self._head, self._memory, self._message, self._verdict = (
            W.HTML(layout=W.Layout(margin="0", width="auto")) for _ in range(4)
        )
        for control in self.controls.values():
            control.observe(self._on_control, "value")
        self._memory.value = self._memory_html()

    def _arrange(self) -> list[W.Widget]:
        line = W.Layout(display="flex", flex_flow="row wrap", width="auto")
        buttons = list(self.buttons.values())
        c = self.controls
        left = W.VBox(
            [c["slots"], c["memory_mb"], self._memory, c["threads"], c["storage"], c["disk"], self.prompt,
             W.Box(buttons[:2], layout=line), W.Box(buttons[2:], layout=line)],
            layout=W.Layout(flex="0 0 292px", width="292px", margin="0 12px 0 0"),
        )  # fmt: skip
        grid = W.Layout(grid_template_columns="minmax(0, 1.2fr) minmax(0, 1fr)", grid_gap="6px 10px", width="100%")
        right = W.VBox([W.GridBox(self._panels, layout=grid)], layout=W.Layout(flex="1 1 0", min_width="0"))
        style = W.HTML(CSS, layout=W.Layout(display="none"))
        return [style, self._head, W.HBox([left, right]), self._verdict, self._message, self._code]

    def _wanted(self) -> tuple[dict, str, dict]:
        """(settings of scope open, prompt, settings of scope generate)."""
        c = {name: control.value for name, control in self.controls.items()}
        left = max(0, int(1e6 * c["memory_mb"]) - self._slots_bytes())
        values = (c["slots"], c["threads"], c["storage"], c["disk"], f"{left} B")
        return dict(zip(OPEN, values, strict=True)), self.prompt.value, dict(self._generate)

    def _slots_bytes(self) -> int:
        pools = 1 if self.lab.settings.get("scope") == "global" else len(self.lab.config.moe_layers)
        return self.controls["slots"].value * pools * self.lab.slot_bytes

    def _change(self, changes: dict) -> None:
        rest = {name: value for name, value in changes.items() if name not in self.controls and name != "prompt"}
        strange = [name for name in rest if name not in self._generate]
        if strange:
            raise SettingError(
                f"profile_view: unknown {strange[0]!r}; {did_you_mean(strange[0], [*self.controls, 'prompt', *self._generate])}"
            )
        for name in changes.keys() & self.controls.keys():
            control, value = self.controls[name], changes[name]
            if isinstance(control, W.Dropdown):
                if value not in control.options:
                    raise SettingError(f"{name} cannot be {value!r}; {did_you_mean(str(value), control.options)}")
            elif (
                not isinstance(value, (int, float))
                or isinstance(value, bool)
                or not control.min <= value <= control.max
            ):
                raise SettingError(f"{name} must be {control.min} to {control.max}, got {value!r}")
        self._generate = resolve(self._generate | rest, "generate")
        with self._silently():
            for name in changes.keys() & self.controls.keys():
                self.controls[name].value = changes[name]
            self.prompt.value = changes.get("prompt", self.prompt.value)
        self._memory.value = self._memory_html()

    @contextmanager
    def _silently(self):
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _on_control(self, _) -> None:
        with self._lock:
            if self._quiet:
                return
            self._memory.value = self._memory_html()
            self._panels[RUNS].show(self._frame(RUNS, f"next: {self.controls['slots'].value} slots"))
            settings, prompt, generate = self._wanted()
        if self.rerun_tokens is not None:
            generate["max_tokens"] = min(self.rerun_tokens, generate["max_tokens"])
        self._worker.submit((settings, prompt, generate))

    def _on_copy(self, _) -> None:
        text = self.code()
        with self._lock:
            self._code.value = text
            self._code.layout.display = "none" if self._code.layout.display is None else None
            self._panels[0].copy(text)

    # Showing. The lock is held.

    def _memory_html(self) -> str:
        slots, memory = self._slots_bytes(), 1e6 * self.controls["memory_mb"].value
        text = f"slots {bytes_text(slots)}"
        if memory:
            text += f", page cache {bytes_text(max(0, memory - slots))}" + (
                " (slots exceed the memory)" if slots > memory else ""
            )
        return f"<p>{text}</p>"

    def _enter(self, state: str, text: str) -> None:
        self.state = state
        stop, busy = self.buttons["Stop"], state == "running"
        stop.style.button_color, stop.style.text_color = (LIGHT["miss"], "white") if busy else (None, None)
        look = "colibri-error" if state == "error" else ""
        self._message.value = f'<p class="{look}" role="status">{html.escape(text)}&nbsp;</p>'

    def _other(self) -> Run | None:
        """What the run on show is laid over: the kept one, as far as the two are compared."""
        if self.kept is None or self.kept is self.run:
            return None
        asked = self.run.settings["max_tokens"] if self.run else self._generate["max_tokens"]
        return self.kept if asked >= self.kept.settings["max_tokens"] else self._compared(self.kept)

    def _compared(self, run: Run) -> Run:
        """As much of a complete run as is compared with others; the same object each time."""
        if self.rerun_tokens is None:
            return run
        return self._cuts.setdefault(id(run), (run, run.first(self.rerun_tokens)))[1]

    def _frame(self, panel: int, coming: str = "") -> Frame:
        """`coming` names the run that has been asked for, so that a moved control shows before the model has answered."""
        run, kept = self.run, self._other()
        source, empty = ([], EMPTY) if run is None else (run, "")
        if panel == LATENCY:
            asked = (run.settings if run else self._generate)["max_tokens"]
            return frames.stage_latency(source, kept, asked - 1, 0.0, None, empty)
        if panel == SHARE:
            return frames.stage_share(source, kept, empty)
        if panel == READS:
            return profile_frames.reads(run, kept, empty)
        shown = self._compared(run) if any(run is done for done in self.runs) else None
        return profile_frames.all_runs([self._compared(r) for r in self.runs], shown, coming, empty)

    def _said(self) -> list[str]:
        if self.run is None:
            return ["No run yet: press Start, or move a control. Every run starts from a cold cache."]
        if not any(s.phase == "decode" for s in self.run.steps):
            return ["Reading the prompt …"]
        said = [profile_frames.verdict(self.run)]
        if self.run.stop_reason != "running" and len(self.run.cache):
            said += advise(self.run, self.lab)
        return said

    def _paint(self) -> None:
        with self._lock:
            for at, panel in enumerate(self._panels):
                panel.show(self._frame(at))
            self._head.value = f"<p><b>Profile</b> &nbsp; {html.escape(self._title(self.run))}</p>"
            lines = "".join(f'<p class="colibri-verdict">{html.escape(s)}</p>' for s in self._said())
            self._verdict.value = f'<div class="colibri-said">{lines}</div>'

    def _title(self, run: Run | None) -> str:
        s = run.settings if run else self.lab.settings
        parts = [
            self.lab.name,
            f"{s['expert_cache_slots']} slots",
            s["policy"],
            f"{s['threads']} thread{'s' * (s['threads'] != 1)}",
            s["storage"],
        ]
        if s["storage"] == "modelled":
            parts += [f"{s['disk_bandwidth']} with {bytes_text(parse_size(s['disk_page_cache']))} of page cache"]
        return " · ".join([*parts, "cold start"])
