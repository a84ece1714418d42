"""Replay speed beside libCacheSim (the `test` extra), interleaved in one program on one thread.

    python benchmarks/replay.py [--repeats 5] [--json] [--picture benchmarks/results/olmoe_curves.png]

Workloads: 1 M Zipf(0.8) accesses over 4096 objects at 512 slots, and the OLMoE trace repeated at 16 slots per layer.
On the first every access is an event of one block, so both programs do the same work and their hits can be compared.
The peer gets its records from an oracleGeneral file in the page cache, by its own C++ reader. It is timed as it comes (a
hash table of 2^24 entries) and tuned (2^14 entries: enough for the objects there are, and several times faster); `ratio`
is against the first, `ratio_tuned` against the second. Times are CPU seconds of the one thread that works, medians of the
repeats, which are interleaved; spread is (worst - best) / median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import libcachesim as peer
import numpy as np

import colibri_lab as cl
from colibri_lab import kernels
from colibri_lab.ui import trace_plots

ROOT = Path(__file__).resolve().parent.parent
RECORD = np.dtype([("time", "<u4"), ("obj_id", "<u8"), ("size", "<u4"), ("next_access_vtime", "<i8")])
PEERS = {
    "lru": peer.LRU, "fifo": peer.FIFO, "clock": peer.Clock, "sieve": peer.Sieve, "arc": peer.ARC, "slru": peer.SLRU,
    "lfu-in-cache": peer.LFU, "2q": peer.TwoQ, "s3-fifo": peer.S3FIFO, "belady": peer.Belady,
}  # fmt: skip
OURS = {"lfu-in-cache": ("lfu", "lfu-in-cache")}  # the peer's LFU forgets what leaves; both of ours are timed
TUNED = 14


def zipf(n=1_000_000, objects=4096, alpha=0.8, seed=1) -> np.ndarray:
    """uint16 (n,): accesses to `objects` whose popularity falls with rank^-alpha, ranks shuffled."""
    rng = np.random.default_rng(seed)
    p = np.arange(1, objects + 1) ** -alpha
    return rng.permutation(objects)[rng.choice(objects, n, p=p / p.sum())].astype(np.uint16)


def records(keys: np.ndarray, path: Path) -> Path:
    """Write accesses as oracleGeneral records of size 1."""
    table = np.zeros(len(keys), RECORD)
    table["time"] = np.arange(len(keys)) + 1
    table["obj_id"] = keys.astype(np.uint64) + 1
    table["size"] = 1
    last, nexts = {}, np.full(len(keys), np.iinfo(np.int64).max, np.int64)
    for i in range(len(keys) - 1, -1, -1):
        nexts[i] = last.get(keys[i], np.iinfo(np.int64).max)
        last[keys[i]] = i
    table["next_access_vtime"] = nexts
    path.write_bytes(table.tobytes())
    return path


def stream(offsets, experts, layer, layers: int, blocks: int):
    events = len(layer)
    return kernels.load("replay").Stream.make(
        layers, blocks, offsets, experts, layer, np.ones(events, np.uint8), np.zeros(events, np.int32)
    )


def timed(work) -> tuple[float, object]:
    start = time.thread_time()
    result = work()
    return time.thread_time() - start, result


def race(contenders: dict, repeats: int) -> dict:
    """Run every contender once per round, round after round; {name: (median_s, spread, result)}."""
    times, results = {name: [] for name in contenders}, {}
    for _ in range(repeats):
        for name, work in contenders.items():
            seconds, results[name] = timed(work)
            times[name].append(seconds)
    return {
        name: (statistics.median(t), (max(t) - min(t)) / statistics.median(t), results[name])
        for name, t in times.items()
    }


def compare(workload: str, mine, slots: int, path: Path, peer_slots: int, accesses: int, repeats: int) -> list[dict]:
    """A row per policy: million accesses per second of both, median of the repeats."""
    native = kernels.load("replay")
    reader = peer.TraceReader(str(path), peer.TraceType.ORACLE_GENERAL_TRACE)
    rows = []
    for theirs, make in PEERS.items():
        for policy in OURS.get(theirs, (theirs,)):

            def run_peer(make=make, hashpower=24):
                reader.reset()
                return make(peer_slots, hashpower=hashpower).process_trace(reader)[0]

            contenders = {
                "ours": lambda p=policy: native.replay(mine, p, slots),
                "peer": run_peer,
                "tuned": lambda run=run_peer: run(hashpower=TUNED),
            }
            found = race(contenders, repeats)
            (ours_s, ours_spread, counts), (peer_s, peer_spread, miss) = found["ours"], found["peer"]
            rows.append(
                {
                    "workload": workload, "policy": policy, "ours_macc_s": accesses / ours_s / 1e6,
                    "peer_macc_s": accesses / peer_s / 1e6, "ratio": peer_s / ours_s,
                    "peer_tuned_macc_s": accesses / found["tuned"][0] / 1e6, "ratio_tuned": found["tuned"][0] / ours_s,
                    "ours_spread": ours_spread, "peer_spread": peer_spread,
                    "ours_hit_rate": int(counts["hits"].sum()) / accesses, "peer_hit_rate": 1 - float(miss),
                }
            )  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the OLMoE curves with both oracles, and measure nothing"
    )
    args = parser.parse_args()
    trace = cl.load_trace(ROOT / "data" / "traces" / "warp_olmoe_1b7b_299.jsonl")
    if args.picture:
        chosen = "lru,fifo,weighted-lru,lfru,s3-fifo,sieve,belady,belady-bypass"
        Path(args.picture).write_bytes(trace_plots.curves(trace.curve(policies=chosen)).png())
        return 0
    native = kernels.load("replay")
    with tempfile.TemporaryDirectory() as folder:
        keys = zipf()
        n = len(keys)
        simple = stream(np.arange(n + 1), keys, np.zeros(n, np.int32), 1, 4096)
        path = records(keys, Path(folder) / "zipf.bin")
        rows = compare("zipf", simple, 512, path, 512, n, args.repeats)

        events = trace.events()
        times = 26  # about 1 M accesses
        flat = np.tile(events.experts, times)
        layer = np.tile(events.layer_index, times)
        offsets = np.concatenate([[0], np.cumsum(np.tile(events.widths, times))])
        olmoe = stream(offsets, flat, layer, len(trace.layers), trace.num_experts)
        keys = np.repeat(layer, np.tile(events.widths, times)).astype(np.int64) * trace.num_experts + flat
        path_olmoe = records(keys, Path(folder) / "olmoe.bin")
        rows += compare("olmoe x 26", olmoe, 16, path_olmoe, 16 * len(trace.layers), len(flat), args.repeats)

        reader = peer.TraceReader(str(path), peer.TraceType.ORACLE_GENERAL_TRACE)

        def peer_curve():
            for slots in np.linspace(64, 4096, 64).astype(int):
                reader.reset()
                peer.LRU(int(slots)).process_trace(reader)

        curves = race({"ours": lambda: native.lru_curve(simple), "peer": peer_curve}, max(3, args.repeats // 2))
        (ours_s, ours_spread, _), (peer_s, peer_spread, _) = curves["ours"], curves["peer"]
        curve = {"ours_s": ours_s, "peer_s": peer_s, "ratio": peer_s / ours_s, "ours_sizes": 4096, "peer_sizes": 64,
                 "ours_spread": ours_spread, "peer_spread": peer_spread}  # fmt: skip
    result = {"policies": rows, "curve": curve}
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        "million accesses per second         ours   peer  ratio  tuned  ratio  spread: ours peer  hit rate: ours   peer"
    )
    for r in rows:
        print(
            f"{r['workload']:12s} {r['policy']:17s} {r['ours_macc_s']:8.1f} {r['peer_macc_s']:6.2f} {r['ratio']:6.1f} "
            f"{r['peer_tuned_macc_s']:6.1f} {r['ratio_tuned']:6.1f} {r['ours_spread']:13.0%} {r['peer_spread']:4.0%} "
            f"{r['ours_hit_rate']:15.4f} {r['peer_hit_rate']:6.4f}"
        )
    print(f"lru curve: all 4096 sizes in {curve['ours_s']:.3f} s, the peer's 64 sizes in {curve['peer_s']:.1f} s: "
          f"{curve['ratio']:.0f} x")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
