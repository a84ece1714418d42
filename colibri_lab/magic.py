"""Notebook commands for kernels, after `%load_ext colibri_lab`:

    %kernel_show gemm                      the kernel's core
    %kernel_show gemm include/simd.hpp 40:60
    %kernel_show gemm kSuper               the lines around a word

    %%kernel gemm --tokens 1,64            try an edit: - lines are replaced by the + lines that follow them
    - constexpr int kSuper = 96;
    + constexpr int kSuper = 32;

An edit is compiled in a scratch copy, checked against numpy, and timed in turn with the kernel as it is. An edit that
does not compile, or gives wrong results, is named with its place and changes nothing.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from . import kernels
from .errors import KernelError, SettingError
from .kernels.draft import Draft
from .trial import Trial, compare, workloads

AROUND = 6  # lines shown above and below a word


def register(ipython) -> None:
    """Add `%kernel_show` and `%%kernel` to an IPython shell."""
    ipython.register_magic_function(kernel_show, "line")
    ipython.register_magic_function(kernel, "cell")


@dataclass(frozen=True)
class Listing:
    """Lines of a source file with their numbers, coloured where the front end can."""

    name: str
    text: str
    first: int = 1

    def __str__(self) -> str:
        return "\n".join(f"{i:>4}  {line}" for i, line in enumerate(self.text.splitlines(), self.first))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import CppLexer

        style = HtmlFormatter(linenos="inline", linenostart=self.first, noclasses=True, nobackground=True)
        return f"<b>{self.name}</b>{highlight(self.text, CppLexer(stripnl=False), style)}"


def kernel_show(line: str) -> Listing:
    """`%kernel_show NAME [FILE] [FIRST:LAST | WORD]`: source of a kernel, its core unless a file is named; all of it, the
    lines asked for, or those around the first that has the word in it."""
    words = shlex.split(line)
    if not words:
        raise SettingError(
            f"%kernel_show wants a kernel, as in: %kernel_show gemm. Known: {', '.join(kernels.names())}"
        )
    name, *rest = words
    path = rest.pop(0) if rest and rest[0].endswith((".hpp", ".cpp")) else None
    every = kernels.source(name, path).splitlines()
    first, last = 1, len(every)
    if rest and rest[0].replace(":", "").isdigit():
        start, _, end = rest[0].partition(":")
        first, last = int(start or 1), int(end or len(every))
    elif rest:
        found = next((i for i, text in enumerate(every, 1) if rest[0] in text), None)
        if found is None:
            raise SettingError(f"%kernel_show {name}: no line has {rest[0]!r} in it")
        first, last = found - AROUND, found + AROUND
    first, last = max(1, first), min(last, len(every))
    return Listing(path or f"{name}_core.hpp", "\n".join(every[first - 1 : last]), first)


@dataclass(frozen=True)
class Rejected:
    """An edit that was not taken, and why. Nothing was changed."""

    reason: str

    def __str__(self) -> str:
        return f"✗ not taken, the kernel is as before\n{self.reason}"

    __repr__ = __str__


def kernel(line: str, cell: str) -> Trial | Rejected:
    """`%%kernel NAME [--OPTION VALUE …]` with `- old` and `+ new` lines: a `Trial`, or why there is none.

    Options are those of the kernel's workload (a comma makes several: --tokens 1,64), and --threads and --rounds. Raises
    `SettingError` for a command that cannot be understood.
    """
    name, options = _options(line)
    how = {key: options.pop(key) for key in ("threads", "rounds") if key in options}
    works, edits = workloads(name, **options), _edits(cell)
    draft = Draft(name)
    try:
        for old, new in edits:
            draft.edit(old, new)
        return compare(draft, works, **how)
    except (KernelError, SettingError) as error:  # a CompileError is a KernelError
        return Rejected(str(error))


def _options(line: str) -> tuple[str, dict]:
    words = shlex.split(line)
    if not words or words[0].startswith("--"):
        raise SettingError(
            f"%%kernel wants a kernel first, such as: %%kernel gemm. Known: {', '.join(kernels.names())}"
        )
    name, *rest = words
    options = {}
    while rest:
        key = rest.pop(0)
        if not key.startswith("--") or not rest:
            raise SettingError(f"%%kernel {name}: options are --name value pairs, got {key!r}")
        values = [_value(text) for text in rest.pop(0).split(",")]
        options[key[2:].replace("-", "_")] = values[0] if len(values) == 1 else tuple(values)
    return name, options


def _value(text: str) -> int | bool | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def _edits(cell: str) -> list[tuple[str, str]]:
    """Pairs of old and new text from `-` and `+` lines."""
    pairs: list[tuple[list[str], list[str]]] = []
    for line in cell.splitlines():
        mark, text = line[:1], line[1:]
        if mark == "-":
            if not pairs or pairs[-1][1]:
                pairs.append(([], []))
            pairs[-1][0].append(text)
        elif mark == "+" and pairs:
            pairs[-1][1].append(text)
        elif line.strip():
            raise SettingError(
                f"%%kernel: a line must begin with - (old text) or, below it, + (new text), got {line!r}"
            )
    if not pairs:
        raise SettingError(
            "%%kernel: nothing to edit; give - lines with the old text, and below them + lines with the new"
        )
    return [("\n".join(old), "\n".join(new)) for old, new in pairs]
