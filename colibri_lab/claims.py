"""Claims that are in print about engines of this kind, put to the test on this machine.

    cards = colibri_lab.claims.run()
    cards                      # a card each: what is claimed, what was measured here, the verdict
    cards.table                # the same as a DataFrame

A claim is a text, its source, an experiment and a judge. Nothing that was measured is written down here: experiments run, and
judges, plain functions of their numbers, word the verdict. A failed experiment is a card with its error.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from tqdm import tqdm

from . import claim_experiments as measure
from .errors import SettingError, did_you_mean
from .front import project_root

REPRODUCED, NOT, OTHER, UNTESTABLE, IMPLAUSIBLE = (
    "reproduced", "not reproduced", "different hardware", "not testable", "implausible",
)  # fmt: skip
FAILED = "failed"
VERDICTS = (REPRODUCED, NOT, OTHER, UNTESTABLE, IMPLAUSIBLE)
COLORS = {REPRODUCED: "#009E73", NOT: "#D55E00", OTHER: "#56B4E9", UNTESTABLE: "#9A9A9A", IMPLAUSIBLE: "#CC79A7", FAILED: "#222222"}  # fmt: skip
GPU = "a published description of an engine for GPU and CPU"
C = "a published description of an engine in plain C"
NEAR = 0.2  # a claim is reproduced when what was measured reaches it to within a fifth


class Verdict(NamedTuple):
    """`kind` is one of `VERDICTS`; `measured` says what was found, in words made from the numbers."""

    kind: str
    measured: str


@dataclass(frozen=True)
class Claim:
    """`name` for programs, `text` what is claimed in our words, `source` who claims it."""

    name: str
    text: str
    source: str
    experiment: Callable[[], dict] = field(repr=False)
    judge: Callable[[dict], Verdict] = field(repr=False)


@dataclass(frozen=True)
class Card:
    """A claim, the numbers of its experiment, and the verdict; `error` instead of both when the experiment failed."""

    claim: Claim
    numbers: dict
    verdict: Verdict
    error: Exception | None = None

    def _repr_html_(self) -> str:
        kind, said = (html.escape(text) for text in self.verdict)
        return (
            f'<div style="border: 1px solid #9994; border-left: 6px solid {COLORS[self.verdict.kind]}; padding: 6px 10px; '
            f'margin: 6px 0; max-width: 900px"><b>{kind}</b> · {html.escape(self.claim.text)} '
            f'<span style="opacity: .7">({html.escape(self.claim.source)})</span><br>Here: {said}</div>'
        )

    def __str__(self) -> str:
        return f"{self.verdict.kind}: {self.claim.text} Here: {self.verdict.measured}"


class Cards(list):
    """Cards in the order of the claims; shows itself in a notebook."""

    @property
    def table(self) -> pd.DataFrame:
        """claim, claimed, measured, verdict, source; a row per card."""
        rows = [(c.claim.name, c.claim.text, c.verdict.measured, c.verdict.kind, c.claim.source) for c in self]
        return pd.DataFrame(rows, columns=["claim", "claimed", "measured", "verdict", "source"])

    def counts(self) -> pd.Series:
        """How many cards have each verdict, those that failed included."""
        found = self.table.verdict.value_counts()
        return found.reindex([*VERDICTS, FAILED], fill_value=0).rename("cards")

    def _repr_html_(self) -> str:
        return "".join(card._repr_html_() for card in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def run(names: Iterable[str] | None = None, progress: bool = True) -> Cards:
    """Test all claims, or those with these names. Raises `SettingError` for an unknown name; a failing experiment does not
    stop the others."""
    names = list(CLAIMS) if names is None else list(names)
    for name in names:
        if name not in CLAIMS:
            raise SettingError(f"there is no claim {name!r}; {did_you_mean(name, CLAIMS)}")
    shared = {}
    for claim in map(CLAIMS.get, names):  # several claims may speak of one experiment, which then runs once
        shared.setdefault(claim.experiment, cache(claim.experiment))
    return Cards(
        test(CLAIMS[name], shared[CLAIMS[name].experiment]) for name in tqdm(names, "claims", disable=not progress)
    )


def test(claim: Claim, experiment: Callable[[], dict] | None = None) -> Card:
    """Run one claim's experiment, or the one given in its place, and judge it."""
    numbers: dict = {}
    try:
        numbers = (experiment or claim.experiment)()
        return Card(claim, numbers, claim.judge(numbers))
    except Exception as error:  # whatever it is, it belongs on this card and not on the next one
        return Card(claim, numbers, Verdict(FAILED, f"{type(error).__name__}: {error}"), error)


test.__test__ = False  # not one of pytest's


def traces() -> dict[str, Path]:
    """The recorded routing that claims are tested on: name → file."""
    return {name: project_root() / "data/traces" / file for name, file in measure.TRACES.items()}


