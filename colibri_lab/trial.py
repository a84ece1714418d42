"""Try an edit of a kernel: compile it beside the old one, check it, time both in turn, place both under the roofline.

    trial = colibri_lab.try_edit("gemm", {"kSuper = 96": "kSuper = 32"}, tokens=(1, 64))
    print(trial)           # the diff, parity, times, and a verdict
    trial.roofline()       # a picture

The edit lives in a draft (kernels/draft.py). Neither the checkout nor any open model sees it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pandas as pd

from . import kernels
from .errors import SettingError, did_you_mean
from .kernels.draft import Draft
from .limits import Limits, LimitWork
from .timing import Timing, race
from .workloads import WORKLOADS, Workload, workload


@dataclass(frozen=True, repr=False)
class Trial:
    """Old and new version of a kernel on the same work. `modules` are both, loaded; `diff` is what the edit changed."""

    kernel: str
    diff: str
    parity: list[kernels.Case]
    works: list[Workload]
    timings: list[tuple[Timing, Timing]]  # old, new of each workload
    differences: list[float]  # largest |new - old| of each workload's result
    limits: Limits
    modules: tuple[ModuleType, ModuleType]

    @property
    def table(self) -> pd.DataFrame:
        """A row per workload and version: case, version, median, low and high in us, GB_per_s, GOP_per_s, share of the
        bound, clean samples."""
        rows = []
        for work, pair in zip(self.works, self.timings, strict=True):
            for version, timing in zip(("old", "new"), pair, strict=True):
                rows.append({
                    "case": work.label, "version": version, "median_us": 1e6 * timing.median_s,
                    "low_us": 1e6 * timing.low_s, "high_us": 1e6 * timing.high_s,
                    "GB_per_s": 1e-9 * work.bytes / timing.median_s, "GOP_per_s": 1e-9 * work.operations / timing.median_s,
                    "share_of_bound": self.limits.bound_s(work) / timing.median_s,
                    "samples": len(timing.samples), "clean": timing.clean,
                })  # fmt: skip
        return pd.DataFrame(rows)

    @property
    def verdict(self) -> str:
        """One sentence per workload. A difference inside the spread is not called one."""
        said = []
        for work, (old, new), difference in zip(self.works, self.timings, self.differences, strict=True):
            ratio = old.median_s / new.median_s
            if not (old.trusted and new.trusted):
                what = "no verdict, since other work took the cores in nearly every sample: try again"
            elif new.high_s < old.low_s:
                what = f"the new one is {ratio:.2f} times as fast"
            elif old.high_s < new.low_s:
                what = f"the new one is slower, {ratio:.2f} of the old speed"
            else:
                what = f"no difference beyond the spread ({ratio:.2f} by the medians)"
            same = "the same bits" if difference == 0 else f"results within {difference:.1g} of each other"
            said.append(f"{work.label}: {what}; {same}.")
        return "\n".join(said)

    def roofline(self):
        """Both versions under this machine's limits, as a picture."""
        from .ui.roofline import roofline

        return roofline(self.limits, self.table, self.works)

    def __str__(self) -> str:
        worst = max(self.parity, key=lambda case: case[1] / max(case[2], 1e-30))
        table = self.table.to_string(index=False, float_format="{:.3g}".format)
        nearest = f"nearest to its limit: {worst[0]}, error {worst[1]:.2g} of {worst[2]:.2g}"
        checked = f"{len(self.parity)} comparisons with numpy hold; {nearest}"
        changed = self.diff.rstrip() or "nothing was changed: both are the same version"
        return "\n".join([changed, checked, table, self.verdict])

    __repr__ = __str__

    def _ipython_display_(self) -> None:
        from IPython.display import display

        print(self)
        display(self.roofline())


def try_edit(
    kernel: str,
    edits: Mapping[str, str] | Sequence[tuple[str, str]],
    *,
    threads: int = 1,
    rounds: int = 7,
    progress: bool = False,
    **options,
) -> Trial:
    """Compile `kernel` with each old text replaced by its new one, check it against numpy, and time it against the old.

    `options` are those of the kernel's workload (`colibri_lab.workloads`), such as format="int8"; a tuple gives several
    workloads, as tokens=(1, 64). Raises `CompileError` (file:line:col first), `KernelError` when the results are wrong,
    `SettingError` for a text that is not in the kernel exactly once. After any of them everything is as before.
    """
    works = workloads(kernel, **options)
    draft = Draft(kernel)
    for old, new in edits.items() if isinstance(edits, Mapping) else edits:
        draft.edit(old, new)
    return compare(draft, works, threads=threads, rounds=rounds, progress=progress)


def compare(draft: Draft, works: list[Workload], *, threads: int = 1, rounds: int = 7, progress: bool = False) -> Trial:
    """Compile a draft and time it against the kernel as its files are; raises as `try_edit` does."""
    old, new = kernels.load(draft.name), draft.load(progress)
    parity = kernels.check(draft.name, new)
    contenders, differences = {}, []
    for i, work in enumerate(works):
        pair = work.call(old, threads), work.call(new, threads)
        contenders |= {f"{i} old": pair[0], f"{i} new": pair[1]}
        differences.append(_difference(*pair))
    ceiling = LimitWork(threads)
    found = race(contenders | ceiling.contenders, rounds=rounds, threads=threads, progress="old and new" * progress)
    timings = [(found[f"{i} old"], found[f"{i} new"]) for i in range(len(works))]
    return Trial(draft.name, draft.diff(), parity, works, timings, differences, ceiling.limits(found), (old, new))


def _difference(old, new) -> float:
    before = np.array(old())
    return float(np.abs(np.array(new()) - before).max())


def workloads(kernel: str, **options) -> list[Workload]:
    """A workload per value of the option that has several; default 1 and 64 tokens."""
    if kernel not in WORKLOADS:
        raise SettingError(f"kernel {kernel!r} has no workload to time; {did_you_mean(kernel, WORKLOADS)}")
    known = list(inspect.signature(WORKLOADS[kernel]).parameters)
    for name in options:
        if name not in known:
            raise SettingError(f"{kernel} has no option {name!r}; {did_you_mean(name, known)}")
    options = {"tokens": (1, 64), **options}
    many = [name for name, value in options.items() if isinstance(value, (list, tuple))]
    if len(many) > 1:
        raise SettingError(f"only one option may have several values, got {' and '.join(many)}")
    if not many:
        return [workload(kernel, **options)]
    return [workload(kernel, **{**options, many[0]: value}) for value in options[many[0]]]
