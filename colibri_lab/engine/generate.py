"""Generation: prompt in, steps out. `stream` is the loop; `Run` is what is left when it ends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ..errors import SettingError
from ..telemetry import PHASES, Recorder, Step, stage_table, step_table
from .engine import Engine
from .sampling import Sampler
from .tokenizer import StreamDecoder, Tokenizer


@dataclass(eq=False)
class Run:
    """One generation: its text, its settings as they took effect, and every number that was recorded."""

    prompt: str
    settings: dict
    steps: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    stop_reason: str = "running"  # then: length, eos or interrupted
    cache: pd.DataFrame = field(default_factory=pd.DataFrame)  # layer, phase, hits, misses, loads, bytes
    events: pd.DataFrame = field(default_factory=pd.DataFrame)  # one row per access, with log_level debug
    requested: dict = field(default_factory=dict)  # settings as they were given, by name
    resident_before: int = 0  # experts that were in memory when it began, left there by earlier texts

    def first(self, tokens: int) -> Run:
        """Its first `tokens` sampled tokens, as a run of that length would have been recorded step by step; without the
        tables `cache` and `events`, which are of the whole run. Itself when it has no more."""
        if len(self.tokens) <= tokens:
            return self
        ends = [i for i, step in enumerate(self.steps) if step.token is not None]
        steps = self.steps[: ends[tokens - 1] + 1]
        return replace(
            self, settings=self.settings | {"max_tokens": tokens}, steps=steps, tokens=self.tokens[:tokens],
            text="".join(step.text for step in steps), stop_reason="length", cache=pd.DataFrame(), events=pd.DataFrame(),
        )  # fmt: skip

    @property
    def stages(self) -> pd.DataFrame:
        """stage, phase, calls, seconds, share of its phase's wall time."""
        return stage_table(self.steps)

    @property
    def table(self) -> pd.DataFrame:
        """One row per step."""
        return step_table(self.steps)

    @property
    def wall_s(self) -> float:
        return sum(s.wall_s for s in self.steps)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: all of prefill."""
        first = next((s for s in self.steps if s.token is not None), None)
        return None if first is None else sum(s.wall_s for s in self.steps[: first.index + 1])

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self._rate("decode")

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._rate("prefill")

    @property
    def hit_rate(self) -> float | None:
        """Of all decode accesses; of prefill accesses when nothing was decoded."""
        return next((s.running_hit_rate for s in reversed(self.steps)), None)

    def save(self, lab=None, **about):
        """Keep this run as a record (`colibri_lab.runs` lists them); returns it. `lab`: the model it ran on, for its
        identity, memory and page cache; `about` as in `tune.runs.save_run`."""
        from ..tune.runs import save_run

        return save_run(self, lab, **about)

    def _rate(self, phase: str) -> float | None:
        mine = [s for s in self.steps if s.phase == phase]
        wall = sum(s.wall_s for s in mine)
        return sum(s.tokens for s in mine) / wall if wall else None

    def __repr__(self) -> str:
        rate = self.decode_tokens_per_s
        speed = f"{rate:.1f} tokens/s decode" if rate else "nothing decoded"
        hits = "no expert asked for" if self.hit_rate is None else f"hit rate {self.hit_rate:.1%}"
        return f"<Run {len(self.tokens)} tokens, {speed}, {hits}, stopped by {self.stop_reason}>"


def fit_prompt(ids: list[int], max_tokens: int, max_seq_len: int) -> tuple[list[int], int]:
    """(prompt ids that are kept, tokens that may be generated), warning with the counts when something is cut.

    A prompt that leaves no room keeps its end; the answer gets at most half of the context then.
    """
    if not ids:
        raise SettingError("prompt is empty: expected text of at least one token, found none")
    if len(ids) >= max_seq_len:
        kept = max(1, max_seq_len - min(max_tokens, max(1, max_seq_len // 2)))
        warnings.warn(
            f"the prompt has {len(ids)} tokens, max_seq_len is {max_seq_len}: kept the last {kept}, dropped {len(ids) - kept}",
            stacklevel=3,
        )
        ids = ids[-kept:]
    room = max_seq_len - len(ids)
    if room < max_tokens:
        warnings.warn(
            f"{len(ids)} prompt tokens and max_tokens {max_tokens} exceed max_seq_len {max_seq_len}: at most {room} tokens "
            "will be generated",
            stacklevel=3,
        )
    return ids, min(room, max_tokens)


def stream(engine: Engine, tokenizer: Tokenizer, run: Run, stopping) -> Iterator[Step]:
    """Fill `run` step by step. `stopping()` is asked between steps; a closed generator ends the run as interrupted."""
    s, config = run.settings, engine.config
    recorder = engine.recorder = Recorder(engine.cache.clock)
    engine.cache.start_sequence()
    run.steps = recorder.steps
    sampler = Sampler(s["temperature"], s["top_p"], s["seed"])
    decoder = StreamDecoder(tokenizer)
    before = Counters(engine)
    stop_ids = config.eos_token_ids if s["stop_at_eos"] else ()
    run.stop_reason = "interrupted"
    try:
        recorder.begin("prefill")
        with recorder.stage("tokenize"):
            ids = tokenizer.encode(run.prompt)
        ids, budget = fit_prompt(ids, s["max_tokens"], s["max_seq_len"])
        run.prompt_tokens = len(ids)
        chunks = [ids[i : i + s["prefill_chunk"]] for i in range(0, len(ids), s["prefill_chunk"])]
        pending, phase, at = chunks, "prefill", before
        while True:
            chunk = pending.pop(0)
            logits = engine.forward(np.array(chunk, np.int64), phase)
            token, text = None, ""
            if not pending:
                with recorder.stage("sample"):
                    token = sampler(logits[-1], engine.request.probabilities)
                run.tokens.append(token)
                if token not in stop_ids:
                    with recorder.stage("tokenize"):
                        text = decoder.add(token)
                    run.text += text
            now = Counters(engine)
            step = recorder.end(tokens=len(chunk), token=token, text=text, **now.since(at))
            at = now
            if token in stop_ids:
                run.stop_reason = "eos"
            elif len(run.tokens) >= budget:
                run.stop_reason = "length"
            yield step
            if run.stop_reason != "interrupted" or stopping():
                return
            if token is not None:
                pending, phase = [[token]], "decode"
            recorder.begin(phase)
    finally:
        run.text += decoder.finish()
        engine.kv.release()
        run.cache = before.table(engine)
        run.events = before.events(engine)
        engine.recorder = None


class Counters:
    """The cache's counters at one moment, to be subtracted from a later one."""

    def __init__(self, engine: Engine):
        cache = engine.cache
        self.counted = cache.counters()
        self.bytes, self.service_s, self.device_bytes = (
            cache.bytes_loaded.copy(),
            cache.load_service_s(),
            cache.device_bytes(),
        )
        self.event = len(cache.events)

    def since(self, before: Counters) -> dict:
        """Step fields: what happened after `before`."""

        def more(name: str) -> int:
            return int(self.counted[name].sum() - before.counted[name].sum())

        told = self.device_bytes is not None and before.device_bytes is not None
        return dict(
            hits=more("hits"),
            prefetch_hits=more("prefetch_timely") + more("prefetch_late"),
            misses=more("misses"),
            bytes_loaded=int(self.bytes.sum() - before.bytes.sum()),
            device_bytes=self.device_bytes - before.device_bytes if told else None,
            load_service_s=self.service_s - before.service_s,
        )

    def table(self, engine: Engine) -> pd.DataFrame:
        """What happened since, a row per MoE layer and phase: layer, phase, hits (demand only), misses, loads (misses and
        prefetches), bytes, evictions, and what became of prefetches: issued, timely, late, wasted."""
        now, rows = Counters(engine), []
        columns = [
            "hits",
            "misses",
            "evictions",
            *(f"prefetch_{fate}" for fate in ("issued", "timely", "late", "wasted")),
        ]
        for p, phase in enumerate(PHASES):
            for i, layer in enumerate(engine.cache.layers):
                more = {name: int(now.counted[name][i, p] - self.counted[name][i, p]) for name in columns}
                loads = more["misses"] + more["prefetch_issued"]
                loaded = int(now.bytes[i, p] - self.bytes[i, p])
                rows.append({"layer": layer, "phase": phase, "loads": loads, "bytes": loaded, **more})
        order = ["layer", "phase", "hits", "misses", "loads", "bytes", *columns[2:]]
        return pd.DataFrame(rows, columns=order)

    def events(self, engine: Engine) -> pd.DataFrame:
        columns = ["step", "layer", "expert", "block", "hit", "slot", "victim"]
        return pd.DataFrame(engine.cache.events[self.event :], columns=columns)
