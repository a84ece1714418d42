"""Every replacement policy: its rule, its parameters and what it must know. The C++ classes are in cpp/policies.

A policy for experiments can be written in Python, as a callable `make(slots)` whose objects have `victim(candidates)`:

    class Mru:
        def __init__(self, slots): self.last = {}
        def hit(self, layer, block, now, weight): self.last[layer, block] = now
        insert = hit
        def victim(self, candidates): return max(candidates, key=self.last.get)

    trace.replay(policy=Mru, slots=8)

`insert`, `hit`, `evict(layer, block)` and `clear()` are called when they exist. `candidates` are (layer, block) pairs,
ascending, never members of the running event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..errors import SettingError, did_you_mean


@dataclass(frozen=True)
class Param:
    """A number that a policy takes: default, least and greatest value, meaning."""

    default: float
    low: float
    high: float
    help: str


@dataclass(frozen=True)
class Policy:
    """One row of the registry. `stack`: hits at every slot count come from one pass (curves.py).

    `needs`: "future" (an oracle: replay only), "gates" (router weights), "pins" (a set chosen from a history).
    """

    name: str
    rule: str
    params: dict[str, Param] = field(default_factory=dict)
    stack: bool = False
    needs: tuple[str, ...] = ()

    @property
    def oracle(self) -> bool:
        return "future" in self.needs


_HALF_LIFE = "forward passes (tokens while decoding) after which a use counts half"

_ALL = (
    Policy("lru", "the least recently used block leaves", stack=True),
    Policy("fifo", "the block resident longest leaves"),
    Policy("random", "any block leaves, all with the same chance (seeded)"),
    Policy("clock", "fifo with a second chance for blocks used since",
           {"bits": Param(1, 1, 7, "bits of the use counter")}),
    Policy("lfu", "the block with the fewest uses since the start leaves, uses out of the cache counted too", stack=True),
    Policy("lfu-in-cache", "the block with the fewest uses since it was loaded leaves"),
    Policy("lfu-aged", "the block with the least mass leaves; a use adds 1, masses halve every half_life",
           {"half_life": Param(16, 1e-3, 1e9, _HALF_LIFE)}),
    Policy("weighted-lru", "min of hits since loaded x 2^(-age / half_life) leaves: few hits and long unused, together",
           {"half_life": Param(8, 1e-3, 1e9, "forward passes without use after which hits count half")}),
    Policy("lfru", "min of uses since the start / (age + 1) leaves, age in forward passes"),
    Policy("colibri-lfru", "min of heat x 256 + max(0, 255 - accesses since last use) leaves: frequency, then recency"),
    Policy("slru", "blocks used twice are protected; the least recently used other block leaves",
           {"protected": Param(0.5, 0, 1, "share of the slots that may be protected")}),
    Policy("2q", "newcomers wait in a fifo, those wanted again after leaving it enter the lru list",
           {"in": Param(0.25, 0, 1, "share of the slots for newcomers"),
            "out": Param(0.5, 0, 100, "blocks remembered after leaving the fifo, as a share of the slots")}),
    Policy("arc", "two lru lists, used once and used again, whose shares follow the hits in their memories"),
    Policy("s3-fifo", "a small fifo filters newcomers before the main one",
           {"small": Param(0.1, 0, 1, "share of the slots for newcomers, at least one slot"),
            "threshold": Param(2, 1, 3, "uses that bring a newcomer into the main fifo")}),
    Policy("sieve", "a hand walks a fifo and takes the first block not used since it last passed"),
    Policy("lru-k", "the block whose k-th last use is oldest leaves",
           {"k": Param(2, 1, 16, "how many uses back")}),
    Policy("static-pin", "a fixed set chosen from a history stays, everything else streams through", needs=("pins",)),
    Policy("pin+lru", "part of the slots hold a fixed set chosen from a history, lru rules the rest", needs=("pins",)),
    Policy("least-stale", "blocks not touched in this forward pass first, then the least recently used: lru, "
           "because fetched-ahead blocks are kept apart"),
    Policy("layer-aware", "one pool for all layers: of the blocks unused for most runs of their layer, the one whose "
           "layer comes up last leaves"),
    Policy("gate-weighted", "the block with the least router weight leaves; weights of past uses halve every half_life",
           {"half_life": Param(16, 1e-3, 1e9, _HALF_LIFE)}, needs=("gates",)),
    Policy("belady", "the block whose next use is furthest away leaves; every missed block is kept", stack=True,
           needs=("future",)),
    Policy("belady-bypass", "after each event the blocks with the nearest next uses stay, missed or not: the bound",
           stack=True, needs=("future",)),
)  # fmt: skip

POLICIES: dict[str, Policy] = {p.name: p for p in _ALL}
PINNED_SHARE = 0.5  # of the slots, under pin+lru
ADMISSIONS = ("forced", "bypass")


def policy(name: str | Callable) -> Policy:
    """The registry's row for a name; a callable is a policy written in Python. Raises `SettingError`."""
    if callable(name):
        return Policy(getattr(name, "__name__", "python"), (name.__doc__ or "written in Python").strip().split("\n")[0])
    if name not in POLICIES:
        raise SettingError(f"unknown policy {name!r}; {did_you_mean(str(name), POLICIES)}")
    return POLICIES[name]


def parse(names: str | Callable | Iterable) -> list:
    """Policies from "lru,lfu", a list of names and callables, or "all". Raises `SettingError` on an unknown name."""
    if names == "all":
        return list(POLICIES)
    if isinstance(names, str):
        names = [part.strip() for part in names.split(",") if part.strip()]
    chosen = [names] if callable(names) else list(names)
    if not chosen:
        raise SettingError(f"no policy given; known: {', '.join(POLICIES)}")
    for name in chosen:
        policy(name)
    return chosen


def check_params(name: str | Callable, given: dict[str, float] | None) -> dict[str, float]:
    """`given`, checked against the policy's parameters. Raises `SettingError` naming policy, parameter and rule."""
    known = policy(name).params
    for key, value in (given or {}).items():
        if key not in known:
            have = ", ".join(known) or "none"
            raise SettingError(f"policy {name!r} has no parameter {key!r}; it has {have}")
        p = known[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not p.low <= value <= p.high:
            raise SettingError(f"parameter {key} of policy {name!r} must be {p.low:g} to {p.high:g}, got {value!r}")
    return {key: float(value) for key, value in (given or {}).items()}


def table() -> str:
    """The policies as a Markdown table."""
    rows = ["| policy | rule | parameters |", "|---|---|---|"]
    for p in POLICIES.values():
        params = "; ".join(f"`{key}` {q.default:g}: {q.help}" for key, q in p.params.items())
        rows.append(f"| `{p.name}` | {p.rule} | {params} |")
    return "\n".join(rows)
