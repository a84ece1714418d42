"""The workbench's handle on one model: open it, generate, look inside, change the cache, go on."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from . import __version__, machine
from .checkpoint.container import Container
from .config import SETTINGS, resolve
from .engine.engine import Engine
from .engine.generate import Run, stream
from .engine.routers import PAD, RouterHook, describe
from .engine.tokenizer import Tokenizer
from .engine.watch import Watch
from .errors import ColibriError, SettingError, TokenizerError
from .kernels import load
from .telemetry import Step
from .tune.memory_plan import MemoryPlan, ModelFacts, make_plan


class Lab:
    """A model that is open. Made by `colibri_lab.open`; keyword arguments are the settings of scope "open".

    One generation at a time; `stop` may be called from any thread. Raises `SettingError` for a setting that is unknown
    or out of range, `ContainerError` or `TokenizerError` for a model that cannot be used.
    """

    def __init__(self, path: str | os.PathLike, **settings):
        self.path = Path(path)
        given = resolve(settings, "open")
        self.requested = dict(settings)
        self.container = Container.open(self.path, allow_fp32=given["allow_fp32"])
        self.config, self.name = self.container.config, str(self.container.info["source"])
        given["router_calib"] = _router_calibration(self.container, given["router_calib"])
        self.tokenizer = _checked_tokenizer(self.container)
        self._facts = ModelFacts.of_container(self.container)
        self.plan: MemoryPlan = make_plan(self._facts, given, machine.memory()[1])
        self.settings = self.plan.settings
        self.engine = Engine(self.container, self.settings)
        if self.settings["prefault"]:
            self.engine.prefault()
        self.last_run: Run | None = None
        self._stop = threading.Event()
        self._busy = threading.Lock()
        self._exchange = threading.Lock()  # held while `configure` takes one engine away and makes the next
        self._here = threading.local()  # .router: what `routing` put in force in this thread

    def generate(self, prompt: str, **settings) -> Run:
        """Run to the end. Settings of scope "generate": max_tokens, temperature, top_p, seed, stop_at_eos.

        On Ctrl-C the run so far is `lab.last_run`.
        """
        for _ in self.stream(prompt, **settings):
            pass
        return self.last_run

    def stream(self, prompt: str, **settings) -> Iterator[Step]:
        """The same step by step: prefill chunks, then one `Step` per token. `lab.last_run` fills up meanwhile."""
        if not isinstance(prompt, str):
            raise SettingError(f"prompt must be text, got {type(prompt).__name__}")
        router = self._router()
        run = Run(prompt, {**self.settings, "routing": describe(router), **resolve(settings, "generate")})
        run.requested = {**self.requested, **settings}
        return self._locked(run, router)

    @contextlib.contextmanager
    def routing(self, router: RouterHook | None) -> Iterator[None]:
        """Until the block ends, in this thread, `router` decides which experts a token goes to; None: the model's own.

            with lab.routing(cl.routers.TopK(k=2)):
                run = lab.generate("def read_lines(path):")

        See `engine/routers.py` for what a router is and for those there are. A stream keeps the router it was made with.
        Raises `SettingError` for what is no router, or one that asks for what the model does not have.
        """
        if router is not None and not callable(router):
            raise SettingError(f"routing: a router is called as router(layer, logits); got {router!r}")
        if hasattr(router, "check"):
            router.check(self.config)
        before = getattr(self._here, "router", None)
        self._here.router = router
        try:
            yield
        finally:
            self._here.router = before

    def stop(self) -> None:
        """End the running generation after its current step; from any thread."""
        self._stop.set()

    def logits(self, token_ids) -> np.ndarray:
        """Teacher-forced: token_ids (tokens,) → float32 (tokens, vocab); row i predicts token i + 1."""
        router = self._router()
        with self._exclusive(), self.engine.routed_by(router):
            return self._through(token_ids)

    def routes(self, token_ids) -> pd.DataFrame:
        """Where each token goes: layer, token (position), rank, expert, weight; one row per choice, in router order."""
        router = self._router()
        with self._exclusive(), self.engine.routed_by(router), self._watched() as chunks:
            self._through(token_ids)
        frames, seen = [], {}
        for layer, ids, weights in chunks:
            first = seen.get(layer, 0)
            seen[layer] = first + len(ids)
            token, rank = np.divmod(np.arange(ids.size), ids.shape[1])
            frames.append(
                pd.DataFrame(
                    {
                        "layer": layer,
                        "token": first + token,
                        "rank": rank,
                        "expert": ids.ravel(),
                        "weight": weights.ravel(),
                    }
                )
            )
        table = pd.concat(frames, ignore_index=True)
        table = table[table.expert != PAD].sort_values(["layer", "token", "rank"], ignore_index=True)
        return table.astype({"expert": int})

    @contextlib.contextmanager
    def record(self):
        """Record the routing of every generation inside the `with` block.

            with lab.record() as rec:
                lab.generate("def read_lines(path):", max_tokens=64)
            rec.trace.replay(policy="lru", slots=16)

        Yields a `TraceRecorder`; `rec.trace` raises `TraceError` when nothing ran.
        """
        from .trace.record import TraceRecorder

        recorder = TraceRecorder(**self._trace_header())
        watch = Watch(self.engine, recorder)
        engine = self.engine
        engine.observers.append(watch)
        try:
            yield recorder
        finally:
            engine.observers.remove(watch)

    def memory(self, peak: bool = False) -> dict[str, int]:
        """Bytes by part, as in `plan`: what is mapped or allocated now, or with `peak` the most since the model is open.

        Slots and pages count whole, filled or not. `lab.engine.pool.touched()` tells what the system really gave.
        """
        parts = {**self._settled_engine().memory(peak), "tokenizer_bytes": self._facts.tokenizer_bytes}
        return {**parts, "total_bytes": sum(parts.values())}

    def residency(self) -> np.ndarray:
        """uint8 (moe_layers, experts): 0 absent, 1 resident, 2 resident and used by the layer's last step."""
        return self._settled_engine().cache.residency()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest expert block, in whole pages."""
        return self._facts.slot_bytes

    def reset_cache(self) -> None:
        """Cold cache: no block is resident, the policy remembers nothing."""
        with self._exclusive():
            self.engine.cache.reset()

    def resize(self, slots: int | str) -> None:
        """Change expert_cache_slots and keep what is resident as far as it fits, with the policy's history.

        Raises as `configure`; a failure leaves the model open as it was, but cold.
        """
        carried = self.engine.cache.hand_over()
        self.configure(expert_cache_slots=slots)
        with self._exclusive():
            self.engine.cache.take_over(carried)

    def configure(self, **settings) -> None:
        """Change settings of scope "open" while the model stays open; the expert cache starts cold.

        Raises `MemoryPlanError` before anything changes; a failure later on leaves the model open as it was, but cold.
        """
        with self._exclusive(), self._exchange:
            known = {name: value for name, value in self.settings.items() if name in SETTINGS}
            given = resolve({**known, **settings}, "open")
            if "router_calib" in settings:
                given["router_calib"] = _router_calibration(self.container, given["router_calib"])
            if (
                settings.get("scope", self.settings["scope"]) != self.settings["scope"]
                and "expert_cache_slots" not in settings
            ):
                given["expert_cache_slots"] = None
            if "memory" in settings and "expert_cache_slots" not in settings:
                given["expert_cache_slots"] = None
            elif "memory" not in settings:
                given["memory"] = None
            if "huge_pages" not in self.requested | settings:
                given["huge_pages"] = None  # for the new pool's size to decide
            plan = make_plan(self._facts, given, machine.memory()[1] + self.engine.pool.size)
            self.engine = None  # its memory must be free before the next one is made
            try:
                self.engine = Engine(self.container, plan.settings)
            except BaseException:
                self.engine = Engine(self.container, self.settings)
                raise
            self.plan, self.settings = plan, plan.settings
            self.requested |= settings

    def warmup(self, runs: int = 1) -> None:
        """Fill the cache with dummy generations (one token of prompt, a few of answer); the counters of later runs do not see them."""
        token = self.tokenizer.decode([min(1, self.config.vocab_size - 1)]) or "a"
        for _ in range(runs):
            self.generate(
                token, max_tokens=min(8, self.settings["max_seq_len"] - 1), temperature=0.0, stop_at_eos=False
            )

    def summary(self) -> str:
        """One line: model, slots and their bytes, policy, threads, SIMD path, storage, total memory."""
        s, m = self.settings, self.memory()
        each = "in all" if s["scope"] == "global" else "per layer"
        return (
            f"{self.name} ({self.config.family}): {s['expert_cache_slots']} slots {each} of {self.slot_bytes / 1e6:.3g} MB, "
            f"{s['policy']}, {s['threads']} threads ({load('gemm').simd}), {s['storage']}, "
            f"scratch {m['scratch_bytes'] / 1e6:.3g} MB, memory {m['total_bytes'] / 1e6:.4g} MB"
        )

    def __repr__(self) -> str:
        return f"<Lab {self.summary()}>"

    def _router(self) -> RouterHook | None:
        router = getattr(self._here, "router", None)
        if self.settings["router_offload"] == "none" and (router is None or getattr(router, "needs_logits", True)):
            raise SettingError(
                f"router_offload 'none': the engine runs no router, and routing {describe(router)!r} needs one; give the "
                "experts: with lab.routing(colibri_lab.routers.Precomputed(ids, weights)): …"
            )
        return router

    def _locked(self, run: Run, router: RouterHook | None) -> Iterator[Step]:
        with self._exclusive(), self.engine.routed_by(router):
            self._stop.clear()
            self.last_run = run
            run.resident_before = int((self.engine.cache.residency() > 0).sum())
            yield from stream(self.engine, self.tokenizer, run, self._stop.is_set)

    @contextlib.contextmanager
    def _exclusive(self):
        if not self._busy.acquire(blocking=False):
            raise ColibriError(
                f"{self.name} is generating: finish or close that stream first, or call lab.stop() from another thread"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _settled_engine(self) -> Engine:
        """The engine, for whoever only looks: waits while another thread changes settings."""
        with self._exchange:
            return self.engine

    def _trace_header(self) -> dict:
        config, cache = self.config, self.engine.cache
        return dict(
            model=self.name, num_experts=config.num_experts, top_k=config.top_k, shared=config.shared,
            moe_layers=list(config.moe_layers), expert_bytes=cache.block_bytes(), engine="colibri-lab", version=__version__,
            quant=self.container.info["formats"]["expert"], settings={k: v for k, v in self.settings.items() if k != "future"},
            capture="lab.record", ranked=True,
        )  # fmt: skip

    @contextlib.contextmanager
    def _watched(self):
        chunks = []

        def watch(layer, ids, weights, lease):
            chunks.append((layer, ids.copy(), weights.copy()))

        self.engine.observers.append(watch)
        try:
            yield chunks
        finally:
            self.engine.observers.remove(watch)

    def _through(self, token_ids) -> np.ndarray:
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise SettingError(
                f"token_ids must be a non-empty list of whole numbers, got shape {ids.shape} of {ids.dtype}"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise SettingError(f"token_ids must be 0 to {self.config.vocab_size - 1}, found {ids.min()} to {ids.max()}")
        if len(ids) > self.settings["max_seq_len"]:
            raise SettingError(
                f"{len(ids)} tokens exceed max_seq_len {self.settings['max_seq_len']}; open the model with more"
            )
        chunk, kv = self.settings["prefill_chunk"], self.engine.kv
        try:
            parts = [
                self.engine.forward(ids[i : i + chunk].astype(np.int64), "prefill", every=True)
                for i in range(0, len(ids), chunk)
            ]
        finally:
            kv.release()
        return np.concatenate(parts)


def _router_calibration(container: Container, asked: bool | None) -> bool:
    """Whether the routers' correction is in force; warns where quantised weights go without one."""
    path = container.router_calibration_path
    there = path.exists()
    if asked and not there:
        raise SettingError(f"router_calib: {path} is missing; colibri quantize --calibration-data FILE makes it")
    if container.quantised and not (there and asked is not False):
        hint = "router_calib is off" if there else "it has none; colibri quantize --calibration-data FILE makes one"
        warnings.warn(f"{container.dir}: quantised weights without router calibration: {hint}", stacklevel=4)
    return there if asked is None else asked


def _checked_tokenizer(container: Container) -> Tokenizer:
    """The container's tokenizer, refused unless it is the one the model was converted with."""
    from .engine.tokenizer import fingerprint

    found, wanted = fingerprint(container.dir), container.info["tokenizer"]
    if found != wanted:
        raise TokenizerError(
            f"{container.dir / 'tokenizer.json'}: not the tokenizer this model was converted with: expected "
            f"{wanted['vocab_size']} entries, sha256 {wanted['sha256'][:12]}…, found {found['vocab_size']}, "
            f"{found['sha256'][:12]}…; copy the right file back or convert again"
        )
    return Tokenizer(container.dir)
