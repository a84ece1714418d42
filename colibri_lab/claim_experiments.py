"""The experiments behind `claims`: each measures one thing in a second or two and returns its numbers as a dict.

Nothing here knows what was claimed. Times are medians of `timing.race`; `low` and `high` bound eight of ten samples.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

import numpy as np

from . import kernels, machine, workloads
from .checkpoint.families import read_config
from .engine.memory import BLOCK, MemoryPool
from .errors import CompileError, ModelError
from .front import find_model, project_root
from .kernels import toolchain
from .limits import measure_limits
from .timing import race
from .trace import load_trace
from .tune.shapes import PRESETS, find_shape

PROMPT = "def read_lines(path):"
TRACES = {
    "OLMoE": "warp_olmoe_1b7b_299.jsonl",
    "Qwen3": "bigmoe_qwen.route.csv",
    "colibri-tiny": "colibri_tiny_six_domains.parquet",
}
NAIVE = """
extern "C" void product(const float* x, const float* w, float* out, int tokens, int rows, int cols) {
    for (int t = 0; t < tokens; ++t)
        for (int r = 0; r < rows; ++r) {
            float sum = 0;
            for (int c = 0; c < cols; ++c) sum += x[t * cols + c] * w[r * cols + c];
            out[t * rows + r] = sum;
        }
}
"""


@cache
def _trace(name: str):
    return load_trace(project_root() / "data/traces" / TRACES[name])


def _ratio(times: dict, slow: str, fast: str) -> float:
    return times[slow].median_s / times[fast].median_s


# ---- memory


def pool_latency() -> dict:
    """Nanoseconds of one allocation and release: of a block in a pool whose front is full to some percent, and of two blocks
    where every second block of the front is free, so that none of those holes will do."""
    contenders, pools = {}, []
    for percent, blocks, every in ((0, 1, 0), (50, 1, 0), (95, 1, 0), (95, 2, 2)):
        pool = MemoryPool(4096 * BLOCK, warn_above=None)
        pools.append(pool)  # alive while it is raced
        taken = [pool.allocate(BLOCK, "other") for _ in range(4096 * percent // 100)]
        for offset in taken[::every] if every else ():
            pool.release(offset)
        allocate, release, size = pool._core.allocate, pool._core.release, blocks * BLOCK
        name = f"at_{percent}_percent_ns" if not every else "past_holes_ns"
        contenders[name] = lambda allocate=allocate, release=release, size=size: release(allocate(size, False, 5))
    times = race(contenders, rounds=7, budget_s=0.003)
    return {name: 1e9 * timing.median_s for name, timing in times.items()}


def arena_ratio() -> dict:
    """Reserved over needed bytes of the arenas of the shipped model."""
    from .tune.memory_plan import memory_plan

    return {"ratio": memory_plan("colibri-tiny", check=False).scratch_ratio}


def scratch_by_depth() -> dict:
    """Peak of the arenas of the same model with 2 and with 6 layers, bytes."""
    import dataclasses

    from .config import resolve
    from .engine.sizes import arena_peaks

    config, settings = read_config(find_model("colibri-tiny")), resolve({}, "open")
    cut = {n: dataclasses.replace(config, num_layers=n, ffn=("moe",) * n, windows=(None,) * n) for n in (2, 6)}
    return {f"layers_{n}_bytes": sum(arena_peaks(c, 64, settings).values()) for n, c in cut.items()}


def kv_bytes_per_token() -> dict:
    """Bytes of keys and values in fp16 per token and layer, for the published models."""
    return {name: 2 * shape.kv_elements for name, shape in PRESETS.items()}


def paged_saving(longest: int = 131072, page: int = 256) -> dict:
    """Share of KV memory that pages save when lengths are spread evenly up to `longest`."""
    lengths = np.random.default_rng(0).integers(1, longest + 1, 2000)
    held = (-(-lengths // page) * page).mean() / longest
    return {"saving_even_lengths": float(1 - held)}


# ---- cache


def weighted_gain() -> dict:
    """Percentage points that weighted-lru hits more than lru in decode, by trace, at an eighth to a half of the experts."""
    found = {}
    for name in TRACES:
        trace = _trace(name)
        for share in (8, 4, 2):
            slots = max(trace.num_experts // share, trace.k)
            rates = [
                trace.replay(p, slots, phase="decode").attrs["totals"]["hit_rate"] for p in ("weighted-lru", "lru")
            ]
            found[f"{name}, {slots} slots"] = 100 * (rates[0] - rates[1])
    return found


def small_pool() -> dict:
    """Hit rate of lru with 16 and 24 slots shared by all layers, by trace."""
    return {
        f"{name}, {slots} slots": _trace(name).replay("lru", slots, scope="global").attrs["totals"]["hit_rate"]
        for name in TRACES
        for slots in (16, 24)
    }


def slots_cost() -> dict:
    """Bytes that 8 more slots take for OLMoE (7 billion weights, 1.3 active) in int8: in one pool, and in each layer."""
    shape = find_shape("OLMoE-1B-7B").in_format("int8")
    return {"one_pool_bytes": 8 * shape.block_bytes, "each_layer_bytes": 8 * shape.block_bytes * len(shape.moe_layers)}


def router_share() -> dict:
    """Hit rate and the router's share of decode time with few and with many slots, on a modelled disk."""
    import colibri_lab as cl

    lab, found = cl.open("colibri-tiny", storage="modelled", disk_bandwidth="200 MB/s"), {}
    for slots in (4, 32):
        lab.configure(expert_cache_slots=slots)
        run = lab.generate(PROMPT, max_tokens=60, temperature=0.7, seed=1)
        share = run.stages.query("phase == 'decode'").set_index("stage").seconds
        found |= {f"hit_rate_{slots}_slots": _hits(run),
                  f"router_share_{slots}_slots": float(share["router"] / share.sum())}  # fmt: skip
    return found


