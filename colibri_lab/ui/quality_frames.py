"""Bytes against quality, and one matrix in few bits, as frames with their sentences."""

from __future__ import annotations

import numpy as np

from .. import rounding
from ..rounding import Measured, Rounded, Survey
from .frames import Frame, Mark, Series
from .theme import bytes_text

CLASSES = (0.0, 0.02, 0.1)  # relative errors above which an expert's cell changes its colour
ERROR_WORDS = ("exact", "error up to 2 %", "error 2 to 10 %", "error above 10 %")
ERROR_SERIES = (Series("to 2 %", "resident"), Series("2 to 10 %", "hit"), Series("above 10 %", "miss"))
LINE_COLUMNS = 96  # of a row, in the picture of codes


def frontier(rows: list[Measured]) -> list[Measured]:
    """The copies that no other beats in bytes and divergence at once, smallest first."""
    best, found = np.inf, []
    for row in sorted(rows, key=lambda r: (r.total_bytes, r.kl_mnat)):
        if row.kl_mnat < best:
            best = row.kl_mnat
            found.append(row)
    return found


def trade(rows: list[Measured], chosen: Measured, empty: str = "") -> Frame:
    """Every copy as a point, the best so far as a staircase, `chosen` as a star."""
    edge = frontier(rows)
    sizes = [r.total_bytes / 1e6 for r in rows]
    right = 1.05 * max(sizes)
    left = max(0.0, min(sizes) - 0.1 * (right - min(sizes)))
    ends = [r.total_bytes / 1e6 for r in edge[1:]] + [right]
    xs = [x for row, end in zip(edge, ends, strict=True) for x in (row.total_bytes / 1e6, end)]
    ys = [row.kl_mnat for row in edge for _ in range(2)]
    top = 1.25 * max(r.kl_mnat for r in [*edge, chosen]) or 1.0
    marks = [Mark(r.total_bytes / 1e6, r.kl_mnat, r.name if r in edge else "", "hit" if r in edge else "other")
             for r in rows if r is not chosen and r.kl_mnat <= top]  # fmt: skip
    marks.append(Mark(chosen.total_bytes / 1e6, chosen.kl_mnat, chosen.name, "miss", "star"))
    above = [r.name for r in rows if r.kl_mnat > top]
    return Frame(
        "lines", "Bytes against quality", "MB of all weights", "divergence, mnat per token",
        np.array([ys], np.float32), (Series("best so far", "hit", (), 1.4),), xlim=(left, right), ylim=(0, top),
        x=tuple(xs), marks=tuple(marks), note=f"{len(above)} above" if above else "", empty=empty,
    )  # fmt: skip


def domains(chosen: Measured, kept: Measured | None, top: float) -> Frame:
    """Divergence by domain; `kept` as ticks."""
    found = list(chosen.by_domain().items())[::-1]
    old = kept.by_domain() if kept and kept is not chosen else {}
    values = np.array([(value, old.get(name, np.nan)) for name, value in found], np.float32)
    return Frame(
        "bars", "Divergence by domain", "mnat per token", "", values, tuple(Series(name, "hit") for name, _ in found),
        xlim=(0, max(top, 1e-3)), texts=tuple(f"{value:.3g}" for _, value in found),
        note=f"tick: {kept.name}" if old else "",
    )  # fmt: skip


def agreement(chosen: Measured, kept: Measured | None, layers) -> Frame:
    """Share of expert choices that stayed, by layer."""
    lines, series = [100 * chosen.agreement], [Series(_named(chosen), "router", (), 2.2)]
    if kept is not None and kept is not chosen:
        lines.insert(0, 100 * kept.agreement)
        series.insert(0, Series(f"kept: {_named(kept)}", "kept", (3, 3)))
    low = min(90.0, 10 * np.floor(np.min(lines) / 10))
    return Frame(
        "lines", "Expert choices that stay", "layer", "% of choices", np.array(lines, np.float32), tuple(series),
        xlim=(layers[0], layers[-1]), ylim=(low, 100), x=tuple(float(n) for n in layers),
    )  # fmt: skip


