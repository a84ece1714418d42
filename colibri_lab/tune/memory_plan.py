"""How much memory a model takes, exactly, before anything is allocated.

The parts are those that `Lab.memory` measures. Where a part depends on the run (KV cache, pages of the embedding that
are looked up) the plan counts the most it can become. Read-only mapped files count whole; the system can take their
pages back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .. import machine
from ..checkpoint import binfile, container, layout
from ..checkpoint.plan import make_plan as plan_conversion
from ..config import ModelConfig, resolve
from ..engine.linear import packed_bytes
from ..engine.settings import effective, most_slots
from ..engine.sizes import EngineSizes, engine_sizes, scratch_ratio
from ..errors import MemoryPlanError
from ..front import find_model
from ..units import format_size, parse_size

# What the `tokenizers` library takes per vocabulary entry: 315 to 345 bytes for BPE vocabularies of 4 to 150 thousand.
BYTES_PER_ENTRY = 340

PARTS = {
    "dense_bytes": "weights that every token needs, mapped",
    "embedding_bytes": "embedding, mapped; a row per token is read",
    "router_bytes": "routers, packed in memory",
    "slots_bytes": "expert slots",
    "transient_bytes": "buffers of experts that stream through",
    "kv_cache_bytes": "KV cache at max_seq_len",
    "rotary_bytes": "rotary tables",
    "scratch_bytes": "arenas, logits and probabilities",
    "loader_bytes": "windows of the loader threads",
    "tokenizer_bytes": "tokenizer, estimated",
}


@dataclass(frozen=True)
class ModelFacts:
    """What a memory plan needs to know of a model, converted or not yet. Bytes; `block_file_bytes` of the largest
    block."""

    name: str
    config: ModelConfig
    blocks_per_layer: int
    slot_bytes: int
    block_file_bytes: int
    dense_bytes: int
    embedding_bytes: int
    max_seq_len: int | None
    tokenizer_bytes: int = 0

    @classmethod
    def of_container(cls, box: container.Container) -> ModelFacts:
        def size(name: str) -> int:
            stored = box.find(name)[0]
            if stored.suffix == ".bin" and ("/expert_" in name or binfile.read_header(stored).version):
                return stored.stat().st_size
            return box.read(name).payload.nbytes  # .npy and version 0: packed into memory, without a header

        return cls._of(
            str(box.info["source"]), box.config, box.block_size, {name: size(name) for name in box.files}, box.slot_bytes,
            box.info.get("max_seq_len"), box.info["tokenizer"],
        )  # fmt: skip

    @classmethod
    def of_checkpoint(cls, directory: str | os.PathLike, **convert_options) -> ModelFacts:
        """A checkpoint as `convert` with these options would make it; only headers are read."""
        plan = plan_conversion(directory, Path(directory) / "not-written", **convert_options)
        return cls._of(
            Path(directory).name,
            plan.config,
            plan.block_size,
            plan.sizes,
            plan.slot_bytes,
            plan.max_seq_len,
            plan.tokenizer,
        )

    @classmethod
    def _of(cls, name, config, block_size, sizes, slot_bytes, max_seq_len, tokenizer) -> ModelFacts:
        embedding = 0 if config.tied_embeddings else sizes[layout.EMBED]
        return cls(
            name=name, config=config, blocks_per_layer=layout.blocks_per_layer(config, block_size), slot_bytes=slot_bytes,
            block_file_bytes=max(size for file, size in sizes.items() if "/expert_" in file),
            dense_bytes=sum(size for file, size in sizes.items() if file.startswith("dense/")) - embedding,
            embedding_bytes=embedding, max_seq_len=max_seq_len, tokenizer_bytes=tokenizer["vocab_size"] * BYTES_PER_ENTRY,
        )  # fmt: skip


class MemoryPlan(dict):
    """Bytes by part, as `PARTS`, and `total_bytes`. `settings` are those in force, `sizes` the pool's parts in detail,
    `available_bytes` what the machine had left when the plan was made."""

    def __init__(self, facts: ModelFacts, settings: dict, available: int):
        self.facts, self.settings, self.available_bytes = facts, settings, available
        self.sizes: EngineSizes = engine_sizes(facts.config, facts.slot_bytes, facts.blocks_per_layer, settings)
        z = self.sizes
        windows = settings["loader_threads"] * facts.block_file_bytes if settings["storage"] == "mmap" else 0
        parts = dict(
            dense_bytes=facts.dense_bytes,
            embedding_bytes=facts.embedding_bytes,
            router_bytes=packed_bytes(facts.config),
            slots_bytes=z.slots * z.slot_bytes,
            transient_bytes=z.transient * z.slot_bytes,
            kv_cache_bytes=z.kv_bytes,
            rotary_bytes=z.rotary_bytes,
            scratch_bytes=z.scratch_bytes,
            loader_bytes=windows,
            tokenizer_bytes=facts.tokenizer_bytes,
        )
        super().__init__(parts, total_bytes=sum(parts.values()))

    @property
    def fits(self) -> bool:
        return self["total_bytes"] <= self.available_bytes

    @property
    def page_cache_bytes(self) -> int:
        """What the machine has left for its page cache, in which files of experts stay that were read."""
        return max(0, self.available_bytes - self["total_bytes"])

    @property
    def slots(self) -> int:
        """expert_cache_slots: per layer, or in all with scope global."""
        return self.settings["expert_cache_slots"]

    @property
    def scratch_ratio(self) -> float:
        """What the arenas reserve over what their arrays need at once."""
        return scratch_ratio(self.facts.config, self.settings)

    def __str__(self) -> str:
        return f"{plan_table(self)}\narenas reserve {self.scratch_ratio:.3f} times what is in use at once"


def memory_plan(
    model: str | os.PathLike, *, available: int | str | None = None, check: bool = True, **settings
) -> MemoryPlan:
    """What opening `model` (a container or a checkpoint) with these settings of scope "open" takes.

        cl.memory_plan("data/colibri-tiny", expert_cache_slots=16, max_seq_len=512)["total_bytes"]
        cl.memory_plan("OLMoE-1B-7B", memory="2 GiB").slots

    available: bytes there are, as a number or "16 GiB"; None asks this machine. Raises `MemoryPlanError` naming the
    largest setting that fits when the plan does not, unless `check` is False; nothing is allocated either way.
    """
    given = resolve(settings, "open")
    directory = find_model(model)
    if container.is_container(directory):
        facts = ModelFacts.of_container(container.Container.open(directory, allow_fp32=given["allow_fp32"]))
    else:
        facts = ModelFacts.of_checkpoint(directory)
    room = machine.memory()[1] if available is None else parse_size(available, "available")
    return make_plan(facts, given, room, check)


def make_plan(facts: ModelFacts, given: dict, available: int, check: bool = True) -> MemoryPlan:
    """The plan for settings as `resolve` returns them; errors as in `memory_plan`."""
    settings = effective(given, facts.config, facts.slot_bytes, facts.blocks_per_layer, facts.max_seq_len)
    if settings["memory"] is not None:
        budget = parse_size(settings["memory"], "memory")
        slots = largest_slots(facts, settings, budget)
        if slots is None:
            least = MemoryPlan(facts, {**settings, "expert_cache_slots": 1}, available)
            raise MemoryPlanError(_refusal(least, budget, "memory allows"))
        settings["expert_cache_slots"] = slots
    plan = MemoryPlan(facts, settings, available)
    if check and not plan.fits:
        raise MemoryPlanError(_refusal(plan, available, "are available"))
    return plan


def largest_slots(facts: ModelFacts, settings: dict, budget: int) -> int | None:
    """The most expert_cache_slots with which everything takes at most `budget` bytes; None when not even one does."""

    def total(slots: int) -> int:
        return MemoryPlan(facts, {**settings, "expert_cache_slots": slots}, budget)["total_bytes"]

    every = most_slots(settings, facts.config, facts.blocks_per_layer)
    if total(every) <= budget:  # asked first: without buffers for streaming it may take less than a slot fewer
        return every
    return _largest(every - 1, lambda slots: total(slots) <= budget)


def largest_length(facts: ModelFacts, settings: dict, budget: int) -> int | None:
    """The longest max_seq_len, up to the one asked for, that fits with a single slot; None when not even 1 does."""
    one = {**settings, "expert_cache_slots": 1}
    return _largest(
        settings["max_seq_len"], lambda n: MemoryPlan(facts, {**one, "max_seq_len": n}, budget)["total_bytes"] <= budget
    )


def _largest(most: int, fits) -> int | None:
    """The largest number from 1 to `most` that fits, where a smaller one always does; None when 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None


