"""From what the cache serves and what things cost to seconds: the predictor's formula.

Per layer of a step

    t = max(compute, read - overlap) + management

`compute` is the layer's expert products. `read` is the time until the last missing block is in memory. `overlap` is what
reading gains by an early start (blocks fetched ahead) less what it cannot hide behind: the products of the last blocks to
arrive come after their reads. Blocks that must wait for a slot, or stream through, are read and computed in turns, which
nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .served import DECODE, PREFILL, Served


@dataclass(frozen=True)
class Costs:
    """Seconds of the engine's work on one machine. `spread` is the half-width, relative, by which steps scatter.

    step_s            a decode step beside routed experts: attention, routers, shared experts, head, sampling
    position_s        more of that per token of context
    expert_s          one expert block with one token
    miss_s            what a miss costs beside its read: managing it, and weights that no processor cache holds yet
    wait_s            what a layer costs that has any: falling asleep, waking, cores that have cooled down
    prefill_token_s   a prompt token beside routed experts
    prefill_block_s   an expert block of a prefill step, and
    prefill_assign_s  each token it serves there
    """

    step_s: float
    expert_s: float
    miss_s: float = 0.0
    wait_s: float = 0.0
    position_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_block_s: float = 0.0
    prefill_assign_s: float = 0.0
    spread: float = 0.0
    source: str = ""


@dataclass(frozen=True, eq=False)
class Reads:
    """Reading by event: seconds of blocks with a free slot, of those read in turns, of either on the device; bytes."""

    early_s: np.ndarray
    late_s: np.ndarray
    device_s: np.ndarray
    device_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class Timeline:
    """Seconds by event: `total_s = max(compute, read - overlap) + management`, and what of it was waiting.

    wait_device_s, wait_cache_s  waiting for the disk and for copies out of the page cache
    """

    total_s: np.ndarray
    compute_s: np.ndarray
    wait_device_s: np.ndarray
    wait_cache_s: np.ndarray
    manage_s: np.ndarray


def read_all(served: Served, reader, wave: int) -> Reads:
    """Ask `reader` for every event's misses in order. `wave`: blocks read at a time where slots are short."""
    count = len(served.step)
    seconds = np.zeros((2, count))  # early, late
    device_s, device_bytes = np.zeros(count), np.zeros(count, np.int64)
    loaded, ends, late = served.loaded.tolist(), served.ends.tolist(), served.late.tolist()
    for e in np.flatnonzero(np.diff(served.ends)).tolist():
        cut = ends[e + 1] - late[e]
        parts = [(0, loaded[ends[e] : cut])]
        parts += [(1, loaded[at : min(at + wave, ends[e + 1])]) for at in range(cut, ends[e + 1], wave)]
        for turn, keys in parts:
            if keys:
                spent, on_device, moved = reader.seconds(keys)
                seconds[turn, e] += spent
                device_s[e] += on_device
                device_bytes[e] += moved
    return Reads(seconds[0], seconds[1], device_s, device_bytes)


def timeline(served: Served, reads: Reads, costs: Costs, lanes: int, moe_layers: int) -> Timeline:
    """The formula for every event. `lanes`: loader threads; `moe_layers` share `step_s` among them, for the lead that
    blocks fetched ahead have."""
    decode = served.phase == DECODE
    blocks = np.maximum(served.blocks, 1)
    prompt_block_s = costs.prefill_block_s + costs.prefill_assign_s * served.assignments / blocks
    each_s = np.where(decode, costs.expert_s, prompt_block_s)
    compute_s = each_s * (served.blocks - served.late)
    tail_s = each_s * np.where(served.early > 0, (served.early - 1) % lanes + 1, 0)  # the last group to arrive
    lead_s = np.r_[0.0, compute_s[:-1]] + (costs.step_s + costs.position_s) / moe_layers
    overlap_s = np.where(served.ahead > 0, lead_s, 0.0) - tail_s
    first_s = np.where(reads.early_s > 0, np.maximum(compute_s, reads.early_s - overlap_s), compute_s)
    turns_s = reads.late_s + each_s * served.late
    manage_s = costs.miss_s * (served.misses + served.ahead) + costs.wait_s * (served.misses > 0)
    waiting = first_s - compute_s + reads.late_s
    read_s = reads.early_s + reads.late_s
    on_device = np.divide(reads.device_s, read_s, out=np.zeros_like(read_s), where=read_s > 0)
    return Timeline(
        first_s + turns_s + manage_s, each_s * served.blocks, waiting * on_device, waiting * (1 - on_device), manage_s
    )


def decode_seconds(served: Served, line: Timeline, costs: Costs, first_position: int) -> np.ndarray:
    """Seconds of each decode step, ascending; `first_position` is the context at the first of them."""
    experts = served.per_step(line.total_s, DECODE)
    return experts + costs.step_s + costs.position_s * (first_position + np.arange(len(experts)))


def prefill_seconds(served: Served, line: Timeline, costs: Costs) -> float:
    """Seconds of all prefill steps; their tokens are counted in the layer that lists most of them."""
    mine = served.phase == PREFILL
    return float(line.total_s[mine].sum() + costs.prefill_token_s * prompt_tokens(served))


def prompt_tokens(served: Served) -> int:
    """Tokens of all prefill steps."""
    mine = served.phase == PREFILL
    if not mine.any():
        return 0
    by_layer = np.bincount(served.layer[mine], weights=served.tokens[mine])
    return int(by_layer.max())
