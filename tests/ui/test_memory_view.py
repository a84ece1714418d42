"""The memory map and the findings of notebook 03."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from looking import together, values_of

import colibri_lab as cl
from colibri_lab.engine import experiments
from colibri_lab.engine.memory import ARENAS, BLOCK, TAGS
from colibri_lab.errors import ColibriError, SettingError, StorageError
from colibri_lab.ui import memory_frames as frames
from colibri_lab.ui import memory_lessons as lessons
from colibri_lab.ui import memory_map

PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def model():
    return cl.open("data/colibri-tiny", expert_cache_slots=8, max_seq_len=256, page_size=16)


@pytest.fixture
def view(model):
    model.configure(expert_cache_slots=8)
    view = memory_map(model, PROMPT, max_tokens=60, seed=1, stop_at_eos=False)
    yield view
    assert view.stop()
    view.close()


@pytest.fixture(scope="module")
def moves(model):
    return experiments.arena_moves(model, PROMPT, max_tokens=4, seed=1, stop_at_eos=False)


def state_of(tags, touched) -> frames.PoolState:
    nothing = dict.fromkeys(ARENAS, 0)
    return frames.PoolState(np.array(tags, np.uint8), None if touched is None else np.array(touched, np.uint8), 0, nothing, nothing,
                            dict.fromkeys(ARENAS, 64), None)  # fmt: skip


def test_it_begins_empty_and_says_why(view, model):
    assert view.state == "empty" and view._panels[3].spec["empty"] == "nothing ran yet: press Start"
    assert "8 slots × 6 layers × 147 kB = 7.08 MB" in view._cost.value
    with pytest.raises(ColibriError, match="press Start or call run_once"):
        view.png()


def test_a_run_fills_the_map(view, model, tmp_path):
    view.run_once(max_tokens=60)
    data = view.data
    parts = data["parts"].set_index("part")
    assert view.state == "done" and "60 tokens" in view._message.value
    assert (
        parts.taken_bytes["slots"]
        == (model.plan.sizes.slots + model.plan.sizes.transient) * model.plan.sizes.slot_bytes
    )
    assert 0 < parts.touched_bytes["arena"] < parts.taken_bytes["arena"]
    assert (data["arenas"].peak_bytes <= data["arenas"].reserved_bytes).all() and data["arenas"].peak_bytes[
        "decode"
    ] > 0
    assert data["growth"].step.is_monotonic_increasing and len(data["moves"]) <= 200
    assert "reserving is not using" in view._verdict.value
    view.png(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_slots_make_the_pool_anew_in_the_background(view, model):
    view.run_once()
    before = len(view.pool.tags)
    view.slots.value = 4
    assert view.wait(60) and view.state == "done"
    assert model.settings["expert_cache_slots"] == 4 and len(view.pool.tags) < before


def test_moved_slots_may_generate_fewer_tokens(model):
    view = memory_map(model, rerun_tokens=7, max_tokens=20, stop_at_eos=False)
    view.slots.value = 5
    assert view.wait(60) and len(view.run.tokens) == 7 and view.tokens.value == 20
    view.start()
    assert view.wait(60) and len(view.run.tokens) == 20
    view.close()
    with pytest.raises(SettingError, match="max_tokens must be"):
        memory_map(model, rerun_tokens=0)


def test_a_moved_slider_shows_the_coming_plan_before_the_pool_is_made_anew(view, model, monkeypatch):
    view.run_once()
    go, configure = threading.Event(), model.configure
    monkeypatch.setattr(model, "configure", lambda **settings: go.wait(60) and configure(**settings))
    before = values_of(view._panels[1])[-1, 1]
    view.slots.value = 4
    shown, planned = values_of(view._panels[1])[-1, 1], view.data["plan"].set_index("part").planned_bytes
    go.set()
    assert shown < before and shown == pytest.approx(planned["slots"] / 1e6)
    assert view.wait(60) and planned.equals(view.data["plan"].set_index("part").planned_bytes)
    z = model.plan.sizes
    assert planned["slots"] == (z.slots + z.transient) * z.slot_bytes


def test_stop_and_errors_leave_the_last_picture(view, model, monkeypatch):
    view.tokens.value = 180
    view.start()
    view.stop()
    assert view.state in ("stopped", "empty")  # empty: it was dropped before it began
    view.run_once(max_tokens=20)
    picture = view.pool

    def fail(*args, **settings):
        raise StorageError("layer_3/expert_17.bin: read failed")
        yield

    monkeypatch.setattr(model, "stream", fail)
    with pytest.raises(StorageError):
        view.run_once()
    assert view.state == "error" and "read failed – the last picture stays" in view._message.value
    assert np.array_equal(view.pool.tags, picture.tags)


def test_settings_that_cannot_be_are_refused(view, model):
    with pytest.raises(SettingError, match="slots must be 1 to 32"):
        view.run_once(slots=33)
    with pytest.raises(SettingError, match="max_tokns"):
        view.run_once(max_tokns=3)
    with pytest.raises(SettingError, match="max_tokns"):
        memory_map(model, max_tokns=3)


def test_code_names_the_settings(view):
    assert (
        "colibri run --model colibri-tiny" in view.code()
        and "cl.open('colibri-tiny', expert_cache_slots=8" in view.code()
    )


def test_two_threads_hammer_controls_and_pictures(view):
    def slots():
        view.slots.value = 5 if view.slots.value == 6 else 6

    together(
        *(lambda work=work: [work() for _ in range(4)] for work in (slots, view.paint, lambda: view.data, view.paint))
    )
    assert view.stop() and view.state in ("done", "stopped", "empty")


def test_cells_name_the_part_and_whether_it_is_in_memory():
    slots, kv, arena = TAGS["slots"], TAGS["kv"], TAGS["arena"]
    state = state_of([0, slots, slots, kv, arena], [1, 1, 0, 1, 1])
    assert frames.cells(state).tolist() == [frames.FREE, frames.SLOT, frames.RESERVED, frames.KV, frames.ARENA]
    assert frames.cells(state_of([slots, 0], None)).tolist() == [frames.SLOT, frames.FREE]  # the system does not tell
    assert np.isnan(state_of([slots], None).bytes_by_part().touched_bytes[0])


def test_new_cells_are_marked_and_those_of_another_pool_are_not():
    state = state_of([TAGS["kv"], TAGS["slots"]], [1, 1])
    marked = frames.pool_map(state, np.array([frames.FREE, frames.SLOT], np.uint8)).values[0].ravel()
    assert marked[:2].tolist() == [frames.NEW, frames.SLOT]
    assert frames.pool_map(state, np.zeros(7, np.uint8)).values[0].ravel()[:2].tolist() == [frames.KV, frames.SLOT]


def test_a_large_pool_is_drawn_in_larger_cells():
    state = state_of(np.full(10_000, TAGS["slots"]), np.r_[np.ones(5_000), np.zeros(5_000)])
    cells = frames.cells(state)
    assert len(cells) <= frames.CELLS and {frames.SLOT, frames.RESERVED} == set(cells.tolist())
    assert frames.pool_map(state, None).xlabel == f"cell of {frames.blocks_per_cell(10_000) * BLOCK // 1024} KiB"


def test_bump_pointer_tells_takes_from_rewinds(moves):
    first = lessons.bump_pointer(moves, 0)
    assert "prefill takes" in first.said and first.table.used_bytes["prefill"] == moves.prefill_bytes.iloc[0]
    back = int(np.flatnonzero(np.diff(moves.prefill_bytes) < 0)[0]) + 1
    assert "prefill gives back" in lessons.bump_pointer(moves, back).said
    assert lessons.bump_pointer(moves, 10**6).frames[0].cursor == len(moves) - 1
    assert (first.table.peak_bytes <= first.table.reserved_bytes).all()


def test_phases_compare_prefill_and_decode(moves):
    found = lessons.phases(moves)
    assert len(found.table) == moves.step.max() + 1 and found.table.moves.sum() == len(moves)
    assert found.table.peak_bytes[0] > found.table.peak_bytes[1:].max() and "times less" in found.said


def test_fragmentation_says_what_decides():
    refused, served = lessons.fragmentation(every=2, ask=2), lessons.fragmentation(every=3, ask=1)
    assert "is refused, although the sum would do" in refused.said and refused.table.blocks.tolist() == [128, 1, 2]
    assert "is served at block 0" in served.said and (served.frames[0].values[0] == 2).sum() == 1
    assert served.png().png().startswith(b"\x89PNG")


def test_mapped_file_reads_four_numbers(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 4096)
    found = lessons.mapped_file(path, touched=50)
    assert "not as the process's own memory" in found.said and len(found.frames[0].series) == 4
    assert found.table is lessons.mapped_file(path, touched=100).table  # measured once


def test_plan_is_kept_to_the_byte_but_for_the_kv_cache(model):
    table = lessons.plan_against_measured(model).table
    assert set(table.index[table.difference != 0]) <= {"kv_cache_bytes", "total_bytes"}
    assert table.difference["kv_cache_bytes"] <= 0