# ---- judges: numbers in, verdict out


def constant_time(n: dict) -> Verdict:
    empty, full, holes = n["at_0_percent_ns"], n["at_95_percent_ns"], n["past_holes_ns"]
    said = (
        f"a block takes {empty:.0f} ns in an empty pool and {full:.0f} ns when its first 95 % are in use; two blocks in a row take "
        f"{holes:.0f} ns when they lie behind {4096 * 95 // 200} holes of one block."
    )
    return Verdict(REPRODUCED if max(full, holes) / empty < 1 + NEAR else NOT, said)


def nanoseconds(n: dict) -> Verdict:
    value = n["at_50_percent_ns"]
    said = f"{value:.0f} ns for an allocation and a release called from Python; there is no GPU here to compare with."
    return Verdict(REPRODUCED if value <= 2 * 37 * (1 + NEAR) else OTHER, said)


def weighted(n: dict) -> Verdict:
    low, high = min(n.values()), max(n.values())
    best = max(n, key=n.get)
    said = f"{low:+.1f} to {high:+.1f} points over {len(n)} cases of recorded routing, most for {best}."
    return Verdict(REPRODUCED if low >= 8 * (1 - NEAR) else NOT, said)


def sweet_spot(n: dict) -> Verdict:
    best = max(n.values())
    nothing = sum(rate == 0 for rate in n.values())
    said = (
        f"as one pool for all layers {nothing} of {len(n)} cases hit nothing at all, since a token's layers take turns; the best "
        f"hits {best:.0%}. As slots of each layer, 8 already hold a layer of 8 experts."
    )
    return Verdict(REPRODUCED if min(n.values()) > 0.5 else NOT, said)


def slot_bytes(n: dict) -> Verdict:
    pool, layers = n["one_pool_bytes"], n["each_layer_bytes"]
    fits = [abs(size / 1.2e9 - 1) < NEAR for size in (pool, layers)]
    said = (
        f"for such a model (OLMoE) 8 more int8 experts take {pool / 1e9:.2f} GB in one pool and {layers / 1e9:.2f} GB in each layer; "
        f"1.2 GB would be {1.2e3 / 8:.0f} MB a slot."
    )
    return Verdict(REPRODUCED if any(fits) else IMPLAUSIBLE, said)


def router_blamed(n: dict) -> Verdict:
    few, many = n["router_share_4_slots"], n["router_share_32_slots"]
    said = (
        f"at a hit rate of {n['hit_rate_4_slots']:.0%} the router takes {few:.1%} of the time, at {n['hit_rate_32_slots']:.0%} "
        f"{many:.1%}. Waiting is clocked apart here, and a share only grows when something else shrinks."
    )
    return Verdict(REPRODUCED if few > 0.15 > many else NOT, said)


def first_token(n: dict) -> Verdict:
    first, later = n["cold_first_ms"] / n["warm_first_ms"], n["cold_later_ms"] / n["warm_later_ms"]
    said = f"first token {n['cold_first_ms']:.0f} ms cold, {n['warm_first_ms']:.0f} ms after a run (× {first:.1f}); later tokens × {later:.1f}."
    return Verdict(REPRODUCED if first > 1 + NEAR else NOT, said)


def _format_said(row: dict, name: str) -> str:
    return f"{name} takes {row['bytes_share']:.0%} of the bytes and changes the loss by {row['change_percent']:+.2f} ± {row['plus_minus']:.2f} %"


def int8_loss(n: dict) -> Verdict:
    row = n["int8"]
    worst = abs(row["change_percent"]) + row["plus_minus"]
    good = abs(row["bytes_share"] - 0.5) < 0.5 * NEAR and worst < 2
    return Verdict(REPRODUCED if good else NOT, f"{_format_said(row, 'int8')}, on a model of 17 million weights.")


def int4_loss(n: dict) -> Verdict:
    row, coarse = n["int4-g64"], n["int4-row"]
    visible = row["change_percent"] - row["plus_minus"] > 0
    fits = abs(row["bytes_share"] - 0.25) < 0.25 * NEAR
    said = f"{_format_said(row, 'int4-g64')}; with one scale per row {coarse['change_percent']:+.2f} ± {coarse['plus_minus']:.2f} %."
    return Verdict(REPRODUCED if fits and visible else NOT, said)


def small_loss(n: dict) -> Verdict:
    row = n["int8"]
    worst = abs(row["change_percent"]) + row["plus_minus"]
    said = f"{_format_said(row, 'int8')}. Loss of what is not said; taken here as nats per token."
    return Verdict(REPRODUCED if worst < 0.3 else NOT, said)


