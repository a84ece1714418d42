"""Slow, obvious numpy twins of the kernels, and the parity checks that compare the two on awkward shapes.

`check_NAME(module)` yields (case, largest error, tolerance) for kernel NAME; `colibri_lab.kernels.check` runs it. Errors
are absolute, tolerances grow with the number of terms summed in float32.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .checkpoint import formats, packing
from .config import RouterConfig
from .engine.linear import ABSENT, KIND_CODES

Case = tuple[str, float, float]
SIZES = (1, 15, 31, 33, 64, 65, 257)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


def expert_ffn(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """x (tokens, hidden) → down(silu(gate x) * up x), in float64."""
    x, gate, up, down = (a.astype(np.float64) for a in (x, gate, up, down))
    g = x @ gate.T
    return (g * sigmoid(g) * (x @ up.T)) @ down.T


def int8_activations(x: np.ndarray) -> np.ndarray:
    """x (tokens, cols) rounded to int8 in groups of 64 columns, as the integer path of gemm sees it; float64."""
    out = np.zeros(x.shape)
    for first in range(0, x.shape[1], 64):
        part = x[:, first : first + 64]
        top = np.abs(part).max(axis=1, keepdims=True)
        inverse = np.divide(np.float32(127), top, where=top > 0, out=np.zeros_like(top))
        out[:, first : first + 64] = np.rint(part * inverse) * (top / np.float32(127)).astype(np.float64)
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary embedding of the first 2 * cos.shape[1] dims of x (tokens, heads, head_dim)."""
    out, half = x.astype(np.float64), cos.shape[1]
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    a, b = out[..., first].copy(), out[..., second].copy()
    c, s = cos[:, None, :], sin[:, None, :]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, past: int, window: int, scale: float) -> np.ndarray:
    """q (tokens, heads, d) at positions past …; k, v (positions, kv_heads, d) → (tokens, heads, d), in float64."""
    tokens, heads, _ = q.shape
    out = np.empty(q.shape)
    for t in range(tokens):
        last = past + t
        first = max(0, last - window + 1) if window else 0
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            score = (k[first : last + 1, kv].astype(np.float64) @ q[t, h].astype(np.float64)) * scale
            p = np.exp(score - score.max())
            out[t, h] = (p / p.sum()) @ v[first : last + 1, kv].astype(np.float64)
    return out


def stored(values: np.ndarray, format: str, factor: float = 1.0) -> tuple[np.ndarray, list[int], np.ndarray]:
    """A matrix as a container holds it: (bytes, descriptor, the float32 values that the format can represent)."""
    kind = formats.FORMATS[format]
    encoded = formats.encode(values, format, factor)
    starts, region = [], b""
    for part in packing.pack(encoded, kind, "rows16"):
        region += bytes(-len(region) % 64)
        starts.append(ABSENT if part is None else len(region))
        region += b"" if part is None else part.tobytes()
    place = [*values.shape, KIND_CODES[kind.kind], *starts, kind.group]
    return np.frombuffer(region, np.uint8), place, formats.decode(encoded, format, factor)


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max()) if found.size else 0.0


def check_threads(module) -> Iterator[Case]:
    x = np.arange(1000, dtype=np.float64)
    for threads in (1, 2, 4):
        out = np.zeros_like(x)
        module.square(x, out, threads)
        yield f"square, {threads} threads", _error(out, x * x), 0.0


