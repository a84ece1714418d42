"""Findings about time, for notebook 06 and for any trace or model: each function answers one question with a picture."""

from __future__ import annotations

import numpy as np
import pandas as pd
from tqdm import tqdm

from ..errors import SettingError, TraceError
from ..trace import experiments
from ..trace.formats.tables import read_metrics
from ..trace.table import Trace
from ..units import parse_rate, parse_size
from .frames import Frame, Mark, Series
from .profile_frames import axis_top
from .theme import bytes_text, policy_style
from .what_if import Finding


def decode_times(trace: Trace, metrics) -> pd.DataFrame:
    """token, hits, misses, hit_rate, wall_ms, compute_ms, wait_ms (= wall - compute) of every decoded token.

    `metrics` is a BigMoeOnEdge metrics file, or its table; misses come from the trace's own residency column, since the
    hit rate in the file is cumulative. Raises `TraceError` when the two do not belong together.
    """
    metrics = metrics if isinstance(metrics, pd.DataFrame) else read_metrics(metrics)
    decode = trace.select(phase="decode")
    decode.require("residency", what="misses as the engine had them")
    steps, at = np.unique(decode.step, return_inverse=True)
    if len(steps) != len(metrics):
        raise TraceError(f"the trace has {len(steps)} decode steps, the metrics have {len(metrics)} rows")
    hits = np.bincount(at, (decode.resident != 0).sum(1)).astype(int)
    asked = np.bincount(at) * decode.k
    wall, compute = metrics.wall_ms.to_numpy(), metrics.compute_ms.to_numpy()
    return pd.DataFrame(
        {"token": np.arange(1, len(steps) + 1), "hits": hits, "misses": asked - hits, "hit_rate": hits / asked,
         "wall_ms": wall, "compute_ms": compute, "wait_ms": wall - compute}
    )  # fmt: skip


def line(x, y) -> tuple[float, float, float]:
    """Least squares: (y at x = 0, y per x, correlation)."""
    slope, start = np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)
    return float(start), float(slope), float(np.corrcoef(x, y)[0, 1])


def quarters(times: pd.DataFrame) -> pd.DataFrame:
    """Tokens in four groups by misses: hit_rate, misses, wall_ms, compute_ms, wait_ms, the means of each."""
    order = times.sort_values("misses", kind="stable").reset_index(drop=True)
    group = np.arange(len(order)) * 4 // len(order)
    names = ["hit_rate", "misses", "wall_ms", "compute_ms", "wait_ms"]
    return order.groupby(group)[names].mean().rename_axis("quarter").reset_index()


def misses_and_time(times: pd.DataFrame, skip: int = 10) -> Finding:
    """What a miss costs: wall time against misses, and what is left of it without compute. `times` of `decode_times`;
    the first `skip` tokens are left out."""
    rest = times.iloc[skip:]
    if len(rest) < 8:
        raise SettingError(f"skip {skip} leaves {len(rest)} of {len(times)} tokens; at least 8 are needed")
    four = quarters(rest)
    few, many = four.iloc[0], four.iloc[-1]
    start, slope, r = line(rest.misses, rest.wait_ms)
    *_, r_wall = line(rest.misses, rest.wall_ms)
    said = (
        f"From the worst to the best quarter of tokens the hit rate rises from {100 * many.hit_rate:.0f} to "
        f"{100 * few.hit_rate:.0f} %; misses fall {many.misses / few.misses:.1f} times, but time only "
        f"{many.wall_ms / few.wall_ms:.1f} times. Without compute, a token waits {start:.1f} ms + {slope:.2f} ms per miss "
        f"(r {r:.3f}); wall time hides that (r {r_wall:.2f})."
    )
    xlim = (0, axis_top(rest.misses))
    frames = []
    for column, title, color in (("wall_ms", "Wall time", "kept"), ("wait_ms", "Wall time without compute", "miss")):
        at, per, corr = line(rest.misses, rest[column])
        marks = tuple(Mark(float(x), float(y), "", color) for x, y in zip(rest.misses, rest[column], strict=True))
        frames.append(Frame(
            "lines", title, "misses of the token", "ms per token", np.array([[at, at + per * xlim[1]]], np.float32),
            (Series(f"{at:.0f} ms + {per:.2f} ms per miss, r {corr:.3f}", "ink", (6, 3), 1.5),), xlim=xlim,
            ylim=(0, axis_top(times.wall_ms[5:])), x=xlim, marks=marks,
        ))  # fmt: skip
    return Finding(tuple(frames), said, four)


