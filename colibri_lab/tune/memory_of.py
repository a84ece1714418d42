"""Bytes that a model takes under given settings, by part: of any shape, whether its weights exist or not."""

from __future__ import annotations

from .shapes import Shape

PAGE = 4096


def memory_of(shape: Shape, settings: dict, context: int) -> dict[str, int]:
    """dense, router, slots, transient, KV cache and scratch bytes, and `total_bytes`. `context`: tokens of the longest
    sequence."""
    s, layers = settings, len(shape.moe_layers)
    slot = _whole(shape.block_bytes)
    every = s["expert_cache_slots"] * (1 if s["scope"] == "global" else layers)
    from ..engine.sizes import transient_buffers

    router = layers * shape.num_experts * shape.hidden * 4
    tokens = min(s["prefill_chunk"], s["max_seq_len"])
    item = 2 if s.get("kv_dtype") == "fp16" else 4
    page = min(s["page_size"], s["max_seq_len"])
    pages = -(-context // page) if s["kv_cache_type"] == "paged" else 1
    length = page if s["kv_cache_type"] == "paged" else s["max_seq_len"]
    widest = max(shape.hidden, shape.expert_width, shape.shared_width, shape.dense_width)
    parts = {
        "dense_bytes": shape.dense_bytes - min(router, shape.dense_bytes // 2),
        "router_bytes": min(router, shape.dense_bytes // 2),
        "slots_bytes": every * slot,
        "transient_bytes": transient_buffers(s["expert_cache_slots"], shape.blocks, s["loader_threads"]) * slot,
        "kv_cache_bytes": pages * length * item * shape.kv_elements * shape.layers,
        "scratch_bytes": 4 * tokens * (4 * shape.hidden + 2 * widest + 2 * shape.top_k * shape.hidden),
    }
    return {**parts, "total_bytes": sum(parts.values())}


def _whole(size: int) -> int:
    return -(-size // PAGE) * PAGE
