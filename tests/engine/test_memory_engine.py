"""The engine in its memory: what it uses is what was planned, whatever the family, and no setting of it changes a
token."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import colibri_lab as cl
from colibri_lab import kernels
from colibri_lab.engine import engine as engine_module
from colibri_lab.engine.linear import pack_float32
from colibri_lab.engine.sizes import arena_peaks, blocks, ffn_scratch, matmul_scratch, walk
from colibri_lab.errors import MemoryPlanError, PoolExhausted, SettingError

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "glm4_moe")
TEXT = "the quick brown fox jumps over the lazy dog "


def run_twice(lab, tokens: int) -> None:
    """Prefill `tokens` and decode one, cold and then with every expert resident, as one run of the kernel."""
    ids = np.arange(tokens) % lab.config.vocab_size
    for _ in range(2):
        lab.engine.forward(ids, "prefill", every=True)
        lab.engine.forward(ids[:1], "decode")
        lab.engine.kv.release()


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_arenas_use_exactly_what_was_planned(family_container, family, checks):
    lab = cl.open(
        family_container(family), allow_fp32=True, expert_cache_slots=1000, prefill_chunk=64, check_memory=checks
    )
    run_twice(lab, 64)
    used = {name: blocks(c.high_water) for name, c in lab.engine.request.arenas.counts().items()}
    assert (
        used == lab.engine.sizes.peaks == {name: c.capacity for name, c in lab.engine.request.arenas.counts().items()}
    )


@pytest.mark.parametrize("prefetch", ["none", "lookahead"])
@pytest.mark.parametrize("slots", [1, 3])
def test_few_slots_and_lookahead_stay_within_the_plan(family_container, slots, prefetch):
    lab = cl.open(
        family_container("glm4_moe"), allow_fp32=True, expert_cache_slots=slots, prefetch=prefetch, check_memory=True
    )
    run_twice(lab, 100)
    for name, counts in lab.engine.request.arenas.counts().items():
        assert 0 < counts.high_water <= counts.capacity == lab.engine.sizes.peaks[name], name


def test_scratch_is_at_most_a_third_above_what_is_needed_at_once(tiny):
    lab = cl.open(tiny, max_seq_len=512)
    run_twice(lab, 256)
    counts = lab.engine.request.arenas.counts()
    capacity, needed = (sum(getattr(c, part) for c in counts.values()) for part in ("capacity", "requested"))
    assert 1 <= capacity / needed <= 1.3
    walked = walk(lab.config, 256, lab.settings)
    assert counts["prefill"].requested == walked["main"].requested


def test_scratch_does_not_depend_on_the_number_of_layers(tmp_path):
    used = []
    for layers in (2, 16):
        cl.make_model(
            tmp_path / f"{layers}", "olmoe", hidden=64, layers=layers, experts=4, top_k=2, vocab=300, progress=False
        )
        cl.convert(tmp_path / f"{layers}", tmp_path / f"{layers}c", progress=False)
        lab = cl.open(tmp_path / f"{layers}c")
        run_twice(lab, 50)
        used.append({name: c.high_water for name, c in lab.engine.request.arenas.counts().items()})
    assert used[0] == used[1]


def test_four_arenas_are_empty_after_every_step(tiny):
    lab = cl.open(tiny)
    for _ in lab.stream(TEXT, max_tokens=3):
        counts = lab.engine.request.arenas.counts()
        assert list(counts) == ["prefill", "decode", "router", "expert_compute"]
        assert all(c.used == 0 for c in counts.values())


def test_arenas_are_empty_after_a_step_that_failed(tiny, monkeypatch):
    lab = cl.open(tiny)
    monkeypatch.setattr(lab.engine, "_head", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab.generate(TEXT, max_tokens=2)
    assert all(c.used == 0 for c in lab.engine.request.arenas.counts().values())
    assert lab.memory()["kv_cache_bytes"] == 0
    monkeypatch.undo()
    assert len(lab.generate(TEXT, max_tokens=2, stop_at_eos=False).tokens) == 2


def test_decoding_takes_nothing_from_the_pool_but_pages_and_little_from_python(tiny):
    lab = cl.open(tiny, page_size=16, threads=1, expert_cache_slots=32)
    engine = lab.engine
    engine.forward(np.arange(40), "prefill")
    for token in range(8):  # up to the end of the third page, every array made
        engine.forward(np.array([token]), "decode")
    before = engine.pool.counts()["allocations"]
    largest = 0
    for token in range(32):
        tracemalloc.start()
        engine.forward(np.array([token]), "decode")
        largest = max(largest, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert engine.pool.counts()["allocations"] - before == 2
    assert largest < 64_000  # bookkeeping; a row of logits alone would be 16 kB, the experts' rows 6 kB a layer


def test_a_growing_arena_gives_the_same_tokens_from_a_smaller_reserve(tiny):
    fixed, growing = cl.open(tiny), cl.open(tiny, dynamic_arena=True)
    assert growing.memory()["scratch_bytes"] < fixed.memory()["scratch_bytes"] / 10
    a, b = (lab.generate(TEXT * 8, max_tokens=12, temperature=0.0) for lab in (fixed, growing))
    assert a.tokens == b.tokens
    counts = growing.engine.request.arenas.counts()
    assert counts["prefill"].growths > 0 and counts["expert_compute"].growths > 0
    assert growing.memory()["scratch_bytes"] <= growing.plan["scratch_bytes"]
    growing.generate(TEXT * 8, max_tokens=12, temperature=0.0)  # more experts at once, now that they are resident
    grown = {name: c.growths for name, c in growing.engine.request.arenas.counts().items()}
    growing.generate(TEXT * 8, max_tokens=12, temperature=0.0)
    assert {name: c.growths for name, c in growing.engine.request.arenas.counts().items()} == grown


@pytest.mark.parametrize(
    "changed",
    [
        dict(kv_cache_type="naive"),
        dict(page_size=5),
        dict(dynamic_arena=True),
        dict(huge_pages=True),
        dict(prefault=True),
        dict(check_memory=True),
        dict(pool_power_of_two=True),
        dict(pool_size="64 MiB"),
        dict(memory="20 MB"),
        dict(max_seq_len=128),
        dict(max_batch_size=3),
    ],
    ids=str,
)
def test_no_memory_setting_changes_a_bit_of_the_logits(tiny, changed):
    ids = list(range(40, 140))
    settings = dict(threads=1, prefill_chunk=64, **({} if "memory" in changed else {"expert_cache_slots": 4}))
    np.testing.assert_array_equal(
        cl.open(tiny, **settings, **changed).logits(ids), cl.open(tiny, **settings).logits(ids)
    )


def greedy(engine, request, prompt, steps: int):
    """A generator of greedy tokens; one engine step for each."""
    ids, phase = np.array(prompt), "prefill"
    for _ in range(steps):
        token = int(engine.forward(ids, phase, request=request)[-1].argmax())
        yield token
        ids, phase = np.array([token]), "decode"


def test_eight_requests_that_take_turns_write_what_they_write_alone(tiny):
    lab = cl.open(tiny, max_batch_size=8, max_seq_len=128, expert_cache_slots=6)
    engine = lab.engine
    prompts = [list(range(10 * i + 5, 10 * i + 5 + 3 * i + 4)) for i in range(8)]
    alone = []
    for prompt in prompts:
        alone.append(list(greedy(engine, engine.request, prompt, 10)))
        engine.kv.release()
    requests = [engine.request] + [engine.new_request() for _ in range(7)]
    with pytest.raises(MemoryPlanError, match="8 requests are open, max_batch_size is 8"):
        engine.new_request()
    running = [greedy(engine, request, prompt, 10) for request, prompt in zip(requests, prompts, strict=True)]
    together = [list(turn) for turn in zip(*[list(row) for row in zip(*running, strict=True)], strict=True)]
    assert together == alone
    for request in requests[1:]:
        request.close()
    engine.kv.release()
    assert lab.memory()["kv_cache_bytes"] == 0
    assert engine.new_request() is requests[1]


def test_a_pool_that_is_too_small_is_refused_and_one_that_runs_full_is_survived(tiny):
    with pytest.raises(
        MemoryPlanError, match=r"pool_size of 1000000 bytes is too small: slots, arenas and one KV page take \d+"
    ):
        cl.open(tiny, pool_size="1 MB")
    lab = cl.open(tiny, expert_cache_slots=4, page_size=16)
    room = lab.engine.sizes
    small = room.pool_bytes - room.kv_bytes + 3 * room.page_bytes
    with pytest.warns(UserWarning, match="memory pool: .* used .*; a larger pool_size would leave room"):
        lab.configure(pool_size=str(small))
    with pytest.raises(PoolExhausted, match="needed for kv"):
        lab.generate(TEXT, max_tokens=100, stop_at_eos=False)
    assert lab.memory()["kv_cache_bytes"] == 0
    assert len(lab.generate("Hello", max_tokens=10, stop_at_eos=False).tokens) == 10


def test_a_step_of_more_tokens_than_arenas_are_for_is_refused(tiny):
    lab = cl.open(tiny, prefill_chunk=8)
    for count, phase in ((9, "prefill"), (0, "prefill"), (2, "decode")):
        with pytest.raises(SettingError, match=rf"a {phase} step takes 1 to \d tokens, got {count}"):
            lab.engine.forward(np.arange(count), phase)


def test_the_reserve_follows_max_seq_len_used_or_not_and_only_what_is_used_is_touched(tiny):
    runs, reserved, touched = [], [], []
    for longest in (256, 2048):
        lab = cl.open(tiny, max_seq_len=longest, expert_cache_slots=4)
        runs.append(lab.generate(TEXT, max_tokens=20, temperature=0.0).tokens)
        reserved.append(lab.engine.pool.size)
        touched.append(int(lab.engine.pool.touched().sum()))
    assert runs[0] == runs[1]
    kv, rotary = 7 * 2 * 2 * 32 * 4, 4 * 16  # bytes a position: layers, k and v, heads, head_dim, float32; cos and sin
    assert lab.config.num_kv_heads * lab.config.head_dim == 64 and lab.config.rope.dims == 16
    assert reserved[1] - reserved[0] == (2048 - 256) * (kv + rotary)
    assert abs(touched[1] - touched[0]) <= 2


def test_a_failed_change_of_settings_leaves_the_model_open_as_it_was(tiny, monkeypatch):
    lab = cl.open(tiny, expert_cache_slots=4)
    before = lab.generate(TEXT, max_tokens=5, temperature=0.0).tokens
    with pytest.raises(MemoryPlanError, match="memory allows"):
        lab.configure(memory="1 MB")
    real, calls = engine_module.ExpertCache, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("no memory for slots")
        return real(*args)

    monkeypatch.setattr(engine_module, "ExpertCache", failing)
    with pytest.raises(MemoryError, match="no memory for slots"):
        lab.configure(expert_cache_slots=9)
    assert len(calls) == 2
    assert lab.settings["expert_cache_slots"] == 4
    assert lab.generate(TEXT, max_tokens=5, temperature=0.0).tokens == before


def test_peaks_grow_with_the_chunk_and_not_with_the_context(tiny):
    lab = cl.open(tiny)
    small, large = (arena_peaks(lab.config, tokens, lab.settings) for tokens in (16, 256))
    assert all(small[name] < large[name] for name in ("prefill", "router", "expert_compute"))
    assert small["decode"] == large["decode"]
    assert cl.open(tiny, max_seq_len=1000).engine.sizes.peaks == large


@given(
    tokens=st.integers(1, 40),
    k=st.integers(1, 8),
    active=st.integers(1, 64),
    hidden=st.integers(1, 700),
    inner=st.integers(1, 700),
)
def test_the_plan_counts_what_products_take_while_they_run(tokens, k, active, hidden, inner):
    gemm, ffn = kernels.load("gemm"), kernels.load("ffn")
    assert matmul_scratch(tokens, hidden) == gemm.scratch_bytes(tokens, hidden)
    assert ffn_scratch(tokens, tokens * k, active, hidden, inner) == ffn.scratch_bytes(
        tokens, tokens * k, active, hidden, inner
    )


def test_huge_pages_follow_the_size_of_the_pool_unless_asked_for(tiny, monkeypatch):
    lab = cl.open(tiny, expert_cache_slots=4)
    assert lab.settings["huge_pages"] is False
    monkeypatch.setattr(engine_module, "HUGE_PAGES_FROM", lab.engine.pool.size + 1)
    lab.configure(expert_cache_slots=32)
    assert lab.settings["huge_pages"] is True
    lab.configure(expert_cache_slots=4)
    assert lab.settings["huge_pages"] is False
    lab.configure(huge_pages=True)
    lab.configure(expert_cache_slots=5)
    assert lab.settings["huge_pages"] is True


def test_a_product_takes_what_is_lent_and_no_more():
    x, out = np.ones((3, 64), np.float32), np.empty((3, 16), np.float32)
    memory, place = pack_float32(np.ones((16, 64), np.float32))
    matmul, needed = kernels.load("gemm").matmul, matmul_scratch(3, 64)
    room = np.zeros(needed + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][:needed]
    matmul(x, memory, np.array(place, np.int64), 1.0, None, out, scratch=room)
    assert (out == 64).all()
    with pytest.raises(ValueError, match=f"scratch has {needed - 64} bytes, {needed} are needed"):
        matmul(x, memory, np.array(place, np.int64), 1.0, None, out, scratch=room[:-64])
    with pytest.raises(ValueError, match="scratch must begin on a multiple of 64"):
        matmul(x, memory, np.array(place, np.int64), 1.0, None, out, scratch=room[1:])
