"""The memory map: what the pool has handed out and what the system has really given, moving while the model generates."""

from __future__ import annotations

from pathlib import Path

import ipywidgets as W
import numpy as np
import pandas as pd

from ..config import SETTINGS, resolve
from ..engine.experiments import moves_of
from ..engine.sizes import engine_sizes
from ..errors import ColibriError, SettingError
from . import memory_frames as frames
from .memory_frames import PoolState
from .plots import Picture, page
from .run_monitor import PROMPT
from .runner import Runner
from .runs import Job, MonitorRun, code_of
from .theme import bytes_text
from .view import View, labelled, line

MOVES = 200  # takes and rewinds on show
EMPTY = "nothing ran yet: press Start"
PARTS = 1  # the panel of what is in memory beside what was planned


def memory_map(
    lab, prompt: str | None = None, live: str = "auto", rerun_tokens: int | None = None, **generate
) -> MemoryMap:
    """A live map of `lab`'s memory pool. Start generates from a cold cache; `slots` makes the pool anew.

    `generate` are settings of scope "generate". `rerun_tokens`: moved slots generate no more than so many of them; None for
    all. `live` is "auto", "canvas" or "png". Raises `SettingError` for an unknown
    setting or value, `MissingTool` for live="canvas" without anywidget.
    """
    return MemoryMap(lab, prompt, live, rerun_tokens, **generate)


