"""From a run's counters to sentences. Pure functions; every threshold stands here and nowhere else.

Three rules of thumb are in print for engines of this kind: a hit rate below 85 % wants more slots and one above 95 %
fewer; a router above 15 % of the time means misses; matrix products above 70 % want threads or wider SIMD. The middle
one holds only for an engine that books the wait for a missing expert under its router. Here that wait is a stage of its
own, `expert_load_wait`, so each rule is shown as printed and beside it the form that follows from what was measured.
"""

from __future__ import annotations

from typing import NamedTuple

from . import machine

FEW_HITS, MANY_HITS = 0.85, 0.95
MUCH_ROUTER = MUCH_WAIT = 0.15
LITTLE_WAIT = 0.05
MUCH_COMPUTE = 0.70
HOT, NARROW = 1.5, 0.1  # temperature and top-p beyond which text falls apart or repeats


class Advice(NamedTuple):
    """`fact` is the measurement, `published` the rule of thumb's verdict on it (None: silent), `corrected` ours."""

    fact: str
    published: str | None
    corrected: str | None

    def __str__(self) -> str:
        return (
            f"{self.fact}. Rule in print: {self.published or 'nothing to do'}. "
            f"What the counters say: {self.corrected or 'nothing to do'}."
        )


def on_hit_rate(hit_rate: float, wait: float, all_resident: bool = False) -> Advice:
    """On the share of expert requests found in their slots, given the share of time spent waiting for the others.

    `all_resident`: there is a slot for every expert block, so that each is read once and more slots cannot help.
    """
    published = None
    if hit_rate < FEW_HITS:
        published = f"below {FEW_HITS:.0%}, add slots"
    elif hit_rate > MANY_HITS:
        published = f"above {MANY_HITS:.0%}, reduce slots to save memory"
    if all_resident:
        corrected = (
            "every expert already has a slot; what misses are left is each expert's first read, so warm up first"
        )
    elif wait > MUCH_WAIT:
        corrected = "misses cost real time, add slots, or try another policy or a faster disk"
    elif wait < LITTLE_WAIT:
        corrected = "misses cost next to nothing at this hit rate, more slots would not be noticed and fewer may do"
    else:
        corrected = None
    fact = f"Hit rate {hit_rate:.1%} in decode, waiting for experts {wait:.1%} of the time"
    return Advice(fact, published, corrected)


def on_router(router: float, wait: float) -> Advice | None:
    """On the router's share of the time, which here holds no loading; None when neither rule has anything to say."""
    published = "above 15 %, the hit rate is low, add slots" if router > MUCH_ROUTER else None
    if wait > MUCH_WAIT:
        corrected = f"waiting for experts takes {wait:.1%}, above 15 %: add slots"
    elif published:
        corrected = (
            f"waiting for experts takes {wait:.1%}, so slots will not help; routing itself is the cost of small experts"
        )
    else:
        return None
    return Advice(f"Router {router:.1%} of decode", published, corrected)


def on_compute(compute: float, threads: int, cores: int) -> Advice | None:
    """On the share of routed and shared experts' matrix products; None at 70 % or less."""
    if compute <= MUCH_COMPUTE:
        return None
    if threads < cores:
        corrected = f"{threads} of {cores} physical cores compute, so raise threads"
    else:
        corrected = (
            "every core computes already; at one token a step each weight is read from memory for a single product, so "
            "a narrower number format (convert --quantize int8) is what is left"
        )
    return Advice(f"Expert products {compute:.1%} of decode", "above 70 %, more threads or AVX-512", corrected)


def on_sampling(temperature: float, top_p: float) -> str | None:
    """A sentence when the sampler's settings are known to spoil text, else None."""
    if temperature > HOT:
        return f"Temperature {temperature:g} is above {HOT:g}: text usually falls apart there."
    if temperature == 0:
        return "Temperature 0 is greedy: the same text every time, and small models start to repeat themselves."
    if top_p < NARROW:
        return f"top_p {top_p:g} is below {NARROW:g}: nearly greedy, expect repetition."
    return None


def advise(run, lab=None, cores: int | None = None) -> list[str]:
    """Sentences on a finished run, read from `run.cache`, `run.stages` and `run.settings`. Counters speak of decode only.

    `lab`: the model it ran on, which tells whether every expert had a slot. `cores`: physical cores of the machine,
    asked of it when None. What was not measured gets no sentence.
    """
    cores = machine.cores()[0] if cores is None else cores
    stages = run.stages[run.stages.phase == "decode"]
    share = dict(zip(stages.stage, stages.share, strict=True))
    cache = run.cache[run.cache.phase == "decode"]
    hits, misses = int(cache.hits.sum()), int(cache.misses.sum())
    wait = share.get("expert_load_wait", 0.0)
    said: list = []
    if share and hits + misses:
        said.append(on_hit_rate(hits / (hits + misses), wait, lab is not None and has_all_slots(run, lab)))
    if share:
        said.append(on_router(share.get("router", 0.0), wait))
        compute = share.get("expert_compute", 0.0) + share.get("shared_expert", 0.0)
        said.append(on_compute(compute, run.settings["threads"], cores))
    said.append(on_sampling(run.settings["temperature"], run.settings["top_p"]))
    return [str(item) for item in said if item]


def has_all_slots(run, lab) -> bool:
    """Whether there was a slot for every expert block of the model."""
    pools = len(lab.config.moe_layers) if run.settings["scope"] == "global" else 1
    return run.settings["expert_cache_slots"] >= lab.container.blocks * pools
