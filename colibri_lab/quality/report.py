"""What a number format costs: a model against its 16-bit original, on identical tokens and weight by weight."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import pandas as pd

from ..checkpoint import layout
from ..checkpoint.moments import Moments
from ..config import SETTINGS
from ..errors import SettingError, did_you_mean
from . import texts
from .logits import Comparison, compare
from .weights import compare_matrices

SOURCES = ("stdlib",)
MOMENT_TOKENS = 8192  # of the text, for relative output errors
MOMENT_BYTES = 2 * 10**9


@dataclass(frozen=True, eq=False)
class QualityReport:
    """Everything measured. Tables: `windows` and `layers` as in `Comparison`; `matrices` and `blocks` as in `weights`.

    weight_error, output_error and zero_share are relative; bytes are those of elements, scales and zero points.
    """

    model: str
    reference: str
    formats: dict
    container_bytes: int
    reference_container_bytes: int
    settings: dict
    comparison: Comparison = field(repr=False)
    matrices: pd.DataFrame = field(repr=False)
    blocks: pd.DataFrame = field(repr=False)

    @property
    def windows(self) -> pd.DataFrame:
        return self.comparison.windows

    @property
    def layers(self) -> pd.DataFrame:
        return self.comparison.layers

    @property
    def texts(self) -> pd.DataFrame:
        """A row per text: tokens, bytes, bits_per_byte, reference_bits_per_byte, kl (nats per token)."""
        sums = self.windows.groupby("text", sort=False)[["tokens", "bytes", "nll", "reference_nll", "kl"]].sum()
        per_byte = 1 / math.log(2) / sums.bytes.where(sums.bytes > 0)
        return pd.DataFrame(
            {
                "tokens": sums.tokens, "bytes": sums.bytes, "bits_per_byte": sums.nll * per_byte,
                "reference_bits_per_byte": sums.reference_nll * per_byte, "kl": sums.kl / sums.tokens,
            }
        ).reset_index()  # fmt: skip

    def summary(self) -> dict:
        """The numbers without the tables."""
        c, tokens = self.comparison, int(self.windows.tokens.sum())
        low, high = c.change_interval()
        return {
            "model": self.model,
            "reference": self.reference,
            "formats": self.formats,
            "container_bytes": self.container_bytes,
            "reference_container_bytes": self.reference_container_bytes,
            "tokens": tokens,
            "bytes": int(self.windows.bytes.sum()),
            "windows": len(self.windows),
            "bits_per_byte": c.bits_per_byte,
            "reference_bits_per_byte": c.reference_bits_per_byte,
            "bits_per_byte_change": c.change,
            "bits_per_byte_change_low": low,
            "bits_per_byte_change_high": high,
            "perplexity": math.exp(self.windows.nll.sum() / tokens),
            "reference_perplexity": math.exp(self.windows.reference_nll.sum() / tokens),
            "kl": c.kl,
            "router_agreement": c.router_agreement,
            "frequency_distance": float(self.layers.frequency_distance.mean()),
            "lost_blocks": int(self.blocks.lost.sum()),
            "settings": self.settings,
        }

    def to_json(self) -> dict:
        """`summary` and the tables: layers, texts, matrices, and those blocks that are lost."""
        lost = self.blocks[self.blocks.lost]
        return {**self.summary(), "layers": self.layers, "texts": self.texts, "matrices": self.matrices, "lost": lost}

    def __str__(self) -> str:
        s = self.summary()
        change = f"{100 * s['bits_per_byte_change']:+.3f} %"
        interval = f"{100 * s['bits_per_byte_change_low']:+.3f} to {100 * s['bits_per_byte_change_high']:+.3f} %"
        lost = (
            f"{s['lost_blocks']} of {len(self.blocks)} column blocks lost"
            if s["lost_blocks"]
            else "no column block lost"
        )
        return "\n".join(
            [
                f"{self.model} against {self.reference}",
                f"  experts {self.formats['expert']}, other matrices {self.formats['dense']}; {self.container_bytes} bytes, "
                f"{self.container_bytes / self.reference_container_bytes:.3f} of the reference",
                f"  bits per byte      {s['bits_per_byte']:.4f}, reference {s['reference_bits_per_byte']:.4f}: {change} "
                f"(95 %: {interval}), {s['windows']} windows, {s['tokens']} tokens",
                f"  perplexity         {s['perplexity']:.3f}, reference {s['reference_perplexity']:.3f}",
                f"  KL of the logits   {s['kl']:.5f} nats per token",
                f"  router agreement   {100 * s['router_agreement']:.2f} % of choices, frequency distance "
                f"{s['frequency_distance']:.4f}",
                f"  weights            {lost}; relative output error, median and worst: {_spread(self.matrices)}",
            ]
        )


def _spread(matrices: pd.DataFrame) -> str:
    errors = matrices.output_error.dropna()
    if errors.empty:
        return "not measured"
    worst = matrices.loc[errors.idxmax()]
    place = f"layer {worst.layer}" if pd.notna(worst.layer) else "the model's"
    expert = f" expert {worst.expert}" if pd.notna(worst.expert) else ""
    return f"{errors.median():.4f}, {errors.max():.4f} ({place}{expert} {worst.matrix})"


def quality_report(
    directory: str | os.PathLike,
    against: str | os.PathLike,
    *,
    text: str | os.PathLike | list[texts.Text] | None = None,
    source: str | None = None,
    tokens: int = 32768,
    window: int = 256,
    weights: bool = True,
    progress: bool = True,
    **settings,
) -> QualityReport:
    """Measure the container `directory` against `against`, the same model in 16 bits.

    text: a file, or a list of `texts.Text`; source: "stdlib" for Python's own library, the half that calibration does not
    read. Up to `tokens` of it, evenly spread, in windows of `window` tokens. `weights` False leaves the matrices out.
    `settings` are those of scope "open"; what changes tokens is for `directory` alone.

    Raises `SettingError`, `ModelError` for different models or a text with nothing to predict, and as `colibri_lab.open`.
    """
    from ..front import container_of
    from ..lab import Lab

    if (text is None) == (source is None):
        raise SettingError("give either text or source")
    if source is not None and source not in SOURCES:
        raise SettingError(f"source cannot be {source!r}; {did_you_mean(str(source), SOURCES)}")
    if window < 2 or tokens < 2:
        raise SettingError(f"window and tokens must be at least 2, got {window} and {tokens}")
    lab = Lab(container_of(directory, progress), **settings)
    placement = {name: value for name, value in settings.items() if not SETTINGS[name].changes_tokens}
    reference = Lab(container_of(against, progress), **placement)
    given = texts.stdlib_texts() if source else text if isinstance(text, list) else texts.file_text(text)
    window = min(window, lab.settings["max_seq_len"], reference.settings["max_seq_len"])
    cut = texts.windows(given, reference.tokenizer, window, tokens)
    comparison = compare(lab, reference, cut, progress)
    tables = _weights(lab.container, reference, cut, progress) if weights else compare_matrices(
        lab.container, reference.container, lambda file, tensor: None, set(), False
    )  # fmt: skip
    return QualityReport(
        str(lab.path), str(reference.path), dict(lab.container.info["formats"]), _bytes(lab.container),
        _bytes(reference.container), {k: v for k, v in lab.settings.items() if k in SETTINGS and SETTINGS[k].changes_tokens},
        comparison, *tables,
    )  # fmt: skip


def _bytes(box) -> int:
    return sum(path.stat().st_size for file in box.files for path in box.find(file))


def _weights(box, reference, cut: list[texts.Window], progress: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables of all matrices, as many layers at a time as there is room for the moments of their inputs."""
    from ..engine.taps import tapped

    some = cut[:: max(1, -(-sum(len(w.ids) for w in cut) // MOMENT_TOKENS))]
    layers, files = list(range(box.config.num_layers)), layout.container_files(box.config, 1)
    room = max(1, MOMENT_BYTES // Moments.bytes_per_layer(box.config))
    tables = []
    for first in range(0, len(layers), room):
        chosen = set(layers[first : first + room])
        chosen |= {None} if not first else set()
        tensors = [
            (f, t)
            for f, specs in files.items()
            if layout.layer_of(f) in chosen
            for t in specs
            if specs[t].part != "float"
        ]
        moments = Moments(reference.container, tensors)
        with tapped(reference.engine, moments):
            for one in some:
                reference.logits(one.ids)
        moments.finish()
        tables.append(compare_matrices(box, reference.container, moments.of, chosen, progress))
    matrices, blocks = zip(*tables, strict=True)
    return pd.concat(matrices, ignore_index=True), pd.concat(blocks, ignore_index=True)