class MemoryMap(View):
    """See `memory_map`. `state` is "empty", "running", "done", "stopped" or "error" (then `error` is the exception and the
    last picture stays); `pool` the `PoolState` on show; `run` what ran."""

    def __init__(self, lab, prompt: str | None = None, live: str = "auto", rerun_tokens: int | None = None, **generate):
        super().__init__(Runner(lab, self), [230] * 4, live)
        self.lab = lab
        self.run: MonitorRun | None = None
        self.pool: PoolState | None = None
        self._generate = resolve({"max_tokens": 200} | generate, "generate")
        self.rerun_tokens = None if rerun_tokens is None else SETTINGS["max_tokens"].check(rerun_tokens)
        self._history: list[tuple[int, float, float]] = []
        self._before: np.ndarray | None = None
        self._make_controls(PROMPT if prompt is None else prompt)
        self.paint()

    def start(self, _=None) -> None:
        """Generate with what the controls say, in the background; a newer request ends the one that runs."""
        with self._lock:
            job = self._wanted()
        self._worker.submit(job)

    def run_once(self, slots: int | None = None, prompt: str | None = None, **generate) -> MonitorRun:
        """Run now, in this thread; the controls follow. Raises what the engine raises and `SettingError` for a setting that
        cannot be."""
        self.stop()
        with self._lock:
            checked = SETTINGS["expert_cache_slots"].check(self.slots.value if slots is None else slots)
            if checked is None or checked > self.slots.max:
                raise SettingError(f"slots must be 1 to {self.slots.max}, the experts there are; got {checked}")
            self._generate = resolve(self._generate | {"max_tokens": self.tokens.value} | generate, "generate")
            with self._silently():
                self.slots.value, self.tokens.value = checked, self._generate["max_tokens"]
                self.prompt.value = self.prompt.value if prompt is None else prompt
            job = self._wanted()
        return self._worker.run(job)

    @property
    def data(self) -> dict[str, pd.DataFrame]:
        """`parts`: taken and touched bytes of the pool by part. `arenas`: used, peak and reserved bytes. `moves`: the last takes
        and rewinds. `growth`: step, slots_MB, kv_MB while the run lasted. `plan`: planned bytes by part."""
        with self._lock:
            pool, history = self.pool, list(self._history)
            planned = self._planned()
        arenas = pd.DataFrame({"used_bytes": pool.used, "peak_bytes": pool.peak, "reserved_bytes": pool.reserved})
        return {
            "parts": pool.bytes_by_part(), "arenas": arenas.rename_axis("arena"), "moves": pool.moves,
            "growth": pd.DataFrame(history, columns=["step", "slots_MB", "kv_MB"]),
            "plan": pd.DataFrame({"part": list(planned), "planned_bytes": list(planned.values())}),
        }  # fmt: skip

    def code(self) -> str:
        """The run that Start would make, as a CLI line and as Python."""
        with self._lock:
            job = self._wanted()
        return code_of(self.lab, job, dict(self.lab.settings))

    def png(self, path: str | Path | None = None) -> Picture:
        """The view as a static picture with its verdict, written to `path` if given. `ColibriError` before any run."""
        with self._lock:
            if self.run is None or not self.run.steps:
                raise ColibriError("memory_map: nothing to draw yet; press Start or call run_once()")
            shown, said = self._frames(), [self._said()]
        return page(shown, said, path)

    # Told by the runner, on its thread.

    def begun(self, run: MonitorRun) -> None:
        with self._lock:
            self.run, self._history = run, []
            self._enter("running", "reading the prompt …")

    def paint(self) -> None:
        """Look at the pool and show what is there; nothing while the engine is being made anew."""
        with self._lock:
            pool = self._look()
            if pool is None:
                return
            before = None if self.pool is None else frames.cells(self.pool)
            # Another pool has other cells; the first picture of a run marks nothing.
            self._before = before if before is not None and self._history else None
            self.pool = pool
            if self.run is not None and self.state == "running":
                parts = pool.bytes_by_part().set_index("part").touched_bytes / 1e6
                self._history.append((pool.step, float(parts.get("slots", 0.0)), float(parts.get("kv", 0.0))))
            self._show(self._frames())
            self._say([self._said()])
            self._cost.value = f"<p>{self._slots_text()}</p>"

    def ended(self, run: MonitorRun, replaced: bool) -> None:
        if not self._history:  # over before the first picture
            self.paint()
        with self._lock:
            count = len(run.tokens)
            if run.stop_reason == "interrupted":
                self._enter("stopped", f"stopped after {count} tokens; then the KV pages went back to the pool")
            else:
                self._enter("done", f"done: {count} tokens; then the KV pages went back to the pool")

    def failed(self, run: MonitorRun, error: BaseException) -> None:
        self._failed(error)

    # Controls

    def _make_controls(self, prompt: str) -> None:
        settings, config = self.lab.settings, self.lab.config
        most = config.num_experts * (len(config.moe_layers) if settings["scope"] == "global" else 1)
        about = "slots of the expert cache; most of the pool is made of them"
        self.slots = W.IntSlider(min(settings["expert_cache_slots"], most), 1, most, **labelled("slots", about, 52))
        self.tokens = W.BoundedIntText(
            self._generate["max_tokens"], 1, 1_000_000, **labelled("tokens", "most tokens to generate in a run", 52)
        )
        self.prompt = W.Textarea(
            prompt, rows=4, **labelled("prompt", "a longer prompt needs a larger prefill arena", 52)
        )
        buttons = {
            "Start": (self.start, "play", "generate with these settings, from a cold cache"),
            "Stop": (self.stop, "stop", "end the run after its current step"),
            "Copy settings": (self._on_copy, "copy", "this run as a command line and as Python"),
        }
        self._cost = line()
        self.slots.observe(self._on_slots, "value")
        self._arrange([self._row(buttons), self.slots, self._cost, self.tokens, self.prompt])
        self._title("Memory map", str(self.lab.name))

    def _wanted(self) -> Job:
        generate = self._generate | {"max_tokens": self.tokens.value}
        return Job(self.prompt.value, self.slots.value, self.lab.settings["policy"], generate)

    def _on_slots(self, _) -> None:
        with self._lock:
            self._cost.value = f"<p>{self._slots_text()}</p>"
            if self._quiet:
                return
            self._panels[PARTS].show(frames.parts(self.pool, self._planned()))  # before the pool has been made anew
            job = self._wanted()
        self._worker.submit(job.at_most(self.rerun_tokens))

    # Looking and showing. The lock is held.

    def _look(self) -> PoolState | None:
        engine = self.lab.engine  # None while settings change
        if engine is None:
            return None
        arenas, pool = engine.request.arenas, engine.pool
        samples, counts = arenas.samples(), arenas.counts()
        peak, reserved = ({name: getattr(c, part) for name, c in counts.items()} for part in ("high_water", "capacity"))
        moves = moves_of(samples, peak, reserved).tail(MOVES).reset_index(drop=True)
        if not len(moves) and self.pool is not None and self.state != "running":
            moves = self.pool.moves
        arenas.record(1 << 13)
        step = len(self.run.steps) if self.run else 0
        used = {name: c.used for name, c in counts.items()}
        return PoolState(pool.snapshot(), pool.touched(), step, used, peak, reserved, moves)

    def _frames(self):
        planned, empty = self._planned(), EMPTY if self.run is None else ""
        steps = self.tokens.value if self.run is None else self.run.job.generate["max_tokens"]
        return (
            frames.pool_map(self.pool, self._before), frames.parts(self.pool, planned),
            frames.arena_lines(self.pool.moves, empty=empty), frames.growth(self._history, steps, empty),
        )  # fmt: skip

    def _planned(self) -> dict[str, int]:
        """Bytes by part, with the slots that the control says."""
        lab = self.lab
        settings = lab.settings | {"expert_cache_slots": self.slots.value}
        z = engine_sizes(lab.config, lab.slot_bytes, lab.container.blocks, settings)
        parts = {"slots": (z.slots + z.transient) * z.slot_bytes, "kv": z.kv_bytes, "arena": z.scratch_bytes}
        return {name: size for name, size in (parts | {"rotary": z.rotary_bytes}).items() if size}

    def _said(self) -> str:
        return frames.verdict(self.pool, self._planned(), self.lab.settings["expert_cache_slots"], self._slot_step())

    def _slot_step(self) -> int:
        """Bytes that one more slot in every layer takes."""
        return self._layers * self.lab.plan.sizes.slot_bytes

    @property
    def _layers(self) -> int:
        """How many times the pool has the slots that the control says."""
        return 1 if self.lab.settings["scope"] == "global" else len(self.lab.config.moe_layers)

    def _slots_text(self) -> str:
        size, layers = self.lab.plan.sizes.slot_bytes, self._layers
        return f"{self.slots.value} slots × {layers} layers × {bytes_text(size)} = {bytes_text(self.slots.value * layers * size)}"