def squeeze_runs(
    lab, prompt: str, memory: str, slots, disk: str = "200 MB/s", progress: bool = True, **generate
) -> pd.DataFrame:
    """One run per slot count on a modelled disk, all with the same memory: what the slots take, the page cache loses.

    Columns, per decoded token where that makes sense: slots, slot_bytes (in all), page_cache_bytes, hit_rate, misses,
    device_bytes, disk_ms (what the disk takes for them, without queueing), wait_ms and work_ms (measured: work is everything
    but waiting). The settings of `lab` are put back.
    """
    total = parse_size(memory, "memory")
    layers = 1 if lab.settings["scope"] == "global" else len(lab.config.moe_layers)
    names = ("storage", "disk_bandwidth", "disk_page_cache", "expert_cache_slots")
    before = {name: lab.settings[name] for name in names}
    rows = []
    try:
        for count in tqdm(list(slots), desc="slots", unit="run", disable=not progress):
            taken = count * layers * lab.slot_bytes
            if taken > total:
                raise SettingError(f"{count} slots take {bytes_text(taken)}, the memory is {bytes_text(total)}")
            lab.configure(
                storage="modelled", disk_bandwidth=disk, disk_page_cache=f"{total - taken} B", expert_cache_slots=count
            )
            steps = [s for s in lab.stream(prompt, **generate) if s.phase == "decode"]
            n, asked = len(steps), sum(s.hits + s.misses for s in steps)
            wait = 1e3 * sum(s.stages.get("expert_load_wait", 0.0) for s in steps) / n
            wall = 1e3 * sum(s.wall_s for s in steps) / n
            from_disk = sum(s.device_bytes for s in steps) / n
            rows.append((
                count, taken, total - taken, sum(s.hits for s in steps) / asked, sum(s.misses for s in steps) / n,
                from_disk, 1e3 * from_disk / parse_rate(disk), wait, wall - wait,
            ))  # fmt: skip
    finally:
        lab.configure(**before)
    columns = [
        "slots",
        "slot_bytes",
        "page_cache_bytes",
        "hit_rate",
        "misses",
        "device_bytes",
        "disk_ms",
        "wait_ms",
        "work_ms",
    ]
    return pd.DataFrame(rows, columns=columns)


def squeeze(runs: pd.DataFrame) -> Finding:
    """More slots, higher hit rate, and yet slower: `runs` of `squeeze_runs`."""
    best, worst = runs.loc[runs.disk_ms.idxmin()], runs.loc[runs.disk_ms.idxmax()]
    least = runs.iloc[0]
    said = (
        f"{least.slots:.0f} → {worst.slots:.0f} slots raise the hit rate from {100 * least.hit_rate:.0f} to "
        f"{100 * worst.hit_rate:.0f} %, and yet the disk works {least.disk_ms:.1f} → {worst.disk_ms:.1f} ms for a token: the "
        f"slots take the page cache's memory, so {least.device_bytes / 1e6:.2f} → {worst.device_bytes / 1e6:.2f} MB come from the "
        f"disk. Least work: {best.disk_ms:.1f} ms at {best.slots:.0f} slots."
    )
    x = tuple(runs.slots.astype(float))
    xlim = (min(x) - 1, max(x) + 1)
    hits = Frame(
        "lines", "Hit rate of the slots", "slots per layer, all with the same memory", "% of accesses",
        (100 * runs[["hit_rate"]].to_numpy().T).astype(np.float32), (Series("hit rate", "hit", (), 2.4),), xlim=xlim,
        ylim=(0, 100), x=x,
    )  # fmt: skip
    measured = tuple(Mark(float(s), float(w), "", "ink", "star") for s, w in zip(runs.slots, runs.wait_ms, strict=True))
    waits = Frame(
        "lines", "Time for the disk (stars: waited, measured)", "slots per layer, all with the same memory", "ms per token",
        runs[["disk_ms"]].to_numpy(np.float32).T, (Series("disk at work", "miss", (), 2.4),), xlim=xlim,
        ylim=(0, axis_top([*runs.disk_ms, *runs.wait_ms])), x=x,
        marks=(*measured, Mark(float(best.slots), float(best.disk_ms), "least", "attention"),
               Mark(float(worst.slots), float(worst.disk_ms), "most", "miss")),
    )  # fmt: skip
    return Finding((hits, waits), said, runs)


