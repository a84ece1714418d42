"""The cache tuner: what any slots, policy, scope, lookup and admission would have hit on a recorded trace, and how far
from the best possible that is.

A moved control is answered in two or three steps: counts at once, then the course over tokens, then the curve over all
slots, which is kept. Callbacks may come on any thread; one lock guards the widgets, and replays run on a worker.
"""

from __future__ import annotations

import html
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

import ipywidgets as W
import numpy as np
import pandas as pd

from ..errors import ColibriError, SettingError, TraceError, did_you_mean
from ..trace.history import Overtaken
from ..trace.record import TraceRecorder
from ..trace.source import CHOICES
from . import plots, tuner, tuner_frames
from .frames import Frame
from .live import live_plot
from .newest import Newest
from .theme import CSS, bytes_text
from .tuner import Choice, Outcome

ALL = CURVE, COURSE, GRID, CAUSES = range(4)  # the panels
NOTHING = "no routing yet: generate inside `with lab.record() as rec:`, then press Reload"
TOOLTIPS = {
    "policy": "which resident expert leaves when a slot is needed",
    "scope": "layer: each layer owns its slots; global: all layers share one pool",
    "lookup": "atomic: a token's experts meet the cache together; serial: one after the other, as some engines do",
    "admission": "forced: every expert that was read stays; bypass: it may be dropped after use",
    "phase": "what is counted; both phases always run",
}


def cache_tuner(source, expert_bytes: int | None = None, live: str = "auto", **choice) -> CacheTuner:
    """Tune an expert cache on recorded routing.

    source        a trace, a trace file, a recorder (`lab.record()`), a run with log_level debug, or a dict of them by
                  name, among which the view can switch
    expert_bytes  bytes of one expert, for traces that do not tell
    choice        where to start: trace, slots, policy, scope, lookup, admission, phase

    Raises `SettingError` for an unknown or impossible choice, `TraceError` for a trace without order.
    """
    return CacheTuner(source, expert_bytes, live, **choice)


