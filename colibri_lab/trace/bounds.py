"""What a hit rate leaves on the table, and what it cannot have: oracles, splits, regimes, floors and warnings.

Under the atomic contract with blocks of one size, `belady-bypass` is the only bound that holds for every policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..cache import policies as registry
from ..errors import SettingError, TraceError
from ..units import format_size
from .curves import curve, hit_table, one_pass
from .replay import ratio, replay
from .source import Size, contract_of

if TYPE_CHECKING:
    from .table import Trace


def gap(trace: Trace, slots: int | str, policy: str = "lru", **settings) -> dict:
    """How far `policy` is from the bound at one size, in misses, and where the gap comes from.

    gap               (policy - bypass) / policy: the share of its misses that a perfect policy would not have
    admission_share   (forced - bypass) / (policy - bypass): what keeping every missed block costs
    victim_share      (policy - forced) / (policy - bypass): what choosing the wrong victims costs
    None where there is nothing to divide. `note` warns when no policy can matter.
    """
    contract = contract_of(settings)
    misses = {}
    for name in (policy, "belady", "belady-bypass"):
        misses[name] = replay(trace, name, slots, **settings).attrs["totals"]["misses"]
    own, forced, bypass = misses[policy], misses["belady"], misses["belady-bypass"]
    return {
        "policy": policy,
        "slots": slots,
        "misses": own,
        "misses_belady": forced,
        "misses_belady_bypass": bypass,
        "gap": _share(own - bypass, own),
        "admission_share": _share(forced - bypass, own - bypass),
        "victim_share": _share(own - forced, own - bypass),
        "valid_bound": contract.lookup == "atomic" and _one_size(trace, contract),
        "note": too_small(trace, slots, **settings),
    }


def miss_split(trace: Trace, slots: int | str, policy: str = "lru", **settings) -> dict:
    """The policy's misses as compulsory (first uses), capacity (also the bypass oracle's), and policy (the rest)."""
    own = replay(trace, policy, slots, **settings).attrs["totals"]
    oracle = replay(trace, "belady-bypass", slots, **settings).attrs["totals"]
    if own["compulsory"] > oracle["misses"]:
        raise SettingError("the split needs first uses to miss: count='union' and start='empty', without prefetch")
    return {
        "policy": policy,
        "slots": slots,
        "accesses": own["accesses"],
        "misses": own["misses"],
        "compulsory": own["compulsory"],
        "capacity": oracle["misses"] - own["compulsory"],
        "policy_misses": own["misses"] - oracle["misses"],
    }


def regime(trace: Trace, slots: int, scope: str = "layer", phase: str = "all", bins: int = 20) -> dict:
    """How large events are beside the cache: r = distinct experts of an event / slots of its pool.

    Policies can be compared between traces only where r is alike. Returns mean, quantiles, the share of events above 1
    (they do not fit) and a histogram DataFrame (from, to, events).
    """
    events = trace.events()
    widths = events.widths
    if phase != "all":
        widths = widths[events.phase == {"prefill": 0, "decode": 1}[phase]]
    if not len(widths):
        raise TraceError(f"the trace has no {phase} events")
    r = widths / Size.of(trace, slots, contract_of({"scope": scope})).of_layer[0]
    counts, edges = np.histogram(r, bins=bins, range=(0, max(1.0, float(r.max()))))
    return {
        "slots": slots,
        "events": len(r),
        "mean": float(r.mean()),
        "quantiles": {q: float(np.quantile(r, q)) for q in (0.05, 0.25, 0.5, 0.75, 0.95)},
        "share_above_1": float((r > 1).mean()),
        "histogram": pd.DataFrame({"from": edges[:-1], "to": edges[1:], "events": counts}),
    }


def cycle(trace: Trace) -> dict:
    """One token's cycle: the blocks all layers need for one decoded token, below which a global cache thrashes."""
    events = trace.events()
    decode = events.phase == 1
    use = decode if decode.any() else np.ones(events.count, bool)
    per_layer = np.array(
        [events.widths[use & (events.layer_index == i)].max(initial=0) for i in range(len(trace.layers))]
    )
    sizes = trace.expert_bytes
    return {
        "blocks_per_layer": int(per_layer.max()),
        "blocks": int(per_layer.sum()),
        "bytes": None if sizes is None else int((per_layer * sizes).sum()),
    }


