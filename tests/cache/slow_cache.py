"""The expert cache again, slow and obvious: sets, lists and `min`, written from the rules and not from the C++.

`simulate` plays a list of events through one pool. Policies hold what they need in plain dicts; a choice looks at every
candidate. Blocks are ids of the pool; `layer_of(id) = id // blocks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEVER = math.inf


@dataclass
class Clock:
    """What the rules may know about time."""

    now: int = 0  # events of the pool (accesses under serial)
    passes: int = 0
    accesses: int = 0
    layer: int = 0


@dataclass
class Policy:
    slots: int
    clock: Clock
    blocks: int = 1 << 30
    layers: int = 1
    params: dict = field(default_factory=dict)

    def __post_init__(self):
        self.start()

    def start(self): ...
    def miss(self, x): ...
    def hit(self, x, weight, next_use): ...
    def insert(self, x, weight, next_use): ...
    def evict(self, x): ...


class Lru(Policy):
    def start(self):
        self.order = []  # oldest first

    def insert(self, x, weight, next_use):
        self.order.append(x)

    def hit(self, x, weight, next_use):
        self.order.remove(x)
        self.order.append(x)

    def evict(self, x):
        self.order.remove(x)

    def victim(self, pinned):
        return next(x for x in self.order if x not in pinned)


class Fifo(Lru):
    def hit(self, x, weight, next_use):
        pass


class ClockPolicy(Fifo):
    def start(self):
        super().start()
        self.counter = {}

    def insert(self, x, weight, next_use):
        super().insert(x, weight, next_use)
        self.counter[x] = 0

    def hit(self, x, weight, next_use):
        self.counter[x] = min(self.counter[x] + 1, 2 ** int(self.params.get("bits", 1)) - 1)

    def victim(self, pinned):
        while True:
            x = self.order[0]
            if x not in pinned and self.counter[x] == 0:
                return x
            if x not in pinned:
                self.counter[x] -= 1
            self.order.append(self.order.pop(0))


class Sieve(Fifo):
    def start(self):
        super().start()
        self.visited, self.hand = {}, None

    def insert(self, x, weight, next_use):
        super().insert(x, weight, next_use)
        self.visited[x] = False

    def hit(self, x, weight, next_use):
        self.visited[x] = True

    def victim(self, pinned):
        at = 0 if self.hand is None else self.order.index(self.hand)
        while True:
            x = self.order[at]
            if x not in pinned and not self.visited[x]:
                self.hand = x
                return x
            if x not in pinned:
                self.visited[x] = False
            at = (at + 1) % len(self.order)

    def evict(self, x):
        if self.hand == x:
            at = self.order.index(x) + 1
            self.hand = self.order[at] if at < len(self.order) else None
        super().evict(x)


class Scored(Policy):
    """Evicts min of (score(x), x) over what it holds."""

    history = True

    def start(self):
        self.held, self.uses, self.last, self.last_pass, self.times, self.mass = set(), {}, {}, {}, {}, {}

    def use(self, x, weight):
        self.uses[x] = self.uses.get(x, 0) + 1
        self.mass[x] = self.decayed(x) + self.unit(weight)
        self.last[x] = self.clock.now
        self.last_pass[x] = self.clock.passes
        self.last_access = getattr(self, "last_access", {})
        self.last_access[x] = self.clock.accesses
        self.times.setdefault(x, []).append(self.clock.now)

    def unit(self, weight):
        return 1.0

    def decayed(self, x):
        half = self.params.get("half_life", 16)
        return self.mass.get(x, 0.0) * 2 ** (-(self.clock.passes - self.last_pass.get(x, 0)) / half)

    def insert(self, x, weight, next_use):
        if not self.history:
            self.uses.pop(x, None)
        self.held.add(x)
        self.use(x, weight)

    def hit(self, x, weight, next_use):
        self.use(x, weight)

    def evict(self, x):
        self.held.remove(x)

    def victim(self, pinned):
        return min((x for x in self.held if x not in pinned), key=lambda x: (self.score(x), x))


class Lfu(Scored):
    def score(self, x):
        return self.uses[x], self.last[x]


class LfuInCache(Lfu):
    history = False


class LfuAged(Scored):
    def score(self, x):
        return round(math.log2(self.decayed(x)), 9) if self.mass[x] else -math.inf


class GateWeighted(LfuAged):
    def unit(self, weight):
        return weight


class WeightedLru(Scored):
    history = False

    def score(self, x):
        age = self.clock.passes - self.last_pass[x]
        return round(math.log2(self.uses[x]) - age / self.params.get("half_life", 8), 9)


class Lfru(Scored):
    def score(self, x):
        from fractions import Fraction

        return Fraction(self.uses[x], self.clock.passes - self.last_pass[x] + 1)


class ColibriLfru(Scored):
    def score(self, x):
        return self.uses[x] * 256 + max(0, 255 - (self.clock.accesses - self.last_access[x]))


class LruK(Scored):
    def score(self, x):
        k = int(self.params.get("k", 2))
        return self.times[x][-k] if len(self.times[x]) >= k else -1, self.last[x]


class LayerAware(Scored):
    def score(self, x):
        layer, now = x // self.blocks, self.clock.layer
        age = self.clock.passes - self.last_pass[x] - (layer > now)
        ahead = layer - now if layer > now else layer - now + self.layers
        return -age, -ahead, self.last[x]


class Belady(Policy):
    def start(self):
        self.next = {}

    def insert(self, x, weight, next_use):
        self.next[x] = next_use

    hit = insert

    def evict(self, x):
        del self.next[x]

    def victim(self, pinned):
        return max((x for x in self.next if x not in pinned), key=lambda x: (self.next[x], -x))


class Slru(Policy):
    def start(self):
        self.probation, self.safe = [], []  # oldest first

    def insert(self, x, weight, next_use):
        self.probation.append(x)

    def hit(self, x, weight, next_use):
        (self.safe if x in self.safe else self.probation).remove(x)
        self.safe.append(x)
        while len(self.safe) > int(self.params.get("protected", 0.5) * self.slots):
            self.probation.append(self.safe.pop(0))

    def evict(self, x):
        (self.safe if x in self.safe else self.probation).remove(x)

    def victim(self, pinned):
        return next(x for x in self.probation + self.safe if x not in pinned)


class TwoQ(Policy):
    def start(self):
        self.fifo, self.main, self.ghosts, self.again = [], [], [], set()
        self.most_in = max(1, _round(self.params.get("in", 0.25) * self.slots))
        self.most_out = max(1, _round(self.params.get("out", 0.5) * self.slots))

    def miss(self, x):
        if x in self.ghosts:
            self.ghosts.remove(x)
            self.again.add(x)

    def insert(self, x, weight, next_use):
        if x in self.ghosts:
            self.ghosts.remove(x)
        (self.main if x in self.again else self.fifo).append(x)
        self.again.discard(x)

    def hit(self, x, weight, next_use):
        if x in self.main:
            self.main.remove(x)
            self.main.append(x)

    def evict(self, x):
        if x in self.main:
            self.main.remove(x)
        else:
            self.fifo.remove(x)
            self.ghosts.append(x)
            self.ghosts = self.ghosts[-self.most_out :]

    def victim(self, pinned):
        order = self.fifo + self.main if len(self.fifo) > self.most_in else self.main + self.fifo
        return next(x for x in order if x not in pinned)


class Arc(Policy):
    def start(self):
        self.t1, self.t2, self.b1, self.b2, self.again = [], [], [], [], set()
        self.target, self.from_b2 = 0.0, False

    def miss(self, x):
        if x in self.b1:
            self.target = min(self.slots, self.target + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(x)
            self.again.add(x)
        elif x in self.b2:
            self.target = max(0.0, self.target - max(1.0, len(self.b1) / len(self.b2)))
            self.from_b2 = True
            self.b2.remove(x)
            self.again.add(x)

    def insert(self, x, weight, next_use):
        self.from_b2 = False
        for ghosts in (self.b1, self.b2):
            if x in ghosts:
                ghosts.remove(x)
        (self.t2 if x in self.again else self.t1).append(x)
        self.again.discard(x)
        while self.b1 and len(self.t1) + len(self.b1) > self.slots:
            self.b1.pop(0)
        while self.b2 and len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.slots:
            self.b2.pop(0)

    def hit(self, x, weight, next_use):
        self.from_b2 = False
        (self.t1 if x in self.t1 else self.t2).remove(x)
        self.t2.append(x)

    def evict(self, x):
        once = x in self.t1
        (self.t1 if once else self.t2).remove(x)
        (self.b1 if once else self.b2).append(x)

    def victim(self, pinned):
        first = len(self.t1) > self.target or (self.from_b2 and len(self.t1) == self.target)
        order = self.t1 + self.t2 if first else self.t2 + self.t1
        return next(x for x in order if x not in pinned)


class S3Fifo(Policy):
    def start(self):
        self.small, self.main, self.ghosts, self.again, self.count = [], [], [], set(), {}
        self.small_slots = max(1, _round(self.params.get("small", 0.1) * self.slots))
        self.memory = max(1, self.slots - self.small_slots)

    def miss(self, x):
        if x in self.ghosts:
            self.ghosts.remove(x)
            self.again.add(x)

    def insert(self, x, weight, next_use):
        if x in self.ghosts:
            self.ghosts.remove(x)
        (self.main if x in self.again else self.small).append(x)
        self.again.discard(x)
        self.count[x] = 0

    def hit(self, x, weight, next_use):
        self.count[x] = min(3, self.count[x] + 1)

    def evict(self, x):
        if x in self.main:
            self.main.remove(x)
        else:
            self.small.remove(x)
            self.ghosts.append(x)
            self.ghosts = self.ghosts[-self.memory :]

    def victim(self, pinned):
        while True:
            s = next((x for x in self.small if x not in pinned), None)
            m = next((x for x in self.main if x not in pinned), None)
            if s is not None and (len(self.small) >= self.small_slots or m is None):
                if self.count[s] < self.params.get("threshold", 2):
                    return s
                self.small.remove(s)
                self.main.append(s)
                self.count[s] = 0
            elif self.count[m] == 0:
                return m
            else:
                self.count[m] -= 1
                self.main.remove(m)
                self.main.append(m)


def _round(x: float) -> int:
    return math.floor(x + 0.5)


POLICIES = {
    "lru": Lru, "fifo": Fifo, "clock": ClockPolicy, "sieve": Sieve, "lfu": Lfu, "lfu-in-cache": LfuInCache,
    "lfu-aged": LfuAged, "gate-weighted": GateWeighted, "weighted-lru": WeightedLru, "lfru": Lfru,
    "colibri-lfru": ColibriLfru, "lru-k": LruK, "layer-aware": LayerAware, "least-stale": Lru, "slru": Slru, "2q": TwoQ,
    "arc": Arc, "s3-fifo": S3Fifo, "belady": Belady, "belady-bypass": Belady,
}  # fmt: skip


@dataclass
class Result:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    drops: int = 0
    full_events: int = 0
    residents: list = field(default_factory=list)  # after each event, one set for all pools: (layer, block)
    hit_sets: list = field(default_factory=list)  # after each event: the members that hit


def simulate(
    events, policy, slots, *, layers=1, blocks, scope="layer", lookup="atomic", admission="forced", params=None
):
    """Play `events`, a list of (layer, [distinct blocks in served order], [weights]), and return the `Result`.

    Slots are per layer, or of the one pool under scope global.
    """
    if policy == "belady-bypass":
        admission = "bypass"
    pools = 1 if scope == "global" else layers
    base = [layer * blocks if scope == "global" else 0 for layer in range(layers)]
    clocks = [Clock() for _ in range(pools)]
    keep = [
        POLICIES[policy](slots, clocks[p], blocks, layers if scope == "global" else 1, params or {})
        for p in range(pools)
    ]
    resident = [set() for _ in range(pools)]
    result = Result()
    passes, accesses, before = 0, 0, None
    for e, (layer, members, weights) in enumerate(events):
        if before is not None and layer <= before:
            passes += 1
        before = layer
        p = 0 if scope == "global" else layer
        clock, rule, inside = clocks[p], keep[p], resident[p]
        clock.passes, clock.layer = passes, layer if scope == "global" else 0
        members = [base[layer] + x for x in members]
        weight = dict(zip(members, weights, strict=True))
        hits_before = result.misses
        hit_set = set()

        def evict(pinned, new, rule=rule, inside=inside):
            x = rule.victim(pinned)
            rule.evict(x)
            inside.remove(x)
            if x in new:
                result.drops += 1
            else:
                result.evictions += 1

        def serve(x, i, rule=rule, inside=inside, weight=weight, hit_set=hit_set, layer=layer, e=e):
            use = weight[x], next_use(events, e, layer, x - base[layer], i, lookup)
            if x in inside:
                result.hits += 1
                hit_set.add(x - base[layer])
                rule.hit(x, *use)
            else:
                result.misses += 1
                inside.add(x)
                rule.insert(x, *use)

        if lookup == "atomic":
            members = sorted(members)
            clock.now += 1
            clock.accesses = accesses
            new = [x for x in members if x not in inside]
            for x in new:
                rule.miss(x)
            if admission == "forced":
                while len(inside) + len(new) > slots and inside - set(members):
                    evict(set(members), ())
            for i, x in enumerate(members):
                serve(x, i)
            while len(inside) > slots:
                evict((), new)
        else:
            if lookup == "serial-hits-first":
                members = [x for x in members if x in inside] + [x for x in members if x not in inside]
            for i, x in enumerate(members):
                clock.now += 1
                clock.accesses = accesses + i
                new = [] if x in inside else [x]
                if new:
                    rule.miss(x)
                    if admission == "forced" and len(inside) == slots:
                        evict((), ())
                serve(x, i)
                while len(inside) > slots:
                    evict((), new)
        accesses += len(members)
        result.full_events += result.misses == hits_before
        result.hit_sets.append(hit_set)
        result.residents.append(
            {(x // blocks if scope == "global" else q, x % blocks) for q in range(pools) for x in resident[q]}
        )
    return result


def next_use(events, e, layer, block, i, lookup):
    """When this block of this layer is wanted again: the event, and under serial its place in it."""
    for later in range(e + 1, len(events)):
        if events[later][0] == layer and block in events[later][1]:
            place = 0 if lookup == "atomic" else events[later][1].index(block)
            return later * 1000 + place
    return NEVER
