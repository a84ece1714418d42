"""From a model or a trace to settings: what is recommended is said, drawn, measured and written out."""

from __future__ import annotations

import shlex

import pytest
from looking import hammer

import colibri_lab as cl
from colibri_lab import cli
from colibri_lab.errors import MemoryPlanError, ModelError, SettingError, StorageError
from colibri_lab.front import project_root
from colibri_lab.trace.table import Trace
from colibri_lab.tune.fingerprint import machine_facts
from colibri_lab.tune.probe import Probe
from colibri_lab.ui import plan_lessons as lessons
from colibri_lab.ui import what_if

OLMOE = "data/traces/warp_olmoe_1b7b_299.jsonl"


def made_up_probe() -> Probe:
    """A machine with a disk of 1 GB/s and kernels of 10 GB/s."""
    rate = {"bytes_per_s": 1e9, "low": 0.9e9, "high": 1.1e9, "n": 5}
    kernel = {
        "threads": 2,
        "seconds": 1.0,
        "low": 0.9,
        "high": 1.1,
        "n": 5,
        "weight_bytes_per_s": 1e10,
        "flop_per_s": 1e11,
    }
    kinds = [("bf16", "fp32"), ("int8", "int8")]
    return Probe(
        machine_facts(), "/", 10**10, 0, disk=[{"block_bytes": 1 << 22, "depth": 2, "how": "direct", **rate}],
        page_cache=[{"depth": 1, **rate, "bytes_per_s": 1e10}], memory=[{"threads": 2, **rate, "bytes_per_s": 2e10}],
        kernels=[{"format": f, "activations": a, "tokens": n, **kernel} for f, a in kinds for n in (1, 64)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    return lessons.Bench(made_up_probe())


def test_a_trace_finds_its_model_and_a_budget_its_settings(bench):
    found = lessons.budget(bench, OLMOE, percent=50)
    subject = bench.subject(OLMOE)
    assert subject.shape.name == "OLMoE-1B-7B" and subject.path is None
    plan = subject.plan(50)
    speed, time = found.frames
    assert plan.predicted.memory["total_bytes"] <= subject.memory(50)
    assert speed.marks[0].x == plan.predicted.settings["expert_cache_slots"]
    assert speed.marks[0].y == plan.predicted.tokens_per_s.value
    assert time.values[:, 0].sum() == pytest.approx(100, abs=0.01)
    assert "3.8 GB, 50 % of what all experts would need" in found.said and "slots per layer" in found.said
    assert {"expert_cache_slots", "policy", "storage", "threads"} <= set(found.table.index)
    assert (found.table.reason.str.len() > 0).all()


def test_axes_hold_still_while_the_budget_moves(bench):
    small, large = (lessons.budget(bench, OLMOE, percent=p).frames[0] for p in (40, 50))
    assert (small.xlim, small.ylim) == (large.xlim, large.ylim)


def test_more_memory_is_not_predicted_slower(bench):
    table = lessons.what_memory_buys(bench, OLMOE, (10, 40, 70, 100)).table
    assert table.percent.tolist() == [40, 70, 100]  # 10 % hold no slot
    assert table.tokens_per_s.is_monotonic_increasing
    with pytest.raises(SettingError, match="no budget of .* holds one slot per layer"):
        lessons.what_memory_buys(bench, OLMOE, (1, 2))


def test_what_cannot_be_planned_is_told_and_the_view_goes_on(bench):
    view = what_if(lessons.budget, bench, source=OLMOE, model="", percent=range(10, 101, 10))
    said = view.finding.said
    for wanted, error, match in (
        ({"percent": 10}, MemoryPlanError, "no slot count fits"),
        ({"source": "no/such/model", "percent": 50}, ModelError, "no/such/model"),
        ({"source": "data/traces/mce_toy_events.csv"}, SettingError, "3 MoE layers of 4 experts, like no model known"),
        ({"source": "README.md"}, (StorageError, cl.errors.TraceError), "README.md"),
    ):
        with pytest.raises(error, match=match):
            view.set(**wanted)
        assert view.finding.said == said and view.state == "error" and "the last picture stays" in view._message.value
    view.set(source="OLMoE-1B-7B", percent=60)
    assert view.state == "done" and "60 %" in view.finding.said
    view.close()


def test_a_model_that_is_here_is_run_and_measured():
    bench = lessons.Bench(made_up_probe())
    subject = bench.subject("data/colibri-tiny")
    assert subject.shape.name == "colibri-tiny" and subject is bench.subject(" data/colibri-tiny")
    assert subject.made.costs.source.startswith("calibration run")
    table = lessons.predicted_and_measured(subject, slots=(4, 32), tokens=10, rounds=1)
    assert table.slots.tolist() == [4, 32] and (table[["predicted", "measured", "low"]] > 0).all(axis=None)
    with pytest.raises(SettingError, match="not a model on this machine"):
        lessons.predicted_and_measured(bench.subject(OLMOE))


def test_the_command_line_is_one_that_colibri_understands(bench):
    line = lessons.command("data/colibri-tiny", {**bench.subject(OLMOE).plan(50).settings, "prefault": True})
    args = cli.build_parser().parse_args(shlex.split(line)[1:])
    plan = bench.subject(OLMOE).plan(50).settings
    assert (
        args.expert_cache_slots == plan["expert_cache_slots"]
        and args.policy == plan["policy"]
        and args.prefault is True
    )
    with pytest.raises(SettingError, match="polcy"):
        lessons.command("x", {"polcy": "lru"})


def test_the_shipped_models_traces_are_recognised():
    assert (
        lessons.model_of(cl.load_trace(project_root() / "data/traces/colibri_tiny_six_domains.parquet"))
        == "colibri-tiny"
    )
    made_up = Trace.from_rows(step=[0], layer=[0], experts=[[1]], header={"num_experts": 3})
    with pytest.raises(SettingError, match="give model="):
        lessons.model_of(made_up)


def test_two_threads_hammering_one_bench(bench):
    view = what_if(lessons.budget, bench, source=OLMOE, model="", percent=range(40, 101, 10))

    def actions(turn):
        return (
            lambda: setattr(view.controls["percent"], "value", turn.choice((40, 50, 60))),
            lambda: setattr(view.controls["source"], "value", turn.choice((OLMOE, "OLMoE-1B-7B", "no/such/model"))),
            lambda: lessons.reasons(bench.subject(OLMOE).plan(turn.choice((40, 50)))),
        )

    hammer(actions, 45)
    assert view.wait(60)
    assert view.set(source=OLMOE, percent=50).said.startswith("3.8 GB, 50 %")
    view.close()