def warnings(trace: Trace, slots: int | str, **settings) -> list[str]:
    """What to say about this size before anybody reads its hit rates."""
    contract = contract_of(settings)
    size, one = Size.of(trace, slots, contract), cycle(trace)
    said = []
    if contract.scope == "global":
        need, have = one["blocks"], int(size.of_layer[0])
        if have < need:
            bytes_ = "" if one["bytes"] is None else f" ({format_size(one['bytes'])})"
            said.append(
                f"{have} slots are below one token's cycle of {need} blocks{bytes_}: a shared lru evicts every block "
                f"before its next use. Use at least {need}, or scope layer"
            )
    elif size.of_layer.min() < one["blocks_per_layer"]:
        said.append(
            f"{int(size.of_layer.min())} slots per layer are fewer than the {one['blocks_per_layer']} experts of one "
            f"token: part of every event streams through. Use at least {one['blocks_per_layer']}"
        )
    note = too_small(trace, slots, **settings)
    return said + ([note] if note else [])


def too_small(trace: Trace, slots: int | str, **settings) -> str | None:
    """A sentence when every forced-admission policy must give the same hits at this size, else None."""
    contract = contract_of(settings)
    if contract.lookup != "atomic" or contract.scope != "layer" or contract.admission != "forced":
        return None
    widths = trace.events().widths
    fits = int(Size.of(trace, slots, contract).of_layer.max())
    if fits > widths.min():
        return None
    return (
        f"{fits} slots hold no more than one event ({int(widths.min())} experts): what stays is the event itself, so no "
        "policy that keeps every missed block can matter"
    )


def allocate(
    trace: Trace, slots: int | str, policy: str = "lru", *, held_out: float = 0.5, **settings
) -> tuple[pd.DataFrame, dict]:
    """The best unequal slots per layer for a budget, by an exact dynamic programme over the layers' curves.

    slots     the budget: slots per layer on average, or bytes in all as text
    policy    a one-pass policy (lru, lfu, belady, belady-bypass, static-pin)
    held_out  share of the trace's steps, at its end, that judge the choice made on the steps before

    Returns a DataFrame (layer, slots, equal_slots) fitted on the first part, and a dict with the bytes loaded on the
    held-out part under both and the saving. Bytes are loads where the trace does not say how large experts are.
    """
    contract = contract_of(settings)
    if contract.scope != "layer":
        raise SettingError("allocate divides slots among layers: scope must be layer")
    if not one_pass(policy, contract):
        known = ", ".join(name for name in registry.POLICIES if one_pass(name, contract))
        raise SettingError(f"allocate needs a policy with a one-pass curve ({known}), got {policy!r}")
    if not 0 < held_out < 1:
        raise SettingError(f"held_out must be above 0 and below 1, got {held_out!r}")
    steps = len(np.unique(trace.step))
    cut = round(steps * (1 - held_out))
    if not 0 < cut < steps:
        raise TraceError(f"held_out={held_out} leaves one side of the trace without steps; it has {steps}")
    equal = Size.of(trace, slots, contract)
    sizes = (
        np.ones(len(trace.layers), np.int64) if trace.expert_bytes is None else trace.expert_bytes * contract.block_size
    )
    budget = equal.bytes or int((sizes * equal.of_layer).sum())

    def loaded(part):  # (layers, most + 1): bytes loaded at 0, 1, … slots
        hits, accesses = hit_table(part, policy, **settings)
        return (accesses[:, None] - hits) * sizes[:, None]

    fitted, judged = loaded(trace.select(steps=slice(None, cut))), loaded(trace.select(steps=slice(cut, None)))
    best = best_split(fitted, sizes, budget)
    layers = np.arange(len(sizes))
    own, same = (int(judged[layers, split].sum()) for split in (best, equal.of_layer))
    table = pd.DataFrame({"layer": trace.layers, "slots": best, "equal_slots": equal.of_layer})
    unit = "loads" if trace.expert_bytes is None else "bytes"
    return table, {
        "policy": policy,
        "unit": unit,
        "budget": budget,
        "steps_fitted": cut,
        "steps_held_out": steps - cut,
        "loaded_fitted": int(fitted[layers, best].sum()),
        "loaded_fitted_equal": int(fitted[layers, equal.of_layer].sum()),
        "loaded_held_out": own,
        "loaded_held_out_equal": same,
        "saving_held_out": _share(same - own, same),
    }


