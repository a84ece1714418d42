"""Memory at work, as tables."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

import colibri_lab as cl
from colibri_lab.engine import experiments
from colibri_lab.engine.memory import ARENAS
from colibri_lab.errors import SettingError


@pytest.fixture(scope="module")
def moves():
    lab = cl.open("data/colibri-tiny", expert_cache_slots=16, max_seq_len=256)
    table = experiments.arena_moves(lab, "def read_lines(path):", max_tokens=4, temperature=0.0, stop_at_eos=False)
    table.attrs["run"], table.attrs["counts"] = lab.last_run, lab.engine.request.arenas.counts()
    return table


def test_moves_reach_the_peaks_and_end_with_nothing(moves):
    for name in ARENAS:
        assert moves[f"{name}_bytes"].max() == moves.attrs["peak"][name] == moves.attrs["counts"][name].high_water
        assert moves.attrs["peak"][name] <= moves.attrs["reserved"][name] and moves[f"{name}_bytes"].iloc[-1] == 0
    assert moves.filter(like="_bytes").to_numpy().min() == 0


def test_steps_are_those_of_the_run_and_use_their_own_arena(moves):
    assert moves.step.max() + 1 == len(moves.attrs["run"].steps)
    prefill, decode = moves[moves.step == 0], moves[moves.step > 0]
    assert prefill.prefill_bytes.max() > 0 == prefill.decode_bytes.max()
    assert decode.decode_bytes.max() > 0 == decode.prefill_bytes.max()
    assert set(moves.arena) == set(ARENAS)


def test_every_layer_climbs_over_the_same_memory(moves):
    decode = moves[(moves.step == 1) & (moves.arena == "decode")].decode_bytes.to_numpy()
    tops = (decode == decode.max()).sum()
    assert tops == 7  # attention of each of the 7 layers reaches the same height


def test_samples_of_arenas_that_did_not_move():
    empty = {name: np.zeros((0, 2), np.int64) for name in ARENAS}
    table = experiments.moves_of(empty, dict.fromkeys(ARENAS, 0), dict.fromkeys(ARENAS, 64))
    assert len(table) == 0 and list(table.columns)[:2] == ["step", "arena"]


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("ask", [1, 2, 5])
def test_holes_against_a_search_by_hand(every, ask):
    found = experiments.holes(64, every, ask)
    free = np.arange(64) % every == 0
    assert np.array_equal(found["before"], ~free) and found["free"] == free.sum()
    places = [at for at in range(64 - ask + 1) if free[at : at + ask].all()]
    assert found["first"] == (places[0] if places else None)
    assert found["largest"] == (64 if every == 1 else 1)
    assert found["external"] == pytest.approx(1 - found["largest"] / free.sum())
    assert found["after"].sum() == found["before"].sum() + (ask if places else 0)


def test_holes_refuses_what_cannot_be():
    with pytest.raises(SettingError, match="every and ask must be 1 to 64, got 0 and 2"):
        experiments.holes(64, 0, 2)


def test_a_mapped_file_is_counted_as_file_and_not_as_own_memory(tmp_path):
    size = 8 << 20
    (tmp_path / "weights").write_bytes(os.urandom(size))
    table = experiments.mapped(tmp_path / "weights", (0.0, 0.5, 1.0))
    assert table.attrs["file_MB"] == size / 1e6 and table.touched_MB.tolist() == [0, size / 2e6, size / 1e6]
    slack = 64 * mmap.PAGESIZE / 1e6  # neighbours that were in the page cache come along
    assert table.mapped_files_MB.iloc[0] <= slack and abs(table.mapped_files_MB.iloc[-1] - size / 1e6) <= slack
    assert table.mapped_files_MB.iloc[1] >= size / 2e6 - slack
    assert table.page_cache_MB.iloc[-1] == pytest.approx(size / 1e6)
    assert table.anonymous_MB.iloc[-1] < 2
