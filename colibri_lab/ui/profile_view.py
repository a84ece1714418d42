"""Where a token's time goes: runs of an open model with other slots, threads, storage or disk, laid over each other.

Waiting for an expert is wall time; the time loader threads (or a modelled disk) spend reading is not, since much of it
happens while experts that are there compute. The view shows both, and never adds them.
"""

from __future__ import annotations

import time
from pathlib import Path

import ipywidgets as W
import pandas as pd

from .. import machine
from ..advice import advise
from ..config import SETTINGS, resolve
from ..engine.generate import Run
from ..errors import ColibriError, SettingError, did_you_mean
from ..telemetry import stage_table, step_table
from ..units import parse_size
from . import frames, profile_frames
from .frames import Frame
from .newest import Newest
from .plots import Picture, page
from .runs import Job, code_of
from .theme import bytes_text
from .view import View, labelled, line

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


class ProfileView(View):
    """See `profile_view`; naming it in a cell shows it.

    `state` is "empty", "running", "done", "stopped" or "error" (then `error` is the exception, and the last picture
    stays). `runs` are the complete runs, oldest first; `run` is on show, `kept` the grey one.
    """

    def __init__(self, lab, prompt: str = PROMPT, live: str = "auto", rerun_tokens: int | None = None, **generate):
        super().__init__(Newest(self._serve, "colibri-profile"), [235] * len(ALL), live)
        self.lab = lab
        self.runs: list[Run] = []
        self.run: Run | None = None
        self.kept: Run | None = None
        self._generate = resolve({"max_tokens": 48, **generate}, "generate")
        self.rerun_tokens = None if rerun_tokens is None else SETTINGS["max_tokens"].check(rerun_tokens)
        self._cuts: dict[int, tuple[Run, Run]] = {}  # by id: a complete run and as much of it as is compared
        self._make_controls(prompt)
        self._paint()

    def start(self, _=None) -> None:
        """Run what the controls say, in the background; the newest request wins."""
        with self._lock:
            wanted = self._wanted()
        self._worker.submit(wanted)

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
        job = Job(prompt, settings["expert_cache_slots"], self.lab.settings["policy"], generate)
        return code_of(self.lab, job, dict(self.lab.settings) | settings)

    def png(self, path: str | Path | None = None) -> Picture:
        """The view as a static picture, written to `path` if given. `ColibriError` before any run."""
        with self._lock:
            if self.run is None or not self.run.steps:
                raise ColibriError("profile_view: nothing to draw yet; press Start or call run_once()")
            shown, said, title = [self._frame(at) for at in ALL], self._said(), self._about(self.run)
        return page(shown, said, path, title)

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
                            self.run = lab.last_run
                            self._enter("running", "reading the prompt …")
                    if stale():
                        break
                    if time.monotonic() - shown_at > self.interval_s:
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
            with self._lock:
                self.run = self.run if self.run is not None and self.run.steps else before
                self._failed(error)
            raise

    # Controls

    def _make_controls(self, prompt: str) -> None:
        lab, settings = self.lab, self.lab.settings
        pools = len(lab.config.moe_layers) if settings.get("scope") == "global" else 1
        cores = machine.cores()[1]

        self.controls = {
            "slots": W.IntSlider(
                settings["expert_cache_slots"], 1, lab.config.num_experts * pools,
                **labelled("slots", "slots of the expert cache; one slot holds one expert in memory", 60),
            ),
            "threads": W.IntSlider(
                min(settings["threads"] or 1, 2 * cores), 1, 2 * cores, **labelled("threads", f"compute threads; this machine has {cores} cores", 60)
            ),
            "storage": W.Dropdown(
                options=SETTINGS["storage"].choices, value=settings["storage"],
                **labelled("storage", "how a missing expert is read: through the page cache, past it, or from a modelled disk", 60),
            ),
            "disk": W.Dropdown(
                options=list(dict.fromkeys([*DISKS, settings["disk_bandwidth"]])),
                value=settings["disk_bandwidth"], **labelled("disk", "bandwidth of the modelled disk", 60),
            ),
            "memory_mb": W.FloatSlider(
                0.0, min=0.0, max=round(1.2 * lab.slot_bytes * lab.config.num_experts * len(lab.config.moe_layers) / 1e6, 1),
                step=0.1, readout_format=".1f",
                **labelled("memory", "MB (10^6 bytes) that slots and page cache of the modelled disk have together; 0: no page cache", 60),
            ),
        }  # fmt: skip
        self.prompt = W.Textarea(prompt, rows=2, **labelled("prompt", "the text to continue", 60))
        run = self._row(
            {
                "Start": (self.start, "play", "run with these settings, from a cold cache"),
                "Stop": (self.stop, "stop", "end the run after its current step"),
            }
        )
        after = self._row(
            {
                "Keep": (self.keep, "thumb-tack", "keep the run on show in grey, to compare later runs with it"),
                "Copy settings": (self._on_copy, "copy", "these settings as a command line and as Python"),
            }
        )
        self._memory = line()
        for control in self.controls.values():
            control.observe(self._on_control, "value")
        self._memory.value = self._memory_html()
        c = self.controls
        cache = [c["slots"], c["memory_mb"], self._memory]
        self._arrange([*cache, c["threads"], c["storage"], c["disk"], self.prompt, run, after])

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

    # Showing. The lock is held.

    def _memory_html(self) -> str:
        slots, memory = self._slots_bytes(), 1e6 * self.controls["memory_mb"].value
        text = f"slots {bytes_text(slots)}"
        if memory:
            text += f", page cache {bytes_text(max(0, memory - slots))}" + (
                " (slots exceed the memory)" if slots > memory else ""
            )
        return f"<p>{text}</p>"

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
        shown = None if coming or all(run is not done for done in self.runs) else self._compared(run)
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
            self._show(self._frame(at) for at in ALL)
            self._title("Profile", self._about(self.run))
            self._say(self._said())

    def _about(self, run: Run | None) -> str:
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
