"""The run monitor: text, hit rate, time per stage and the experts in memory, moving while the model generates."""

from __future__ import annotations

import html
from contextlib import suppress
from pathlib import Path

import ipywidgets as W
import numpy as np
import pandas as pd

from ..config import SETTINGS, resolve
from ..errors import ColibriError, SettingError
from ..telemetry import stage_table, step_table
from . import frames, plots
from .runner import Runner
from .runs import (
    Job,
    MonitorRun,
    code_of,
    comparison,
    memory_text,
    speed_text,
    summary_row,
    verdict,
)
from .theme import bytes_text
from .view import View, labelled, line

PROMPT = "def read_lines(path):"
EMPTY = "no run yet: press Start"
SETTLED = 100  # steps after which the time axis no longer shrinks: the first ones are slow, and few


def run_monitor(
    lab, prompt: str | None = None, live: str = "auto", rerun_tokens: int | None = None, **generate
) -> RunMonitor:
    """A live view of `lab`: press Start, or move `slots` or `policy` to run again over the kept run.

    `generate` are settings of scope "generate" (max_tokens, temperature, …). `rerun_tokens`: a moved control generates no
    more than so many of them, and is compared with as much of the kept run; None for all. `live` is "auto", "canvas" or
    "png". Raises `SettingError` for an unknown setting or value, `MissingTool` for live="canvas" without anywidget.
    """
    return RunMonitor(lab, prompt, live, rerun_tokens, **generate)