def _refusal(plan: MemoryPlan, budget: int, what: str) -> str:
    total = plan["total_bytes"]
    facts, settings = plan.facts, plan.settings
    slots, length = largest_slots(facts, settings, budget), largest_length(facts, settings, budget)
    if slots:
        advice = f"expert_cache_slots={slots} is the most that fits"
    elif length:
        advice = f"max_seq_len={length} with expert_cache_slots=1 is the most that fits"
    else:
        least = MemoryPlan(facts, {**settings, "expert_cache_slots": 1, "max_seq_len": 1}, budget)
        largest = max(PARTS, key=lambda part: least[part])
        advice = f"no setting fits; {PARTS[largest]} take {least[largest]} bytes of at least {least['total_bytes']}"
    return (
        f"{facts.name} with expert_cache_slots={settings['expert_cache_slots']} and max_seq_len={settings['max_seq_len']} takes "
        f"{total} bytes ({format_size(total)}), {budget} ({format_size(budget)}) {what}; {advice}. Nothing was allocated"
    )


def plan_table(plan: dict, measured: dict | None = None) -> str:
    """A plan as text, a part a line, beside what was measured where that is given. MB and GB are powers of ten."""
    rows = [(part, what, plan[part]) for part, what in PARTS.items()] + [("total_bytes", "total", plan["total_bytes"])]
    lines = [f"{'bytes':>14}  {'':>8}" + (f"  {'measured':>14}" if measured else "")]
    for part, what, size in rows:
        shown = f"  {measured[part]:>14}" if measured else ""
        lines.append(f"{size:>14}  {format_size(size):>8}{shown}  {what}")
    return "\n".join(lines)