def check_gemm(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for format, kind in formats.FORMATS.items():
        for rows, cols in zip(SIZES, reversed(SIZES), strict=True):
            for tokens in (1, 5):
                w, x = rng.normal(size=(rows, cols)), rng.normal(size=(tokens, cols)).astype(np.float32)
                factor = 4.0 if kind.scaled else 1.0
                memory, place, values = stored(w.astype(np.float32), format, factor)
                bias = rng.normal(size=rows).astype(np.float32)
                out = np.empty((tokens, rows), np.float32)
                module.matmul(x, memory, np.array(place, np.int64), factor, bias, out, 2, 16)
                wanted = x.astype(np.float64) @ values.astype(np.float64).T + bias
                yield (
                    f"{format} {tokens}x{cols} @ {rows}",
                    _error(out, wanted),
                    3e-7 * cols + (5e-6 if kind.scaled else 2e-6),
                )
            if kind.scaled:  # more tokens than one register tile, and a rest
                x = rng.normal(size=(13, cols)).astype(np.float32)
                out = np.empty((13, rows), np.float32)
                module.matmul(x, memory, np.array(place, np.int64), factor, None, out, 2, 16, True)
                wanted = int8_activations(x) @ values.astype(np.float64).T
                yield f"{format} 13x{cols} @ {rows}, int8 activations", _error(out, wanted), 3e-7 * cols + 5e-6
                alone = np.empty((1, rows), np.float32)
                module.matmul(x[7:8].copy(), memory, np.array(place, np.int64), factor, None, alone, 1, 64, True)
                yield f"{format} {cols} @ {rows}, a token alone", _error(alone[0], out[7]), 0.0


def check_ffn(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    x = np.linspace(-20, 20, 4001, dtype=np.float32)
    out = np.empty_like(x)
    for exact, limit in ((True, 4e-6), (False, 1e-4)):
        module.silu(x, out, exact)
        nonzero = x != 0
        found = out[nonzero] / x[nonzero]
        yield f"sigmoid, {'exact' if exact else 'polynomial'}", _error(found, sigmoid(x[nonzero])), limit
    for format in formats.FORMATS:
        for hidden, width in ((1, 1), (31, 33), (64, 65)):
            yield (f"{format} hidden {hidden}, width {width}", *_ffn_case(module, rng, format, hidden, width))


def _ffn_case(module, rng, format: str, hidden: int, width: int) -> tuple[float, float]:
    """Three experts, seven tokens, two choices each: buckets, products and the weighted sum against plain loops."""
    experts, tokens, k = 3, 7, 2
    places, regions, values = [], [], []
    for _ in range(experts):
        at, offsets, mine = b"", [], []
        for rows, cols in ((width, hidden), (width, hidden), (hidden, width)):
            region, place, value = stored(rng.normal(size=(rows, cols)).astype(np.float32) / cols**0.5, format)
            at += bytes(-len(at) % 64)
            place[3:6] = [p if p == ABSENT else p + len(at) for p in place[3:6]]
            at += region.tobytes()
            offsets.append(place)
            mine.append(value)
        places.append(offsets), regions.append(at), values.append(mine)
    memory = np.stack([np.frombuffer(r, np.uint8) for r in regions])
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    ids = np.array([rng.permutation(experts)[:k] for _ in range(tokens)], np.int32)
    weights = rng.random((tokens, k)).astype(np.float32)
    offsets, token_of = np.empty(experts + 1, np.int32), np.empty(tokens * k, np.int32)
    row_of, cursor = np.empty((tokens, k), np.int32), np.empty(experts, np.int32)
    module.fill_buckets(ids, offsets, token_of, row_of, cursor, experts)
    all_experts = np.arange(experts, dtype=np.int32)
    rows, y = np.empty((tokens * k, hidden), np.float32), np.empty((tokens, hidden), np.float32)
    module.experts(
        x, memory, all_experts, all_experts, np.array(places, np.int64), np.ones((experts, 3), np.float32), offsets, token_of,
        np.empty((tokens * k, width), np.float32), rows, 2, 16, True,
    )  # fmt: skip
    module.combine(rows, row_of, weights, y, 2)
    wanted = np.zeros((tokens, hidden))
    for t in range(tokens):
        for rank in range(k):
            wanted[t] += weights[t, rank] * expert_ffn(x[t : t + 1], *values[ids[t, rank]])[0]
    return _error(y, wanted), 1e-6 * (1 + np.abs(wanted).max())


def check_norm(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for n in SIZES:
        x, weight = rng.normal(size=(5, n)).astype(np.float32), rng.normal(size=n).astype(np.float32)
        out = np.empty_like(x)
        module.rms_norm(x, weight, 1e-5, out, 2)
        wanted = rms_norm(x, weight, 1e-5)
        yield f"rms_norm of {n}", _error(out, wanted), 1e-6 * (1 + np.abs(wanted).max())


def check_attention(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    cases = (
        (1, 24, 0, 7),
        (3, 24, 5, 7),
        (9, 24, 0, 7),
        (37, 32, 9, 64),
        (37, 33, 0, 256),
        (16, 64, 130, 16),
        (70, 16, 0, 1),
    )
    for tokens, head_dim, window, page_size in cases:
        past, heads, kv_heads = 150, 6, 2
        positions = tokens + past
        pages = -(-positions // page_size)
        k, v = (rng.normal(size=(pages * page_size, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
        q = rng.normal(size=(tokens, heads, head_dim)).astype(np.float32)
        table = rng.permutation(pages).astype(np.int32)
        shape = (pages, page_size, kv_heads, head_dim)
        k_pages, v_pages = (np.empty(shape, np.float32) for _ in range(2))
        k_pages[table], v_pages[table] = k.reshape(shape), v.reshape(shape)
        out = np.empty_like(q)
        module.attend(q, k_pages, v_pages, table, past, window, head_dim**-0.5, out, 2)
        wanted = attend(q, k[:positions], v[:positions], past, window, head_dim**-0.5)
        yield f"attend, {tokens} tokens of {head_dim}, window {window}, pages of {page_size}", _error(out, wanted), 5e-6
    for interleaved in (False, True):
        x = rng.normal(size=(3, 2, 24)).astype(np.float32)
        angle = rng.normal(size=(3, 8)).astype(np.float32)
        found = x.copy()
        module.rotate(found, np.cos(angle), np.sin(angle), interleaved)
        wanted = rotate(x, np.cos(angle), np.sin(angle), interleaved)
        yield f"rotate, {'interleaved' if interleaved else 'half'}", _error(found, wanted), 1e-6


def check_router(module) -> Iterator[Case]:
    from .engine.router import KINDS
    from .engine.router_reference import route_numpy

    rng = np.random.default_rng(0)
    cases = [
        RouterConfig("softmax"),
        RouterConfig("softmax", renormalise=True),
        RouterConfig("topk_softmax"),
        RouterConfig("sigmoid_group", True, 2.5, 4, 2, True),
        RouterConfig("sigmoid_group", False, 1.0, 1, 1, True),
    ]
    for router in cases:
        for ties in (False, True):
            logits = rng.normal(size=(50, 16)).astype(np.float32)
            logits = np.round(logits) if ties else logits
            bias = rng.normal(size=16).astype(np.float32) / 4 if router.correction_bias else None
            ids, weights = np.empty((50, 4), np.uint16), np.empty((50, 4), np.float32)
            module.route(
                logits, KINDS[router.kind], bias, router.groups, router.top_groups, router.renormalise, router.scale, ids,
                weights, 2,
            )  # fmt: skip
            wanted_ids, wanted = route_numpy(logits, router, 4, bias)
            name = f"{router.kind}{', renormalised' if router.renormalise else ''}{', ties' if ties else ''}"
            yield f"{name}: ids", float((ids != wanted_ids).sum()), 0.0
            yield f"{name}: weights", _error(weights, wanted), 2e-6 * router.scale


def check_storage(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks"
        content = rng.integers(0, 256, 3 * 4096 + 7, np.uint8)
        path.write_bytes(content.tobytes())
        offsets, sizes = [0, 4096, 8192], [4096, 1, 4103]
        for mode in ("mmap", "pread", "direct"):
            memory = np.frombuffer(mmap.mmap(-1, 3 * 8192), np.uint8).reshape(3, 8192)  # page-aligned
            loader = module.BlockLoader([str(path)] * 3, offsets, sizes, mode, 2, memory)
            faults = loader.wait(loader.submit([0, 1, 2], [2, 1, 0]))
            for i, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
                wrong = (memory[2 - i, :size] != content[start : start + size]).sum()
                yield f"{mode}, {size} bytes at {start}", float(wrong + len(faults)), 0.0


def lru_hits(events: list[np.ndarray], slots: int) -> int:
    """Hits of one layer's lru cache under the atomic contract, `events` distinct ids each; by sets and sorting."""
    last, inside, hits = {}, set(), 0
    for now, members in enumerate(events):
        asked = set(members.tolist())
        hits += len(asked & inside)
        last |= dict.fromkeys(asked, now)
        inside = set(sorted(inside | asked, key=lambda x: (last[x], x))[-slots:])
    return hits


def check_expert_cache(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    events = [rng.permutation(24)[:4].astype(np.uint16) for _ in range(300)]
    for slots in (1, 4, 9, 24):
        cache = module.ExpertCache(1, 24, slots)
        for members in events:
            cache.step(0, members, 1)
        yield f"lru, {slots} slots: hits", abs(float(cache.counters()["hits"].sum() - lru_hits(events, slots))), 0.0


def check_replay(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    events = [rng.permutation(24)[:4].astype(np.uint16) for _ in range(300)]
    zeros = np.zeros(300, np.int32)
    stream = module.Stream.make(1, 24, np.arange(301) * 4, np.concatenate(events), zeros, zeros.astype(np.uint8), zeros)
    curve = module.lru_curve(stream)[0][0, 0]
    for slots in (1, 4, 9, 24):
        wanted = lru_hits(events, slots)
        yield f"lru, {slots} slots: hits", abs(float(module.replay(stream, "lru", slots)["hits"].sum() - wanted)), 0.0
        yield f"lru curve at {slots} slots", abs(float(curve[1 : slots + 1].sum() - wanted)), 0.0


def check_memory_pool(module) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for blocks in (1, 63, 65, 257):
        pool, owner, runs, wrong = module.MemoryPool(blocks * 4096, 4096), np.zeros(blocks, np.uint8), [], 0
        for tag in rng.integers(1, 8, 200).tolist():
            if runs and tag < 4:
                at, count = runs.pop(int(rng.integers(len(runs))))
                pool.release(at * 4096)
                owner[at : at + count] = 0
            count = int(rng.integers(1, 9))
            free = [at for at in range(blocks - count + 1) if not owner[at : at + count].any()]
            at = pool.allocate(count * 4096, False, tag)
            wrong += at != (free[0] * 4096 if free else -1)
            if at >= 0:
                runs.append((at // 4096, count))
                owner[at // 4096 :][:count] = tag
            wrong += int((pool.snapshot() != owner).sum())
        yield f"{blocks} blocks, lowest run first", float(wrong), 0.0


def check_arena(module) -> Iterator[Case]:
    def no_more(needed: int):
        raise MemoryError(needed)

    rng = np.random.default_rng(0)
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)  # page-aligned
    arena, used, most, wrong = module.Arena(no_more, True), 0, 0, 0
    arena.add_chunk(memory)
    for size in rng.integers(1, 500, 300).tolist():
        mark, before = arena.mark(), used
        for n in (size, size // 2 + 1):
            array = arena.take((n,), np.float32)
            wrong += array.ctypes.data - memory.ctypes.data != used
            array[:] = n
            used += -(-4 * n // 64) * 64 + 64  # and a red zone
            most = max(most, used)
        if size % 3 or used > 900_000:
            arena.rewind(mark)
            used = before
        if used > 800_000:
            arena.reset()
            used = 0
    counts = arena.counts()
    wrong += (counts["used_bytes"] != used) + (counts["high_water_bytes"] != most)
    yield "positions, use and high-water mark", float(wrong), 0.0
