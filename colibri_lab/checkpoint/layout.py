"""Which files a container has and which tensors are in them: a function of the model's settings alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config import ModelConfig

LAYOUTS = ("rows", "rows16")
EMBED, HEAD, FINAL = "dense/embed.bin", "dense/head.bin", "dense/final.bin"


@dataclass(frozen=True)
class Spec:
    """One tensor: its shape, and its part: "expert" and "dense" matrices take a number format, "float" is float32."""

    shape: tuple[int, ...]
    part: str
    layout: str = "rows16"


def _float(*shape: int) -> Spec:
    return Spec(shape, "float", "rows")


def _ffn(hidden: int, width: int, part: str, prefix: str = "") -> dict[str, Spec]:
    return {
        f"{prefix}gate": Spec((width, hidden), part),
        f"{prefix}up": Spec((width, hidden), part),
        f"{prefix}down": Spec((hidden, width), part),
    }


def dense_path(layer: int) -> str:
    return f"dense/layer_{layer}.bin"


def router_path(layer: int) -> str:
    return f"layer_{layer}/router.bin"


def block_path(layer: int, block: int, block_size: int) -> str:
    """A block is named by its first expert."""
    return f"layer_{layer}/expert_{block * block_size}.bin"


def layer_of(file: str) -> int | None:
    """The layer a file belongs to; None for those of the whole model."""
    found = re.search(r"layer_(\d+)", file)
    return int(found[1]) if found else None


def blocks_per_layer(config: ModelConfig, block_size: int) -> int:
    return -(-config.num_experts // block_size)


def block_experts(config: ModelConfig, block: int, block_size: int) -> range:
    """Numbers of the experts in a block; the last block may be short."""
    return range(block * block_size, min((block + 1) * block_size, config.num_experts))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Spec]:
    """Tensors of `dense/layer_<layer>.bin`."""
    c, hidden = config, config.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tensors = {
        "input_norm": _float(hidden),
        "post_norm": _float(hidden),
        "q": Spec((q, hidden), "dense"),
        "k": Spec((kv, hidden), "dense"),
        "v": Spec((kv, hidden), "dense"),
        "o": Spec((hidden, q), "dense"),
    }
    if c.qkv_bias:
        tensors |= {"q_bias": _float(q), "k_bias": _float(kv), "v_bias": _float(kv)}
    if c.output_bias:
        tensors["o_bias"] = _float(hidden)
    if c.qk_norm != "none":
        widths = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q, kv)
        tensors |= {"q_norm": _float(widths[0]), "k_norm": _float(widths[1])}
    if c.ffn[layer] == "dense":
        tensors |= _ffn(hidden, c.dense_intermediate_size, "dense")
    elif c.shared != "none":
        tensors |= _ffn(hidden, c.shared_intermediate_size, "dense", "shared_")
        if c.shared == "gated":
            tensors["shared_router"] = _float(1, hidden)
    return tensors


def router_tensors(config: ModelConfig) -> dict[str, Spec]:
    """Tensors of `layer_<L>/router.bin`."""
    tensors = {"router": _float(config.num_experts, config.hidden_size)}
    if config.router.correction_bias:
        tensors["correction_bias"] = _float(config.num_experts)
    return tensors


def block_tensors(config: ModelConfig, block: int, block_size: int) -> dict[str, Spec]:
    """Tensors of one expert block, expert by expert: "<e>.gate", "<e>.up", "<e>.down"."""
    tensors = {}
    for expert in block_experts(config, block, block_size):
        tensors |= _ffn(config.hidden_size, config.expert_intermediate_size, "expert", f"{expert}.")
    return tensors


def npy_path(file: str, tensor: str) -> str:
    """Where a tensor may lie as .npy in place of `file`: "router.npy" (the tensor named as the file is), else
    "router.correction_bias.npy"; tensors of experts as "expert_<e>.gate.npy", whatever block they are in."""
    stem = file.removesuffix(".bin")
    if "/expert_" in file:
        return f"{stem[: stem.rindex('_')]}_{tensor}.npy"
    return f"{stem}.npy" if stem.endswith(f"/{tensor}") else f"{stem}.{tensor}.npy"


def container_files(config: ModelConfig, block_size: int) -> dict[str, dict[str, Spec]]:
    """Every `.bin` file of the container with its tensors, in the order in which they are written.

    The embedding is stored row by row for look-ups; tied to the head it is stored as the head is, for products.
    """
    c = config
    files = {EMBED: {"embed": Spec((c.vocab_size, c.hidden_size), "dense", "rows16" if c.tied_embeddings else "rows")}}
    if not c.tied_embeddings:
        files[HEAD] = {"head": Spec((c.vocab_size, c.hidden_size), "dense")}
    files[FINAL] = {"norm": _float(c.hidden_size)}
    for layer in range(c.num_layers):
        files[dense_path(layer)] = layer_tensors(c, layer)
    for layer in c.moe_layers:
        files[router_path(layer)] = router_tensors(c)
        for block in range(blocks_per_layer(c, block_size)):
            files[block_path(layer, block, block_size)] = block_tensors(c, block, block_size)
    return files
