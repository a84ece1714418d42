"""Hit rate at every number of slots.

Policies with the stack property (lru, lfu, both Beladys, a static set) give all slot counts in one pass over the trace,
equal to one replay per size; the others are replayed at each size, several at a time. Curves of those may rise and fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .. import kernels
from ..cache import policies as registry
from ..errors import SettingError
from .replay import PREFETCH, count, ratio
from .source import Contract, Size, Source, contract_of, in_threads, top_blocks, usable

if TYPE_CHECKING:
    from .table import Trace

SIZES = 64  # how many slot counts are replayed when there are too many to replay all
_COUNTS = ("accesses", "hits", "events", "full_events", "loads")


def curve(
    trace: Trace,
    policies: str | Callable | Iterable = "all",
    slots: Sequence[int | str] | None = None,
    *,
    by: str = "policy",
    params: dict[str, dict] | None = None,
    fit: Trace | None = None,
    threads: int | None = None,
    progress: bool = True,
    **settings,
) -> pd.DataFrame:
    """Hits of policies over slot counts: a row per policy and size, and per layer with `by="layer"`.

    policies   "all" (those this trace has the data for), "lru,lfu", a name, a callable, or a list of them
    slots      slot counts or bytes as text; by default all counts for one-pass policies, and for the others every count up
               to 128 blocks in a pool, else 64 counts spread evenly
    params     {policy: its parameters}
    fit        history for the static sets; without it they come from this trace, which flatters them
    settings   fields of `source.Contract`

    Columns: policy, slots, [layer,] accesses, hits, misses, hit_rate, events, full_events, full_event_hit_rate, loads,
    bytes_loaded (None without expert_bytes), prefetch_* when something is fetched ahead, one_pass.
    `.attrs["notes"]` says what was left out and why. Raises `SettingError` and `TraceError` as `replay` does; Ctrl-C
    stops it.
    """
    contract = contract_of(settings)
    if by not in ("policy", "layer"):
        raise SettingError(f"by must be policy or layer, got {by!r}")
    chosen, notes = usable(trace, policies)
    strange = [policy for policy in params or () if policy not in chosen]
    if strange:
        raise SettingError(f"params for {strange[0]!r}, which is not among the policies {chosen}")
    source = Source.of(trace, contract)
    most = source.blocks * (len(trace.layers) if contract.scope == "global" else 1)
    every = list(range(1, most + 1)) if slots is None else list(slots)
    some = every if slots is not None or most <= 128 else np.unique(np.linspace(1, most, SIZES).round()).astype(int)
    sizes = [Size.of(trace, size, contract) for size in every]

    def work(job, stop):
        policy, size = job
        if size is None:
            return _one_pass(source, contract, policy, [s.of_layer[0] for s in sizes], fit, stop)
        counts = count(trace, policy, size, contract, (params or {}).get(policy), fit=fit, stop=stop)
        names = _COUNTS + (PREFETCH if contract.prefetch != "none" else ())
        return counts.size.of_layer[:1], {name: counts[name][:, None] for name in names}

    jobs = []
    for policy in chosen:
        fast = one_pass(policy, contract) and not any(size.bytes for size in sizes)
        jobs += [(policy, None)] if fast else [(policy, size) for size in some]
    done = in_threads(work, jobs, threads, progress, "curve")
    parts = []
    for policy in chosen:
        mine = [found for job, found in zip(jobs, done, strict=True) if job[0] == policy]
        columns = {name: np.concatenate([found[1][name] for found in mine], axis=1) for name in mine[0][1]}
        fast = (policy, None) in jobs
        parts.append(_table(trace, contract, policy, np.concatenate([found[0] for found in mine]), columns, by, fast))
    table = pd.concat(parts, ignore_index=True)
    table.attrs = {
        "notes": notes + source.notes,
        "contract": vars(contract) | {"fit": "this trace" if fit is None else "another"},
    }
    return table


def one_pass(policy: str | Callable, contract: Contract) -> bool:
    """Whether this policy's hits at all sizes come from one pass under this contract."""
    known = not callable(policy) and (registry.policy(policy).stack or policy == "static-pin")
    return known and contract.lookup != "serial-hits-first" and contract.prefetch == "none"


