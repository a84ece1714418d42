"""From the settings that were given to those in force: every "auto" replaced by its value, contradictions refused."""

from __future__ import annotations

from .. import machine
from ..config import ModelConfig
from ..errors import SettingError
from ..kernels import simd
from ..units import parse_size
from .sizes import blocks


def effective(
    given: dict, config: ModelConfig, slot_bytes: int, blocks_per_layer: int, stored_max_seq_len: int | None
) -> dict:
    """`given` as `config.resolve` returns it; `stored_max_seq_len` is what the conversion set, if it did.

    With `memory` the number of slots stays open (None): it is for the memory plan to choose. Raises `SettingError`.
    """
    s = dict(given)
    if s["max_seq_len"] is None:
        s["max_seq_len"] = min(4096, stored_max_seq_len or config.max_position_embeddings)
    if s["max_seq_len"] > config.max_position_embeddings:
        raise SettingError(
            f"max_seq_len must be at most {config.max_position_embeddings}, the positions {config.family} was trained for, "
            f"got {s['max_seq_len']}"
        )
    if s["memory"] is not None and s["expert_cache_slots"] is not None:
        raise SettingError(
            f"memory {s['memory']!r} and expert_cache_slots {s['expert_cache_slots']!r} both decide how many slots there are: "
            "give one of them"
        )
    if s["prefault"] and s["dynamic_arena"]:
        raise SettingError("prefault touches all memory at once, dynamic_arena takes it on demand: choose one of them")
    if s["router_offload"] == "gpu":
        raise SettingError(
            "router_offload 'gpu': there is no device backend; use cpu, or none with experts from elsewhere"
        )
    if s["router_offload"] == "none" and s["prefetch"] == "lookahead":
        raise SettingError(
            "prefetch 'lookahead' runs the router early, router_offload 'none' never: change one of them"
        )
    if s["memory"] is None:
        s["expert_cache_slots"] = _slots(s, config, blocks(slot_bytes), blocks_per_layer)
    if s["threads"] is None:
        s["threads"] = machine.cores()[0]
    s["simd"] = simd()
    return s


def most_slots(settings: dict, config: ModelConfig, blocks_per_layer: int) -> int:
    """The value of expert_cache_slots with which every block has a slot."""
    return blocks_per_layer * (len(config.moe_layers) if settings["scope"] == "global" else 1)


def _slots(s: dict, config: ModelConfig, slot_bytes: int, blocks_per_layer: int) -> int:
    layers = len(config.moe_layers)
    slots = s["expert_cache_slots"]
    if slots is None:
        slots = 4 * config.top_k * (layers if s["scope"] == "global" else 1)
    elif isinstance(slots, str):
        each = slot_bytes if s["scope"] == "global" else slot_bytes * layers
        wanted = parse_size(slots, "expert_cache_slots")
        slots = wanted // each
        if not slots:
            raise SettingError(
                f"expert_cache_slots {wanted} bytes hold no slot{'' if s['scope'] == 'global' else ' per layer'}: at least "
                f"{each} bytes are needed"
            )
    return min(slots, most_slots(s, config, blocks_per_layer))
