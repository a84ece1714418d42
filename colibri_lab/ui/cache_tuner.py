"""The cache tuner: what any slots, policy, scope, lookup and admission would have hit on a recorded trace, and how far
from the best possible that is.

A moved control is answered in two or three steps: counts at once, then the course over tokens, then the curve over all
slots, which is kept.
"""

from __future__ import annotations

import html
import time
from dataclasses import replace
from pathlib import Path

import ipywidgets as W
import numpy as np
import pandas as pd

from ..errors import ColibriError, SettingError, TraceError, did_you_mean
from ..trace.history import Overtaken
from ..trace.record import TraceRecorder
from ..trace.source import CHOICES
from . import tuner, tuner_frames
from .frames import Frame
from .newest import Newest
from .plots import Picture, page
from .theme import bytes_text
from .tuner import Choice, Outcome
from .view import View, labelled, line

LEFT_COLUMN = 1.35  # times as wide as the right one
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


class CacheTuner(View):
    """See `cache_tuner`; naming it in a cell shows it.

    `state` is "empty" (a recorder that holds nothing yet), "running", "done" or "error" (then `error` is the exception
    and the last picture stays). `outcome` is what is on show, `kept` what it is compared with in grey.
    """

    _remedy = "Change a control to go on."

    def __init__(self, source, expert_bytes: int | None = None, live: str = "auto", **choice):
        super().__init__(Newest(self._serve, "colibri-tuner"), [250, 250, 270, 270], live)
        self.outcome: Outcome | None = None
        self.kept: Outcome | None = None
        self._source, self._expert_bytes = source, expert_bytes
        self._painted = False
        self.subjects = self._read()
        start = self._checked(Choice(next(iter(self.subjects), ""), 16), choice) if self.subjects else None
        self._make_controls()
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

    def png(self, path: str | Path | None = None) -> Picture:
        """The view as a static picture with its verdict, written to `path` if given. `ColibriError` while empty."""
        self.wait()
        with self._lock:
            found = self.outcome
            frames = [self._frame(at) for at in ALL] if found else []
            said = self._said() if found else []
        if not found:
            raise ColibriError(f"cache_tuner: nothing to draw yet; {self.error or NOTHING}")
        return page(frames, said, path, found.subject.about, LEFT_COLUMN)

    # The worker: counts, then the course, then the curves, then advice. Each shows as soon as it is there.

    def _serve(self, choice: Choice, stale) -> None:
        try:
            self._enter("running", "replaying …")
            subject = self.subjects[choice.trace]
            found = tuner.outcome(subject, choice)
            with self._lock:
                if stale():
                    return
                self.outcome = found
                self._paint((CURVE, CAUSES) if self._painted else ALL)
                self._painted = True
            found.history = tuner.follow(found, stale)
            self._update(found, stale, (COURSE, GRID))
            self._complete_curves(found, stale)
            found.advice = tuner.advise(found)
            with self._lock:
                if self.kept is None:
                    self.kept = found
                self._update(found, stale, ())
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
                if done == count or now - shown_at > self.interval_s:
                    self._update(found, stale, (CURVE,))
                    shown_at = now
                    self._enter("running", f"curve of {policy}: {done} of {count} sizes …")

    def _update(self, found: Outcome, stale, panels) -> None:
        """Paint these panels. Raises `Overtaken` when something newer is wanted."""
        with self._lock:
            if stale():
                raise Overtaken
            self._paint(panels)

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
        self.trace = W.Dropdown(options=list(self.subjects), **labelled("trace", "whose routing is replayed", 70))
        self.slots = W.IntSlider(
            16, 1, 64, **labelled("slots", "slots of the expert cache; one slot holds one expert", 70)
        )
        self.choices = {
            name: W.Dropdown(options=CHOICES.get(name, ()), **labelled(name, text, 70))
            for name, text in TOOLTIPS.items()
        }
        self.token = W.IntSlider(0, 0, 0, **labelled("step", "the step whose experts are shown", 40))
        self.token.layout.flex = "1 1 auto"
        self.play = W.Play(0, min=0, max=0, interval=150, tooltip="move through the steps")
        self._link = W.jslink((self.play, "value"), (self.token, "value"))
        buttons = {
            "Keep": (self.keep, "thumb-tack", "keep this choice in grey, to compare the next ones with it"),
            "Copy settings": (self._on_copy, "copy", "this choice as a command line and as Python"),
        }
        if isinstance(self._source, TraceRecorder):
            buttons["Reload"] = (self.reload, "refresh", "read the recorder again")
        if len(self.subjects) < 2:
            self.trace.layout.display = "none"
        self._memory, self._numbers = line(), line()
        for control in (self.trace, self.slots, *self.choices.values()):
            control.observe(self._on_control, "value")
        self.token.observe(self._on_token, "value")
        time = W.HBox([self.play, self.token], layout=W.Layout(width="auto", align_items="center"))
        choices = [self.trace, self.slots, self._memory, *self.choices.values(), self._numbers]
        self._arrange([*choices, self._row(buttons)], under=[time], left_column=LEFT_COLUMN)

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

    def _on_copy(self, button) -> None:
        if self.subjects:
            super()._on_copy(button)

    # Showing. The lock is held.

    def _say_empty(self) -> None:
        self._enter("empty", NOTHING)
        titles = ("Hit rate", "Hit rate over time", "Experts in memory", "Misses")
        nothing = np.zeros((0, 0), np.float32)
        self._show(Frame("lines", title, "", "", nothing, empty="no routing yet") for title in titles)

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
        return [tuner.verdict(found), found.advice, tuner.comparison(found, self._other())]

    def _paint(self, panels=ALL) -> None:
        """Show the outcome in these panels and in words."""
        if self.outcome.history is not None:
            self._follow_steps(len(self.outcome.history))
        for at in panels:
            self._panels[at].show(self._frame(at))
        self._title("Cache tuner", f"{self.outcome.subject.about} · empty start")
        self._numbers.value = _numbers_html(self.outcome)
        self._say(self._said())

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
