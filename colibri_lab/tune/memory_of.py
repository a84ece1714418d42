"""Bytes that a run takes, by part, of any shape: exactly for models that are here, by arithmetic for the others."""

from __future__ import annotations

from ..engine.sizes import blocks, ffn_scratch, kv_bytes, matmul_scratch, transient_buffers
from .memory_plan import PARTS, MemoryPlan
from .shapes import Shape


def memory_of(shape: Shape, settings: dict, context: int) -> dict[str, int]:
    """The parts of `memory_plan.PARTS` and `total_bytes`, as `Lab.memory(peak=True)` measures them after a run of `context`
    tokens. `settings` are effective ones."""
    s = settings
    if shape.facts is not None:
        parts = {name: size for name, size in MemoryPlan(shape.facts, s, 0).items() if name in PARTS}
        parts["kv_cache_bytes"] = kv_bytes(shape.facts.config, [min(context, s["max_seq_len"])], s)
        return {**parts, "total_bytes": sum(parts.values())}
    layers = len(shape.moe_layers)
    slot = blocks(shape.block_bytes)
    slots = s["expert_cache_slots"] * (1 if s["scope"] == "global" else layers)
    tokens = min(s["prefill_chunk"], s["max_seq_len"])
    page = s["max_seq_len"] if s["kv_cache_type"] == "naive" else min(s["page_size"], s["max_seq_len"])
    embedding = 0 if shape.tied else round(shape.dense_bytes * shape.vocab * shape.hidden / shape.dense_params)
    router = 4 * layers * shape.num_experts * shape.hidden
    # What a chunk of tokens needs beside its own rows: the experts' inputs and outputs, once per choice.
    rows = 6 * shape.hidden + shape.top_k * (shape.hidden + shape.expert_width) + shape.shared_width + shape.dense_width
    choices = tokens * shape.top_k  # and what products take while they run, as the engine counts it
    products = 2 * matmul_scratch(tokens, shape.hidden) + ffn_scratch(
        tokens, choices, min(shape.num_experts, choices), shape.hidden, shape.expert_width
    )
    parts = {
        "dense_bytes": shape.dense_bytes - embedding,
        "embedding_bytes": embedding,
        "router_bytes": router,
        "slots_bytes": slots * slot,
        "transient_bytes": transient_buffers(slots, layers, shape.blocks, s) * slot,
        "kv_cache_bytes": -(-context // page)
        * page
        * (2 if s["kv_dtype"] == "fp16" else 4)
        * shape.kv_elements
        * shape.layers,
        "rotary_bytes": 0,
        "scratch_bytes": 4 * tokens * rows + products + 12 * shape.vocab,  # logits, and probabilities to sample from
        "loader_bytes": s["loader_threads"] * slot if s["storage"] == "mmap" else 0,
    }
    return {**parts, "total_bytes": sum(parts.values())}
