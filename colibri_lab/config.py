"""Two descriptions everything else reads: the model (`ModelConfig`) and the runtime settings (`SETTINGS`).

`SETTINGS` is the only list of runtime settings. Keyword arguments of `colibri_lab.open` and `Lab.generate`, CLI flags,
the settings table in the README and the "unknown setting" error are made from it.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cache.policies import ADMISSIONS, POLICIES
from .errors import ModelError, SettingError, did_you_mean
from .units import parse_rate, parse_size

# Policies with a future need a recorded run of the same text, which `future` gives.
LIVE_POLICIES = tuple(POLICIES)


def read_pairs(value: Any, name: str) -> list[tuple[int, int]]:
    """(layer, block) pairs from a list of them or the path of a JSON file that holds one."""
    if isinstance(value, (str, os.PathLike)):
        try:
            value = json.loads(Path(value).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingError(f"{name}: {value}: {error}") from None
    try:
        return [(operator.index(layer), operator.index(block)) for layer, block in value]
    except (TypeError, ValueError):
        raise SettingError(f"{name} must be (layer, block) pairs of whole numbers, got {str(value)[:80]}") from None


def _policy_object(value: Any, name: str) -> Any:
    if not callable(value):
        raise SettingError(f"{name} must be a policy's name or a callable that makes a policy, got {value!r}")
    return value


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `dims` leading dimensions of each head rotate; pairs are (j, j + dims/2) for style "half"."""

    theta: float = 10000.0
    dims: int = 0
    style: str = "half"


@dataclass(frozen=True)
class RouterConfig:
    """How scores become expert ids and weights; kinds and switches as in Hugging Face's modelling code.

    softmax        p = softmax(logits); top-k of p; renormalise optionally
    topk_softmax   top-k of the logits; weights = softmax over those k
    sigmoid_group  s = sigmoid(logits); choose by s + correction bias inside the best groups; weight by s, without bias
    """

    kind: str = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """One MoE transformer, normalised: a family is a setting of these switches, never a branch in the engine.

    `ffn[i]` is "moe" or "dense" for layer i; `windows[i]` is the sliding-window width in tokens or None.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    ffn: tuple[str, ...]
    windows: tuple[int | None, ...]
    router: RouterConfig = field(default_factory=RouterConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    dense_intermediate_size: int = 0
    shared: str = "none"  # none | plain (added) | gated (times sigmoid of a learned score)
    shared_intermediate_size: int = 0
    qk_norm: str = "none"  # none | head (RMS per head) | full (RMS over all heads together)
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None
    rms_norm_eps: float = 1e-5
    tied_embeddings: bool = False
    max_position_embeddings: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layer numbers that route to experts, ascending."""
        return tuple(i for i, kind in enumerate(self.ffn) if kind == "moe")

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict, where: str = "config.json") -> ModelConfig:
        """Inverse of `to_json`. Raises `ModelError` naming `where` and the missing, unknown or mistyped field."""
        return _from_json(cls, data, where)


def _from_json(cls, data: Any, where: str):
    if not isinstance(data, dict):
        raise ModelError(f"{where}: expected an object for {cls.__name__}, found {type(data).__name__}")
    hints = {f.name: f for f in dataclasses.fields(cls)}
    missing = [name for name in hints if name not in data]
    if missing:
        raise ModelError(f"{where}: field {missing[0]!r} is missing; convert the checkpoint again")
    unknown = [name for name in data if name not in hints]
    if unknown:
        raise ModelError(f"{where}: unknown field {unknown[0]!r}; {did_you_mean(unknown[0], hints)}")
    values = {}
    nested = {"router": RouterConfig, "rope": RopeConfig}
    for name, value in data.items():
        if name in nested:
            value = _from_json(nested[name], value, f"{where}: {name}")
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = _typed(value, str(hints[name].type), f"{where}: field {name!r}")
    return cls(**values)


_TYPES = {"int": int, "float": (int, float), "bool": bool, "str": str, "None": types.NoneType, "tuple": tuple}


def _typed(value, hint: str, what: str):
    """`value` if it has one of the types spelled in `hint` ("int | None"); nested configs pass unchecked."""
    names = [part.strip().split("[")[0] for part in hint.split(" | ")] if "tuple" not in hint else ["tuple"]
    if any(name not in _TYPES for name in names):
        return value
    for name in names:
        if isinstance(value, _TYPES[name]) and not (isinstance(value, bool) and name != "bool"):
            return float(value) if name == "float" else value
    raise ModelError(f"{what}: expected {hint}, found {value!r}")