def _hits(run) -> float:
    decode = run.cache.query("phase == 'decode'")[["hits", "misses"]].sum()
    return float(decode.hits / decode.sum())


def warm_up() -> dict:
    """Milliseconds to the first token and per later token, after a cold start and after a dummy run, on a modelled disk."""
    import colibri_lab as cl

    lab, found = cl.open("colibri-tiny", storage="modelled", disk_bandwidth="200 MB/s", expert_cache_slots=32), {}
    lab.generate("a", max_tokens=2)  # kernels and pages of the process itself
    for name in ("cold", "warm"):
        if name == "cold":
            lab.reset_cache()
        run = lab.generate(PROMPT, max_tokens=20, temperature=0.0, stop_at_eos=False)
        found |= {f"{name}_first_ms": 1e3 * run.ttft_s, f"{name}_later_ms": 1e3 / run.decode_tokens_per_s}
    return found


# ---- formats


def formats() -> dict:
    """Bytes of the experts relative to 16 bits, and the change of the loss in percent with its uncertainty, on the texts
    of six domains."""
    import colibri_lab as cl

    from .rounding import Survey

    survey = Survey(cl.open("colibri-tiny", expert_cache_slots=32))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without router calibration")  # what the claims are about has none either
        survey.measure_all({name: {"quantize": name} for name in ("int8", "int4-g64", "int4-row")}, progress=False)
    table, found = survey.table, {}
    for name in ("int8", "int4-g64", "int4-row"):
        row = table.loc[name]
        found[name] = {
            "bytes_share": float(row.expert_MB / table.expert_MB.iloc[0]),
            "change_percent": float(row.change_percent), "plus_minus": float(row.plus_minus),
        }  # fmt: skip
    return found


def container_ratio() -> dict:
    """Bytes of the converted shipped model over those of its checkpoint."""
    from .front import container_of

    source, copy = find_model("colibri-tiny"), container_of("colibri-tiny", progress=False)
    weights = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    return {"ratio": sum(p.stat().st_size for p in copy.rglob("*.bin")) / weights}


# ---- kernels


def product_speed(tokens: int = 64) -> dict:
    """Speed of the float32 product of (64, 2048) and (1024, 2048) over three plain loops and over numpy's BLAS, each on one
    thread, by the fastest tenth of the samples."""
    work, rng = workloads.gemm("fp32", tokens), np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((tokens, 2048), (1024, 2048)))
    out = np.empty((tokens, 1024), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        naive = _compiled(NAIVE, Path(folder))
        naive.product.restype = None
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, w, out)]
        contenders = {"own": work.call(threads=1), "naive": lambda: naive.product(*pointers, tokens, 1024, 2048)}
        times = race(contenders, rounds=4, budget_s=0.02, patience=2)
    own = times["own"].low_s
    return {"over_naive": times["naive"].low_s / own, "of_blas": _blas_s(tokens) / own}


