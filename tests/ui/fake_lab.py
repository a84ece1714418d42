"""A `Lab` that computes nothing: seeded routing, a plain LRU, made-up times. The views cannot tell the difference."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from colibri_lab.config import ModelConfig, resolve
from colibri_lab.errors import StorageError
from colibri_lab.telemetry import Step

WORDS = "def read lines path with open file as f for line in if not break yield return strip < & > \n".split(" ")


class FakeLab:
    """`step_s` is slept per step; `fail_at` raises StorageError at that step; `gate`, if set, is awaited before steps."""

    slot_bytes = 147_456

    def __init__(
        self, slots: int = 8, policy: str = "lru", step_s: float = 0.0, fail_at: int | None = None, **settings
    ):
        self.path, self.name = Path("/somewhere/containers/colibri-tiny-0123"), "colibri-tiny"
        self.config = ModelConfig(
            family="glm4_moe", vocab_size=4096, hidden_size=192, num_layers=7, num_heads=6, num_kv_heads=2, head_dim=32,
            num_experts=32, top_k=4, expert_intermediate_size=128, ffn=("dense",) + ("moe",) * 6, windows=(None,) * 7,
            shared="plain", shared_intermediate_size=128, eos_token_ids=(0,),
        )  # fmt: skip
        given = {"expert_cache_slots": slots, "policy": policy, "threads": 2} | settings
        self.settings = resolve(given, "open")
        self.step_s, self.fail_at = step_s, fail_at
        self.streams = 0  # running now
        self.most_streams = 0
        self._stop = threading.Event()
        self.reset_cache()

    def configure(self, **settings) -> None:
        self.settings = resolve(self.settings | settings, "open")
        self.reset_cache()

    def reset_cache(self) -> None:
        self._order = [[] for _ in self.config.moe_layers]  # least recently used first
        self._used = np.zeros((6, 32), bool)

    def stop(self) -> None:
        self._stop.set()

    def residency(self) -> np.ndarray:
        out = np.zeros((6, 32), np.uint8)
        for layer, order in enumerate(self._order):
            out[layer, order] = 1
        out[self._used & (out > 0)] = 2
        return out

    def stream(self, prompt: str, **generate):
        self._stop.clear()
        settings = resolve(generate, "generate")
        rng = np.random.default_rng(settings["seed"])
        favourites = rng.permuted(np.tile(np.arange(32), (6, 1)), axis=1)
        self.streams += 1
        self.most_streams = max(self.most_streams, self.streams)
        try:
            for index in range(settings["max_tokens"]):
                if self.fail_at is not None and index == self.fail_at:
                    raise StorageError("layer_3/expert_17.bin: read failed: input/output error; check the disk")
                time.sleep(self.step_s)
                yield self._step(index, rng, favourites)
                if self._stop.is_set():
                    return
        finally:
            self.streams -= 1

    def _step(self, index: int, rng, favourites) -> Step:
        tokens = 12 if index == 0 else 1
        hits = misses = 0
        self._used[:] = False
        slots = self.settings["expert_cache_slots"]
        for layer, order in enumerate(self._order):
            # experts near the front are likelier, and all drift slowly through the list
            picks = (rng.geometric(0.15, (tokens, 4)) + index // 12) % 32
            experts = sorted({int(favourites[layer, p]) for p in picks.ravel()})
            hit = [e for e in experts if e in order]
            hits, misses = hits + len(hit), misses + len(experts) - len(hit)
            order[:] = ([e for e in order if e not in experts] + experts)[-max(slots, 1) :]
            self._used[layer, experts] = True
        ms = {"expert_compute": 1.5, "attention": 0.8, "router": 0.15, "shared_expert": 0.3, "head": 0.25, "other": 0.1}
        stages = {k: v * 1e-3 * (1 + 0.1 * rng.random()) * tokens**0.5 for k, v in ms.items()}
        stages["expert_load_wait"] = misses * 9e-5
        token = int(rng.integers(1, 4096))
        return Step(
            index=index,
            phase="prefill" if index == 0 else "decode",
            tokens=tokens,
            token=token,
            text=WORDS[token % len(WORDS)] + " ",
            stages=stages,
            calls=dict.fromkeys(stages, 6),
            wall_s=sum(stages.values()),
            hits=hits,
            misses=misses,
            bytes_loaded=misses * self.slot_bytes,
            hit_rate=hits / (hits + misses),
        )