@dataclass(frozen=True)
class Setting:
    """One runtime setting. `scope` is "open" (fixed when the model is opened) or "generate" (per call)."""

    name: str
    type: type
    default: Any
    help: str
    scope: str = "open"
    choices: tuple = ()
    minimum: float | None = None
    maximum: float | None = None
    changes_tokens: bool = False  # False: speed and memory only
    also: Callable[[Any, str], Any] | None = None  # reads other spellings of a value, as "2 GiB"; raises SettingError

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> Any:
        """The value in its own type. Raises `SettingError` naming the setting, the rule and the value found."""
        if value is None and self.default is None:
            return None
        if self.type is object:
            return value
        free_text = self.type is str and not self.choices
        if self.also and (free_text or self.type is list or not isinstance(value, self.type)):
            self.also(value, self.name)
            return value
        good = isinstance(value, (int, float) if self.type is float else self.type)
        if not good or (isinstance(value, bool) and self.type is not bool):
            raise SettingError(f"{self.name} must be {self.type.__name__}, got {value!r} ({type(value).__name__})")
        if self.choices and value not in self.choices:
            hint = did_you_mean(value, self.choices) if isinstance(value, str) else f"Known: {self.choices}"
            raise SettingError(f"{self.name} cannot be {value!r}; {hint}")
        if self.minimum is not None and value < self.minimum:
            raise SettingError(f"{self.name} must be at least {self.minimum}, got {value!r}")
        if self.maximum is not None and value > self.maximum:
            raise SettingError(f"{self.name} must be at most {self.maximum}, got {value!r}")
        return self.type(value)


