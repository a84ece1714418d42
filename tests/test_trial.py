"""Old against new: what a trial measures, what it says, and the notebook commands that make one."""

from __future__ import annotations

import pytest

from colibri_lab import kernels, trial
from colibri_lab.errors import CompileError, KernelError, SettingError
from colibri_lab.limits import Limits
from colibri_lab.magic import Listing, Rejected, kernel, kernel_show
from colibri_lab.timing import Sample, Timing
from colibri_lab.trial import Trial, try_edit, workloads


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    monkeypatch.setattr("colibri_lab.limits.READ_BYTES", 1 << 20)
    monkeypatch.setattr("colibri_lab.limits.ROUNDS", 1000)


def timing(*seconds, held=1.0) -> Timing:
    return Timing(tuple(Sample(s, held) for s in seconds))


def made(old: Timing, new: Timing, difference: float = 0.0) -> Trial:
    limits = Limits(1, "any", *(timing(per, per, per) for per in (1e-10, 1e-11, 2e-12)))
    return Trial(
        "norm", "", [("a case", 1e-7, 1e-6)], workloads("norm", tokens=3), [(old, new)], [difference], limits, ()
    )


def test_an_edit_is_compiled_checked_and_timed_against_the_old_version():
    edit = {"float inverse = 1.0f /": "const float inverse = 1.0f /"}
    found = try_edit("norm", edit, tokens=(1, 3), rounds=1)
    assert found.modules[0] is kernels.load("norm") is not found.modules[1]
    assert "+            const float inverse" in found.diff
    assert list(found.table.version) == ["old", "new"] * 2
    assert list(found.table.case.unique()) == ["1 token", "3 tokens"]
    assert found.differences == [0.0, 0.0] and "the same bits" in found.verdict
    assert (found.table.median_us > 0).all()
    assert found.roofline().png().startswith(b"\x89PNG")
    for part in (found.diff.strip(), "comparisons with numpy hold", "1 token"):
        assert part in str(found)


def test_wrong_results_and_broken_text_are_errors_that_change_nothing():
    before = kernels.load("norm")
    with pytest.raises(KernelError, match="kernel norm differs from its reference: rms_norm of .* and 4 more of 7"):
        try_edit("norm", {"float inverse = 1.0f /": "float inverse = 2.0f /"})
    with pytest.raises(CompileError, match=r"^norm_core.hpp:\d+:\d+: "):
        try_edit("norm", {"float inverse = 1.0f /": "flat inverse = 1.0f /"})
    assert kernels.load("norm") is before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (timing(2, 2.1, 2.2), timing(1, 1.1, 1.2), "1.91 times as fast"),
        (timing(1, 1.1, 1.2), timing(2, 2.1, 2.2), "slower, 0.52 of the old speed"),
        (timing(1, 1.5, 2), timing(1.2, 1.4, 1.9), "no difference beyond the spread"),
        (timing(1, 1, 1), timing(0.5, 0.5, 0.5, held=0.4), "no verdict, since other work took the cores"),
    ],
)
def test_only_a_difference_beyond_the_spread_of_clean_samples_is_called_one(old, new, says):
    assert says in made(old, new).verdict


def test_the_verdict_says_how_far_the_results_are_apart():
    clean = timing(1, 1, 1)
    assert "the same bits" in made(clean, clean).verdict
    assert "results within 2e-07 of each other" in made(clean, clean, 2e-7).verdict


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("storage", {}, "kernel 'storage' has no workload"),
        ("norm", {"token": 3}, "norm has no option 'token'; did you mean 'tokens'"),
        ("gemm", {"tokens": (1, 2), "format": ("int8", "bf16")}, "only one option may have several values"),
    ],
)
def test_workloads_that_cannot_be_made_are_refused(name, options, says):
    with pytest.raises(SettingError, match=says):
        workloads(name, **options)


def test_the_cell_command_makes_a_trial():
    found = kernel("norm --tokens 1,3 --rounds 1", "- float inverse = 1.0f /\n+ const float inverse = 1.0f /")
    assert isinstance(found, Trial) and len(found.works) == 2


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("- float inverse = 1.0f /\n+ flat inverse = 1.0f /", "norm_core.hpp:"),
        ("- float inverse = 1.0f /\n+ float inverse = 2.0f /", "differs from its reference"),
        ("- nowhere\n+ x", "is in none of"),
    ],
)
def test_the_cell_command_shows_what_is_wrong_with_an_edit(cell, says):
    found = kernel("norm --tokens 1 --rounds 1", cell)
    assert isinstance(found, Rejected) and says in str(found)
    assert "not taken, the kernel is as before" in repr(found)


def test_several_edits_in_a_cell_are_done_together():
    from colibri_lab.magic import _edits

    cell = "- a\n- b\n+ c\n\n- d\n+ e\n+ f\n"
    assert _edits(cell) == [(" a\n b", " c"), (" d", " e\n f")]


@pytest.mark.parametrize(
    ("line", "cell", "says"),
    [
        ("", "- a\n+ b", "%%kernel wants a kernel first"),
        ("norm --tokens", "- a\n+ b", "options are --name value pairs"),
        ("norm", "a\n+ b", "a line must begin with -"),
        ("norm", "\n", "nothing to edit"),
        ("norm --tokns 3", "- a\n+ b", "did you mean 'tokens'"),
    ],
)
def test_a_cell_that_cannot_be_understood_is_an_error(line, cell, says):
    with pytest.raises(SettingError, match=says):
        kernel(line, cell)


def test_the_line_command_lists_source_lines_with_their_numbers():
    shown = kernel_show("norm 2:4")
    lines = kernels.source("norm").splitlines()
    assert str(shown).splitlines() == [f"{i:>4}  {lines[i - 1]}" for i in (2, 3, 4)]
    assert isinstance(shown, Listing) and "pragma" in shown._repr_html_()
    assert kernel_show("norm include/threads.hpp").name == "include/threads.hpp"
    around = kernel_show("norm sum_of_squares")
    assert "sum_of_squares" in str(around) and 7 <= len(str(around).splitlines()) <= 13
    with pytest.raises(SettingError, match="no line has 'nowhere' in it"):
        kernel_show("norm nowhere")
    with pytest.raises(SettingError, match="wants a kernel"):
        kernel_show("")


def test_the_extension_registers_both_commands():
    import colibri_lab

    class Shell:
        def __init__(self):
            self.known = []

        def register_magic_function(self, function, kind):
            self.known.append((function.__name__, kind))

    shell = Shell()
    colibri_lab.load_ipython_extension(shell)
    assert shell.known == [("kernel_show", "line"), ("kernel", "cell")]


def test_the_public_name_is_the_function():
    import colibri_lab

    assert colibri_lab.try_edit is trial.try_edit
