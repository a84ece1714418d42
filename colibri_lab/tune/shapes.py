"""What a predictor must know of a model: sizes, not weights. From a container, from a checkpoint's config.json, or from the
presets, which are published models nobody needs to have on disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ..checkpoint.binfile import plan_table
from ..checkpoint.container import Container, is_container
from ..checkpoint.families import read_config
from ..checkpoint.formats import ALIASES, FORMATS
from ..checkpoint.layout import Spec
from ..config import ModelConfig
from ..errors import ModelError, SettingError, did_you_mean
from ..front import find_model
from .memory_plan import ModelFacts

FP8 = "fp8"  # published in it; containers hold such weights in another format


@dataclass(frozen=True)
class Shape:
    """A mixture-of-experts model in numbers; `_params` are counts of weights, norms left out.

    moe_layers         layer numbers that route
    attention_params   per layer
    kv_elements        numbers in the KV cache per token and layer
    formats            (of experts, of everything else)
    block_size         experts per block
    exact_block_bytes  bytes of one expert block, and
    exact_dense_bytes  of all that is always resident, where files say so; else None
    path, facts        of a container, or the facts of a checkpoint that is here: then memory is planned exactly
    """

    name: str
    layers: int
    moe_layers: tuple[int, ...]
    hidden: int
    vocab: int
    num_experts: int
    top_k: int
    expert_width: int
    attention_params: int
    kv_elements: int
    shared_width: int = 0
    dense_width: int = 0
    tied: bool = False
    formats: tuple[str, str] = ("bf16", "bf16")
    block_size: int = 1
    exact_block_bytes: int | None = None
    exact_dense_bytes: int | None = None
    path: str | None = None
    facts: ModelFacts | None = field(default=None, repr=False, compare=False)

    @property
    def blocks(self) -> int:
        """Expert blocks per layer."""
        return -(-self.num_experts // self.block_size)

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.expert_width

    @property
    def step_params(self) -> int:
        """Always-resident weights that one decoded token reads: attention, routers, dense and shared layers, the head."""
        dense = (self.layers - len(self.moe_layers)) * 3 * self.hidden * self.dense_width
        moe = len(self.moe_layers) * self.hidden * (3 * self.shared_width + self.num_experts)
        return self.layers * self.attention_params + dense + moe + self.vocab * self.hidden

    @property
    def dense_params(self) -> int:
        """All always-resident weights: those and the embedding table."""
        return self.step_params + (0 if self.tied else self.vocab * self.hidden)

    @property
    def total_params(self) -> int:
        return self.dense_params + len(self.moe_layers) * self.num_experts * self.expert_params

    @property
    def active_params(self) -> int:
        """Weights that one decoded token computes with."""
        return self.step_params + len(self.moe_layers) * self.top_k * self.expert_params

    @property
    def block_bytes(self) -> int:
        """Bytes of one expert block, which is what a miss reads."""
        if self.exact_block_bytes is not None:
            return self.exact_block_bytes
        return self.block_size * expert_bytes(self.hidden, self.expert_width, self.formats[0])

    @property
    def dense_bytes(self) -> int:
        if self.exact_dense_bytes is not None:
            return self.exact_dense_bytes
        return round(self.dense_params * weight_bytes(self.formats[1]))

    @property
    def step_bytes(self) -> int:
        """Bytes of always-resident weights that one decoded token reads."""
        return round(self.dense_bytes * self.step_params / self.dense_params)

    @property
    def experts_bytes(self) -> int:
        """Bytes of all expert blocks."""
        return len(self.moe_layers) * self.blocks * self.block_bytes

    def in_format(self, experts: str, dense: str | None = None) -> Shape:
        """The same model with its experts, and if given everything else, in another number format."""
        formats = (canonical(experts), canonical(dense) if dense else self.formats[1])
        if formats == self.formats:
            return self
        return replace(
            self, formats=formats, path=None, facts=None,
            exact_block_bytes=None if formats[0] != self.formats[0] else self.exact_block_bytes,
            exact_dense_bytes=None if formats[1] != self.formats[1] else self.exact_dense_bytes,
        )  # fmt: skip

    @classmethod
    def of_config(cls, config: ModelConfig, name: str = "", formats: tuple[str, str] = ("bf16", "bf16")) -> Shape:
        """From the settings of a model that this project's engine can run."""
        c = config
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return cls(
            name or c.family, c.num_layers, c.moe_layers, c.hidden_size, c.vocab_size, c.num_experts, c.top_k,
            c.expert_intermediate_size, c.hidden_size * (2 * heads + 2 * kv), 2 * kv,
            shared_width=c.shared_intermediate_size if c.shared != "none" else 0,
            dense_width=c.dense_intermediate_size, tied=c.tied_embeddings, formats=formats,
        )  # fmt: skip

    @classmethod
    def of_container(cls, container) -> Shape:
        """From an open `Container`, with the exact bytes of its files."""
        formats = container.info["formats"]
        shape = cls.of_config(container.config, container.dir.name, (formats["expert"], formats["dense"]))
        facts = ModelFacts.of_container(container)
        layers = container.config.moe_layers
        looked_at = [(layer, block) for layer in layers for block in range(container.blocks)][
            :: max(1, len(layers) // 4)
        ]
        sizes = [container.block_layout(layer, block).payload_bytes for layer, block in looked_at]
        routers = sum((container.dir / f"layer_{layer}" / "router.bin").stat().st_size for layer in layers)
        return replace(
            shape, block_size=container.block_size, path=str(container.dir), facts=facts,
            exact_block_bytes=round(sum(sizes) / len(sizes)),
            exact_dense_bytes=facts.dense_bytes + facts.embedding_bytes + routers,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.total_params / 1e9:.3g} billion weights, {self.active_params / 1e9:.3g} active; "
            f"{len(self.moe_layers)} of {self.layers} layers x {self.num_experts} experts, top-{self.top_k}; experts in "
            f"{self.formats[0]}, {self.block_bytes / 1e6:.3g} MB a block, the rest in {self.formats[1]}, "
            f"{self.dense_bytes / 1e9:.3g} GB"
        )