class CacheTuner(W.VBox):
    """See `cache_tuner`; naming it in a cell shows it.

    `state` is "empty" (a recorder that holds nothing yet), "running", "done" or "error" (then `error` is the exception
    and the last picture stays). `outcome` is what is on show, `kept` what it is compared with in grey.
    """

    def __init__(self, source, expert_bytes: int | None = None, live: str = "auto", **choice):
        self._worker = Newest(self._serve, "colibri-tuner")
        self.state, self.error = "empty", None
        self.outcome: Outcome | None = None
        self.kept: Outcome | None = None
        self._source, self._expert_bytes = source, expert_bytes
        self._lock = threading.RLock()
        self._quiet = False  # True while code, not a reader, moves a control
        self._painted = False
        self.subjects = self._read()
        self._panels = [live_plot(live, height) for height in (250, 250, 270, 270)]  # curve, course, grid, causes
        start = self._checked(Choice(next(iter(self.subjects), ""), 16), choice) if self.subjects else None
        self._make_controls()
        super().__init__(self._arrange(), layout=W.Layout(width="100%", max_width="1250px"))
        self.add_class("colibri")
        if start is None:
            self._say_empty()
        else:
            self._set_controls(start)
            self._worker.submit(start)

    def set(self, **changes) -> Outcome:
        """Change the choice and wait for all of its numbers; needs no front end. Raises what `cache_tuner` raises."""
        self._need_trace()
        if self.kept is None:
            self._worker.wait()  # the choice it began with is what later ones are compared with
        with self._lock:
            choice = self._checked(self._wanted(), changes)
            self._set_controls(choice)
        self._worker.run(choice)
        self._worker.wait()
        return self.outcome

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for what runs in the background. True when it is done."""
        return self._worker.wait(timeout_s)

    def keep(self, _=None) -> None:
        """Make the choice on show the grey one."""
        with self._lock:
            if self.outcome is not None:
                self.kept = self.outcome
                self._paint()

    def reload(self, _=None) -> None:
        """Read the source again: a recorder that has recorded more."""
        self._worker.stop()
        try:
            fresh = self._read()
        except ColibriError as error:
            self._failed(error)
            return
        with self._lock:
            self.subjects, self.kept = fresh, None
            if not fresh:
                return
            with self._silently():
                self.trace.options = list(fresh)
            choice = self._checked(self._wanted() if self.outcome else Choice(next(iter(fresh)), 16), {})
            self._set_controls(choice)
        self._worker.submit(choice)

    def close(self) -> None:
        """Stop, and free the widgets."""
        self._worker.stop()
        super().close()

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`choices`: kept and shown, a row each. Of the one on show `curves` (a row per policy and size), `layers`,
        `steps`, and `residency` at the step on show."""
        with self._lock:
            found, kept, step = self.outcome, self.kept, self.token.value
            tables = list(found.subject.curves.values()) if found else []
        rows = [o.row() for o in (kept, found) if o is not None]
        rows = rows[:1] if kept and found and kept.choice == found.choice else rows
        course = found.history if found else None
        return {
            "choices": pd.DataFrame(rows),
            "curves": pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(),
            "layers": pd.DataFrame(found.totals["per_layer"] if found else []),
            "steps": pd.DataFrame() if course is None else course.table(found.choice.phase),
            "residency": pd.DataFrame() if course is None else _residency(course, step),
        }

    def code(self) -> str:
        """The choice on the controls as a CLI line and as Python."""
        self._need_trace()
        with self._lock:
            choice = self._wanted()
        subject = self.subjects[choice.trace]
        return f"{tuner.cli_line(subject, choice)}\n\n{tuner.python_lines(subject, choice)}"

    def png(self, path: str | Path | None = None) -> plots.Picture:
        """The view as a static picture with its verdict, written to `path` if given. `ColibriError` while empty."""
        self.wait()
        with self._lock:
            found = self.outcome
            frames = [self._frame(at) for at in ALL] if found else []
            said = self._said() if found else []
        if not found:
            raise ColibriError(f"cache_tuner: nothing to draw yet; {self.error or NOTHING}")
        picture = plots.Picture((10.4, 7.0))
        places = picture.add_gridspec(2, 2, width_ratios=(1.35, 1))
        for at, frame in enumerate(frames):
            plots.draw(picture.add_subplot(places[at // 2, at % 2]), frame)
        picture.suptitle(found.subject.about, x=0.01, ha="left", fontsize=10)
        picture.supxlabel("\n".join(_wrapped(said)), x=0.01, ha="left", fontsize=9)
        if path is not None:
            picture.savefig(path)
        return picture

    # The worker: counts, then the course, then the curves, then advice. Each shows as soon as it is there.

    def _serve(self, choice: Choice, stale) -> None:
        try:
            self._enter("running", "replaying …")
            subject = self.subjects[choice.trace]
            found = tuner.outcome(subject, choice)
            with self._lock:
                if stale():
                    return
                self.outcome, self.error = found, None
                self._paint((CURVE, CAUSES) if self._painted else ALL)
                self._painted = True
            found.history = tuner.follow(found, stale)
            self._show(found, stale, (COURSE, GRID))
            self._complete_curves(found, stale)
            found.advice = tuner.advise(found)
            with self._lock:
                if self.kept is None:
                    self.kept = found
                self._show(found, stale, ())
                self._enter("done", "")
        except Overtaken:
            return
        except BaseException as error:
            self._failed(error)
            raise

    def _complete_curves(self, found: Outcome, stale) -> None:
        c, shown_at = found.choice, 0.0
        for policy, contract in [(c.policy, c.contract), *((oracle, c.bound) for oracle in tuner.ORACLES)]:
            for done, count in tuner.curve_parts(found.subject, policy, contract, stale):
                now = time.monotonic()
                if done == count or now - shown_at > self._panels[CURVE].interval_s:
                    self._show(found, stale, (CURVE,))
                    shown_at = now
                    self._enter("running", f"curve of {policy}: {done} of {count} sizes …")

    def _show(self, found: Outcome, stale, panels) -> None:
        """Paint these panels. Raises `Overtaken` when something newer is wanted."""
        with self._lock:
            if stale():
                raise Overtaken
            self._paint(panels)

    def _failed(self, error: BaseException) -> None:
        with self._lock, suppress(Exception):
            self.error = error
            what = str(error) if isinstance(error, ColibriError) else f"{type(error).__name__}: {error}"
            self._enter("error", f"{what} – the last picture stays. Change a control to go on.")

    # Controls

    def _read(self) -> dict[str, tuner.Subject]:
        """The subjects, none while a recorder is empty."""
        if isinstance(self._source, TraceRecorder) and not len(self._source):
            return {}
        return tuner.subjects(self._source, self._expert_bytes)

    def _need_trace(self) -> None:
        if not self.subjects:
            raise TraceError(f"cache_tuner: {NOTHING}")

    def _make_controls(self) -> None:
        def shown(name: str, tooltip: str) -> dict:  # a layout each, since the trace's may be hidden
            style = {"description_width": "70px"}
            return {"description": name, "tooltip": tooltip, "layout": W.Layout(width="auto"), "style": style}

        self.trace = W.Dropdown(options=list(self.subjects), **shown("trace", "whose routing is replayed"))
        self.slots = W.IntSlider(16, 1, 64, **shown("slots", "slots of the expert cache; one slot holds one expert"))
        self.choices = {
            name: W.Dropdown(options=CHOICES.get(name, ()), **shown(name, text)) for name, text in TOOLTIPS.items()
        }
        self.token = W.IntSlider(
            0, 0, 0, description="step", tooltip="the step whose experts are shown",
            layout=W.Layout(flex="1 1 auto", width="auto"), style={"description_width": "40px"},
        )  # fmt: skip
        self.play = W.Play(0, min=0, max=0, interval=150, tooltip="move through the steps")
        self._link = W.jslink((self.play, "value"), (self.token, "value"))
        buttons = {
            "Keep": (self.keep, "thumb-tack", "keep this choice in grey, to compare the next ones with it"),
            "Copy settings": (self._on_copy, "copy", "this choice as a command line and as Python"),
            "Reload": (self.reload, "refresh", "read the recorder again"),
        }
        self.buttons = {}
        for name, (action, icon, tip) in buttons.items():
            button = W.Button(description=name, icon=icon, tooltip=tip, layout=W.Layout(width="auto", flex="1 1 auto"))
            button.on_click(action)
            self.buttons[name] = button
        self._code = W.Textarea(rows=5, layout=W.Layout(width="100%", display="none"))
        self._head, self._memory, self._numbers, self._message, self._verdict = (
            W.HTML(layout=W.Layout(margin="0", width="auto")) for _ in range(5)
        )
        for control in (self.trace, self.slots, *self.choices.values()):
            control.observe(self._on_control, "value")
        self.token.observe(self._on_token, "value")

    def _arrange(self) -> list[W.Widget]:
        row = W.Layout(display="flex", flex_flow="row wrap", width="auto")
        if len(self.subjects) < 2:
            self.trace.layout.display = "none"
        recorder = isinstance(self._source, TraceRecorder)
        shown = [b for name, b in self.buttons.items() if name != "Reload" or recorder]
        left = W.VBox(
            [self.trace, self.slots, self._memory, *self.choices.values(), self._numbers, W.Box(shown, layout=row)],
            layout=W.Layout(flex="0 0 292px", width="292px", margin="0 12px 0 0"),
        )
        cells = W.Layout(grid_template_columns="minmax(0, 1.35fr) minmax(0, 1fr)", grid_gap="6px 10px", width="100%")
        time = W.HBox([self.play, self.token], layout=W.Layout(width="auto", align_items="center"))
        right = W.VBox([W.GridBox(self._panels, layout=cells), time], layout=W.Layout(flex="1 1 0", min_width="0"))
        style = W.HTML(CSS, layout=W.Layout(display="none"))
        return [style, self._head, W.HBox([left, right]), self._verdict, self._message, self._code]

    def _checked(self, choice: Choice, changes: dict) -> Choice:
        """`choice` with `changes`, every value checked against its trace."""
        known = Choice.__dataclass_fields__
        for name in changes:
            if name not in known:
                raise SettingError(f"cache_tuner has no control {name!r}; {did_you_mean(name, known)}")
        new = replace(choice, **changes)
        if new.trace not in self.subjects:
            raise SettingError(f"trace cannot be {new.trace!r}; {did_you_mean(str(new.trace), self.subjects)}")
        subject = self.subjects[new.trace]
        options = CHOICES | {"policy": subject.policies(), "phase": subject.phases}
        if "phase" not in changes and new.phase not in subject.phases:
            new = replace(new, phase=subject.phases[0])
        for name in TOOLTIPS:
            if getattr(new, name) not in options[name]:
                raise SettingError(
                    f"{name} cannot be {getattr(new, name)!r}; {did_you_mean(getattr(new, name), options[name])}"
                )
        most = subject.most(new.scope)
        if "slots" not in changes:
            new = replace(new, slots=min(max(1, new.slots), most))
        if isinstance(new.slots, bool) or not isinstance(new.slots, int) or not 1 <= new.slots <= most:
            raise SettingError(f"slots must be 1 to {most}, the experts there are; got {new.slots!r}")
        return new

    def _wanted(self) -> Choice:
        """What the controls say. Slots follow a changed scope or trace, so that the share of experts stays."""
        name = self.trace.value
        values = {n: control.value for n, control in self.choices.items()}
        subject, most = self.subjects[name], self.slots.max
        slots = self.slots.value
        if most != subject.most(values["scope"]):
            slots = max(1, round(slots * subject.most(values["scope"]) / most))
        if values["policy"] not in subject.policies():
            values["policy"] = "lru"
        if values["phase"] not in subject.phases:
            values["phase"] = subject.phases[0]
        return Choice(name, slots, **values)

    def _set_controls(self, choice: Choice) -> None:
        subject = self.subjects[choice.trace]
        with self._silently():
            self.trace.value = choice.trace
            self.slots.max = subject.most(choice.scope)
            self.slots.value = choice.slots
            for name, options in (("policy", subject.policies()), ("phase", subject.phases)):
                if list(self.choices[name].options) != options:
                    self.choices[name].options = options
            for name, control in self.choices.items():
                control.value = getattr(choice, name)
        self._memory.value = f"<p>{subject.memory(choice.slots, choice.scope)}</p>"

    @contextmanager
    def _silently(self):
        """Move controls without an answer. The lock must be held."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _on_control(self, _) -> None:
        with self._lock:
            if self._quiet or not self.subjects:
                return
            choice = self._wanted()
            self._set_controls(choice)
        self._worker.submit(choice)

    def _on_token(self, _) -> None:
        with self._lock:
            if self._quiet or self.outcome is None or self.outcome.history is None:
                return
            for at in (GRID, COURSE):
                self._panels[at].show(self._frame(at))

    def _on_copy(self, _) -> None:
        if not self.subjects:
            return
        text = self.code()
        with self._lock:
            self._code.value = text
            self._code.layout.display = "none" if self._code.layout.display is None else None
            self._panels[0].copy(text)

    # Showing. The lock is held.

    def _enter(self, state: str, text: str) -> None:
        with self._lock:
            self.state = state
            look = "colibri-error" if state == "error" else ""
            self._message.value = f'<p class="{look}" role="status">{html.escape(text)}&nbsp;</p>'

    def _say_empty(self) -> None:
        self._enter("empty", NOTHING)
        for panel, title in zip(
            self._panels, ("Hit rate", "Hit rate over time", "Experts in memory", "Misses"), strict=True
        ):
            panel.show(Frame("lines", title, "", "", np.zeros((0, 0), np.float32), empty="no routing yet"))

    def _other(self) -> Outcome | None:
        return None if self.kept is None or self.kept.choice == self.outcome.choice else self.kept

    def _frame(self, panel: int) -> Frame:
        found, kept, step = self.outcome, self._other(), self.token.value
        if panel == CURVE:
            return tuner_frames.curve(found, kept)
        if panel == COURSE:
            return tuner_frames.over_time(found, kept, step)
        return tuner_frames.grid(found, step) if panel == GRID else tuner_frames.causes(found, kept)

    def _said(self) -> list[str]:
        found = self.outcome
        return [s for s in (tuner.verdict(found), found.advice, tuner.comparison(found, self._other())) if s]

    def _paint(self, panels=ALL) -> None:
        """Show the outcome in these panels and in words."""
        if self.outcome.history is not None:
            self._follow_steps(len(self.outcome.history))
        for at in panels:
            self._panels[at].show(self._frame(at))
        self._head.value = f"<p><b>Cache tuner</b> &nbsp; {html.escape(self.outcome.subject.about)} · empty start</p>"
        self._numbers.value = _numbers_html(self.outcome)
        lines = "".join(f'<p class="colibri-verdict">{html.escape(s)}</p>' for s in self._said())
        self._verdict.value = f'<div class="colibri-said">{lines}</div>'

    def _follow_steps(self, count: int) -> None:
        """The step slider spans this trace, and stays where it was if it can; at first in the middle."""
        last = count - 1
        if self.token.max == last:
            return
        with self._silently():
            value = last // 2 if self.token.max == 0 else min(self.token.value, last)
            self.token.max = self.play.max = last
            self.token.value = self.play.value = value


def _numbers_html(found: Outcome) -> str:
    loaded, gap = found.bytes_per_token, 100 * (found.oracle - found.hit_rate)
    rows = (
        f"hit {100 * found.hit_rate:.1f} % of accesses, oracle {gap:+.1f} points",
        f"{found.misses_per_token:.1f} misses per token" + (f", {bytes_text(loaded)}" if loaded is not None else ""),
        f"{100 * found.totals['full_event_hit_rate']:.1f} % of layer steps without a miss",
    )
    body = "".join(f"<tr><td>{row}</td></tr>" for row in rows)
    return f'<table title="{html.escape(found.totals["denominators"]["hit_rate"])}">{body}</table>'


def _residency(course, step: int) -> pd.DataFrame:
    """layer, expert, resident, used, missed, since_step, uses."""
    layers, experts = len(course.layers), course.experts
    state, since, uses = (part.reshape(-1) for part in course.grid(min(step, len(course) - 1)))
    columns = {
        "layer": [layer for layer in course.layers for _ in range(experts)],
        "expert": list(range(experts)) * layers,
        "resident": since == since, "used": state >= 2, "missed": state == 3, "since_step": since, "uses": uses.astype(int),
    }  # fmt: skip
    return pd.DataFrame(columns)


def _wrapped(said: list[str], width: int = 150) -> list[str]:
    return [line for sentence in said for line in wrap(sentence, width)]
