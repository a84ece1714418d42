"""Binary traces of llama.cpp forks: mbolt routing logs, and expert counts inside an imatrix GGUF."""

from __future__ import annotations

import mmap
import re
import struct

import numpy as np

from ..table import DECODE, PREFILL, Trace
from .common import Head, bad, pad_rows

_MBOLT = b"MBLT"


def is_mbolt(head: Head) -> bool:
    return head.bytes[:4] == _MBOLT


def load_mbolt(path) -> Trace:
    """int32 little-endian: magic, version 1, experts; then records of layer, k, tokens and ids, token by token.

    A forward pass begins where the layer number does not rise. A record cut off at the end of the file is left out.
    """
    raw = np.fromfile(path, "<i4")
    if len(raw) < 3 or raw[1] != 1:
        raise bad(path, "byte 4", "format version 1 and an expert count", raw[1:3].tolist())
    num_experts, at, notes = int(raw[2]), 3, []
    parts, layers, passes, several, current, last = [], [], [], [], -1, None
    while at < len(raw):
        if at + 3 > len(raw) or at + 3 + int(raw[at + 1]) * int(raw[at + 2]) > len(raw):
            notes.append(f"the file ends inside a record at byte {4 * at}; that record was left out")
            break
        layer, k, tokens = map(int, raw[at : at + 3])
        if layer < 0 or not 1 <= k <= num_experts or tokens < 1:
            raise bad(path, f"byte {4 * at}", f"layer, k up to {num_experts}, tokens", (layer, k, tokens))
        ids = raw[at + 3 : at + 3 + k * tokens].reshape(tokens, k)
        if ids.min() < 0 or ids.max() >= num_experts:
            raise bad(path, f"byte {4 * (at + 3)}", f"expert ids from 0 to {num_experts - 1}", int(ids.max()))
        if last is None or layer <= last:
            current += 1
            several.append(False)
        last = layer
        several[current] |= tokens > 1
        parts.append(ids)
        layers += [layer] * tokens
        passes += [current] * tokens
        at += 3 + k * tokens
    if not parts:
        raise bad(path, "byte 12", "at least one whole record", "none")
    counts = {layer: layers.count(layer) for layer in set(layers)}
    if any(several) and counts[max(counts)] < counts[min(counts)]:
        notes.append(
            f"layer {max(counts)} lists fewer prompt tokens than the others: only outputs that were needed ran"
        )
    header = {"engine": "llama.cpp (mbolt)", "capture": "MBOLT_TRACE", "ranked": True, "num_experts": num_experts,
              "notes": notes, "complete": not any("ends inside" in note for note in notes)}  # fmt: skip
    return Trace.from_rows(
        step=passes,
        layer=layers,
        experts=pad_rows([row for ids in parts for row in ids]),
        phase=np.where(np.array(several)[passes], PREFILL, DECODE),
        header=header,
    )


_EXPERT_COUNTS = re.compile(r"blk\.(\d+)\.(ffn_\w+_exps)\.weight\.counts$")
# struct format of GGUF's scalar value types; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_F32 = 0


def is_imatrix(head: Head) -> bool:
    return head.bytes[:4] == b"GGUF"


def load_imatrix(path) -> Trace:
    """Expert counts of a llama.cpp importance matrix: the `.counts` tensors beside the expert weights.

    Gate, up and down of a layer repeat the same counts; one is kept, and a difference is noted.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _imatrix(path, data)


def _imatrix(path, data: mmap.mmap) -> Trace:
    meta, tensors = _gguf(path, data)
    if meta.get("general.type") != "imatrix":
        found = f"general.type {meta.get('general.type')!r}: this GGUF is not an importance matrix"
        raise bad(path, "metadata", "general.type imatrix", found)
    found: dict[int, dict[str, np.ndarray]] = {}
    for name, (kind, count, offset) in tensors.items():
        match = _EXPERT_COUNTS.match(name)
        if not match:
            continue
        if kind != _F32 or offset + 4 * count > len(data):
            raise bad(path, f"tensor {name}", f"{count} float32 inside the file", f"type {kind} at byte {offset}")
        found.setdefault(int(match[1]), {})[match[2]] = np.frombuffer(data[offset : offset + 4 * count], "<f4")
    if not found:
        raise bad(path, "tensors", "blk.N.ffn_*_exps.weight.counts", "no expert counts; the model may be dense")
    notes = [f"imatrix of {meta.get('imatrix.chunk_count')} chunks x {meta.get('imatrix.chunk_size')} tokens"]
    layers = sorted(found)
    kept = [next(iter(found[layer].values())) for layer in layers]
    if len({len(row) for row in kept}) > 1:
        raise bad(path, "tensors", f"{len(kept[0])} experts in every layer", sorted({len(row) for row in kept}))
    for layer in layers:
        first, *rest = found[layer].values()
        if any(not np.array_equal(first, other) for other in rest):
            notes.append(f"layer {layer}: gate, up and down counts differ; {next(iter(found[layer]))} was kept")
    counts = np.stack(kept)
    if not np.isfinite(counts).all() or counts.min() < 0:
        raise bad(path, "tensors", "counts from 0", "negative or non-finite values")
    header = {"engine": "llama.cpp", "capture": "imatrix", "moe_layers": layers, "num_experts": counts.shape[1],
              "notes": notes}  # fmt: skip
    return Trace.from_counts(np.rint(counts).astype(np.int64), header)


def _gguf(path, data: mmap.mmap) -> tuple[dict, dict[str, tuple[int, int, int]]]:
    """Metadata, and tensors as name -> (type, number of values, byte offset in the file), of a GGUF version 2 or 3."""
    at = 4

    def take(code: str):
        nonlocal at
        size = struct.calcsize("<" + code)
        if at + size > len(data):
            raise bad(path, f"byte {at}", f"{size} more bytes", "the end of the file")
        value = struct.unpack_from("<" + code, data, at)[0]
        at += size
        return value

    def text() -> str:
        nonlocal at
        length = take("Q")
        if at + length > len(data):
            raise bad(path, f"byte {at}", f"a string of {length} bytes", "the end of the file")
        at += length
        return data[at - length : at].decode("utf-8", "replace")

    def value(kind: int):
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = take("I"), take("Q")
            if count > len(data):
                raise bad(path, f"byte {at}", f"an array that fits {len(data)} bytes", f"{count} values")
            return [value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise bad(path, f"byte {at}", "a GGUF value type from 0 to 12", kind)
        return take(_SCALARS[kind])

    version = take("I")
    if version not in (2, 3):
        raise bad(path, "byte 4", "GGUF version 2 or 3", version)
    num_tensors, num_keys = take("Q"), take("Q")
    meta = {text(): value(take("I")) for _ in range(num_keys)}
    infos = []
    for _ in range(num_tensors):
        name, dims = text(), take("I")
        if dims > 8:
            raise bad(path, f"byte {at}", "at most 8 dimensions", dims)
        count = int(np.prod([take("Q") for _ in range(dims)], dtype=object)) if dims else 1
        infos.append((name, take("I"), count, take("Q")))
    align = meta.get("general.alignment", 32)
    base = at + -at % align
    return meta, {name: (kind, count, base + offset) for name, kind, count, offset in infos}
