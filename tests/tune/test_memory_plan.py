"""The memory plan comes true: exactly in what is allocated, within 2 % in what the process holds, and under a hard
limit."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal

import pytest

import colibri_lab as cl
from colibri_lab import cli
from colibri_lab.checkpoint.container import Container
from colibri_lab.engine import engine as engine_module
from colibri_lab.errors import MemoryPlanError, SettingError
from colibri_lab.front import container_of
from colibri_lab.tune.capped import likely_reason, run_child
from colibri_lab.tune.memory_plan import PARTS, plan_table

TEXT = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="module")
def tiny():
    return container_of("colibri-tiny", progress=False)


def test_every_part_by_hand(tiny):
    """colibri-tiny: 7 layers (6 MoE of 32 experts, top-4), hidden 192, 6 heads of 32, 2 of keys and values, rotary
    over 16 of a head's dimensions, experts 128 wide, vocabulary 4096, bf16."""
    plan = cl.memory_plan(
        tiny, expert_cache_slots=8, max_seq_len=1000, page_size=256, prefill_chunk=64, loader_threads=3
    )
    files = {path.name: path.stat().st_size for path in (tiny / "dense").iterdir()}
    block = 3 * 128 * 192 * 2
    assert plan["embedding_bytes"] == files["embed.bin"]
    assert plan["dense_bytes"] == sum(files.values()) - files["embed.bin"]
    assert plan["router_bytes"] == 6 * 32 * 192 * 4
    assert plan["slots_bytes"] == 6 * 8 * block and block % 4096 == 0
    assert plan["transient_bytes"] == 2 * 3 * block
    assert plan["kv_cache_bytes"] == 4 * 256 * 7 * 2 * 2 * 32 * 4  # four pages
    assert plan["rotary_bytes"] == -(-1000 * 16 * 4 // 4096) * 4096
    assert plan["loader_bytes"] == 0
    assert plan["total_bytes"] == sum(plan[part] for part in PARTS)
    assert list(plan) == [*PARTS, "total_bytes"]
    assert 1 < plan.scratch_ratio <= 1.3 and f"reserve {plan.scratch_ratio:.3f} times" in str(plan)
    naive = cl.memory_plan(
        tiny, expert_cache_slots=8, max_seq_len=1000, kv_cache_type="naive", kv_dtype="fp16", storage="mmap"
    )
    assert naive["kv_cache_bytes"] == -(-1000 * 7 * 2 * 2 * 32 * 2 // 4096) * 4096
    assert naive["loader_bytes"] == 2 * (tiny / "layer_1" / "expert_0.bin").stat().st_size


GRID = [
    dict(expert_cache_slots=slots, kv_cache_type=kv, kv_dtype=dtype, max_seq_len=longest, **more)
    for (slots, longest), (kv, dtype), more in itertools.product(
        [(1, 90), (32, 300)],
        [("paged", "fp32"), ("naive", "fp16")],
        [
            dict(scope="layer"),
            dict(scope="global", page_size=16),
            dict(storage="mmap", loader_threads=3, prefill_chunk=48),
            dict(prefetch="lookahead", prefault=True, max_batch_size=2),
        ],
    )
]


@pytest.mark.parametrize("settings", GRID, ids=lambda s: " ".join(map(str, s.values())))
def test_what_is_measured_is_what_was_planned(tiny, settings):
    plan = cl.memory_plan(tiny, **settings)
    lab = cl.open(tiny, **settings)
    assert lab.plan == plan
    requests = [lab.engine.request, *(lab.engine.new_request() for _ in range(lab.settings["max_batch_size"] - 1))]
    for request in requests:
        request.kv.reserve(lab.settings["max_seq_len"])
    assert lab.memory() == lab.memory(peak=True) == plan
    pool = lab.engine.pool.counts()
    assert pool["used_bytes"] == pool["bytes"] == lab.engine.sizes.pool_bytes


def test_a_run_to_the_end_of_the_context_reaches_the_plan(tiny):
    lab = cl.open(tiny, max_seq_len=80, page_size=16, expert_cache_slots=4)
    assert lab.memory()["kv_cache_bytes"] == 0
    lab.generate(TEXT, max_tokens=200, stop_at_eos=False, temperature=0.0)
    assert lab.memory(peak=True) == lab.plan
    assert lab.memory()["total_bytes"] == lab.plan["total_bytes"] - lab.plan["kv_cache_bytes"]


def test_a_checkpoint_is_planned_as_its_container_will_be(tmp_path):
    cl.make_model(tmp_path / "hf", "qwen2_moe", hidden=64, layers=3, experts=6, top_k=2, vocab=300, progress=False)
    before = cl.memory_plan(tmp_path / "hf", expert_cache_slots=3)
    cl.convert(tmp_path / "hf", tmp_path / "box", progress=False)
    assert cl.memory_plan(tmp_path / "box", expert_cache_slots=3) == before
    assert cl.open(tmp_path / "box", expert_cache_slots=3).plan == before


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("memory", ["20 MB", "20 MiB", "30 MB", "1 GiB"])
def test_memory_picks_the_most_slots_that_fit(tiny, memory, scope):
    budget = {"20 MB": 20_000_000, "20 MiB": 20_971_520, "30 MB": 30_000_000, "1 GiB": 1 << 30}[memory]
    plan = cl.memory_plan(tiny, memory=memory, scope=scope, max_seq_len=512)
    assert plan["total_bytes"] <= budget
    every = 32 * (6 if scope == "global" else 1)
    if plan.slots < every:
        more = cl.memory_plan(tiny, expert_cache_slots=plan.slots + 1, scope=scope, max_seq_len=512)
        assert more["total_bytes"] > budget
    else:
        assert plan.slots == every and plan["transient_bytes"] == 0
    lab = cl.open(tiny, memory=memory, scope=scope, max_seq_len=512)
    assert lab.settings["expert_cache_slots"] == plan.slots
    assert lab.memory()["total_bytes"] <= budget


def test_gb_and_gib_are_not_the_same(tiny):
    decimal, binary = (
        cl.memory_plan(tiny, memory=m, scope="global", max_seq_len=64).slots for m in ("0.025 GB", "0.025 GiB")
    )
    assert decimal < binary


@pytest.fixture
def nothing_allocated(monkeypatch):
    """Fails a test that makes a pool."""
    monkeypatch.setattr(engine_module, "MemoryPool", lambda *_, **__: pytest.fail("memory was allocated"))


@pytest.mark.parametrize(
    ("settings", "available", "message"),
    [
        (dict(expert_cache_slots=32), "30 MB", r"takes \d+ bytes \(\d+\.\d MB\), 30000000 \(30 MB\) are available; "
                                               r"expert_cache_slots=12 is the most that fits\. Nothing was allocated"),
        (dict(), "17 MB", r"max_seq_len=1280 with expert_cache_slots=1 is the most that fits"),
        (dict(), "3 MB", r"no setting fits; weights that every token needs, mapped take 4473856 bytes of at least \d+\."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_largest_that_does(tiny, settings, available, message):
    with pytest.raises(MemoryPlanError, match=message):
        cl.memory_plan(tiny, available=available, **settings)
    plan = cl.memory_plan(tiny, available=available, check=False, **settings)
    assert not plan.fits and plan.page_cache_bytes == 0


def test_the_proposed_settings_do_fit(tiny):
    assert cl.memory_plan(tiny, available="30 MB", expert_cache_slots=12).fits
    assert not cl.memory_plan(tiny, available="30 MB", expert_cache_slots=13, check=False).fits
    assert cl.memory_plan(tiny, available="17 MB", expert_cache_slots=1, max_seq_len=1280).fits
    assert not cl.memory_plan(tiny, available="17 MB", expert_cache_slots=1, max_seq_len=1281, check=False).fits


def test_opening_what_does_not_fit_touches_no_memory(tiny, nothing_allocated, monkeypatch):
    monkeypatch.setattr("colibri_lab.machine.memory", lambda: (10**9, 20_000_000))
    with pytest.raises(
        MemoryPlanError, match=r"20000000 \(20 MB\) are available; expert_cache_slots=\d is the most that fits"
    ):
        cl.open(tiny, expert_cache_slots=30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(memory="2G"), "memory '2G' could be powers of 1000 or of 1024"),
        (dict(memory="2 GB", expert_cache_slots=4), "both decide how many slots there are: give one of them"),
        (dict(prefault=True, dynamic_arena=True), "choose one of them"),
        (dict(max_batch_size=0), "max_batch_size must be at least 1"),
        (dict(memroy="2 GB"), "unknown setting 'memroy': did you mean 'memory'"),
    ],
)
def test_settings_that_make_no_plan(tiny, settings, message):
    with pytest.raises(SettingError, match=message):
        cl.memory_plan(tiny, **settings)


def test_memory_and_slots_can_be_exchanged_while_the_model_is_open(tiny):
    lab = cl.open(tiny, memory="25 MB", max_seq_len=256)
    lab.configure(expert_cache_slots=3)
    assert (lab.settings["memory"], lab.settings["expert_cache_slots"]) == (None, 3)
    lab.configure(memory="25 MB")
    assert lab.settings["expert_cache_slots"] == cl.memory_plan(tiny, memory="25 MB", max_seq_len=256).slots
    lab.configure(policy="fifo")
    assert lab.settings["expert_cache_slots"] == cl.memory_plan(tiny, memory="25 MB", max_seq_len=256).slots


def test_the_process_grows_by_what_was_planned_within_two_percent(tiny):
    run = run_child(
        tiny, TEXT, settings=dict(prefault=True, max_seq_len=256, expert_cache_slots=24),
        generate=dict(max_tokens=300, temperature=0.0, stop_at_eos=False),
    )  # fmt: skip
    assert run.reason is None
    assert run.memory == run.plan
    assert abs(run.error) <= 0.02, run


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A container whose experts are far larger than memory will be: 24 layers that share one layer's files on disk."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = dict(hidden=512, layers=1, heads=4, kv_heads=1, experts=32, top_k=2, expert_width=1536, vocab=300)
    cl.make_model(folder / "hf", "mixtral", **sizes, progress=False)
    cl.convert(folder / "hf", folder / "box", progress=False)
    shutil.rmtree(folder / "hf")
    box, layers = folder / "box", 24
    config = json.loads((box / "config.json").read_text())
    model = config["model"]
    model |= {"num_layers": layers, "ffn": model["ffn"] * layers, "windows": model["windows"] * layers}
    for layer in range(1, layers):
        os.link(box / "dense" / "layer_0.bin", box / "dense" / f"layer_{layer}.bin")
        (box / f"layer_{layer}").mkdir()
        for file in (box / "layer_0").iterdir():
            os.link(file, box / f"layer_{layer}" / file.name)
    (box / "config.json").write_text(json.dumps(config))
    return box


def test_a_model_ten_times_larger_than_a_hard_limit_generates_within_it(wide):
    settings = dict(expert_cache_slots=1, max_seq_len=64, prefill_chunk=16)
    run = run_child(
        wide, "Hello", settings=settings, generate=dict(max_tokens=3, temperature=0.0, stop_at_eos=False), limited=True
    )
    assert run.reason is None
    assert len(run.tokens) == 3
    box = Container.open(wide)
    experts = sum((wide / file).stat().st_size for file in box.files if "/expert_" in file)
    assert run.limit == run.base + int(run.plan["total_bytes"] * 1.05)
    assert experts >= 10 * run.limit
    assert run.base < run.peak <= run.limit


def test_a_run_that_breaks_its_limit_is_reported_with_the_reason(tiny):
    run = run_child(tiny, TEXT, settings=dict(max_seq_len=256), limit=1_000_000)
    assert run.returncode != 0 and run.tokens == ()
    # Whoever asks first is refused or gives up; the watcher kills who gets away with it.
    endings = ("killed for exceeding its memory", "an allocation was refused", "as C++ does when memory ends")
    assert any(ending in run.reason for ending in endings), run.reason
    assert run.limit == 1_000_000


@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        (-signal.SIGKILL, dict(killed=True, peak=7, limit=5), "exceeding its memory or time: its memory was 7 bytes at most, the limit 5"),
        (-signal.SIGKILL, dict(oom=1, peak=7), "killed by the system, which was out of memory: its memory was 7 bytes at most"),
        (-signal.SIGKILL, dict(peak=7), "killed from outside, most often because the system or a control group was out of memory"),
        (-signal.SIGBUS, {}, "a mapped file became shorter"),
        (-signal.SIGSEGV, {}, "check_memory"),
        (-signal.SIGABRT, dict(stderr="x\nterminate: std::bad_alloc\n"), "when memory ends .*terminate: std::bad_alloc"),
        (-signal.SIGABRT, dict(limit=9), r"its memory was not measured, the limit 9\): no message"),
        (-signal.SIGILL, {}, "compiled for another CPU"),
        (-signal.SIGUSR1, {}, "ended by SIGUSR1"),
        (1, dict(stderr="a\nMemoryError: no room", limit=9), "refused at the limit of 9 bytes: no room"),
        (1, dict(stderr="Traceback\nValueError: bad"), "ended with code 1: ValueError: bad"),
        (3, {}, "ended with code 3: no message"),
    ],
)  # fmt: skip
def test_likely_reasons(code, options, words):
    stderr = options.pop("stderr", "")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(likely_reason(int(code), stderr, **options))


def test_the_plan_as_text_and_as_json(tiny, capsys):
    arguments = ["plan", "--model", str(tiny), "--memory-only", "--memory", "20MB", "--max-seq-len", "256"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    plan = cl.memory_plan(tiny, memory="20 MB", max_seq_len=256)
    for size in plan.values():
        assert str(size) in shown
    assert cli.main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {part: told[part] for part in plan} == plan
    assert told["expert_cache_slots"] == plan.slots
    assert told["available_bytes"] - told["total_bytes"] == told["page_cache_bytes"]
    assert cli.main([*arguments[:-4], "--available", "1MB"]) == 1
    assert "no setting fits" in capsys.readouterr().err


def test_the_table_shows_the_measured_beside_the_planned(tiny):
    lab = cl.open(tiny, expert_cache_slots=2)
    lines = plan_table(lab.plan, lab.memory()).splitlines()
    assert "measured" in lines[0]
    assert len(lines) == len(PARTS) + 2
    assert lines[4].split()[0] == lines[4].split()[3] == str(lab.plan["slots_bytes"])
