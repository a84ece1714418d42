"""What fewer bits per weight do: to one matrix, and to a model's answers.

    rounded = rounding.round_matrix(w, "int4-g64")        # codes, scales, zero points, errors
    survey = rounding.Survey(lab)                         # the model as it is, and rounded copies of it
    survey.measure("int4", quantize="int4-g64")           # a row of survey.table: bytes, divergence, routing

Copies are made by `convert` in a temporary folder, read the same tokens as the model itself, and are gone afterwards.
"""

from __future__ import annotations

import math
import tempfile
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from .checkpoint import formats, layout, packing
from .checkpoint.container import Container
from .checkpoint.convert import convert
from .checkpoint.plan_formats import hot_cold
from .distributions import divergence, log_softmax
from .engine.linear import Linear
from .errors import SettingError
from .front import open_model
from .quality.logits import watched_routes
from .routing.reading import Texts, read, texts

COLUMN_BLOCK = 32  # columns looked at together
LOST = 0.9  # share of a column block that became exactly 0: the block is lost
PARTS = ("expert", "dense", "router")


@dataclass(frozen=True, eq=False)
class Rounded:
    """A matrix w (rows, cols) float32 in an integer format: `codes` (rows, cols); `scale` and `zero` float32 (rows, groups);
    `back` float32 (rows, cols), what the codes stand for: (codes - zero) * scale."""

    format: str
    w: np.ndarray
    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    back: np.ndarray

    @property
    def bits_per_weight(self) -> float:
        """Of everything that is stored: codes, scales and zero points."""
        return 8 * sum(packing.part_sizes(self.w.shape, self.format, "rows")) / self.w.size

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of codes, scales and zero points."""
        sizes = packing.part_sizes(self.w.shape, self.format, "rows")
        return dict(zip(("codes", "scales", "zero points"), sizes, strict=True))

    @cached_property
    def error(self) -> np.ndarray:
        return self.back - self.w

    @property
    def relative_error(self) -> float:
        """Root of the summed squared errors, relative to the matrix."""
        return float(np.linalg.norm(self.error) / np.linalg.norm(self.w))

    @property
    def worst(self) -> float:
        """Largest error in steps of its own scale; rounding allows 0.5."""
        kind = formats.FORMATS[self.format]
        return float((np.abs(self.error) / formats.spread(self.scale, kind, self.w.shape[1])).max())

    def column_blocks(self, width: int = COLUMN_BLOCK) -> pd.DataFrame:
        """first_column, zeros (share of the weights that became exactly 0), relative_error, lost; a row per block."""
        starts = np.arange(0, self.w.shape[1], width)
        rows = []
        for start in starts:
            w, back = self.w[:, start : start + width], self.back[:, start : start + width]
            zeros = float(((back == 0) & (w != 0)).mean())
            size = np.linalg.norm(w)
            rows.append((int(start), zeros, float(np.linalg.norm(back - w) / size) if size else 0.0, zeros >= LOST))
        return pd.DataFrame(rows, columns=["first_column", "zeros", "relative_error", "lost"])


def round_matrix(w: np.ndarray, format: str) -> Rounded:
    """w (rows, cols) in an integer format of `formats.FORMATS`, as a conversion stores it. Raises `SettingError` for others."""
    name = formats.format_name(format)
    kind = formats.FORMATS.get(name)
    if kind is None or kind.kind not in ("int8", "int4"):
        raise SettingError(f"round_matrix: expected an int8 or int4 format, got {format!r}")
    w = np.ascontiguousarray(w, np.float32)
    coded = formats.encode(w, name)
    zero = np.full_like(coded.scale, kind.middle) if coded.zero is None else coded.zero.astype(np.float32)
    return Rounded(name, w, coded.data, coded.scale, zero, formats.decode(coded, name))


def shrink_left(w: np.ndarray, times: float = 30.0) -> np.ndarray:
    """A copy of w (rows, cols) whose left half is `times` smaller: two kinds of columns that share a row's scale."""
    out = np.array(w, np.float32)
    out[:, : out.shape[1] // 2] /= np.float32(times)
    return out


def front(w: np.ndarray, names: Iterable[str]) -> pd.DataFrame:
    """bits_per_weight and relative_error of one matrix in each format, ordered by bits."""
    rows = [(r.format, r.bits_per_weight, r.relative_error) for r in (round_matrix(w, name) for name in names)]
    return pd.DataFrame(rows, columns=["format", "bits_per_weight", "relative_error"]).sort_values(
        "bits_per_weight", ignore_index=True
    )


@dataclass(frozen=True, eq=False)
class Measured:
    """One copy of a model beside the model itself, on identical tokens; per-token arrays leave out each text's first token.

    `bytes` by part; `nats` and `reference_nats` (tokens,), losses; `kl` (tokens,), divergence of the answers from the
    model's, in nats; `domain` (tokens,); `agreement` (moe layers,), share of expert choices that stayed; `errors`
    (moe layers, experts), relative error of each expert's gate matrix; `bits` per weight of the routed experts.
    """

    name: str
    options: dict
    bytes: dict[str, int]
    slot_bytes: int
    bits: float
    nats: np.ndarray = field(repr=False)
    reference_nats: np.ndarray = field(repr=False)
    kl: np.ndarray = field(repr=False)
    domain: np.ndarray = field(repr=False)
    agreement: np.ndarray = field(repr=False)
    errors: np.ndarray = field(repr=False)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def kl_mnat(self) -> float:
        """Mean divergence per token in thousandths of a nat."""
        return 1e3 * float(self.kl.mean())

    @property
    def change(self) -> float:
        """Relative change of the loss, and so of the bits per byte."""
        return float(self.nats.sum() / self.reference_nats.sum() - 1)

    @property
    def change_error(self) -> float:
        """Standard error of `change`, from the differences token by token."""
        off = self.nats - self.reference_nats
        if len(off) < 2:
            return math.inf
        return float(off.std(ddof=1) * math.sqrt(len(off)) / self.reference_nats.sum())

    @property
    def telling(self) -> bool:
        """Whether the change of the loss is larger than two of its standard errors: anything below may be chance."""
        return abs(self.change) > 2 * self.change_error

    @property
    def router_agreement(self) -> float:
        return float(self.agreement.mean())

    def by_domain(self) -> dict[str, float]:
        """Mean divergence per token in thousandths of a nat, by domain."""
        return {d: 1e3 * float(self.kl[self.domain == d].mean()) for d in dict.fromkeys(self.domain.tolist())}


class Survey:
    """A model and rounded copies of it. `rows`: name → `Measured`, the model itself first, as "bf16" or what it is.

    `lab` is asked once, here; `source` are the texts by domain (the project's if None). `measure` may be called from any
    thread; calls take turns.
    """

    def __init__(self, lab, source: Texts | None = None):
        self._lock = threading.RLock()
        self.container: Container = lab.container
        self.config, self.threads = lab.config, lab.settings["threads"]
        source = source or texts()
        self._ids = [(d, np.array(lab.tokenizer.encode(t), np.int64)) for d, group in source.items() for t in group]
        self._ids = [(domain, ids) for domain, ids in self._ids if len(ids) > 1]
        if not self._ids:
            raise SettingError("Survey: a text of at least two tokens is needed")
        self.text_bytes = sum(len(t.encode()) for group in source.values() for t in group)
        self._hot: np.ndarray | None = None
        self._domain = np.concatenate([np.repeat(domain, len(ids) - 1) for domain, ids in self._ids])
        self._answers, self._routes = _run(lab, self._ids)
        self.name = str(self.container.info["formats"]["expert"])
        self.rows: dict[str, Measured] = {}
        self.rows[self.name] = self._compared(self.name, {}, lab, self._answers, self._routes, None)

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return len(self._domain)

    def bits_per_byte(self, row: Measured) -> float:
        """Bits per byte of text; each text's first token is not predicted."""
        return float(row.nats.sum() / math.log(2) / self.text_bytes)

    @property
    def table(self) -> pd.DataFrame:
        """name, expert_MB, total_MB, slot_kB, bits_per_weight (of the experts), kl_mnat, bits_per_byte, change_percent and
        its plus_minus (two standard errors), router_agreement_percent, in the order in which they were measured."""
        with self._lock:
            rows = list(self.rows.values())
        return pd.DataFrame(
            {
                "name": [r.name for r in rows],
                "expert_MB": [r.bytes["expert"] / 1e6 for r in rows],
                "total_MB": [r.total_bytes / 1e6 for r in rows],
                "slot_kB": [r.slot_bytes / 1e3 for r in rows],
                "bits_per_weight": [r.bits for r in rows],
                "kl_mnat": [r.kl_mnat for r in rows],
                "bits_per_byte": [self.bits_per_byte(r) for r in rows],
                "change_percent": [100 * r.change for r in rows],
                "plus_minus": [200 * r.change_error for r in rows],
                "router_agreement_percent": [100 * r.router_agreement for r in rows],
            }
        ).set_index("name")

    @property
    def cost(self) -> pd.DataFrame:
        """name, saved_MB, saved_percent (of all weights), router_agreement_percent, kl_mnat, and per MB saved kl_mnat_per_MB
        and loss_percent_per_MB; only copies that save something."""
        with self._lock:
            base, rows = self.rows[self.name], list(self.rows.values())
        rows = [(r, (base.total_bytes - r.total_bytes) / 1e6) for r in rows if r.total_bytes < base.total_bytes]
        return pd.DataFrame(
            {
                "name": [r.name for r, _ in rows],
                "saved_MB": [mb for _, mb in rows],
                "saved_percent": [1e8 * mb / base.total_bytes for _, mb in rows],
                "router_agreement_percent": [100 * r.router_agreement for r, _ in rows],
                "kl_mnat": [r.kl_mnat for r, _ in rows],
                "kl_mnat_per_MB": [r.kl_mnat / mb for r, mb in rows],
                "loss_percent_per_MB": [100 * r.change / mb for r, mb in rows],
            }
        ).set_index("name")

    def measure(self, name: str, router: str = "fp32", **options) -> Measured:
        """Make a copy with these options of `convert` (quantize, group_size, tensors, plan; none: as it is), let it read the
        texts, and compare. `router`: an integer format for the routers, which a conversion always leaves in fp32.

        Measured once: the same name and options again are looked up. Raises as `convert` and `open` do.
        """
        asked = {"router": router, **options} if router != "fp32" else dict(options)
        with self._lock:
            known = self.rows.get(name)
            if known is not None and known.options == asked:
                return known
            with tempfile.TemporaryDirectory(prefix="colibri-") as folder:
                box = Path(folder) / "copy"
                convert(self.container.dir, box, progress=False, **options)
                with warnings.catch_warnings():  # that routers go without calibration is what is looked at here
                    warnings.filterwarnings("ignore", ".*without router calibration")
                    copy = open_model(box, threads=self.threads, expert_cache_slots=self.config.num_experts)
                if router != "fp32":
                    round_routers(copy, router)
                answers, routes = _run(copy, self._ids)
                self.rows[name] = self._compared(name, asked, copy, answers, routes, router)
            return self.rows[name]

    def measure_all(self, copies: dict[str, dict], progress: bool = True) -> pd.DataFrame:
        """`measure(name, **options)` of each; the table of all so far."""
        for name, options in tqdm(copies.items(), disable=not progress, unit="copy"):
            self.measure(name, **options)
        return self.table

    def hot_cold(self, share: float = 0.25, hot: str = "int8", cold: str = "int4") -> dict:
        """A plan for `measure(plan=…)`: the most used experts of each layer take format `hot`, the others `cold`. Use is
        counted on the project's short prompts, not on the texts that are measured."""
        with self._lock:
            if self._hot is None:
                self._hot = self._counts()
            return hot_cold(self._hot, self.config.moe_layers, hot, cold, share)

    def _counts(self) -> np.ndarray:
        """(moe layers, experts): how often each was chosen."""
        lab = open_model(self.container.dir, threads=self.threads)
        counts = np.zeros((len(self.config.moe_layers), self.config.num_experts))
        for text in (t for group in texts("prompts").values() for t in group):
            reading = read(lab, text)
            for row, layer in zip(counts, reading.layers, strict=True):
                row += np.bincount(reading.choose(layer.index)[0].ravel(), minlength=len(row))
        return counts

    def _compared(self, name, asked, copy, answers, routes, router) -> Measured:
        follows = [ids[1:] for _, ids in self._ids]
        nats, base = (
            np.concatenate([-p[np.arange(len(f)), f] for p, f in zip(found, follows, strict=True)]).astype(np.float64)
            for found in (answers, self._answers)
        )
        kl = [divergence(a, b) for a, b in zip(self._answers, answers, strict=True)]
        same = [[(a[:, :, None] == b[:, None]).any(2) for a, b in zip(*pair, strict=True)]
                for pair in zip(self._routes, routes, strict=True)]  # fmt: skip
        agreement = np.array([np.concatenate([text[i] for text in same]).mean() for i in range(len(same[0]))])
        sizes, weights = _part_bytes(copy.container), 3 * self.config.expert_intermediate_size * self.config.hidden_size
        if router not in (None, "fp32"):
            shape = (self.config.num_experts, self.config.hidden_size)
            sizes["router"] = len(self.config.moe_layers) * sum(
                packing.part_sizes(shape, formats.format_name(router), "rows16")
            )
        experts = len(self.config.moe_layers) * self.config.num_experts
        return Measured(
            name, asked, sizes, copy.container.slot_bytes, 8 * sizes["expert"] / (experts * weights), nats, base,
            np.concatenate(kl), self._domain, agreement, weight_errors(self.container, copy.container),
        )  # fmt: skip


def round_routers(lab, format: str) -> None:
    """Round the router matrices of an open model; its files stay what they are, and `lab.configure` brings them back."""
    s = lab.settings
    options = {
        "threads": s["threads"],
        "block_size": s["gemm_block_size"],
        "int8_activations": s["activations"] == "int8",
    }
    for layer in lab.engine.layers:
        if layer.router is not None:
            file = lab.container.router(layer.router.index)
            tensor = file.tensors["router"]
            values = np.ascontiguousarray(round_matrix(tensor.array(), format).back)
            layer.router.linear = Linear(file.payload, replace(tensor, data=values.reshape(-1).view(np.uint8)), options)


def weight_errors(reference: Container, copy: Container) -> np.ndarray:
    """Relative error of each routed expert's gate matrix, (moe layers, experts)."""
    config = reference.config
    errors = np.zeros((len(config.moe_layers), config.num_experts))
    if reference is copy:
        return errors
    for row, layer in zip(errors, config.moe_layers, strict=True):
        for expert in range(config.num_experts):
            a, b = (_gate(box, layer, expert) for box in (reference, copy))
            row[expert] = np.linalg.norm(a - b) / (np.linalg.norm(a) or 1.0)
    return errors


def _gate(box: Container, layer: int, expert: int) -> np.ndarray:
    return box.block(layer, expert // box.block_size).tensors[f"{expert}.gate"].array()


def _part_bytes(box: Container) -> dict[str, int]:
    """Bytes of the stored tensors by part: routed experts, routers, everything else."""
    sizes = dict.fromkeys(PARTS, 0)
    for name in box.files:
        part = (
            "expert"
            if "/expert_" in name
            else "router"
            if layout.layer_of(name) is not None and "router" in name
            else "dense"
        )
        sizes[part] += sum(tensor.nbytes for tensor in box.read(name).tensors.values())
    return sizes


def _run(lab, texts: list[tuple[str, np.ndarray]]) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Per text: log-probabilities of what follows, float32 (tokens - 1, vocab), and the choices of each MoE layer."""
    answers, routes = [], []
    for _, ids in texts:
        with watched_routes(lab) as seen:
            answers.append(log_softmax(lab.logits(ids)[:-1]).astype(np.float32))
        routes.append([np.concatenate(parts) for _, parts in sorted(seen.items())])
    return answers, routes