class RunMonitor(View):
    """Live view of a `Lab`; see `run_monitor`. Naming it in a cell shows it.

    `state` is "empty", "running", "done", "stopped" or "error" (then `error` is the exception and the last picture
    stays). `runs` are the runs so far, oldest first; `run` is the one on show; `kept` is the grey one.
    """

    def __init__(self, lab, prompt: str | None = None, live: str = "auto", rerun_tokens: int | None = None, **generate):
        super().__init__(Runner(lab, self), [230] * 4, live)  # hit rate, residency, latency, share
        self.lab = lab
        self.runs: list[MonitorRun] = []
        self.run: MonitorRun | None = None
        self._before: MonitorRun | None = None  # shown again when the next run yields nothing
        self.kept: MonitorRun | None = None
        self._generate = resolve(generate, "generate")
        self.rerun_tokens = None if rerun_tokens is None else SETTINGS["max_tokens"].check(rerun_tokens)
        self._painted: tuple = ()
        self._cut: tuple = (None, 0, None)  # the kept run, a number of tokens, and so much of it
        self._top_ms = 0.0
        self._make_controls(PROMPT if prompt is None else prompt)
        self._paint(force=True)

    def start(self, _=None) -> None:
        """Run what the controls say, in the background; the newest request wins over one that still runs."""
        with self._lock:
            job = self._wanted()
        self._worker.submit(job)

    def run_again(self, _=None) -> None:
        """Repeat the run on show exactly, for the spread of its speed; like `start` when there is none."""
        with self._lock:
            job = self.run.job if self.run else self._wanted()
            self._set_controls(job)
        self._worker.submit(job)

    def run_once(self, **changes) -> MonitorRun:
        """Run now, in this thread, and return the run; needs no front end.

        `changes` are `slots`, `policy`, `prompt` and settings of scope "generate"; the controls follow them. Raises
        what the engine raises, `SettingError` for an unknown or impossible setting, KeyboardInterrupt on interrupt.
        """
        self.stop()
        with self._lock:
            job = self._changed(self._wanted(), changes)
            self._generate = job.generate
            self._set_controls(job)
        return self._worker.run(job)

    def keep(self, _=None) -> None:
        """Make the run on show the grey one, which later runs are compared with."""
        with self._lock:
            if self.run is not None and len(self.run.decode):
                self.kept = self.run
                self._paint(force=True)

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`runs`: a row per run. Of the run on show `steps`, `stages` and, after its last step, `residency`."""
        with self._lock:
            runs, run = list(self.runs), self.run
            steps = list(run.steps) if run else []
        return {
            "runs": pd.DataFrame([summary_row(r) for r in runs]),
            "steps": step_table(steps),
            "stages": stage_table(steps),
            "residency": _residency_table(run),
        }

    def code(self) -> str:
        """The run on show, or the one that Start would make, as a CLI line and as Python."""
        with self._lock:
            job = self.run.job if self.run else self._wanted()
        return code_of(self.lab, job, dict(self.lab.settings))

    def png(self, path: str | Path | None = None) -> plots.Picture:
        """The view as a static picture with its verdict, written to `path` if given. `ColibriError` before any run."""
        with self._lock:
            run, kept = self.run, self._kept_beside(self.run)
        if run is None or not run.steps:
            raise ColibriError("run_monitor: nothing to draw yet; press Start or call run_once()")
        picture = plots.run_summary(run, kept)
        picture.suptitle(self._about(run), x=0.01, ha="left", fontsize=10)
        picture.supxlabel("\n".join(filter(None, (verdict(run), comparison(run, kept)))), x=0.01, ha="left", fontsize=9)
        if path is not None:
            picture.savefig(path)
        return picture

    # Told by the runner, on its thread.

    def begun(self, run: MonitorRun) -> None:
        with self._lock:
            self._before = self.run if self.run is not None and self.run.steps else self._before
            self.run, self._top_ms = run, 0.0
            self._enter("running", "reading the prompt …")
            self._paint(force=True)  # a moved control shows at once, before the model has answered

    def paint(self) -> None:
        self._paint()

    def ended(self, run: MonitorRun, replaced: bool) -> None:
        with self._lock:
            if run.steps:
                self.runs.append(run)
            elif not replaced:
                self.run = self._before
            if self.kept is None and run.stop_reason != "interrupted" and len(run.decode):
                self.kept = run
            self._paint(force=True)
            count, asked = len(run.tokens), run.job.generate["max_tokens"]
            if run.stop_reason == "interrupted":
                self._enter("stopped", f"stopped after {count} of {asked} tokens")
            else:
                self._enter("done", f"done: {count} tokens{', the text ended' * (run.stop_reason == 'eos')}")

    def failed(self, run: MonitorRun, error: BaseException) -> None:
        with self._lock:
            if not run.steps:
                self.run = self._before
            with suppress(Exception):  # the error may be the painter's own, and is on its way up already
                self._paint(force=True)
            self._failed(error)

    # Controls

    def _make_controls(self, prompt: str) -> None:
        settings, config = self.lab.settings, self.lab.config
        layers = len(config.moe_layers) if settings.get("scope") == "global" else 1
        most = config.num_experts * layers
        self.slots = W.IntSlider(
            min(settings["expert_cache_slots"], most), 1, most,
            **labelled("slots", "slots of the expert cache; one slot holds one expert in memory", 52),
        )  # fmt: skip
        self.policy = W.Dropdown(
            options=SETTINGS["policy"].choices, value=settings["policy"],
            **labelled("policy", "which resident expert leaves when a slot is needed", 52),
        )  # fmt: skip
        self.tokens = W.BoundedIntText(
            self._generate["max_tokens"], 1, 1_000_000, **labelled("tokens", "most tokens to generate in a run", 52)
        )
        self.prompt = W.Textarea(prompt, rows=2, **labelled("prompt", "the text to continue", 52))
        about = "the step whose experts are shown; step 0 reads the prompt"
        self.token = W.IntSlider(0, 0, 0, **labelled("step", about, 52))
        run = self._row(
            {
                "Start": (self.start, "play", "run with these settings, from a cold cache"),
                "Stop": (self.stop, "stop", "end the run after its current step"),
            }
        )
        after = self._row(
            {
                "Run again": (self.run_again, "repeat", "repeat the run on show, for the spread of its speed"),
                "Keep": (self.keep, "thumb-tack", "keep the run on show in grey, to compare later runs with it"),
                "Copy settings": (self._on_copy, "copy", "this run as a command line and as Python"),
            }
        )
        self._text, self._counters, self._memory = line(), line(), line()
        self._memory.value = self._memory_html()
        self.slots.observe(self._on_cache, "value")
        self.policy.observe(self._on_cache, "value")
        self.token.observe(self._on_token, "value")
        controls = [self.slots, self._memory, self.policy, self.tokens, self.prompt]
        self._arrange([self._text, self._counters, run, after, *controls], under=[self.token], left_column=1.35)

    def _wanted(self) -> Job:
        """What the controls say."""
        return Job(
            self.prompt.value, self.slots.value, self.policy.value, self._generate | {"max_tokens": self.tokens.value}
        )

    def _changed(self, job: Job, changes: dict) -> Job:
        """`job` with `changes`, every value checked."""
        rest = {k: v for k, v in changes.items() if k not in ("slots", "policy", "prompt")}
        slots = SETTINGS["expert_cache_slots"].check(changes.get("slots", job.slots))
        if slots is None or slots > self.slots.max:
            raise SettingError(f"slots must be 1 to {self.slots.max}, the experts there are; got {slots}")
        policy = SETTINGS["policy"].check(changes.get("policy", job.policy))
        return Job(changes.get("prompt", job.prompt), slots, policy, resolve(job.generate | rest, "generate"))

    def _set_controls(self, job: Job) -> None:
        with self._silently():
            self.slots.value, self.policy.value, self.prompt.value = job.slots, job.policy, job.prompt
            self.tokens.value = job.generate["max_tokens"]
        self._memory.value = self._memory_html()

    def _on_cache(self, _) -> None:
        with self._lock:
            if self._quiet:
                return
            self._memory.value = self._memory_html()
            job = self._wanted()
        self._worker.submit(job.at_most(self.rerun_tokens))

    def _on_token(self, _) -> None:
        with self._lock:
            if not self._quiet:
                self._paint(force=True)

    # Showing. The lock is held.

    def _paint(self, force: bool = False) -> None:
        """Show what has arrived since the last time."""
        with self._lock:
            run, count = self.run, len(self.run.steps) if self.run else 0  # the run may grow meanwhile
            if not force and (run, count) == self._painted:
                return
            self._painted = (run, count)
            kept = self._kept_beside(run)
            source, empty = ([], EMPTY) if run is None else (run, "")
            tokens = (run.job.generate["max_tokens"] if run else self.tokens.value) - 1
            top_ms = max(self._top_ms, frames.latency_top(source, kept, size=frames.group_size(tokens)))
            if count > SETTLED:
                self._top_ms = top_ms
            step = self._follow(count)
            token = None if run is None else run.token_at(step)
            cursor = None if step == count - 1 else token
            self._show(
                (
                    frames.hit_rate(source, kept, tokens, cursor, empty),
                    self._grid(run, step, token, empty),
                    frames.stage_latency(source, kept, tokens, top_ms, cursor, empty),
                    frames.stage_share(source, kept, empty),
                )
            )
            self._tell(run, kept)

    def _kept_beside(self, run: MonitorRun | None) -> MonitorRun | None:
        """As much of the kept run as `run` was asked for; None when there is none or `run` is the kept one."""
        if self.kept is None or self.kept is run:
            return None
        count = len(self.kept.tokens) if run is None else run.job.generate["max_tokens"]
        if (self.kept, count) != self._cut[:2]:
            self._cut = (self.kept, count, self.kept.first(count))
        return self._cut[2]

    def _grid(self, run: MonitorRun | None, step: int, token: int | None, empty: str) -> frames.Frame:
        if run is None or not run.residency:
            config = self.lab.config
            blank = np.zeros((len(config.moe_layers), config.num_experts), np.uint8)
            return frames.residency(blank, layers=config.moe_layers, empty=empty)
        when = "prompt" if token is None else f"token {token}"
        return frames.residency(run.residency[: step + 1], layers=run.layers, when=when)

    def _follow(self, count: int) -> int:
        """The step on show in the grid: the newest, unless the reader moved the slider back."""
        last = max(count - 1, 0)
        if self.token.max != last:
            follow = self.token.value >= min(self.token.max, last)
            with self._silently():
                self.token.max = last
                self.token.value = last if follow else self.token.value
        return self.token.value

    def _tell(self, run: MonitorRun | None, kept: MonitorRun | None) -> None:
        prompt = html.escape(run.prompt if run else self.prompt.value)
        text = html.escape(run.text) if run else ""
        self._text.value = f'<div class="colibri-text" tabindex="0"><pre><b>{prompt}</b>{text}</pre></div>'
        self._title("Run monitor", self._about(run))
        self._counters.value = _counters_html(run, self.runs)
        if run is None:
            said = ["No run yet: press Start, or move a control. Every run starts from a cold cache."]
        elif not len(run.decode) and run.stop_reason is None:
            said = ["Reading the prompt …"]
        else:
            said = [verdict(run), comparison(run, kept)]
        self._say(said)
        if self.state == "running" and run is not None and run.stop_reason is None:
            self._enter("running", f"token {len(run.tokens)} of {run.job.generate['max_tokens']} …")

    def _about(self, run: MonitorRun | None) -> str:
        s = run.settings if run else self.lab.settings
        where = "slots in all" if s.get("scope") == "global" else "slots per layer"
        parts = [self.lab.name, f"{s['expert_cache_slots']} {where}", s["policy"]]
        parts += [f"{s['threads']} thread{'s' * (s['threads'] != 1)}"] if s.get("threads") else []
        parts += [s["storage"]] if s.get("storage") else []
        return " · ".join([*parts, "cold start"])

    def _memory_html(self) -> str:
        layers, scope = len(self.lab.config.moe_layers), self.lab.settings.get("scope", "layer")
        return f"<p>{memory_text(self.slots.value, self.lab.slot_bytes, layers, scope)}</p>"


def _counters_html(run: MonitorRun | None, runs: list[MonitorRun]) -> str:
    row = summary_row(run) if run else {}

    def cell(name: str, text) -> str:
        return "–" if row.get(name) is None else text(row[name])

    speed = f"{cell('tokens', str)} tokens at {speed_text(run, runs)}" if run else "–"
    rows = (
        (cell("hit_rate", lambda v: f"hit {100 * v:.1f} % of accesses"), cell("ttft_ms", "first in {:.3g} ms".format)),
        (
            cell("misses_per_token", "{:.1f} misses per token".format),
            cell("bytes_per_token", lambda v: f"{bytes_text(v)} per token"),
        ),
    )
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>" for cells in rows)
    return f'<table title="rates count decode only"><tr><td colspan="2">{speed}</td></tr>{body}</table>'


def _residency_table(run: MonitorRun | None) -> pd.DataFrame:
    columns = ["layer", "expert", "resident", "used", "since_step", "uses"]
    if run is None or not run.residency:
        return pd.DataFrame(columns=columns)
    state, since, uses = frames.residency(run.residency).values
    layer, expert = np.indices(state.shape)
    layers = np.asarray(run.layers)[layer.ravel()]
    flat = (
        layers,
        expert.ravel(),
        state.ravel() > 0,
        state.ravel() >= frames.USED,
        since.ravel(),
        uses.ravel().astype(int),
    )
    return pd.DataFrame(dict(zip(columns, flat, strict=True)))
