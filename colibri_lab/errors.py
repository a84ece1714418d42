"""Every error colibri-lab raises on purpose.

    ColibriError
    ├── SettingError      a setting, flag or argument has an unknown name or an impossible value   (ValueError)
    ├── ModelError        a checkpoint or config.json cannot be used as it is                      (ValueError)
    ├── ContainerError    a container file or directory is damaged, incomplete or foreign          (ValueError)
    ├── TokenizerError    the tokenizer or chat template does not fit the model                    (ValueError)
    ├── TraceError        a routing trace is malformed, or lacks what was asked of it              (ValueError)
    ├── MemoryPlanError   the plan does not fit the memory that there is                           (MemoryError)
    │   └── PoolExhausted   the memory pool has no run of blocks long enough
    ├── StorageError      a read or write failed at the operating system                           (OSError)
    ├── KernelError       a kernel cannot be loaded or was called with arrays it cannot take       (RuntimeError)
    │   └── CompileError  its C++ source does not compile; the message starts `file:line:col:`
    └── MissingTool       something outside Python is missing: a compiler, a header, a browser     (RuntimeError)

A message names the thing, what was expected, what was found and what to do next. The second base class lets code that
has never heard of this package catch the errors it expects.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ColibriError(Exception):
    """Base of everything raised here on purpose."""


class SettingError(ColibriError, ValueError):
    """Unknown setting, or a value outside what the setting accepts."""


class ModelError(ColibriError, ValueError):
    """A checkpoint that cannot be read: unsupported family, missing tensor, missing or contradicting config field."""


class ContainerError(ColibriError, ValueError):
    """A container (or one of its files) that is damaged, incomplete, or not a container."""


class TokenizerError(ColibriError, ValueError):
    """A tokenizer or chat template that is missing, unreadable or not the one the model was trained with."""


class TraceError(ColibriError, ValueError):
    """A trace that is malformed, empty, or lacks what the analysis needs."""


class MemoryPlanError(ColibriError, MemoryError):
    """More memory asked for than there is; the message gives need, available and the largest setting that fits."""


class PoolExhausted(MemoryPlanError):
    """The memory pool cannot serve a request. Bytes: `.need`, `.free` in all, `.largest_run` of free blocks."""

    def __init__(self, message: str, need: int = 0, free: int = 0, largest_run: int = 0):
        super().__init__(message)
        self.need, self.free, self.largest_run = need, free, largest_run


class StorageError(ColibriError, OSError):
    """A file could not be read or written; the message names the file and the system's reason."""


class KernelError(ColibriError, RuntimeError):
    """A kernel that cannot be loaded, or one called with arguments it refuses."""


class CompileError(KernelError):
    """C++ that does not compile. `str(error)` starts `file:line:col: message`; `.log` holds the compiler's whole output."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class MissingTool(ColibriError, RuntimeError):
    """A program or header from outside Python is missing; the message says how to get it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an unknown-name message: the nearest known name, then all of them. Leading dashes do not count."""
    known = sorted(known)
    bare = {each.lstrip("-"): each for each in known}
    word = name.lstrip("-")
    near = [each for each in bare if len(word) > 3 and word in each]  # "slots" for "expert-cache-slots"
    near = near or difflib.get_close_matches(word, bare, n=1, cutoff=0.6)
    hint = f"did you mean {bare[near[0]]!r}? " if near else ""
    return f"{hint}Known: {', '.join(known)}"