def best_split(cost: np.ndarray, sizes: np.ndarray, budget: int) -> np.ndarray:
    """Slots per layer, at least 1 each, that minimise sum of cost[layer, slots] with sum of sizes x slots <= budget.

    Exact: layer by layer, all (bytes, cost) pairs that no other pair beats in both. A Lagrange multiplier on the budget
    gives a good split and, for every pair, a bound on where it can lead; pairs that cannot beat that split are dropped.
    cost int64 (layers, most + 1). Raises `SettingError` when one slot per layer is already too much.
    """
    if int(sizes.sum()) > budget:
        raise SettingError(f"one slot per layer takes {int(sizes.sum())} bytes, the budget is {budget}")
    cost = cost[:, 1:] // max(1, int(np.gcd.reduce(cost.ravel())))
    unit = int(np.gcd.reduce(sizes))
    sizes, budget = sizes // unit, budget // unit
    taken = sizes[:, None] * np.arange(1, cost.shape[1] + 1)  # (layers, most) bytes
    price, good = _multiplier(cost, taken, budget)
    rest = np.append(np.cumsum((cost + price * taken).min(1)[::-1])[::-1][1:], 0.0)  # bound of the layers to come
    least = np.append(np.cumsum(sizes[::-1])[::-1][1:], 0)  # bytes they need at least
    scale = int(cost.max()) * len(cost) + 1  # bytes and cost in one sortable number
    bytes_, total, back = np.zeros(1, np.int64), np.zeros(1, np.int64), []
    for layer in range(len(cost)):
        b = (bytes_[:, None] + taken[layer]).ravel()
        c = (total[:, None] + cost[layer]).ravel()
        hopeful = c + rest[layer] - price * (budget - b) <= good * (1 + 1e-9) + 1e-6
        fits = np.flatnonzero((b <= budget - least[layer]) & hopeful)
        order = fits[np.argsort(b[fits] * scale + c[fits])]
        running = np.minimum.accumulate(c[order])
        keep = order[np.append(True, running[1:] < running[:-1])]
        back.append(keep)
        bytes_, total = b[keep], c[keep]
    at, split = int(np.argmin(total)), []
    for keep in back[::-1]:
        at, slot = divmod(int(keep[at]), cost.shape[1])
        split.append(slot + 1)
    return np.array(split[::-1])


def _multiplier(cost: np.ndarray, taken: np.ndarray, budget: int) -> tuple[float, int]:
    """A price per byte at which buying cheapest per layer just fits the budget, and the cost of what it buys."""
    layers = np.arange(len(cost))

    def buy(price):
        choice = (cost + price * taken).argmin(1)
        return int(taken[layers, choice].sum()), int(cost[layers, choice].sum())

    low, high = 0.0, float(cost.max() + 1)  # at the high price every layer takes one slot
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if buy(middle)[0] <= budget else (middle, high)
    return high, buy(high)[1]


def summary(trace: Trace, policies="lru,belady,belady-bypass", slots=None, **settings) -> pd.DataFrame:
    """Curves beside the bounds: `curve` with a column `gap_captured` = (h - lru) / (belady-bypass - lru) at each size."""
    names = list(dict.fromkeys([*registry.parse(policies), "lru", "belady-bypass"]))
    table = curve(trace, names, slots, progress=False, **settings)
    rates = {name: part.set_index("slots")["hit_rate"] for name, part in table.groupby("policy", sort=False)}
    low, high = (table["slots"].map(rates[name]) for name in ("lru", "belady-bypass"))
    table["gap_captured"] = ratio(table["hit_rate"] - low, (high - low).where(high > low, 0.0))
    return table


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _one_size(trace: Trace, contract) -> bool:
    return contract.scope == "layer" or trace.expert_bytes is None or len(set(trace.expert_bytes.tolist())) == 1


__all__ = ["allocate", "best_split", "cycle", "gap", "miss_split", "regime", "summary", "too_small", "warnings"]