def canonical(format: str) -> str:
    """The full name of a number format: "int4" is "int4-g64". Raises `SettingError` for an unknown one."""
    if format == FP8:
        return format
    name = ALIASES.get(format, format)
    if name not in FORMATS:
        raise SettingError(f"unknown number format {format!r}; {did_you_mean(format, (FP8, *ALIASES, *FORMATS))}")
    return name


@cache
def expert_bytes(hidden: int, width: int, format: str) -> int:
    """Bytes of one expert's gate, up and down in a number format, with scales and zero points, as containers store them."""
    if format == FP8:
        return 3 * hidden * width
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    specs = {part: Spec(shape, "expert") for part, shape in shapes.items()}
    return plan_table(specs, dict.fromkeys(specs, canonical(format)))[1]


def weight_bytes(format: str) -> float:
    """Bytes per weight of a large matrix in a number format."""
    return expert_bytes(4096, 4096, format) / (3 * 4096 * 4096)


def _grouped(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict:
    """Grouped-query attention: weights of q, k, v, o; keys and values in the cache."""
    params = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return {"attention_params": params, "kv_elements": 2 * kv_heads * head_dim}


def _latent(hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> dict:
    """Multi-head latent attention: q through a bottleneck, one compressed latent and rope key per token in the cache."""
    q = hidden * q_rank + q_rank * heads * (nope + rope)
    kv = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
    return {"attention_params": q + kv + heads * value * hidden, "kv_elements": kv_rank + rope}


def _preset(
    name, layers, hidden, vocab, experts, top_k, width, attention, first_dense=0, formats=("bf16", "bf16"), **more
):
    moe = tuple(range(first_dense, layers))
    return Shape(name, layers, moe, hidden, vocab, experts, top_k, width, **attention, formats=formats, **more)


# Published sizes; sources are the modelling code and configuration files of each family.
PRESETS: dict[str, Shape] = {
    s.name: s
    for s in (
        _preset("OLMoE-1B-7B", 16, 2048, 50304, 64, 8, 1024, _grouped(2048, 16, 16, 128)),
        _preset("Mixtral-8x7B", 32, 4096, 32000, 8, 2, 14336, _grouped(4096, 32, 8, 128)),
        _preset("Qwen3-30B-A3B", 48, 2048, 151936, 128, 8, 768, _grouped(2048, 32, 4, 128)),
        _preset("GLM-4.5-Air", 46, 4096, 151552, 128, 8, 1408, _grouped(4096, 96, 8, 128), 1,
                shared_width=1408, dense_width=10944),
        _preset("gpt-oss-20b", 24, 2880, 201088, 32, 4, 2880, _grouped(2880, 64, 8, 64), formats=("mxfp4", "bf16")),
        _preset("gpt-oss-120b", 36, 2880, 201088, 128, 4, 2880, _grouped(2880, 64, 8, 64), formats=("mxfp4", "bf16")),
        _preset("DeepSeek-V3", 61, 7168, 129280, 256, 8, 2048, _latent(7168, 128, 1536, 512, 128, 64, 128), 3,
                shared_width=2048, dense_width=18432, formats=("fp8", "fp8")),
        _preset("GLM-5", 78, 6144, 154880, 256, 8, 2048, _latent(6144, 64, 2048, 512, 192, 64, 256), 3,
                shared_width=2048, dense_width=12288),
    )
}  # fmt: skip


def find_shape(model: str | os.PathLike | Shape) -> Shape:
    """A shape from a preset's name, a container, a checkpoint directory or its config.json, or a model of the project.

    Raises `ModelError` when it is none of these.
    """
    if isinstance(model, Shape):
        return model
    by_name = {name.lower(): shape for name, shape in PRESETS.items()}
    if str(model).lower() in by_name:
        return by_name[str(model).lower()]
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return Shape.of_config(read_config(path.parent), path.parent.name)
    try:
        path = find_model(model)
    except ModelError as error:
        raise ModelError(
            f"{error}; shapes known by name: {', '.join(PRESETS)}; {did_you_mean(str(model), PRESETS)}"
        ) from None
    if is_container(path):
        return Shape.of_container(Container.open(path, allow_fp32=True))
    return replace(Shape.of_config(read_config(path), path.name), facts=ModelFacts.of_checkpoint(path))