_ALL = (
    Setting("expert_cache_slots", int, None, "slots per layer (scope layer) or in all (scope global), or the bytes for all "
            "of them, as \"2 GiB\"; one slot holds one expert block. Default 4 x top-k per MoE layer, never more than there "
            "are blocks", minimum=1, also=parse_size),
    Setting("scope", str, "layer", "whether each layer owns its slots or all layers share one pool", choices=("layer", "global")),
    Setting("policy", str, "lru", "which resident expert leaves when a slot is needed", choices=LIVE_POLICIES, also=_policy_object),
    Setting("lookup", str, "atomic", "atomic serves a step's hits, then chooses victims outside the step; serial takes one "
            "expert after the other, as some engines do", choices=("atomic", "serial", "serial-hits-first")),
    Setting("order", str, "rank", "order of a step's experts under serial lookup", choices=("rank", "id", "random")),
    Setting("admission", str, "forced", "whether every expert that was read must be kept", choices=ADMISSIONS),
    Setting("cache_seed", int, 0, "seed of random victims and random order", minimum=0),
    Setting("cache_reset", str, "never", "when the cache starts cold again", choices=("never", "per-sequence")),
    Setting("cache_start", str, "empty", "what is resident at first: nothing, or `cache_blocks`, for good or until evicted",
            choices=("empty", "pinned", "preloaded")),
    Setting("cache_blocks", list, None, "(layer, block) pairs, or a JSON file of them, for cache_start and pinning policies",
            also=read_pairs),
    Setting("future", object, None, "trace of the run to come, for the oracles belady and belady-bypass"),
    Setting("prefetch", str, "none", "who guesses the next layer's experts: the layer's last step, a transition table, "
            "popularity, or the next layer's router run early (lookahead)", choices=("none", "same", "markov", "popular", "lookahead")),
    Setting("prefetch_budget", int, None, "most experts fetched ahead per layer. Default: top-k", minimum=1),
    Setting("storage", str, "pread", "how a missing expert is read: mmap copies from a mapping, pread reads through the page "
            "cache, direct goes past it, modelled reads and then accounts the time of the disk described by disk_*",
            choices=("mmap", "pread", "direct", "modelled")),
    Setting("disk_bandwidth", str, "1 GB/s", "of a modelled disk", also=parse_rate),
    Setting("disk_latency_us", float, 100.0, "of a modelled disk, per read", minimum=0.0),
    Setting("disk_queue_depth", int, 8, "reads a modelled disk works on at once", minimum=1),
    Setting("disk_page_cache", str, "0 B", "page cache in front of a modelled disk", also=parse_size),
    Setting("loader_threads", int, 2, "threads that read missing experts while resident ones compute", minimum=1, maximum=64),
    Setting("threads", int, None, "compute threads. Default: physical cores", minimum=1, maximum=256),
    Setting("router_offload", str, "cpu", "where the router runs: cpu is in the engine; none takes experts decided elsewhere, "
            "given with lab.routing(Precomputed(…)); gpu needs a device backend, of which there is none",
            choices=("cpu", "none", "gpu"), changes_tokens=True),
    Setting("kv_cache_type", str, "paged", "paged allocates the KV cache page by page; naive takes max_seq_len at once",
            choices=("paged", "naive")),
    Setting("page_size", int, 256, "tokens per KV page", minimum=1, maximum=65536),
    Setting("kv_dtype", str, "fp32", "numbers of the KV cache; fp16 halves it", choices=("fp32", "fp16"), changes_tokens=True),
    Setting("max_seq_len", int, None, "most tokens of prompt and answer together. Default: 4096 or what the model was "
            "trained for, whichever is less", minimum=1),
    Setting("max_batch_size", int, 1, "most sequences open at once; each has arenas and KV pages of its own", minimum=1,
            maximum=1024),
    Setting("memory", str, None, "most bytes for the model, as \"2 GiB\": as many slots as fit", also=parse_size),
    Setting("dynamic_arena", bool, False, "arenas begin small and grow on demand; otherwise the peak is reserved at once"),
    Setting("pool_size", str, None, "bytes of the memory pool, as \"512 MiB\". Default: what the plan needs", also=parse_size),
    Setting("pool_power_of_two", bool, False, "refuse a pool_size that is no power of two; round the default up to one"),
    Setting("huge_pages", bool, None, "ask the system for huge pages behind the memory pool. Default: for a pool of 256 MiB or more"),
    Setting("prefault", bool, False, "touch all memory when the model is opened, so that no step waits for a page"),
    Setting("check_memory", bool, False, "poison unused scratch memory and check it after every step; slow, for debugging"),
    Setting("prefill_chunk", int, 256, "prompt tokens that go through the model at once", minimum=1, maximum=65536),
    Setting("gemm_block_size", int, 64, "output rows one thread takes at a time in matrix products, "
            "up to four times as many in decode", minimum=16, maximum=4096),
    Setting("expert_parallelism", int, None, "experts that the threads compute at the same time, 1 one after the other. Default: "
            "all that are there. Not a number of machines or devices", minimum=1),
    Setting("backend", str, "native", "who computes: the compiled kernels, or slow plain numpy to hold them against",
            choices=("native", "numpy"), changes_tokens=True),
    Setting("activations", str, "int8", "what integer weights are multiplied with: activations rounded to int8 in groups of 64, "
            "or exact float32 ones, which are slower; weights of 16 and 32 bits always meet float32", choices=("int8", "fp32"),
            changes_tokens=True),
    Setting("router_calib", bool, None, "add the container's router calibration to the router's logits. Default: where there is one",
            changes_tokens=True),
    Setting("sigmoid", str, "exact", "SwiGLU's sigmoid: exact, or a polynomial with error below 1e-4",
            choices=("exact", "polynomial"), changes_tokens=True),
    Setting("allow_fp32", bool, False, "open float32 containers, which are for tests"),
    Setting("log_level", str, "info", "debug keeps one event per expert access", choices=("warning", "info", "debug")),
    Setting("max_tokens", int, 128, "most tokens to generate", scope="generate", minimum=1, changes_tokens=True),
    Setting("temperature", float, 0.7, "0 is greedy; above 1.5 text usually falls apart", scope="generate", minimum=0.0,
            maximum=100.0, changes_tokens=True),
    Setting("top_p", float, 0.95, "sample from the smallest set of tokens with this much probability; near 0 is greedy",
            scope="generate", minimum=0.0, maximum=1.0, changes_tokens=True),
    Setting("seed", int, 0, "seed of the sampler", scope="generate", minimum=0, changes_tokens=True),
    Setting("stop_at_eos", bool, True, "end at the model's end-of-text token", scope="generate", changes_tokens=True),
)  # fmt: skip

SETTINGS: dict[str, Setting] = {s.name: s for s in _ALL}


def resolve(given: dict[str, Any], scope: str) -> dict[str, Any]:
    """Defaults overlaid with `given`, every value checked. Raises `SettingError` on an unknown name or bad value."""
    mine = {name: s for name, s in SETTINGS.items() if s.scope == scope}
    for name in given:
        if name not in mine:
            other = SETTINGS.get(name)
            where = "cl.open(…)" if other and other.scope == "open" else "generate(…)"
            why = f"it belongs to {where}" if other else did_you_mean(name, mine)
            raise SettingError(f"unknown setting {name!r}: {why}")
    return {name: s.check(given.get(name, s.default)) for name, s in mine.items()}


def settings_table() -> str:
    """The settings as a Markdown table, as the README shows it."""
    rows = ["| setting | default | what it does |", "|---|---|---|"]
    for s in SETTINGS.values():
        what = s.help + (f" ({', '.join(s.choices)})" if s.choices else "")
        rows.append(f"| `{s.name}` | {'auto' if s.default is None else f'`{s.default}`'} | {what} |")
    return "\n".join(rows)
