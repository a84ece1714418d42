"""The program that counts instructions does the work it names, and twice the tokens take more of them."""

from __future__ import annotations

import subprocess

import instructions
import pytest


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = "avx2" if "avx2" in instructions.cpu.supported() else "scalar"
    return instructions.build(path, tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize("argument", [argument for _, argument, _ in instructions.cases()])
def test_every_case_runs(program, argument):
    assert subprocess.run([str(program), argument]).returncode == 0


def test_more_rows_take_more_instructions(program, tmp_path):
    def count(argument):
        return instructions.by_callgrind(program, argument, tmp_path) or instructions.by_stepping(program, argument)

    one, twelve = count("gemm 3 0 1 1"), count("gemm 3 0 12 1")
    assert (one is None and twelve is None) or 2 * one < twelve < 13 * one