def _named(row: Measured) -> str:
    return f"{row.name}: {100 * row.router_agreement:.1f} %"


def errors(chosen: Measured, layers) -> Frame:
    """Layers × experts: how far each expert's gate matrix is off."""
    found = chosen.errors
    states = sum((found > limit).astype(int) for limit in CLASSES)
    nothing = np.full(found.shape, np.nan)
    return Frame(
        "grid", "Error of experts' weights", "expert", "layer", np.stack([states, nothing, nothing]).astype(np.float32),
        ERROR_SERIES, xlim=(0, found.shape[1]), ylim=(0, len(layers)), rows=tuple(map(str, layers)), words=ERROR_WORDS,
        note=f"largest {100 * found.max():.2g} %" if found.any() else "none is rounded",
    )  # fmt: skip


def verdict(survey: Survey, row: Measured) -> str:
    """What this copy saves and costs, whether its loss can be told from chance, and what would serve better."""
    base = survey.rows[survey.name]
    if row is base:
        return (
            f"{row.name}, the model as it is: {bytes_text(row.total_bytes)}, {survey.bits_per_byte(row):.4f} bits per byte on "
            f"{survey.tokens} tokens. Choose another format to see what it saves and what it costs."
        )
    saved = base.total_bytes - row.total_bytes
    loss = f"{100 * row.change:+.2f} % ± {200 * row.change_error:.2f} %"
    told = loss if row.telling else f"{loss}, too little to tell on {survey.tokens} tokens"
    said = (
        f"{row.name}: {bytes_text(row.total_bytes)} instead of {bytes_text(base.total_bytes)}; answers move by "
        f"{row.kl_mnat:.3g} mnat per token, {100 * row.router_agreement:.1f} % of expert choices stay, loss {told}; "
        f"{1e6 * row.kl_mnat / saved:.3g} mnat per MB saved" if saved > 0 else f"{row.name}: nothing is saved"
    )  # fmt: skip
    if "plan" in row.options:
        said += f", but a slot still takes {bytes_text(row.slot_bytes)}, room for a hot expert"
    return f"{said}. {_better(list(survey.rows.values()), row)}"


def _better(rows: list[Measured], row: Measured) -> str:
    edge = frontier(rows)
    if row not in edge:
        other = max(
            (r for r in edge if r.total_bytes <= row.total_bytes and r.kl_mnat <= row.kl_mnat),
            key=lambda r: r.total_bytes,
        )
        return f"{other.name} is no larger and moves the answers less: {other.kl_mnat:.3g} mnat in {bytes_text(other.total_bytes)}."
    larger = edge[edge.index(row) + 1 :]
    if not larger:
        return "Nothing measured so far is better."
    step = max(larger, key=lambda r: (row.kl_mnat - r.kl_mnat) / (r.total_bytes - row.total_bytes))
    more = step.total_bytes - row.total_bytes
    return f"The best use of more bytes is {step.name}: {bytes_text(more)} more for {row.kl_mnat - step.kl_mnat:.3g} mnat less."


# One matrix


def codes(rounded: Rounded, row: int, columns: int = LINE_COLUMNS) -> Frame:
    """The first columns of a row: its weights, what the codes stand for, and where scales change."""
    width = min(columns, rounded.w.shape[1])
    lines = np.stack([rounded.w[row, :width], rounded.back[row, :width]])
    kind = rounding.formats.FORMATS[rounded.format]
    marks = (
        tuple(Mark(float(at) - 0.5, None, "next scale", "rule") for at in range(kind.group, width, kind.group))
        if kind.group
        else ()
    )
    reach = 1.1 * float(np.abs(lines).max()) or 1.0
    step = float(rounded.scale[row, 0])
    return Frame(
        "lines", f"Row {row}: weights and their codes", "column", "value", lines.astype(np.float32),
        (Series("weight", "other", (), 1.2), Series(f"{rounded.format}, step {step:.2g}", "hit", (5, 2), 1.8)),
        xlim=(0, width - 1), ylim=(-reach, reach), marks=marks,
    )  # fmt: skip


