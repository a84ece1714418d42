from __future__ import annotations

import shlex

import numpy as np
import pytest

from colibri_lab.config import resolve
from colibri_lab.ui import runs
from colibri_lab.ui.runs import Job, MonitorRun


def job(**changes) -> Job:
    return Job('say "it\'s"\nnow', 8, "lru", resolve(changes, "generate"))


def run_of(steps, slots=8, scope="layer", residency=None, **changes) -> MonitorRun:
    settings = {"expert_cache_slots": slots, "policy": "lru", "scope": scope}
    run = MonitorRun(job(**changes), settings, layers=(1, 2), top_k=2, stop_reason="length")
    for i, step in enumerate(steps):
        run.add(step, np.zeros((2, 4)) if residency is None else residency[i])
    return run


def test_verdict_names_cost_bound_and_remedy(step):
    run = run_of([step(hits=2, misses=2, expert_compute=3, expert_load_wait=1)] * 4)
    assert runs.verdict(run) == (
        "8 slots, lru: 2.0 misses per token cost 1 of 4 ms; more slots help most: 250 tokens/s now, 333 if nothing waited."
    )


def test_verdict_when_waiting_is_cheap(step):
    run = run_of([step(hits=2, misses=2, expert_compute=9, attention=4, expert_load_wait=0.1)])
    assert "so more slots gain little; expert compute takes most, 69 %" in runs.verdict(run)


@pytest.mark.parametrize(("slots", "scope", "need"), [(1, "layer", "2 per layer"), (3, "global", "4 in all")])
def test_verdict_below_the_working_set(step, slots, scope, need):
    text = runs.verdict(run_of([step(misses=4, expert_load_wait=1)], slots, scope))
    assert f"below one token's working set ({need}), so no policy can help" in text


@pytest.mark.parametrize(("slots", "scope"), [(2, "layer"), (4, "global")])
def test_working_set_itself_is_enough(step, slots, scope):
    assert "working set" not in runs.verdict(run_of([step(misses=4, expert_load_wait=1)], slots, scope))


def test_verdict_when_all_misses_are_first_meetings(step):
    residency = [np.array([[2, 0, 0, 0], [2, 0, 0, 0]]), np.array([[1, 2, 0, 0], [2, 0, 0, 0]])]
    run = run_of([step(misses=2, phase="prefill"), step(hits=1, misses=1, expert_load_wait=1)], residency=residency)
    assert run.new_experts_per_token() == 1
    assert "100 % of them met their expert for the first time, which no cache avoids" in runs.verdict(run)


def test_experts_that_passed_through_in_prefill_are_not_called_new(step):
    residency = [np.array([[2, 0, 0, 0], [2, 0, 0, 0]]), np.array([[1, 2, 0, 0], [2, 0, 0, 0]])]
    run = run_of([step(misses=5, phase="prefill"), step(hits=1, misses=1, expert_load_wait=1)], residency=residency)
    assert run.new_experts_per_token() == 0


def test_verdict_without_misses_or_tokens(step):
    assert "every access hits" in runs.verdict(run_of([step(hits=4, expert_compute=1)]))
    assert "ask for more tokens" in runs.verdict(run_of([step(hits=4, phase="prefill")]))


def test_comparison_checks_that_the_tokens_agree(step):
    kept = run_of([step(misses=2, expert_compute=2, token=t) for t in (1, 2, 3)], slots=4)
    same = run_of([step(misses=1, expert_compute=1, token=t) for t in (1, 2)])
    other = run_of([step(misses=1, expert_compute=1, token=t) for t in (1, 9)])
    reseeded = run_of([step(misses=1, expert_compute=1)], seed=5)
    start = "From kept 4 slots, lru: 2.0 → 1.0 misses, median 2 → 1 ms per token (n = 1 each)"
    assert runs.comparison(same, kept) == start + "; all 2 tokens equal."
    assert runs.comparison(other, kept) == start + "; the tokens differ, which a cache must not do."
    assert runs.comparison(reseeded, kept) == start + "; prompt or sampling differ."
    assert runs.comparison(kept, kept) == runs.comparison(kept, None) == ""


def test_speed_comes_with_n_and_spread(step):
    slow, fast = run_of([step(expert_compute=10)]), run_of([step(expert_compute=8)])
    assert runs.speed_text(slow, [slow]) == "100 tokens/s (n = 1)"
    assert runs.speed_text(fast, [slow, fast]) == "112 tokens/s (n = 2, spread 22 %)"
    assert runs.speed_text(run_of([step(expert_compute=10)], slots=4), [slow, fast]) == "100 tokens/s (n = 1)"
    assert runs.speed_text(run_of([]), []) == "–"


def test_not_measured_is_none(step):
    row = runs.summary_row(run_of([step(phase="prefill", token=None)]))
    for name in ("hit_rate", "misses_per_token", "bytes_per_token", "ms_per_token", "tokens_per_s", "ttft_ms"):
        assert row[name] is None


def test_time_to_first_token_is_all_of_prefill(step):
    prefill = [step(phase="prefill", token=None, attention=30), step(phase="prefill", token=1, attention=12)]
    assert run_of([*prefill, step(attention=1)]).ttft_s == pytest.approx(0.042)


def test_command_line_says_the_settings_back():
    settings = resolve({"storage": "mmap"}, "open")
    words = shlex.split(runs.cli_line("data/my model", job(max_tokens=9, stop_at_eos=False), settings))
    assert words[:2] == ["colibri", "run"]
    flags = dict(zip(words[2::2], words[3::2], strict=False))
    assert flags["--model"] == "data/my model" and flags["--prompt"] == job().prompt
    assert flags["--expert-cache-slots"] == "8" and flags["--max-tokens"] == "9" and flags["--storage"] == "mmap"
    assert words[-1] == "--no-stop-at-eos"


def test_command_line_is_understood_by_the_command():
    from colibri_lab import cli

    words = shlex.split(runs.cli_line("data/colibri-tiny", job(max_tokens=9), resolve({}, "open")))
    args = cli.build_parser().parse_args(words[1:])
    assert cli.given_settings(args, "generate")["max_tokens"] == 9
    assert cli.given_settings(args, "open")["expert_cache_slots"] == 8


def test_python_lines_run():
    called = {}

    class Cl:
        @staticmethod
        def open(path, **settings):
            called["open"] = (path, settings)
            return Cl

        @staticmethod
        def generate(prompt, **settings):
            called["generate"] = (prompt, settings)

    exec(runs.python_lines("data/colibri-tiny", job(seed=4), resolve({}, "open")), {"cl": Cl})
    assert called["open"] == ("data/colibri-tiny", {"expert_cache_slots": 8, "policy": "lru"})
    assert called["generate"] == (job().prompt, {"max_tokens": 128, "temperature": 0.7, "top_p": 0.95, "seed": 4})


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "scope", "text"),
    [
        (16, 147_456, "layer", "16 slots × 6 layers = 14.2 MB"),
        (24, 147_456, "global", "24 slots in all = 3.54 MB"),
        (8, 40_000_000, "layer", "8 slots × 6 layers = 1.92 GB"),
    ],
)
def test_slots_say_their_memory_in_powers_of_ten(slots, slot_bytes, scope, text):
    assert runs.memory_text(slots, slot_bytes, 6, scope) == text