def repacked(n: dict) -> Verdict:
    return Verdict(REPRODUCED if 1.0 <= n["ratio"] <= 1.1 else NOT, f"{n['ratio']:.3f} times the checkpoint's bytes.")


def over_naive(n: dict) -> Verdict:
    value = n["over_naive"]
    said = f"× {value:.3g} over three plain loops, compiled without vectors, on one thread."
    return Verdict(REPRODUCED if value >= 3 * (1 - NEAR) else NOT, said)


def of_blas(n: dict) -> Verdict:
    value = n["of_blas"]
    said = f"{value:.0%} of the speed of numpy's BLAS, 64 tokens, float32, one thread."
    return Verdict(REPRODUCED if value >= 0.7 * (1 - NEAR) else NOT, said)


def stacked(n: dict) -> Verdict:
    own, other = n["slots_GB_per_s"], n["stacked_GB_per_s"]
    said = f"{own:.1f} GB/s with each expert in one piece, {other:.1f} GB/s stacked: × {other / own:.2f}."
    return Verdict(REPRODUCED if other / own >= 89 / 42 * (1 - NEAR) else NOT, said)


def gathered(n: dict) -> Verdict:
    share = 1 - n["gathered_GB_per_s"] / n["slots_GB_per_s"]
    said = f"copying a token's experts side by side first takes {share:.0%} of the time; computing them where they lie, none."
    return Verdict(REPRODUCED if share >= 0.22 * (1 - NEAR) else NOT, said)


def polynomial_error(n: dict) -> Verdict:
    return Verdict(REPRODUCED if n["error"] < 1e-4 else NOT, f"largest error {n['error']:.1e} on [-20, 20].")


def polynomial_speed(n: dict) -> Verdict:
    value = n["times_faster"]
    said = f"× {value:.2f} against an exact sigmoid that is vectorised as well; a scalar library call would be slower."
    return Verdict(REPRODUCED if value >= 17 * (1 - NEAR) else NOT, said)


def at_once(n: dict) -> Verdict:
    four, eight = n["at_once_4"] / n["at_once_1"], n["at_once_8"] / n["at_once_4"]
    said = f"4 at once × {four:.2f}, 8 over 4 × {eight:.2f}, on {n['cores']} physical cores."
    if n["cores"] < 4:
        return Verdict(OTHER, said)
    return Verdict(REPRODUCED if four >= 2.1 * (1 - NEAR) and eight < 1 else NOT, said)


def paged(n: dict) -> Verdict:
    said = (
        f"a saving depends on how long texts are: {n['saving_even_lengths']:.0%} if lengths are spread evenly; 68 % needs a mean of "
        f"{1 - 0.68:.0%} of the longest. The lengths are not told."
    )
    return Verdict(UNTESTABLE, said)


def kv_bytes(n: dict) -> Verdict:
    least = min(n, key=n.get)
    said = f"Mixtral-8x7B {n['Mixtral-8x7B']:,} B per token and layer in fp16; the least of {len(n)} published models, {least}, {n[least]:,} B."
    return Verdict(REPRODUCED if n[least] <= 128 else IMPLAUSIBLE, said)


def arena(n: dict) -> Verdict:
    return Verdict(REPRODUCED if n["ratio"] <= 1.3 else NOT, f"{n['ratio']:.3f} times what is in use at once.")


def depth(n: dict) -> Verdict:
    two, six = n["layers_2_bytes"], n["layers_6_bytes"]
    return Verdict(REPRODUCED if two == six else NOT, f"{two / 1e3:.0f} kB with 2 layers, {six / 1e3:.0f} kB with 6.")


def near_limit(n: dict) -> Verdict:
    share = 89 / A100_GB_PER_S
    said = f"89 GB/s are {share:.0%} of the {A100_GB_PER_S} GB/s of an A100's data sheet; this machine's cores read {n['here_GB_per_s']:.0f} GB/s."
    return Verdict(REPRODUCED if share > 1 - NEAR else IMPLAUSIBLE, said)


def half_floats(n: dict) -> Verdict:
    has = {True: "has", False: "does not have", None: "does not tell whether it has"}[n["avx512_fp16"]]
    said = f"arithmetic on 16-bit floats came with Sapphire Rapids, a generation after Ice Lake; this CPU ({n['cpu']}) {has} it."
    return Verdict(IMPLAUSIBLE, said)


def order(n: dict) -> Verdict:
    return Verdict(
        REPRODUCED if n["same"] == 1 else NOT,
        f"the same experts in the same order for {n['same']:.2%} of 5,000 tokens.",
    )


def reference_run(n: dict) -> Verdict:
    said = f"claimed, not measured here: this is {n['cpu']} with {n['cores']} cores and {n['ram_GB']:.0f} GB"
    said += "" if n["model"] else ", and no such model is in the project"
    return Verdict(UNTESTABLE if "12700" in n["cpu"] else OTHER, said + ".")