def column_error(rounded: Rounded) -> Frame:
    """Relative error of each block of columns; lost blocks are vermilion and say so."""
    table = rounded.column_blocks()[::-1]
    last = rounded.w.shape[1] - 1
    names = [f"{n} – {min(n + rounding.COLUMN_BLOCK - 1, last)}" for n in table.first_column]
    return Frame(
        "bars", "Error by column block", "% of the block", "",
        np.stack([100 * table.relative_error, np.full(len(table), np.nan)], 1).astype(np.float32),
        tuple(Series(name, "miss" if lost else "hit") for name, lost in zip(names, table.lost, strict=True)),
        xlim=(0, 100 if table.lost.any() else max(5.0, 100 * float(table.relative_error.max()))),
        texts=tuple("all zeros" if r.lost else f"{100 * r.relative_error:.2g} %" for r in table.itertuples()),
        note="columns",
    )  # fmt: skip


def bits_front(table, chosen: Rounded) -> Frame:
    """Bits beyond the code's own against error, of formats with codes as wide as the chosen one's."""
    kinds = rounding.formats.FORMATS
    own = 4 if kinds[chosen.format].four_bit else 8
    same = table[[kinds[n].four_bit == kinds[chosen.format].four_bit for n in table.format]]
    low, high = 100 * same.relative_error.min(), 100 * same.relative_error.max()
    marks = [Mark(chosen.bits_per_weight - own, 100 * chosen.relative_error, chosen.format, "miss", "star")]
    for r in same[same.format != chosen.format].itertuples():
        x, y = r.bits_per_weight - own, 100 * r.relative_error
        crowded = any(m.text and abs(m.x - x) < 0.3 and abs(m.y - y) < 0.18 * (high - low) for m in marks)
        marks.insert(0, Mark(x, y, "" if crowded else r.format, "other"))  # the chosen one is drawn last
    room = 0.25 * (high - low) or 1.0
    return Frame(
        "lines", f"int{own} is not {own} bits", f"bits per weight beyond {own}", "% error", np.full((1, 1), np.nan, np.float32),
        (Series("", "hit"),), xlim=(0, 1), ylim=(max(0.0, low - room), high + room), x=(0.0,), marks=tuple(marks),
    )  # fmt: skip


def histogram(rounded: Rounded, bins: int = 41) -> Frame:
    """Errors in steps of their own scale: flat between -1/2 and 1/2 where rounding is all that happens."""
    kind = rounding.formats.FORMATS[rounded.format]
    steps = rounded.error / rounding.formats.spread(rounded.scale, kind, rounded.w.shape[1])
    counts, edges = np.histogram(steps, bins, (-0.6, 0.6))
    share = 100 * counts / steps.size
    return Frame(
        "lines", "Errors in steps of their scale", "steps", "% of weights", share[None].astype(np.float32),
        (Series(f"largest {rounded.worst:.3f}", "hit", (), 2.0),), xlim=(-0.6, 0.6), ylim=(0, max(8.0, 1.1 * float(share.max()))),
        x=tuple(((edges[1:] + edges[:-1]) / 2).tolist()), marks=(Mark(-0.5, None, "", "miss"), Mark(0.5, None, "scale / 2", "miss")),
    )  # fmt: skip


def matrix_verdict(rounded: Rounded) -> str:
    """Bits counted whole, the error, and what was lost."""
    blocks = rounded.column_blocks()
    stored = sum(rounded.parts.values())
    rest = " + ".join(f"{size} of {name}" for name, size in rounded.parts.items() if size)
    lost = blocks.first_column[blocks.lost].tolist()
    said = (
        f"{rounded.format} stores {rounded.bits_per_weight:.4g} bits per weight ({stored} bytes: {rest}); the matrix is off by "
        f"{100 * rounded.relative_error:.2g} %, no weight by more than {rounded.worst:.2f} steps. "
    )  # fmt: skip
    if not lost:
        return said + "No column block is lost."
    names = ", ".join(str(n) for n in lost)
    return said + (
        f"{len(lost)} of {len(blocks)} column blocks became zeros (from {names}) while the whole error hardly shows it: their "
        "weights are smaller than half a step of the scale that they share. Smaller groups keep them."
    )
