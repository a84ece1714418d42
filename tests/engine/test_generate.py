"""Generation: what a run records, how it stops, and what it refuses."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import threading
import time
import warnings

import numpy as np
import pytest

import colibri_lab as cl
from colibri_lab.errors import ColibriError, ContainerError, SettingError, StorageError, TokenizerError
from colibri_lab.telemetry import STAGES

PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def lab(tiny):
    return cl.open(tiny, expert_cache_slots=8, threads=2)


@pytest.fixture
def copy(tiny, tmp_path):
    """A container of our own to damage."""
    return shutil.copytree(tiny, tmp_path / "model")


def test_stages_are_exclusive_and_sum_to_wall_time(lab):
    start = time.perf_counter()
    run = lab.generate(PROMPT, max_tokens=40, temperature=0.0)
    outside = time.perf_counter() - start
    for step in run.steps:
        assert set(step.stages) <= set(STAGES)
        assert min(step.stages.values()) >= 0
        assert sum(step.stages.values()) == pytest.approx(step.wall_s, rel=1e-6)
    assert run.wall_s <= outside
    assert run.stages.groupby("phase").share.sum().to_numpy() == pytest.approx([1, 1], abs=1e-6)
    assert run.stages.seconds.sum() == pytest.approx(run.wall_s, rel=0.01)


def test_cache_table_adds_up_with_steps_and_bytes(lab):
    lab.reset_cache()
    run = lab.generate(PROMPT, max_tokens=30, temperature=0.0)
    assert run.cache.hits.sum() == sum(s.hits for s in run.steps)
    assert run.cache.misses.sum() == sum(s.misses for s in run.steps) == run.cache.loads.sum()
    assert run.cache.bytes.sum() == run.cache.loads.sum() * 147456 == sum(s.bytes_loaded for s in run.steps)
    decode = run.cache[run.cache.phase == "decode"]
    assert (decode.hits + decode.misses == 4 * 29).all()  # top-4, once per layer and decoded token
    assert sorted(run.cache.layer.unique()) == [1, 2, 3, 4, 5, 6]


def test_step_by_step_is_the_same_run(lab):
    run = lab.generate(PROMPT, max_tokens=12, temperature=0.9, seed=5, stop_at_eos=False)
    steps = list(lab.stream(PROMPT, max_tokens=12, temperature=0.9, seed=5, stop_at_eos=False))
    assert [s.token for s in steps] == run.tokens
    assert "".join(s.text for s in steps) == run.text == lab.last_run.text
    assert steps[0].phase == "prefill" and {s.phase for s in steps[1:]} == {"decode"}
    assert steps[0].tokens == run.prompt_tokens == len(lab.tokenizer.encode(PROMPT))
    assert run.stop_reason == "length"


def test_sampling_is_seeded_and_greedy_ignores_the_seed(lab):
    def tokens(**options):
        return lab.generate(PROMPT, max_tokens=16, stop_at_eos=False, **options).tokens

    assert tokens(temperature=1.0, seed=1) == tokens(temperature=1.0, seed=1) != tokens(temperature=1.0, seed=2)
    assert (
        tokens(temperature=0.0, seed=1) == tokens(temperature=0.0, seed=2) == tokens(temperature=1.0, top_p=0.0, seed=3)
    )


def test_end_of_text_stops_the_run(lab, monkeypatch):
    run = lab.generate(PROMPT, max_tokens=400, temperature=0.0, stop_at_eos=False)
    eos = run.tokens[5]
    first = run.tokens.index(eos)
    monkeypatch.setattr(lab.engine, "config", dataclasses.replace(lab.config, eos_token_ids=(eos,)))
    stopped = lab.generate(PROMPT, max_tokens=400, temperature=0.0)
    assert stopped.stop_reason == "eos"
    assert stopped.tokens == run.tokens[: first + 1]
    assert run.text.startswith(stopped.text)


def test_stop_from_another_thread_ends_after_the_current_step(lab):
    steps = []
    for step in lab.stream(PROMPT, max_tokens=500, stop_at_eos=False):
        steps.append(step)
        if len(steps) == 5:
            stopper = threading.Thread(target=lab.stop)
            stopper.start()
            stopper.join()
    assert len(steps) == 5
    assert lab.last_run.stop_reason == "interrupted"
    assert lab.generate(PROMPT, max_tokens=3, stop_at_eos=False).stop_reason == "length"


def test_two_generations_at_once_are_refused_and_a_closed_stream_frees_the_model(lab):
    stream = lab.stream(PROMPT, max_tokens=50)
    next(stream)
    with pytest.raises(ColibriError, match="is generating: finish or close"):
        lab.generate(PROMPT, max_tokens=2)
    stream.close()
    assert lab.engine.kv.pages_used == 0
    assert len(lab.generate(PROMPT, max_tokens=2, stop_at_eos=False).tokens) == 2


def test_ctrl_c_keeps_the_run_so_far_and_the_model_usable(lab):
    reference = lab.generate(PROMPT, max_tokens=30, temperature=0.0, stop_at_eos=False).tokens
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            lab.generate(PROMPT, max_tokens=1000, temperature=0.0, stop_at_eos=False)
    timer.join()
    assert lab.last_run.stop_reason == "interrupted"
    assert lab.last_run.tokens[:30] == reference[: len(lab.last_run.tokens)]
    assert lab.generate(PROMPT, max_tokens=30, temperature=0.0, stop_at_eos=False).tokens == reference


def test_a_long_prompt_keeps_its_end_and_says_how_much_was_dropped(tiny):
    lab = cl.open(tiny, max_seq_len=32, expert_cache_slots=8)
    text = "one two three four five six seven eight nine ten " * 10
    total = len(lab.tokenizer.encode(text))
    with pytest.warns(
        UserWarning, match=f"has {total} tokens, max_seq_len is 32: kept the last 24, dropped {total - 24}"
    ):
        run = lab.generate(text, max_tokens=8, stop_at_eos=False)
    assert run.prompt_tokens == 24 and len(run.tokens) == 8
    short = "one two three four five six"
    room = 32 - len(lab.tokenizer.encode(short))
    with pytest.warns(UserWarning, match=f"at most {room} tokens will be generated"):
        assert len(lab.generate(short, max_tokens=31, stop_at_eos=False).tokens) == room


def test_events_are_kept_for_debugging_only(tiny, lab):
    assert lab.generate(PROMPT, max_tokens=3).events.empty
    debug = cl.open(tiny, expert_cache_slots=8, log_level="debug")
    run = debug.generate(PROMPT, max_tokens=5, temperature=0.0)
    events = run.events
    assert len(events) == run.cache.hits.sum() + run.cache.misses.sum()
    assert events.hit.sum() == run.cache.hits.sum()
    assert events[events.hit].victim.isna().all()
    assert set(events.columns) == {"step", "layer", "expert", "block", "hit", "slot", "victim"}


def test_residency_never_exceeds_the_slots(lab):
    lab.generate(PROMPT, max_tokens=20)
    residency = lab.residency()
    assert residency.shape == (6, 32)
    assert ((residency > 0).sum(1) <= 8).all()
    assert ((residency == 2).sum(1) <= 4).all() and (residency == 2).any()


def test_warmup_is_left_out_of_later_counts(tiny):
    lab = cl.open(tiny, expert_cache_slots=32)
    cold = lab.generate(PROMPT, max_tokens=4, temperature=0.0).cache.misses.sum()
    lab.reset_cache()
    lab.warmup(2)
    warm = lab.generate(PROMPT, max_tokens=4, temperature=0.0).cache
    assert warm.misses.sum() < cold
    assert (warm.hits + warm.misses).sum() > 0


def test_the_first_tokens_of_a_run_are_those_of_a_shorter_one(tiny):
    lab = cl.open(tiny, expert_cache_slots=6)
    whole = lab.generate(PROMPT, max_tokens=12, temperature=1.0, seed=4, stop_at_eos=False)
    lab.reset_cache()
    short = lab.generate(PROMPT, max_tokens=5, temperature=1.0, seed=4, stop_at_eos=False)
    cut = whole.first(5)
    assert (cut.tokens, cut.text, cut.stop_reason, cut.hit_rate) == (
        short.tokens, short.text, short.stop_reason, short.hit_rate
    )  # fmt: skip
    assert [(s.phase, s.hits, s.misses) for s in cut.steps] == [(s.phase, s.hits, s.misses) for s in short.steps]
    assert cut.settings == short.settings and len(whole.tokens) == 12
    assert whole.first(12) is whole and whole.first(99) is whole


def test_another_thread_may_look_while_settings_change(tiny):
    """A view does, each time a control moves: there is no moment without an answer."""
    lab = cl.open(tiny, expert_cache_slots=4)
    seen, wrong, ended = set(), [], threading.Event()

    def look():
        while not ended.is_set():
            try:
                seen.add((lab.slot_bytes, lab.residency().shape, lab.memory()["slots_bytes"] // lab.slot_bytes))
            except Exception as error:
                wrong.append(error)

    watcher = threading.Thread(target=look)
    watcher.start()
    for slots in range(5, 25):
        lab.configure(expert_cache_slots=slots)
    ended.set()
    watcher.join()
    assert wrong == []
    assert {(bytes_, shape) for bytes_, shape, _ in seen} == {(lab.engine.cache.slot_bytes, (6, 32))}
    assert {slots for *_, slots in seen} <= {6 * slots for slots in range(4, 25)}


def test_configure_changes_the_cache_and_keeps_the_tokens(tiny):
    lab = cl.open(tiny, expert_cache_slots=4)
    before = lab.generate(PROMPT, max_tokens=10, temperature=0.0)
    lab.configure(expert_cache_slots=24, policy="weighted-lru")
    after = lab.generate(PROMPT, max_tokens=10, temperature=0.0)
    assert (lab.settings["expert_cache_slots"], lab.settings["policy"]) == (24, "weighted-lru")
    assert after.settings["expert_cache_slots"] == 24
    assert after.tokens == before.tokens and after.cache.misses.sum() < before.cache.misses.sum()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"expert_cache_slots": 0}, "expert_cache_slots must be at least 1, got 0"),
        ({"expert_cache_slots": -3}, "expert_cache_slots must be at least 1, got -3"),
        ({"expert_cache_slot": 4}, "unknown setting 'expert_cache_slot': did you mean 'expert_cache_slots'"),
        ({"policy": "lru2"}, "policy cannot be 'lru2'; did you mean 'lru'"),
        ({"threads": 1.5}, "threads must be int, got 1.5"),
        ({"max_tokens": 4}, "unknown setting 'max_tokens': it belongs to generate"),
        ({"max_seq_len": 10**6}, "max_seq_len must be at most 2048"),
    ],
)
def test_impossible_settings_are_named(tiny, settings, message):
    with pytest.raises(SettingError, match=message.replace("(", r"\(")):
        cl.open(tiny, **settings)


def test_slots_beyond_the_experts_are_clamped_and_the_default_is_four_times_top_k(tiny):
    assert cl.open(tiny, expert_cache_slots=999).settings["expert_cache_slots"] == 32
    assert cl.open(tiny).settings["expert_cache_slots"] == 16
    assert cl.open(tiny, scope="global").settings["expert_cache_slots"] == 16 * 6


@pytest.mark.parametrize("prompt, error", [("", "prompt is empty"), (7, "prompt must be text, got int")])
def test_unusable_prompts_are_named(lab, prompt, error):
    with pytest.raises(SettingError, match=error):
        lab.generate(prompt)


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "non-empty"),
        ([[1, 2]], "shape"),
        ([1.5], "whole numbers"),
        ([0, 4096], "must be 0 to 4095, found 0 to 4096"),
        ([1] * 2049, "2049 tokens exceed max_seq_len 2048"),
    ],
)
def test_unusable_token_ids_are_named(lab, ids, message):
    with pytest.raises(SettingError, match=message):
        lab.logits(ids)


def test_a_missing_expert_file_is_named_before_anything_runs(copy):
    (copy / "layer_3" / "expert_7.bin").unlink()
    with pytest.raises(ContainerError, match=r"layer_3/expert_7\.bin: expected a file, found nothing"):
        cl.open(copy)


def test_an_expert_that_vanishes_while_running_is_named_and_the_model_recovers(copy):
    lab = cl.open(copy, expert_cache_slots=4)
    wanted = lab.generate(PROMPT, max_tokens=8, temperature=0.0).tokens
    moved = {p: p.read_bytes() for p in (copy / "layer_2").glob("expert_*.bin")}
    lab.reset_cache()
    for path in moved:
        path.write_bytes(b"COLI")
    with pytest.raises(StorageError, match=r"layer_2/expert_\d+\.bin: file has 4 bytes, 151552 expected"):
        lab.generate(PROMPT, max_tokens=8)
    for path, content in moved.items():
        path.write_bytes(content)
    assert lab.generate(PROMPT, max_tokens=8, temperature=0.0).tokens == wanted


def test_a_swapped_tokenizer_is_refused(copy, project):
    shutil.copy(project / "tests" / "oracle" / "olmoe" / "tokenizer.json", copy / "tokenizer.json")
    with pytest.raises(TokenizerError, match="not the tokenizer this model was converted with"):
        cl.open(copy)


def test_a_router_with_nan_is_named_when_it_is_used(copy):
    path = copy / "layer_1" / "router.bin"
    content = bytearray(path.read_bytes())
    content[-4096 : -4096 + 4] = np.float32("nan").tobytes()
    path.write_bytes(content)
    lab = cl.open(copy)
    with pytest.raises(ValueError, match="router logit of token 0, expert .* is not finite; run `colibri validate`"):
        lab.generate(PROMPT, max_tokens=2)


def test_float32_containers_open_only_on_request(family_container):
    container = family_container("olmoe")
    with pytest.raises(ContainerError, match="fp32, which is for tests"):
        cl.open(container)
    assert cl.open(container, allow_fp32=True).config.family == "olmoe"


def test_opening_touches_no_expert_weights(tiny):
    """Opening reads headers; slots stay empty until a step asks."""
    lab = cl.open(tiny, expert_cache_slots=32)
    assert not lab.residency().any()
    assert lab.engine.cache.load_service_s() == 0.0


def test_summary_names_slots_threads_simd_and_bytes(lab):
    text = lab.summary()
    for part in ("colibri-tiny", "8 slots per layer of 0.147 MB", "2 threads", "lru", "pread", "memory"):
        assert part in text
    memory = lab.memory()
    assert memory["slots_bytes"] == 6 * 8 * 147456
    assert memory["total_bytes"] == sum(v for k, v in memory.items() if k != "total_bytes")


def test_unknown_model_names_are_answered_with_the_shipped_ones(tmp_path):
    with pytest.raises(ColibriError, match="no such directory.*colibri-tiny"):
        cl.open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ContainerError, match="not a container"):
        cl.open(tmp_path / "empty")


def test_generation_warns_about_nothing_when_all_fits(lab):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lab.generate(PROMPT, max_tokens=3)