def _blas_s(tokens: int) -> float:
    """Seconds of the same product by numpy in a process of its own, since BLAS takes its number of threads once and for all."""
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1")
    code = (
        "import numpy as np, time; r = np.random.default_rng(0)\n"
        f"x, w = (r.normal(size=s).astype('f4') for s in (({tokens}, 2048), (1024, 2048)))\n"
        "def once():\n    t = time.perf_counter(); x @ w.T; return time.perf_counter() - t\n"
        "print(sorted(once() for _ in range(40))[4])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | one, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def _compiled(source: str, folder: Path) -> ctypes.CDLL:
    path, library = folder / "naive.cpp", folder / "naive.so"
    path.write_text(source)
    command = [*toolchain.find_compiler(), "-O2", "-shared", "-fPIC", str(path), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{path.name}: {done.stderr.strip()[:400]}")
    return ctypes.CDLL(str(library))


def expert_layouts() -> dict:
    """GB of int8 weights per second of one token's 8 experts: where they lie, copied together first, and with all matrices
    of a kind stacked."""
    threads = machine.cores()[0]
    works = {layout: workloads.ffn("int8", 1, experts=16, layout=layout, int8_activations=True)
             for layout in ("slots", "gathered", "stacked")}  # fmt: skip
    times = race({name: w.call(threads=threads) for name, w in works.items()}, rounds=7, threads=threads, patience=3)
    return {f"{name}_GB_per_s": works[name].bytes / times[name].median_s / 1e9 for name in works}


def sigmoid() -> dict:
    """Largest error of the polynomial sigmoid on [-20, 20], and how many times faster than the exact one it is."""
    silu = kernels.load("ffn").silu
    x = np.linspace(-20, 20, 400_001, dtype=np.float32)
    exact, near = np.empty_like(x), np.empty_like(x)
    silu(x, near, False)
    truth = 1 / (1 + np.exp(-x.astype(np.float64)))
    apart = np.abs(x) > 1e-3
    error = float(np.abs(near[apart] / x[apart].astype(np.float64) - truth[apart]).max())
    times = race({"exact": lambda: silu(x, exact, True), "polynomial": lambda: silu(x, near, False)}, rounds=7)
    return {"error": error, "times_faster": _ratio(times, "exact", "polynomial")}


def experts_at_once() -> dict:
    """Decode tokens/s with 1, 4 and 8 experts computed at once, everything in memory, and the physical cores."""
    import colibri_lab as cl

    speeds = {"cores": machine.cores()[0]}
    for count in (1, 4, 8):
        lab = cl.open("colibri-tiny", expert_cache_slots=32, expert_parallelism=count)
        lab.warmup()
        runs = [lab.generate(PROMPT, max_tokens=40, temperature=0.0, stop_at_eos=False) for _ in range(3)]
        speeds[f"at_once_{count}"] = float(np.median([run.decode_tokens_per_s for run in runs]))
    return speeds


def same_choice() -> dict:
    """Share of tokens for which the largest raw logits and the largest softmax probabilities are the same experts."""
    logits = np.random.default_rng(0).normal(0, 3, (5000, 64)).astype(np.float32)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    chosen = [np.argsort(-scores, axis=1, kind="stable")[:, :8] for scores in (logits, shares)]
    return {"same": float((chosen[0] == chosen[1]).all(1).mean())}


# ---- hardware


def this_machine() -> dict:
    """CPU, physical cores, GB of RAM, and whether the CPU computes in 16-bit floats with AVX-512 (None: not told)."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = None
    return {"cpu": machine.cpu_name(), "cores": machine.cores()[0], "ram_GB": machine.memory()[0] / 1e9,
            "avx512_fp16": None if flags is None else "avx512_fp16" in flags}  # fmt: skip


def reference_model() -> dict:
    """Whether a model of 6 to 8 billion weights with 1.1 to 1.5 active is in the project's data, and this machine."""
    for folder in sorted((project_root() / "data").glob("*/config.json")):
        try:
            shape = find_shape(folder.parent)
        except ModelError:
            continue
        if 6e9 < shape.total_params < 8e9 and 1.1e9 < shape.active_params < 1.5e9:
            return {**this_machine(), "model": shape.name}
    return {**this_machine(), "model": None}


def memory_bandwidth() -> dict:
    """GB per second that all cores read from memory here."""
    return {"here_GB_per_s": measure_limits(rounds=3).bytes_per_s / 1e9}
