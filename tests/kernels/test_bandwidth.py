"""The limits of the machine: what was counted, what is refused, and paths without byte products."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab import kernels
from colibri_lab.limits import Limits, LimitWork, measure_limits
from colibri_lab.timing import Sample, Timing
from colibri_lab.workloads import Workload


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1024, 4096, 100_001])
def test_bytes_read_are_whole_turns_of_each_thread(threads, size):
    count, seconds, held = kernels.load("bandwidth").read(np.ones((threads, size), np.uint8), 5)
    turns = (size - 64) // 512
    assert count == 5 * threads * turns * 512
    assert seconds > 0 and 0 <= held <= 1.01


def test_operations_are_counted_by_threads_and_rounds():
    kernel = kernels.load("bandwidth")
    one = kernel.multiply_adds(1, 1000)[0]
    assert kernel.multiply_adds(2, 3000)[0] == 6 * one
    assert one % (2 * 16 * 1000) == 0


def test_paths_without_the_instruction_say_so(monkeypatch):
    monkeypatch.setenv("COLIBRI_SIMD", "scalar")
    kernel = kernels.load("bandwidth")
    assert kernel.simd == "scalar" and not kernel.has_byte_dots
    assert kernel.byte_dots(1, 10) is None
    limits = LimitWork(1)
    assert "limit:dots" not in limits.contenders


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda k: k.read(np.ones((1, 1023), np.uint8)), "at least 1024 bytes a thread, got 1023"),
        (lambda k: k.read(np.ones((1, 2048), np.uint8), 0), "passes must be at least 1, got 0"),
        (lambda k: k.read(np.ones((257, 1024), np.uint8)), "threads must be 1 to 256, got 257"),
        (lambda k: k.multiply_adds(0, 1), "threads must be 1 to 256, got 0"),
        (lambda k: k.byte_dots(1, -1), "rounds must be at least 1, got -1"),
    ],
)
def test_impossible_measurements_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call(kernels.load("bandwidth"))


def test_the_least_time_is_that_of_the_bytes_or_of_the_operations():
    def rate(per_s: float) -> Timing:
        return Timing((Sample(1 / per_s, 1.0),))

    limits = Limits(1, "any", read=rate(10e9), fma=rate(100e9), dots=rate(400e9))
    few = Workload("gemm", "few", operations=2e6, bytes=1e6, bind=None)
    many = Workload("gemm", "many", operations=200e6, bytes=1e6, bind=None)
    whole = Workload("gemm", "whole numbers", operations=200e6, bytes=1e6, bind=None, integer=True)
    assert limits.bound_s(few) == pytest.approx(100e-6)
    assert limits.bound_s(many) == pytest.approx(2000e-6)
    assert limits.bound_s(whole) == pytest.approx(500e-6)
    assert (few.intensity, many.intensity) == (2, 200)


def test_measured_limits_are_numbers_a_machine_can_have():
    limits = measure_limits(1, rounds=1)
    assert 1e8 < limits.bytes_per_s < 1e13
    assert 1e7 < limits.flop_per_s < 1e14
    assert limits.int8_op_per_s is None or limits.int8_op_per_s > limits.flop_per_s