def prompt(trace: Trace, tokens: int = 16) -> Finding:
    """Reading a prompt against writing: experts that its first tokens touch together, and per token."""
    table = experiments.prompt_unions(trace)
    if not 1 <= tokens <= len(table):
        raise SettingError(f"tokens must be 1 to {len(table)}, the prompt of this trace; got {tokens}")
    here, k = table.iloc[tokens - 1], table.distinct.iloc[0]
    said = (
        f"{tokens} prompt tokens together touch {here.distinct:.0f} of {trace.num_experts} experts a layer, "
        f"{here.per_token:.1f} each; a decoded token asks for {k:.0f}. Read from a cold cache, a prompt token costs "
        f"{100 * here.per_token / k:.0f} % of the reads of a lone token, but all of them at once."
    )
    x = tuple(table.tokens.astype(float))
    xlim = (0, x[-1] + 1)
    color, dash = policy_style("lru")
    union = Frame(
        "lines", "Experts touched together", "prompt tokens", "experts per layer",
        np.array([table.distinct, k * table.tokens], np.float32),
        (Series("together", color, dash, 2.4), Series("if none were shared", "kept", (2, 3))), xlim=xlim,
        ylim=(0, trace.num_experts), x=x, cursor=tokens, marks=(Mark(tokens, here.distinct, f"{here.distinct:.0f}", color),),
    )  # fmt: skip
    loads = Frame(
        "lines", "Reads from a cold cache", "prompt tokens", "experts per layer and token", table[["per_token"]].to_numpy(np.float32).T,
        (Series("per prompt token", "miss", (), 2.4),), xlim=xlim, ylim=(0, axis_top(k)), x=x, cursor=tokens,
        marks=(Mark(tokens, here.per_token, f"{here.per_token:.1f}", "miss"),),
    )  # fmt: skip
    return Finding((union, loads), said, table)


def batch(trace: Trace, tokens: int = 8, most: int = 32) -> Finding:
    """Several tokens in one step: drawn from different places (a batch), or one after the other (a draft to be checked)."""
    counts = sorted({*range(1, 9), *range(8, most + 1, 4), tokens})
    in_a_row, apart = (experiments.unions(trace, counts, in_a_row=which) for which in (True, False))
    row, draw = (t[t.tokens == tokens].iloc[0] for t in (in_a_row, apart))
    k = in_a_row.distinct.iloc[0]
    size = "" if trace.expert_bytes is None else f" = {bytes_text(draw.per_token * trace.expert_bytes.sum())} a token"
    said = (
        f"{tokens} tokens of different places touch {draw.distinct:.0f} of {trace.num_experts} experts a layer, "
        f"{draw.per_token:.1f} each instead of {k:.0f}{size}; {tokens} in a row touch {row.distinct:.0f}, "
        f"{row.distinct / k:.1f} times what one needs. A batch shares little, a rejected draft costs all the same."
    )
    x = tuple(map(float, counts))
    frame = Frame(
        "lines", "Experts that several tokens touch together", "tokens in one step", "experts per layer",
        np.array([k * np.array(counts), apart.distinct, in_a_row.distinct], np.float32),
        (Series("if none were shared", "kept", (2, 3)), Series("drawn apart: a batch", "miss", (7, 3), 2.2),
         Series("in a row: a draft", "hit", (), 2.4)),
        xlim=(0, max(x)), ylim=(0, trace.num_experts), x=x, cursor=tokens,
        marks=(Mark(tokens, draw.distinct, f"{draw.distinct:.0f}", "miss"), Mark(tokens, row.distinct, f"{row.distinct:.0f}", "hit")),
    )  # fmt: skip
    table = apart.merge(in_a_row, on="tokens", suffixes=("_apart", "_in_a_row"))
    return Finding((frame,), said, table)


