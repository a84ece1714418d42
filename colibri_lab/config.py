"""Two descriptions everything else reads: the model (`ModelConfig`) and the runtime settings (`SETTINGS`).

`SETTINGS` is the only list of runtime settings. Keyword arguments of `colibri_lab.open` and `Lab.generate`, CLI flags,
the settings table in the README and the "unknown setting" error are made from it.
"""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass, field
from typing import Any

from .errors import ModelError, SettingError, did_you_mean


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

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> Any:
        """The value in its own type. Raises `SettingError` naming the setting, the rule and the value found."""
        if value is None and self.default is None:
            return None
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
    Setting("expert_cache_slots", int, None, "slots per layer (scope layer) or in all (scope global); one slot holds one "
            "expert block. Default 4 x top-k per MoE layer, never more than there are blocks", minimum=1),
    Setting("scope", str, "layer", "whether each layer owns its slots or all layers share one pool", choices=("layer", "global")),
    Setting("policy", str, "lru", "which resident expert leaves when a slot is needed", choices=("lru", "weighted-lru")),
    Setting("storage", str, "pread", "how a missing expert is read from its file", choices=("mmap", "pread")),
    Setting("loader_threads", int, 2, "threads that read missing experts while resident ones compute", minimum=1, maximum=64),
    Setting("threads", int, None, "compute threads. Default: physical cores", minimum=1, maximum=256),
    Setting("kv_cache_type", str, "paged", "paged allocates the KV cache page by page; naive takes max_seq_len at once",
            choices=("paged", "naive")),
    Setting("page_size", int, 256, "tokens per KV page", minimum=1, maximum=65536),
    Setting("max_seq_len", int, None, "most tokens of prompt and answer together. Default: 4096 or what the model was "
            "trained for, whichever is less", minimum=1),
    Setting("prefill_chunk", int, 256, "prompt tokens that go through the model at once", minimum=1, maximum=65536),
    Setting("gemm_block_size", int, 64, "output rows one thread takes at a time in matrix products", minimum=16, maximum=4096),
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