def unstated(n: dict) -> Verdict:
    said = f"neither model, prompt nor settings are told, and a GPU is compared; this is {n['cpu']} with {n['cores']} cores."
    return Verdict(UNTESTABLE, said)


A100_GB_PER_S = 1555  # of its data sheet, 40 GB version
_ALL = (
    Claim("pool-constant-time", "The memory pool hands out blocks in constant time.", GPU, measure.pool_latency, constant_time),
    Claim("pool-37-ns", "An allocation takes 37 ns, against 213 ns of CUDA's allocator.", GPU, measure.pool_latency, nanoseconds),
    Claim("scratch-by-layer", "Working memory does not grow with the number of layers.", GPU, measure.scratch_by_depth, depth),
    Claim("arena-peak", "Arenas reserve at most 1.3 times what is needed.", C, measure.arena_ratio, arena),
    Claim("kv-128-bytes", "A token takes 128 bytes of KV cache.", GPU, measure.kv_bytes_per_token, kv_bytes),
    Claim("kv-pages", "Pages save 68 % of the KV cache at 128K tokens.", GPU, measure.paged_saving, paged),
    Claim("weighted-lru", "Weighting LRU by hits gains 8 to 12 points over LRU.", C, measure.weighted_gain, weighted),
    Claim("sweet-spot", "16 to 24 slots are the sweet spot.", C, measure.small_pool, sweet_spot),
    Claim("slots-1.2-GB", "From 16 to 24 slots costs 1.2 GB, in a 7B model with 1.3B active.", C, measure.slots_cost, slot_bytes),
    Claim("router-15-percent", "A router above 15 % of the time means a low hit rate.", C, measure.router_share, router_blamed),
    Claim("warm-up", "A dummy run makes the first token faster.", C, measure.warm_up, first_token),
    Claim("int8", "int8 halves the memory for less than 2 % of perplexity.", C, measure.formats, int8_loss),
    Claim("int8-0.3-percent", "int8 loses less than 0.3 %.", GPU, measure.formats, small_loss),
    Claim("int4", "int4 takes a quarter of the memory at a visible loss.", C, measure.formats, int4_loss),
    Claim("repacking", "Repacking takes 1.0 to 1.1 times the disk of the source.", C, measure.container_ratio, repacked),
    Claim("gemm-naive", "The tiled product is 3 to 4 times as fast as a naive one.", C, measure.product_speed, over_naive),
    Claim("gemm-blas", "It reaches about 70 % of OpenBLAS.", C, measure.product_speed, of_blas),
    Claim("stacked", "Stacking all experts' matrices lifts bandwidth from 42 to 89 GB/s.", GPU, measure.expert_layouts, stacked),
    Claim("near-limit", "89 GB/s is near the limit of an A100.", GPU, measure.memory_bandwidth, near_limit),
    Claim("scatter", "Moving data about, 22 % of a layer, can be avoided.", GPU, measure.expert_layouts, gathered),
    Claim("sigmoid-error", "A polynomial sigmoid is exact to 1e-4.", GPU, measure.sigmoid, polynomial_error),
    Claim("sigmoid-speed", "It is 17 times as fast as the exponential.", GPU, measure.sigmoid, polynomial_speed),
    Claim("half-floats", "AVX-512 arithmetic on 16-bit floats runs on Ice Lake.", GPU, measure.this_machine, half_floats),
    Claim("experts-at-once", "4 experts at once are 2.1 times as fast, 8 are 12 % slower.", GPU, measure.experts_at_once, at_once),
    Claim("no-softmax", "Top-k needs no softmax: raw logits choose the same experts.", GPU, measure.same_choice, order),
    Claim("reference-run", "A desktop i7-12700 with 32 GB runs a 7B model, 1.3B active, with int8 and 16 slots.", C,
          measure.reference_model, reference_run),
    Claim("gpu-latency", "P99 falls from 2140 to 1280 ms and memory by 37 % against another server.", GPU, measure.this_machine, unstated),
)  # fmt: skip
TOPICS = {
    "memory": ("pool-constant-time", "pool-37-ns", "scratch-by-layer", "arena-peak", "kv-128-bytes", "kv-pages", "slots-1.2-GB"),
    "cache": ("weighted-lru", "sweet-spot", "router-15-percent", "warm-up", "no-softmax"),
    "formats": ("int8", "int8-0.3-percent", "int4", "repacking"),
    "kernels": ("gemm-naive", "gemm-blas", "stacked", "scatter", "sigmoid-error", "sigmoid-speed", "experts-at-once"),
    "hardware": ("near-limit", "half-floats", "reference-run", "gpu-latency"),
}  # fmt: skip
CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _ALL}