def warm_up(trace: Trace, slots: int = 16, policy: str = "lru", tokens: int = 8) -> Finding:
    """Misses of every token from an empty cache; what the first `tokens` tokens have done for those after them."""
    table = experiments.warm_up(trace, slots, policy)
    after, late = table.misses[tokens : tokens + 24].mean(), table.misses[tokens + 24 :].mean()
    said = (
        f"{slots} slots, {policy}: the first token misses {table.misses[0]} times. After a warm-up of {tokens} token"
        f"{'s' * (tokens != 1)} the next 24 miss {after:.0f} times each, and all later ones {late:.0f} times; the least any "
        f"token missed is {table.misses.min()}. Warming up shortens the first tokens, it does not end misses."
    )
    color, dash = policy_style(policy)
    smooth = table.misses.rolling(16, min_periods=1).mean()
    frame = Frame(
        "lines", "Misses from an empty cache", "decoded token", "misses per token", np.array([table.misses, smooth], np.float32),
        (Series("", color, (), 1.0, 0.35), Series(f"{slots} slots, {policy}, last 16 together", color, dash, 2.2)),
        xlim=(0, len(table)), ylim=(0, axis_top(table.misses)), x=tuple(table.token.astype(float)), cursor=tokens,
        marks=(Mark(1, float(table.misses[0]), f"first: {table.misses[0]}", "miss"),),
    )  # fmt: skip
    return Finding((frame,), said, table)


def warm_up_live(lab, text: str, runs=(0, 1, 2), **generate) -> pd.DataFrame:
    """What dummy runs before the first prompt save: warm_up_runs, ttft_ms, prompt_misses, first_token_misses."""
    rows = []
    for count in runs:
        lab.reset_cache()
        lab.warmup(count)
        run = lab.generate(text, **{"max_tokens": 2, **generate})
        prefill, decode = ([s for s in run.steps if s.phase == phase] for phase in ("prefill", "decode"))
        rows.append((count, 1e3 * run.ttft_s, sum(s.misses for s in prefill), decode[0].misses if decode else None))
    return pd.DataFrame(rows, columns=["warm_up_runs", "ttft_ms", "prompt_misses", "first_token_misses"])


def prompt_live(lab, text: str, lengths=(1, 4, 16, 64), **generate) -> pd.DataFrame:
    """Prompts of growing length from a cold cache: prompt_tokens, reads and ms per prompt token, and of decode after it."""
    ids, rows = lab.tokenizer.encode(text), []
    for length in lengths:
        lab.reset_cache()
        run = lab.generate(lab.tokenizer.decode(ids[:length]), **{"max_tokens": 16, "stop_at_eos": False, **generate})
        row = [run.prompt_tokens]
        for phase, tokens in (("prefill", run.prompt_tokens), ("decode", len(run.tokens) - 1)):
            steps = [s for s in run.steps if s.phase == phase]
            row += [sum(s.misses for s in steps) / tokens, 1e3 * sum(s.wall_s for s in steps) / tokens]
        rows.append(row)
    names = [
        "prompt_tokens",
        "reads_per_prompt_token",
        "ms_per_prompt_token",
        "reads_per_decoded_token",
        "ms_per_decoded_token",
    ]
    return pd.DataFrame(rows, columns=names)
