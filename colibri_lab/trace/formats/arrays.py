"""numpy files: routed-experts arrays of vLLM and SGLang, router logits of transformers, load matrices (EPLB)."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np

from ...config import ModelConfig
from ...errors import ColibriError, TraceError
from ..table import DECODE, PAD, PREFILL, Trace
from .common import Head, bad, drop_dense_layers, expert_range

_LOGITS = re.compile(r"layer_(\d+)$")


def _read(path) -> dict[str, np.ndarray]:
    """Arrays by name; an npy file is the one array "". Nothing pickled is read."""
    try:
        loaded = np.load(path, allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path}: not a readable numpy file of plain numbers: {error}") from error


def _header(head: Head) -> tuple[tuple[int, ...], np.dtype] | None:
    """Shape and dtype of an npy file."""
    if head.bytes[:6] != b"\x93NUMPY":
        return None
    try:
        array = np.load(head.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError):
        return None
    return array.shape, array.dtype


def is_routed(head: Head) -> bool:
    npy = _header(head)
    if npy:
        return len(npy[0]) == 3 and npy[1].kind in "iu"
    return any(name in ("routed_experts.npy", "prompt_routed_experts.npy") for name in head.members)


def load_routed(
    path,
    num_prompt_tokens: int | None = None,
    num_experts: int | None = None,
    moe_layers=None,
    ranked: bool = False,
) -> Trace:
    """Expert ids (tokens, layers, k), as vLLM and SGLang return per request: npy, or npz with `routed_experts` and
    perhaps `prompt_routed_experts`, `token_ids` (tokens,).

    The first `num_prompt_tokens` tokens are one prefill step, later ones decode. Say `ranked=True` when the server is
    known to keep router rank order. Layers that hold only zeros or -1 are dense placeholders and are dropped.
    """
    arrays, notes = _read(path), []
    prompt = arrays.get("prompt_routed_experts")
    answer = arrays.get("routed_experts", arrays.get(""))
    parts = [part for part in (prompt, answer) if part is not None]
    for part in parts:
        if part.ndim != 3 or part.dtype.kind not in "iu" or not part.size:
            raise bad(path, "routed_experts", "integers (tokens, layers, k)", f"{part.dtype} {part.shape}")
    if len({part.shape[1:] for part in parts}) > 1:
        raise bad(path, "routed_experts", f"layers and k {parts[0].shape[1:]} as in the prompt", parts[1].shape[1:])
    ids = np.concatenate(parts).astype(np.int64)
    if prompt is not None:
        if num_prompt_tokens not in (None, len(prompt)):
            raise bad(path, "prompt_routed_experts", f"num_prompt_tokens {num_prompt_tokens} rows", len(prompt))
        num_prompt_tokens = len(prompt)
    elif num_prompt_tokens is None:
        notes.append("where the prompt ends was not said (num_prompt_tokens=): every token is taken as decode")
    num_prompt_tokens = num_prompt_tokens or 0
    if not 0 <= num_prompt_tokens <= len(ids):
        raise bad(path, "num_prompt_tokens", f"0 to {len(ids)}", num_prompt_tokens)
    width = ids.shape[1]
    ids, kept = drop_dense_layers(ids)
    if not kept:
        raise bad(path, "routed_experts", "at least one routed layer", f"{width} layers of zeros or -1")
    if len(kept) < width:
        notes.append(f"{width - len(kept)} layers without routing were left out as dense")
    layers = _layer_numbers(path, moe_layers, kept, width, notes)
    step, row, phase = _steps(len(ids), num_prompt_tokens)
    tokens = arrays.get("token_ids", arrays.get("input_ids"))
    return _rows(path, ids, layers, step, row, phase, tokens, None, {
        "engine": "vLLM or SGLang", "capture": "routed experts array", "ranked": ranked, "notes": notes,
        "num_experts": expert_range(path, int(ids.max()), num_experts, notes)})  # fmt: skip


def _layer_numbers(path, moe_layers, kept: list[int], width: int, notes: list[str]) -> np.ndarray:
    if moe_layers is None:
        notes.append("layer numbers are positions in the array; pass moe_layers= when it lists MoE layers only")
        return np.array(kept)
    layers = [int(layer) for layer in moe_layers]
    if len(layers) == width:
        return np.array(layers)[kept]
    if len(layers) != len(kept):
        raise bad(path, "moe_layers", f"{width} layer numbers, one per layer of the array", len(layers))
    return np.array(layers)


def _steps(tokens: int, prompt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step, row and phase of each token: the prompt is step 0, each later token a step of its own."""
    at = np.arange(tokens)
    first = 1 if prompt else 0
    return (
        np.where(at < prompt, 0, at - prompt + first),
        np.where(at < prompt, at, 0),
        np.where(at < prompt, PREFILL, DECODE),
    )


