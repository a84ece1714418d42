"""A kernel's sources to play with: copies in the cache, so that an edit never touches the checkout.

    draft = kernels.Draft("gemm")
    draft.edit("kSuper = 96", "kSuper = 32")     # the text must be there exactly once
    new, old = draft.load(), kernels.load("gemm")
    print(draft.diff())

A draft is this process's alone and is gone when it ends.
"""

from __future__ import annotations

import atexit
import difflib
import os
import re
import shutil
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path

from colibri_lab.errors import CompileError, SettingError, did_you_mean

from . import builder, store


class Draft:
    """Sources of kernel `name` and of what it needs, by path relative to the source folder. Starts as the checkout is."""

    def __init__(self, name: str):
        self.name = name
        self.original = {path: text.decode() for path, text in builder.sources(name).items()}
        self._pool = builder.sources("threads") if "threads" in builder.names() else {}
        self.texts = dict(self.original)

    def edit(self, old: str, new: str) -> None:
        """Replace the one place where `old` is. Lines may be indented otherwise than in the file.

        Raises `SettingError` when `old` is in no file of the kernel, or in several places.
        """
        lines = [line.strip() for line in old.strip().splitlines()]
        if not lines:
            raise SettingError(f"{self.name}: the text to replace is empty")
        pattern = re.compile(r"[ \t]*\n[ \t]*".join(map(re.escape, lines)))
        places = [(path, found) for path, text in self.texts.items() for found in pattern.finditer(text)]
        if len(places) != 1:
            where = ", ".join(f"{path}:{self._line(path, found.start())}" for path, found in places)
            found = (
                f"in {len(places)} places ({where}): give more of it"
                if places
                else f"in none of {', '.join(self.texts)}"
            )
            raise SettingError(f"{self.name}: the text {lines[0]!r}{' …' * (len(lines) > 1)} is {found}")
        path, found = places[0]
        text = self.texts[path]
        start = text.rfind("\n", 0, found.start()) + 1
        indent = re.match(r"[ \t]*", text[start:])[0] if text[start : found.start()].isspace() else ""
        self.texts[path] = text[: found.start()] + f"\n{indent}".join(_dedented(new)) + text[found.end() :]

    def write(self, path: str, text: str) -> None:
        """Replace a whole file. Raises `SettingError` for a file the kernel does not have."""
        if path not in self.texts:
            raise SettingError(f"{self.name} has no file {path!r}; {did_you_mean(path, self.texts)}")
        self.texts[path] = text

    def reset(self) -> None:
        """Forget every edit."""
        self.texts = dict(self.original)

    def diff(self) -> str:
        """What was changed, as a unified diff; empty when nothing was."""
        parts = []
        for path, text in self.texts.items():
            before, after = self.original[path].splitlines(True), text.splitlines(True)
            parts += difflib.unified_diff(before, after, path, path, n=1)
        return "".join(parts)

    def load(self, progress: bool = False) -> types.ModuleType:
        """The draft compiled and loaded; versions that were loaded before work on.

        Raises `CompileError`: file (relative to the source folder), line, column and message, then the line itself.
        """
        from . import reload

        folder = self._folder()
        for path, text in {**{p: t.decode() for p, t in self._pool.items()}, **self.texts}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        with store.sources_at(folder):
            try:
                return reload(self.name, progress)
            except CompileError as error:
                said = str(error).removeprefix(f"{folder}/")
                raise CompileError(said + self._marked(said), error.log.replace(f"{folder}/", "")) from None

    def _marked(self, said: str) -> str:
        """The source line that a compiler message is about, with a mark below its column; "" if there is none."""
        found = re.match(r"(.+?):(\d+):(\d+): ", said)
        lines = self.texts.get(found[1], "").splitlines() if found else []
        if not found or not 1 <= int(found[2]) <= len(lines):
            return ""
        return f"\n{lines[int(found[2]) - 1]}\n{' ' * (int(found[3]) - 1)}^"

    def _folder(self) -> Path:
        root = store.cache_root() / "drafts" / str(os.getpid())
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        return root / self.name

    def _line(self, path: str, at: int) -> int:
        return self.texts[path].count("\n", 0, at) + 1


def _dedented(text: str) -> list[str]:
    return textwrap.dedent(text.strip("\n")).rstrip().splitlines() or [""]


def source(name: str, path: str | None = None) -> str:
    """Text of a kernel's core, `NAME_core.hpp`, or of another file it is made of.

    Raises `SettingError` for a kernel or a file that does not exist.
    """
    texts: Mapping[str, bytes] = builder.sources(name)
    core = f"{name}_core.hpp"
    wanted = path or (core if core in texts else f"{name}.cpp")
    if wanted not in texts:
        raise SettingError(f"{name} has no file {wanted!r}; {did_you_mean(wanted, texts)}")
    return texts[wanted].decode()
