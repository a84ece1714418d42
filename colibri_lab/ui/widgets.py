"""The run monitor: text, hit rate, time per stage and the experts in memory, moving while the model generates.

Callbacks may come on any thread, several at a time: JupyterLab delivers them beside a running cell. One lock guards
the widgets and everything they show; it is never held while the engine computes or a thread is joined.
"""

from __future__ import annotations

import html
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import ipywidgets as W
import numpy as np
import pandas as pd

from ..config import SETTINGS, resolve
from ..errors import ColibriError, SettingError
from ..telemetry import stage_table, step_table
from . import frames, plots
from .live import live_plot
from .runner import Runner
from .runs import (
    Job,
    MonitorRun,
    cli_line,
    comparison,
    memory_text,
    python_lines,
    speed_text,
    summary_row,
    verdict,
)
from .theme import CSS, LIGHT, bytes_text

PROMPT = "def read_lines(path):"
EMPTY = "no run yet: press Start"
STOP_WITHIN_S = 30.0
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


class RunMonitor(W.VBox):
    """Live view of a `Lab`; see `run_monitor`. Naming it in a cell shows it.

    `state` is "empty", "running", "done", "stopped" or "error" (then `error` is the exception and the last picture
    stays). `runs` are the runs so far, oldest first; `run` is the one on show; `kept` is the grey one.
    """

    def __init__(self, lab, prompt: str | None = None, live: str = "auto", rerun_tokens: int | None = None, **generate):
        self.lab = lab
        self._runner = Runner(lab, self)  # first: ipywidgets closes even what was never finished
        self.state = "empty"
        self.error: BaseException | None = None
        self.runs: list[MonitorRun] = []
        self.run: MonitorRun | None = None
        self._before: MonitorRun | None = None  # shown again when the next run yields nothing
        self.kept: MonitorRun | None = None
        self._generate = resolve(generate, "generate")
        self.rerun_tokens = None if rerun_tokens is None else SETTINGS["max_tokens"].check(rerun_tokens)
        self._lock = threading.RLock()
        self._quiet = False  # True while code, not a reader, moves a control
        self._painted: tuple = ()
        self._cut: tuple = (None, 0, None)  # the kept run, a number of tokens, and so much of it
        self._top_ms = 0.0
        self._panels = [live_plot(live) for _ in range(4)]  # hit rate, residency, latency, share
        self.interval_s = self._panels[0].interval_s
        self._make_controls(PROMPT if prompt is None else prompt)
        super().__init__(self._arrange(), layout=W.Layout(width="100%", max_width="1250px"))
        self.add_class("colibri")
        self._paint(force=True)

    def start(self, _=None) -> None:
        """Run what the controls say, in the background; the newest request wins over one that still runs."""
        with self._lock:
            job = self._wanted()
        self._runner.submit(job)

    def stop(self, _=None) -> bool:
        """End the run after its current step and wait for that. True when nothing runs any more."""
        return self._runner.stop(STOP_WITHIN_S)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the background run has ended. True when it has."""
        return self._runner.wait(timeout_s)

    def run_again(self, _=None) -> None:
        """Repeat the run on show exactly, for the spread of its speed; like `start` when there is none."""
        with self._lock:
            job = self.run.job if self.run else self._wanted()
            self._set_controls(job)
        self._runner.submit(job)

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
        return self._runner.run(job)

    def keep(self, _=None) -> None:
        """Make the run on show the grey one, which later runs are compared with."""
        with self._lock:
            if self.run is not None and len(self.run.decode):
                self.kept = self.run
                self._paint(force=True)

    def close(self) -> None:
        """Stop, and free the widgets."""
        self.stop()
        super().close()

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
        model, settings = _model_argument(self.lab), dict(self.lab.settings)
        return f"{cli_line(model, job, settings)}\n\n{python_lines(model, job, settings)}"

    def png(self, path: str | Path | None = None) -> plots.Picture:
        """The view as a static picture with its verdict, written to `path` if given. `ColibriError` before any run."""
        with self._lock:
            run, kept = self.run, self._kept_beside(self.run)
        if run is None or not run.steps:
            raise ColibriError("run_monitor: nothing to draw yet; press Start or call run_once()")
        picture = plots.run_summary(run, kept)
        picture.suptitle(self._title(run), x=0.01, ha="left", fontsize=10)
        picture.supxlabel("\n".join(filter(None, (verdict(run), comparison(run, kept)))), x=0.01, ha="left", fontsize=9)
        if path is not None:
            picture.savefig(path)
        return picture

    # Told by the runner, on its thread.

    def begun(self, run: MonitorRun) -> None:
        with self._lock:
            self.error = None
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
            self.error = error
            if not run.steps:
                self.run = self._before
            with suppress(Exception):  # the error may be the painter's own, and is on its way up already
                self._paint(force=True)
            if isinstance(error, KeyboardInterrupt):
                self._enter("stopped", "interrupted")
            else:
                what = str(error) if isinstance(error, ColibriError) else f"{type(error).__name__}: {error}"
                self._enter("error", f"{what} – the last picture stays. Change a control or press Start.")

    # Controls

    def _make_controls(self, prompt: str) -> None:
        settings, config = self.lab.settings, self.lab.config
        layers = len(config.moe_layers) if settings.get("scope") == "global" else 1
        most = config.num_experts * layers
        wide = {"layout": W.Layout(width="auto"), "style": {"description_width": "52px"}}
        self.slots = W.IntSlider(
            min(settings["expert_cache_slots"], most), 1, most, description="slots",
            tooltip="slots of the expert cache; one slot holds one expert in memory", **wide,
        )  # fmt: skip
        self.policy = W.Dropdown(
            options=SETTINGS["policy"].choices, value=settings["policy"], description="policy",
            tooltip="which resident expert leaves when a slot is needed", **wide,
        )  # fmt: skip
        self.tokens = W.BoundedIntText(
            self._generate["max_tokens"], 1, 1_000_000, description="tokens",
            tooltip="most tokens to generate in a run", **wide,
        )  # fmt: skip
        self.prompt = W.Textarea(prompt, rows=2, description="prompt", tooltip="the text to continue", **wide)
        self.token = W.IntSlider(
            0, 0, 0, description="step", tooltip="the step whose experts are shown; step 0 reads the prompt", **wide
        )
        buttons = {
            "Start": (self.start, "play", "run with these settings, from a cold cache"),
            "Stop": (self.stop, "stop", "end the run after its current step"),
            "Run again": (self.run_again, "repeat", "repeat the run on show, for the spread of its speed"),
            "Keep": (self.keep, "thumb-tack", "keep the run on show in grey, to compare later runs with it"),
            "Copy settings": (self._on_copy, "copy", "this run as a command line and as Python"),
        }
        self.buttons = {}
        for name, (action, icon, tip) in buttons.items():
            button = W.Button(description=name, icon=icon, tooltip=tip, layout=W.Layout(width="auto", flex="1 1 auto"))
            button.on_click(action)
            self.buttons[name] = button
        self._code = W.Textarea(rows=5, disabled=False, layout=W.Layout(width="100%", display="none"))
        self._head, self._text, self._counters, self._memory, self._message, self._verdict = (
            W.HTML(layout=W.Layout(margin="0", width="auto")) for _ in range(6)
        )
        self._memory.value = self._memory_html()
        self.slots.observe(self._on_cache, "value")
        self.policy.observe(self._on_cache, "value")
        self.token.observe(self._on_token, "value")

    def _arrange(self) -> list[W.Widget]:
        row = W.Layout(display="flex", flex_flow="row wrap", width="auto")
        first, second = list(self.buttons.values())[:2], list(self.buttons.values())[2:]
        left = W.VBox(
            [
                self._text, self._counters, W.Box(first, layout=row), W.Box(second, layout=row),
                self.slots, self._memory, self.policy, self.tokens, self.prompt,
            ],
            layout=W.Layout(flex="0 0 292px", width="292px", margin="0 12px 0 0"),
        )  # fmt: skip
        grid = W.Layout(grid_template_columns="minmax(0, 1.35fr) minmax(0, 1fr)", grid_gap="6px 10px", width="100%")
        right = W.VBox(
            [W.GridBox(self._panels, layout=grid), self.token],
            layout=W.Layout(flex="1 1 0", min_width="0", width="auto"),
        )
        style = W.HTML(CSS, layout=W.Layout(display="none"))
        return [style, self._head, W.HBox([left, right]), self._verdict, self._message, self._code]

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

    @contextmanager
    def _silently(self):
        """Move controls without starting a run. The lock must be held."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

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
        if self.rerun_tokens is not None:
            job = job.at_most(self.rerun_tokens)
        self._runner.submit(job)

    def _on_token(self, _) -> None:
        with self._lock:
            if not self._quiet:
                self._paint(force=True)

    def _on_copy(self, _) -> None:
        text = self.code()
        with self._lock:
            self._code.value = text
            self._code.layout.display = "none" if self._code.layout.display is None else None
            self._panels[0].copy(text)

    # Showing. The lock is held.

    def _enter(self, state: str, text: str) -> None:
        self.state = state
        running = state == "running"
        stop = self.buttons["Stop"]
        stop.style.button_color, stop.style.text_color = (LIGHT["miss"], "white") if running else (None, None)
        look = "colibri-error" if state == "error" else ""
        self._message.value = f'<p class="{look}" role="status">{html.escape(text)}</p>'

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
            hit, grid, latency, share = self._panels
            hit.show(frames.hit_rate(source, kept, tokens, cursor, empty))
            grid.show(self._grid(run, step, token, empty))
            latency.show(frames.stage_latency(source, kept, tokens, top_ms, cursor, empty))
            share.show(frames.stage_share(source, kept, empty))
            self._say(run, kept)

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

    def _say(self, run: MonitorRun | None, kept: MonitorRun | None) -> None:
        prompt = html.escape(run.prompt if run else self.prompt.value)
        text = html.escape(run.text) if run else ""
        self._text.value = f'<div class="colibri-text" tabindex="0"><pre><b>{prompt}</b>{text}</pre></div>'
        self._head.value = f"<p><b>Run monitor</b> &nbsp; {html.escape(self._title(run))}</p>"
        self._counters.value = _counters_html(run, self.runs)
        if run is None:
            said = ["No run yet: press Start, or move a control. Every run starts from a cold cache."]
        elif not len(run.decode) and run.stop_reason is None:
            said = ["Reading the prompt …"]
        else:
            said = [verdict(run), comparison(run, kept)]
        lines = "".join(f'<p class="colibri-verdict">{html.escape(s)}</p>' for s in said if s)
        self._verdict.value = f'<div class="colibri-said">{lines}</div>'
        if self.state == "running" and run is not None and run.stop_reason is None:
            self._message.value = f"<p>token {len(run.tokens)} of {run.job.generate['max_tokens']} …</p>"

    def _title(self, run: MonitorRun | None) -> str:
        s = run.settings if run else self.lab.settings
        where = "slots in all" if s.get("scope") == "global" else "slots per layer"
        parts = [self.lab.name, f"{s['expert_cache_slots']} {where}", s["policy"]]
        parts += [f"{s['threads']} thread{'s' * (s['threads'] != 1)}"] if s.get("threads") else []
        parts += [s["storage"]] if s.get("storage") else []
        return " · ".join([*parts, "cold start"])

    def _memory_html(self) -> str:
        layers, scope = len(self.lab.config.moe_layers), self.lab.settings.get("scope", "layer")
        return f"<p>{memory_text(self.slots.value, self.lab.slot_bytes, layers, scope)}</p>"


def _model_argument(lab) -> str:
    """What to give `cl.open` for this model: its name when it is the converted copy of a checkpoint, else its path."""
    path = Path(lab.path)
    return lab.name if path.parent.name == "containers" else str(path)


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
