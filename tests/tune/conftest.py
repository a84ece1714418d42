"""What tests of measuring and planning share: run records of their own, a probe by hand, traces, the shipped model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri_lab.front import container_of
from colibri_lab.trace import load_trace
from colibri_lab.trace.table import Trace
from colibri_lab.tune.fingerprint import machine_facts
from colibri_lab.tune.probe import Probe

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(autouse=True)
def own_records(tmp_path, monkeypatch):
    """Run records of a test go to its own folder."""
    monkeypatch.setenv("COLIBRI_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Container of the shipped model."""
    return container_of("colibri-tiny", progress=False)


@pytest.fixture(scope="session")
def olmoe() -> Trace:
    """Recorded decode of OLMoE-1B-7B: 16 layers, top-8 of 64."""
    return load_trace(DATA / "traces" / "warp_olmoe_1b7b_299.jsonl")


@pytest.fixture(scope="session")
def qwen() -> Trace:
    """Recorded prompt and decode of Qwen3-30B-A3B: 48 layers, top-6 of 128, with the engine's own residency and bytes."""
    return load_trace(DATA / "traces" / "bigmoe_qwen.route.csv")


@pytest.fixture
def probe_of() -> Probe:
    """A probe with round numbers: a disk of 1 GB/s, a page cache of 10 GB/s, 20 GB/s of memory."""

    def row(**values):
        rate = next(value for name, value in values.items() if name in ("bytes_per_s", "seconds"))
        return {**values, "low": 0.95 * rate, "high": 1.05 * rate, "n": 5}

    disk = [
        row(block_bytes=size, depth=depth, how="direct", bytes_per_s=1e9)
        for size in (1 << 16, 1 << 23)
        for depth in (1, 8)
    ]
    kernels = []
    for name, activations, weight_bytes in (
        ("bf16", "fp32", 2.0), ("int8", "int8", 1.0), ("int8", "fp32", 2.0), ("int4-g64", "int8", 0.5625), ("int4-g64", "fp32", 1.125),
    ):  # fmt: skip
        for tokens, flops in ((1, 2e10 / weight_bytes), (64, 1e11)):
            seconds = 2 * tokens * 1024 * 2048 / flops
            rate = weight_bytes * 1024 * 2048 / seconds
            kernels.append(
                row(format=name, activations=activations, threads=2, tokens=tokens, seconds=seconds)
                | {
                    "weight_bytes_per_s": rate if activations == "int8" or name == "bf16" else rate / 2,
                    "flop_per_s": flops,
                }
            )
    return Probe(
        {**machine_facts(), "physical_cores": 2}, "/", 16 * 2**30, 0, disk=disk,
        page_cache=[row(depth=depth, bytes_per_s=1e10) for depth in (1, 4)], memory=[row(threads=2, bytes_per_s=2e10)],
        kernels=kernels, layer_s=row(seconds=2e-4),
    )  # fmt: skip


@pytest.fixture(scope="session")
def trace_of():
    """trace_of(steps, experts=8): a decode trace by hand, steps[step][layer] being expert ids."""

    def make(steps: list[list[list[int]]], experts: int = 8) -> Trace:
        rows = [(s, layer, ids) for s, layers in enumerate(steps) for layer, ids in enumerate(layers)]
        return Trace.from_rows(
            step=[row[0] for row in rows], layer=[row[1] for row in rows], experts=np.array([row[2] for row in rows]),
            header={"num_experts": experts, "ranked": True},
        )  # fmt: skip

    return make
