"""Kernels in C++, compiled when they are first used and again after an edit.

    from colibri_lab import kernels

    experts = kernels.load("experts")     # compiles cpp/experts.cpp, or finds the build in the cache
    ...                                   # edit cpp/experts.cpp or a header
    newer = kernels.reload("experts")     # compiles the edit; `experts` is the old version and still works

`load` is like Python's import: it compiles on first use and returns the same module ever after. `reload` looks at the
files again. Versions live side by side, nothing is ever unloaded, and `versions` counts them.

Environment: COLIBRI_CPP (source folder), COLIBRI_CACHE (build folder), COLIBRI_SIMD (auto, scalar, avx2, avx512,
avx512vnni, neon), COLIBRI_CCACHE=0 (no ccache), CXX (compiler).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from tqdm import tqdm

from colibri_lab.errors import KernelError, SettingError, did_you_mean

from . import builder
from .builder import artefact, configure, names, nanobind_object
from .cpu import cpu_features, simd
from .draft import Draft, source
from .process import cancel
from .store import cache_root, cpp_dir, sources
from .toolchain import preflight

__all__ = [
    "Draft", "build", "cache_root", "check", "checked", "configure", "cpp_dir", "cpu_features", "load", "names",
    "preflight", "reference", "reload", "simd", "source", "versions",
]  # fmt: skip

Case = tuple[str, float, float]  # name of the case, largest error, tolerance

_lock = threading.RLock()
_current: dict[tuple[str, ...], types.ModuleType] = {}  # what load() returns, by kernel and environment
_loaded: dict[str, types.ModuleType] = {}  # every version ever loaded, by full module name
_references: dict[str, Callable[[types.ModuleType], Iterable[Case]]] = {}


def load(name: str, progress: bool = True) -> types.ModuleType:
    """The extension module of kernel `name`, compiled if the cache does not have it; the same object on every call.

    Raises CompileError (`file:line:col: message`), KernelError when it compiles but does not load, MissingTool without
    a compiler, SettingError for an unknown kernel or a SIMD path this CPU lacks.
    """
    where = _where(name)
    return _current.get(where) or _refresh(name, where, progress)


def reload(name: str, progress: bool = True) -> types.ModuleType:
    """The module of the kernel as its files are now: the same object when nothing changed, else a new version.

    Modules, functions and objects of older versions keep working. When the new text does not compile this raises as
    `load` does, and `load` goes on returning the version it had.
    """
    return _refresh(name, _where(name), progress)


def versions(name: str) -> int:
    """How many versions of the kernel this process has loaded. None is ever unloaded."""
    return sum(full.endswith(f".{name}") for full in _loaded)


def _where(name: str) -> tuple[str, ...]:
    here = sources.get()
    return (name, str(here) if here else os.environ.get("COLIBRI_CPP", ""), os.environ.get("COLIBRI_SIMD", ""))


def _refresh(name: str, where: tuple[str, ...], progress: bool) -> types.ModuleType:
    with _lock:
        key, path = artefact(name, progress)
        package = f"colibri_hot_{key}"
        full = f"{package}.{name}"
        if full not in _loaded:
            # The last part of the dotted name must stay `name`, for PyInit_<name>; the first part keeps versions apart.
            spec = importlib.util.spec_from_file_location(full, path)
            try:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError as error:
                raise KernelError(f"{path}: kernel {name} does not load: {error}") from error
            _share_pool(name, module)
            sys.modules.setdefault(package, types.ModuleType(package))
            sys.modules[full] = _loaded[full] = module
        _current[where] = _loaded[full]
        return _loaded[full]


def _share_pool(name: str, module: types.ModuleType) -> None:
    """Give a kernel that computes on threads the pool all kernels share, which lives in kernel `threads`.

    The version of `threads` is that of the files now, like the kernel's own: both must agree on the pool's layout.
    """
    if name != "threads" and hasattr(module, "_use_pool") and "threads" in names():
        module._use_pool(reload("threads").pool())


def build(names: Iterable[str] | None = None, progress: bool = True) -> None:
    """Compile kernels (all by default) into the cache without loading them, two at a time, with a progress bar.

    Raises what `load` raises, for the first kernel that fails, after the others are done.
    """
    wanted = builder.names() if names is None else list(names)
    nanobind_object(progress)
    pool = ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1))
    try:
        jobs = [pool.submit(artefact, name, False) for name in wanted]
        for job in tqdm(as_completed(jobs), "compiling kernels", len(jobs), unit=" kernel", disable=not progress):
            job.exception()
        for job in jobs:
            job.result()
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        cancel()
        raise
    finally:
        pool.shutdown()


def reference(name: str) -> Callable:
    """Decorator: register `f(module) -> list of (case, max_error, tolerance)` as the parity check of kernel `name`."""

    def register(function):
        _references[name] = function
        return function

    return register


def _checks() -> dict[str, Callable[[types.ModuleType], Iterable[Case]]]:
    """Every parity check there is, by kernel; what was registered comes before what the package brings."""
    found = {}
    if importlib.util.find_spec("colibri_lab.reference"):
        found = vars(importlib.import_module("colibri_lab.reference"))
    return {key.removeprefix("check_"): value for key, value in found.items() if key.startswith("check_")} | _references


def checked() -> list[str]:
    """Names of the kernels that `check` can compare with a reference."""
    return [name for name in names() if name in _checks()]


def check(name: str, module: types.ModuleType | None = None) -> list[Case]:
    """Compare the kernel, or another version of it, with its plain numpy reference; a (case, max_error, tolerance) for
    each comparison made.

    The reference is what `reference(name)` registered, else `check_<name>` of colibri_lab.reference.
    Raises KernelError when an error is above its tolerance or is NaN, SettingError when there is no such check.
    """
    known = _references if name in _references else _checks()
    if name not in known:
        raise SettingError(f"no check for kernel {name!r}; {did_you_mean(name, known)}")
    cases = list(known[name](load(name) if module is None else module))
    bad = [f"{case}: error {error:.3g}, tolerance {limit:.3g}" for case, error, limit in cases if not error <= limit]
    if bad or not cases:
        more = f"; and {len(bad) - 3} more of {len(cases)} comparisons" if len(bad) > 3 else ""
        said = "; ".join(bad[:3]) + more if bad else "the check compared nothing"
        raise KernelError(f"kernel {name} differs from its reference: {said}")
    return cases
