"""How many bytes an engine takes from its memory pool: a function of the model's and the runtime settings alone.

The engine sizes its pool with these numbers and `colibri_lab.memory_plan` shows them, so the plan cannot differ from
what is allocated. The walk below takes and rewinds as engine.py does; a test holds the two together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..config import ModelConfig
from .memory import ALIGN, ARENAS, BLOCK

ITEM = {"fp32": 4, "fp16": 2}  # bytes of one key or value
GROWING = 4  # a growing arena never has more than so many times its peak (chunks at least double it)


def blocks(size: int) -> int:
    """`size` in whole pool blocks."""
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True)
class EngineSizes:
    """Bytes and counts of everything in the pool; arenas, pages, logits and probabilities are those of `requests` requests
    together."""

    slot_bytes: int
    slots: int
    transient: int
    page_size: int
    page_bytes: int
    pages: int
    rotary_bytes: int
    arenas: dict[str, int]  # of one request
    peaks: dict[str, int]  # what each may grow to
    logits_bytes: int  # of one request
    probability_bytes: int  # of one request: what sampling works on
    requests: int

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.requests * (sum(self.peaks.values()) + self.logits_bytes + self.probability_bytes)

    @property
    def planned_bytes(self) -> int:
        """The pool, without room that only growing arenas pass through."""
        buffers = (self.slots + self.transient) * self.slot_bytes
        return buffers + self.kv_bytes + self.rotary_bytes + self.scratch_bytes

    @property
    def pool_bytes(self) -> int:
        growing = self.arenas != self.peaks
        return self.planned_bytes + (self.requests * (GROWING - 1) * sum(self.peaks.values()) if growing else 0)


def engine_sizes(config: ModelConfig, slot_bytes: int, blocks_per_layer: int, settings: dict) -> EngineSizes:
    """`settings` are effective settings of scope "open"; `slot_bytes` of the largest expert block."""
    s = settings
    page_size, page_bytes = page_shape(config, s)
    slots = s["expert_cache_slots"] * (1 if s["scope"] == "global" else len(config.moe_layers))
    peaks = arena_peaks(config, min(s["prefill_chunk"], s["max_seq_len"]), s)
    arenas = arena_peaks(config, 1, s) if s["dynamic_arena"] else peaks
    return EngineSizes(
        slot_bytes=blocks(slot_bytes),
        slots=slots,
        transient=transient_buffers(slots, len(config.moe_layers), blocks_per_layer, s),
        page_size=page_size,
        page_bytes=page_bytes,
        pages=-(-s["max_seq_len"] // page_size) * s["max_batch_size"],
        rotary_bytes=blocks(4 * s["max_seq_len"] * config.rope.dims),
        arenas=arenas,
        peaks=peaks,
        logits_bytes=blocks(4 * config.vocab_size),
        probability_bytes=blocks(8 * config.vocab_size),
        requests=s["max_batch_size"],
    )


def transient_buffers(slots: int, layers: int, blocks_per_layer: int, settings: dict) -> int:
    """Buffers for blocks that stream through, given the slots in all: none where every block has a slot, unless the
    policy keeps only a chosen set."""
    streams = slots < layers * blocks_per_layer or settings["policy"] == "static-pin"
    return min(blocks_per_layer, max(4, 2 * settings["loader_threads"])) if streams else 0


def page_shape(config: ModelConfig, settings: dict) -> tuple[int, int]:
    """(positions, bytes) of one KV page; a naive cache is a single page as long as max_seq_len."""
    longest = settings["max_seq_len"]
    size = longest if settings["kv_cache_type"] == "naive" else min(settings["page_size"], longest)
    return size, blocks(
        2 * config.num_layers * size * config.num_kv_heads * config.head_dim * ITEM[settings["kv_dtype"]]
    )


def kv_bytes(config: ModelConfig, lengths: list[int], settings: dict) -> int:
    """Bytes of KV cache that sequences of these lengths hold at once."""
    size, page = page_shape(config, settings)
    return sum(-(-length // size) for length in lengths) * page


def arena_peaks(config: ModelConfig, tokens: int, settings: dict) -> dict[str, int]:
    """Bytes by arena for prefill chunks of up to `tokens`, in whole pool blocks."""
    return {name: blocks(tally.peak) for name, tally in _widest(config, tokens, settings).items()}


def scratch_ratio(config: ModelConfig, settings: dict) -> float:
    """Bytes that the arenas reserve over the bytes that their arrays have at the peak, without alignment or
    rounding."""
    tokens = min(settings["prefill_chunk"], settings["max_seq_len"])
    tallies = _widest(config, tokens, settings)
    return sum(blocks(tally.peak) for tally in tallies.values()) / sum(tally.requested for tally in tallies.values())


def _widest(config: ModelConfig, tokens: int, settings: dict) -> dict[str, Tally]:
    """The tally of each arena in the phase that needs most of it."""
    prefill, decode = walk(config, tokens, settings), walk(config, 1, settings)
    widest = {name: max(prefill[name], decode[name], key=lambda t: t.peak) for name in ("router", "expert_compute")}
    return dict(zip(ARENAS, (prefill["main"], decode["main"], *widest.values()), strict=True))


class Tally:
    """Counts as an arena does, without memory. `requested` leaves alignment out, at the moment of the peak."""

    def __init__(self, checks: bool):
        self.zone = ALIGN if checks else 0
        self.used = self.asked = self.peak = self.requested = 0

    def take(self, *shape: int, item: int = 4) -> None:
        size = max(1, math.prod(shape) * item)
        self.used += -(-size // ALIGN) * ALIGN + self.zone
        self.asked += size
        if self.used > self.peak:
            self.peak, self.requested = self.used, self.asked

    def mark(self) -> tuple[int, int]:
        return self.used, self.asked

    def rewind(self, mark: tuple[int, int] = (0, 0)) -> None:
        self.used, self.asked = mark


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _int_rows(tokens: int, cols: int) -> int:
    """Rows rounded to int8: numbers, a scale and two sums for each 64 columns, and 32 bytes that say where they are."""
    groups = -(-cols // 64)
    return (
        _aligned(64 * tokens * groups)
        + _aligned(4 * tokens * groups)
        + _aligned(8 * tokens * groups)
        + _aligned(32 * tokens)
    )


def _row_sums(rows: int, cols: int) -> int:
    """float32 sums over every 32, 64 and 128 columns and over all."""
    return _aligned(4 * rows * (sum(-(-cols // width) for width in (32, 64, 128)) + 1))


@lru_cache(1024)
def matmul_scratch(tokens: int, cols: int) -> int:
    """Bytes that one matrix product takes while it runs; as matmul_scratch_bytes in cpp/gemm_core.hpp."""
    return _aligned(8 * tokens) + max(_int_rows(tokens, cols), _row_sums(tokens, cols))


@lru_cache(1024)
def ffn_scratch(tokens: int, rows: int, active: int, hidden: int, inner: int) -> int:
    """Bytes that one call of the experts takes while it runs; as scratch_bytes in cpp/ffn.cpp."""
    whole = _aligned(32 * rows) + _int_rows(tokens, hidden) + _int_rows(rows, inner)
    parts = _row_sums(rows, hidden) + _row_sums(rows, inner)
    return _aligned(144 * active) + _aligned(8 * tokens) + 2 * _aligned(8 * rows) + max(whole, parts)


def walk(config: ModelConfig, tokens: int, settings: dict) -> dict[str, Tally]:
    """One forward pass of `tokens` tokens in which every expert that can be active is: main, router, expert_compute."""
    c, t, hidden = config, tokens, config.hidden_size
    main, router, expert = (Tally(settings["check_memory"]) for _ in range(3))
    main.take(t, hidden)  # x, through all layers
    for kind in dict.fromkeys(c.ffn):
        layer = main.mark()
        main.take(t, hidden)  # normed
        main.take(matmul_scratch(t, max(hidden, c.num_heads * c.head_dim)), item=1)
        for width in (c.num_heads, c.num_kv_heads, c.num_kv_heads, c.num_heads):  # q, k, v, attended
            main.take(t, width * c.head_dim)
        main.take(t, hidden)  # attention's output
        main.rewind(layer)
        main.take(t, hidden)  # normed
        if kind == "dense":
            _always(expert, t, hidden, c.dense_intermediate_size)
        else:
            for _ in range(2 if settings["prefetch"] == "lookahead" else 1):
                router.take(matmul_scratch(t, hidden), item=1)
                router.take(t, c.num_experts)
                router.take(t, c.top_k, item=2)
                router.take(t, c.top_k)
            active = min(c.num_experts, t * c.top_k)
            for shape in ((t, c.top_k), (active + 1,), (t * c.top_k,), (t, c.top_k), (active,), (t * c.top_k, hidden)):
                expert.take(*shape)  # local, offsets, token_of, row_of, cursor, rows
            rows = expert.mark()
            expert.take(t * c.top_k, c.expert_intermediate_size)
            expert.take(ffn_scratch(t, t * c.top_k, active, hidden, c.expert_intermediate_size), item=1)
            expert.rewind(rows)
            expert.take(t, hidden)  # the experts' sum
            expert.rewind()
            router.rewind()
            if c.shared != "none":
                _always(expert, t, hidden, c.shared_intermediate_size, c.shared == "gated")
        main.rewind(layer)
    main.take(t, hidden)  # normed for the head, of all tokens when every logit is wanted
    main.take(matmul_scratch(t, hidden), item=1)
    return {"main": main, "router": router, "expert_compute": expert}


def _always(expert: Tally, tokens: int, hidden: int, width: int, gated: bool = False) -> None:
    """A feed-forward that every token visits: offsets, token_of, output, hidden, and what its products take."""
    for shape in ((2,), (tokens,), (tokens, hidden), (tokens, width)):
        expert.take(*shape)
    expert.take(ffn_scratch(tokens, tokens, 1, hidden, width), item=1)
    if gated:
        expert.take(matmul_scratch(tokens, hidden), item=1)
        expert.take(tokens, 1)
    expert.rewind()