def _rows(path, ids, layers, step, row, phase, tokens, weights, header) -> Trace:
    """Rows of ids (tokens, layers, k) in running order: step, then layer, then token."""
    if tokens is not None and np.shape(tokens) != (len(ids),):
        raise bad(path, "token ids", f"shape ({len(ids)},)", np.shape(tokens))
    token, layer = (index.reshape(-1) for index in np.indices(ids.shape[:2]))
    flat = ids.reshape(-1, ids.shape[2])
    order = np.lexsort((row[token], layer, step[token]))
    order = order[(flat[order] >= 0).any(1)]
    token, layer = token[order], layer[order]
    return Trace.from_rows(
        step=step[token],
        layer=layers[layer],
        row=row[token],
        phase=phase[token],
        experts=np.where(flat[order] < 0, PAD, flat[order]),
        weights=None if weights is None else weights.reshape(flat.shape)[order],
        token_id=None if tokens is None else np.asarray(tokens)[token],
        header=header,
    )


def is_logits(head: Head) -> bool:
    npy = _header(head)
    if npy:
        return len(npy[0]) == 3 and npy[1].kind == "f"
    names = [name.removesuffix(".npy") for name in head.members]
    return "router_logits" in names or any(_LOGITS.match(name) for name in names)


def load_logits(path, config=None, num_prompt_tokens: int | None = None, moe_layers=None) -> Trace:
    """Raw router logits of transformers (`output_router_logits=True`) turned into choices by the family's own router.

    npz with `router_logits` (layers, tokens, experts), or one `layer_<n>` (tokens, experts) per MoE layer; optional
    `correction_bias` (layers, experts), `attention_mask` (tokens,) and `input_ids` (tokens,). `config` says how the
    family chooses: a `ModelConfig`, its JSON, or a checkpoint directory. Top-k of raw logits is wrong for many.
    """
    from ...engine.router_reference import route_numpy

    arrays, notes = _read(path), []
    if config is None:
        raise bad(path, "config", "config= (ModelConfig or checkpoint directory): logits alone do not say how the "
                  "family routes", "none")  # fmt: skip
    config = model_config(config)
    named = sorted((int(m[1]), name) for name in arrays if (m := _LOGITS.match(name)))
    if named:
        logits, numbers = np.stack([arrays[name] for _, name in named]), [number for number, _ in named]
    else:
        logits, numbers = arrays.get("router_logits", arrays.get("")), moe_layers or config.moe_layers
    if logits.ndim != 3 or logits.shape[2] != config.num_experts or logits.shape[0] != len(numbers):
        want = f"({len(numbers)}, tokens, {config.num_experts})"
        raise bad(path, "router_logits", f"{want} as the config says", logits.shape)
    bias = arrays.get("correction_bias")
    if config.router.correction_bias and bias is None:
        raise bad(path, "correction_bias", "(layers, experts): this family chooses by it", "none")
    mask = np.asarray(arrays.get("attention_mask", np.ones(logits.shape[1]))).reshape(-1) != 0
    if len(mask) != logits.shape[1]:
        raise bad(path, "attention_mask", f"{logits.shape[1]} values", len(mask))
    tokens = arrays.get("input_ids", arrays.get("token_ids"))
    tokens = None if tokens is None else np.asarray(tokens).reshape(-1)
    if not mask.all():
        notes.append(f"{int((~mask).sum())} padding tokens were left out")
    try:
        routed = [
            route_numpy(layer[mask], config.router, config.top_k, None if bias is None else bias[at])
            for at, layer in enumerate(logits)
        ]
    except ColibriError as error:
        raise TraceError(f"{path}: {error}") from error
    ids = np.stack([experts for experts, _ in routed], axis=1).astype(np.int64)
    weights = np.stack([weight for _, weight in routed], axis=1)
    if num_prompt_tokens is None:
        num_prompt_tokens = len(ids)
        notes.append("one forward pass: every token is prefill unless num_prompt_tokens= says otherwise")
    step, row, phase = _steps(len(ids), num_prompt_tokens)
    if tokens is not None and len(tokens) == len(mask):
        tokens = tokens[mask]
    return _rows(path, ids, np.array(numbers), step, row, phase, tokens, weights, {
        "model": config.family, "engine": "transformers", "capture": "router logits", "ranked": True, "notes": notes,
        "num_experts": config.num_experts, "top_k": config.top_k})  # fmt: skip