def hit_table(
    trace: Trace, policy: str, *, fit: Trace | None = None, stop=None, **settings
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Hits (layers, most + 1) int64 at 0, 1, … slots, and accesses (layers,), of a one-pass policy."""
    contract = contract_of(settings)
    if not one_pass(policy, contract):
        raise SettingError(f"policy {policy!r} has no one-pass curve under this contract; use curve(…, slots=[…])")
    source = Source.of(trace, contract)
    accesses, _ = _histograms(source, contract, policy, fit, stop)
    return _cumulated(accesses), accesses.sum(1)


def _histograms(
    source: Source, contract: Contract, policy: str, fit: Trace | None, stop
) -> tuple[np.ndarray, np.ndarray]:
    """Accesses and events by the slots from which they hit, counted phase only: int64 (layers, most + 1), 0 = never."""
    native = kernels.load("replay")
    rest = {"first_counted": source.first_counted, "logical": contract.count == "logical", "stop": stop}
    forced = contract.admission == "forced" and policy != "belady-bypass"
    if policy == "lru":
        found = native.lru_curve(source.stream, **rest)
    elif policy == "lfu":
        found = native.lfu_curve(source.stream, forced, **rest)
    elif policy == "static-pin":
        found = native.static_curve(source.stream, _static_ranks(source, contract, fit), **rest)
    else:
        found = native.belady_curve(source.stream, forced, **rest)
    phases = {"all": slice(None), "prefill": slice(0, 1), "decode": slice(1, 2)}[contract.phase]
    return found[0][:, phases].sum(1), found[1][:, phases].sum(1)


def _static_ranks(source: Source, contract: Contract, fit: Trace | None) -> list[int]:
    """For each block of each pool, from how many slots on the static set holds it."""
    trace = source.trace
    most = source.blocks * (len(trace.layers) if contract.scope == "global" else 1)
    size = Size.of(trace, most, contract)
    ranks = np.zeros((len(trace.layers), source.blocks), int)
    order = top_blocks(trace if fit is None else fit, source, size, 1.0)
    for at, (layer, block) in enumerate(order):
        ranks[layer, block] = at % most + 1
    return ranks.ravel().tolist()


def _cumulated(histogram: np.ndarray) -> np.ndarray:
    """Hits at 0, 1, 2, … slots from a histogram whose entry 0 never hits."""
    return np.concatenate([np.zeros((len(histogram), 1), np.int64), np.cumsum(histogram[:, 1:], axis=1)], axis=1)


def _one_pass(source: Source, contract: Contract, policy: str, sizes: Sequence[int], fit, stop) -> tuple:
    """Sizes and columns (layers, sizes) from one walk over the trace."""
    accesses, events = _histograms(source, contract, policy, fit, stop)
    union = accesses
    if contract.count == "logical":  # what is read does not depend on how accesses are counted
        union, _ = _histograms(source, replace(contract, count="union"), policy, fit, stop)
    shape = (len(accesses), len(sizes))
    return np.array(sizes), {
        "accesses": np.broadcast_to(accesses.sum(1)[:, None], shape),
        "hits": _cumulated(accesses)[:, sizes],
        "events": np.broadcast_to(events.sum(1)[:, None], shape),
        "full_events": _cumulated(events)[:, sizes],
        "loads": union.sum(1)[:, None] - _cumulated(union)[:, sizes],
    }


def _table(
    trace: Trace, contract: Contract, policy, sizes: np.ndarray, columns: dict, by: str, fast: bool
) -> pd.DataFrame:
    """Rows of `curve` for one policy from columns (layers, sizes)."""
    layers = len(trace.layers)
    if trace.expert_bytes is not None:
        columns["bytes_loaded"] = columns["loads"] * (trace.expert_bytes * contract.block_size)[:, None]
    keys = {"policy": registry.policy(policy).name, "slots": sizes}
    if by == "layer":
        columns = {name: values.T.reshape(-1) for name, values in columns.items()}
        keys |= {"slots": np.repeat(sizes, layers), "layer": np.tile(trace.layers, len(sizes))}
    else:
        columns = {name: values.sum(0) for name, values in columns.items()}
    ahead = {name: columns[name] for name in PREFETCH if name in columns}
    found = sum((columns[name] for name in ("prefetch_timely", "prefetch_late") if name in columns), columns["hits"])
    return pd.DataFrame(
        keys
        | {
            "accesses": columns["accesses"],
            "hits": columns["hits"],
            "misses": columns["accesses"] - (columns["hits"] if contract.count == "logical" else found),
            "hit_rate": ratio(columns["hits"], columns["accesses"]),
            "events": columns["events"],
            "full_events": columns["full_events"],
            "full_event_hit_rate": ratio(columns["full_events"], columns["events"]),
            "loads": columns["loads"],
            "bytes_loaded": columns.get("bytes_loaded"),
            **ahead,
            "one_pass": fast,
        }
    )