def model_config(config) -> ModelConfig:
    """A `ModelConfig` from itself, from its JSON dict, or from a checkpoint directory."""
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, dict):
        return ModelConfig.from_json(config)
    if isinstance(config, (str, Path)):
        from ...checkpoint.families import read_config

        return read_config(Path(config))
    raise TraceError(f"config must be a ModelConfig, its JSON or a checkpoint directory, got {type(config).__name__}")


def is_matrix(head: Head) -> bool:
    npy = _header(head)
    if npy:
        return len(npy[0]) == 2
    names = [name.removesuffix(".npy") for name in head.members]
    return bool(set(names) & set(_MATRIX_NAMES)) or head.line.startswith("[") or _json_matrix(head)


_MATRIX_NAMES = ("weight", "counts", "logical_count", "expert_load")


def _json_matrix(head: Head) -> bool:
    return head.line.startswith("{") and any(
        f'"{name}"' in head.bytes.decode("utf-8", "replace") for name in _MATRIX_NAMES
    )


def load_matrix(path, moe_layers=None) -> Trace:
    """Load per (layer, expert), as expert-parallel load balancers (EPLB) take it: npy, npz or JSON.

    JSON is a list of rows, or an object holding one as weight, counts, logical_count or expert_load. A leading axis of
    steps is summed over.
    """
    head = Head(path)
    if head.bytes[:2] in (b"PK", b"\x93N"):
        arrays = _read(path)
        values = next((arrays[name] for name in ("", *_MATRIX_NAMES) if name in arrays), None)
    else:
        try:
            data = json.loads(head.path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: not readable JSON: {error}") from error
        data = next((data[name] for name in _MATRIX_NAMES if name in data), None) if isinstance(data, dict) else data
        try:
            values = np.array(data)
        except ValueError:
            raise bad(path, "matrix", "rows of equal length", "rows of different lengths") from None
    if values is None or values.dtype.kind not in "iuf" or values.ndim not in (2, 3):
        found = getattr(values, "shape", None), getattr(values, "dtype", None)
        raise bad(path, "matrix", "numbers (layers, experts)", found)
    if values.dtype.kind == "f" and (not np.isfinite(values).all() or (values != np.round(values)).any()):
        raise bad(path, "matrix", "whole counts", "fractions or NaN; scale a load matrix to counts first")
    counts = np.asarray(values.sum(0) if values.ndim == 3 else values).astype(np.int64)
    used = np.flatnonzero(counts.any(1))
    layers = np.arange(len(counts)) if moe_layers is None else np.array([int(layer) for layer in moe_layers])
    if len(layers) != len(counts):
        raise bad(path, "moe_layers", f"{len(counts)} layer numbers", len(layers))
    header = {"capture": "load matrix", "moe_layers": layers[used].tolist(), "num_experts": counts.shape[1]}
    if not len(used):
        raise bad(path, "matrix", "at least one count above 0", "all 0")
    return Trace.from_counts(counts[used], header)
