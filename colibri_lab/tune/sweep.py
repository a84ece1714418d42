"""`colibri sweep`: a grid of settings, each replayed or really run; a row of the table per point.

Rows go to disk as they finish, so a sweep that was stopped goes on where it was. A point that fails is a row with the
reason. Work runs in local processes, or on a Dask cluster whose workers see the same files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from ..errors import ColibriError, MissingTool, SettingError, StorageError
from . import runs, trial
from .fingerprint import machine_facts

ROWS = "rows"
PATIENCE_S = 10  # for a scheduler to answer


def sweep(
    model: str | os.PathLike | None = None,
    trace=None,
    *,
    grid: dict[str, list],
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    dask: str | None = None,
    prompt: str = trial.PROMPT,
    repeats: int = 3,
    warmup: int = 1,
    record: bool = True,
    progress: bool = True,
) -> pd.DataFrame:
    """Every combination of `grid`, on a model (real runs) or on a trace (replays): a DataFrame, a row per point.

        colibri_lab.sweep(trace="run.parquet", grid={"policy": ["lru", "arc"], "slots": [8, 16, 32]})
        colibri_lab.sweep(model="colibri-tiny", grid={"expert_cache_slots": [4, 8, 16], "storage": ["pread", "direct"]})

    grid      setting → values; settings of cl.open and generate for a model, of trace.replay for a trace
    out       folder of this sweep; points that are in it already are not run again. Default: a folder of its own, deleted
              at the end
    workers   local processes; default 1 for real runs, which would slow each other down, and all cores for replays
    dask      address of a Dask scheduler to use in place of local processes
    repeats   real runs per point, of which a row holds the medians
    record    keep a run record

    Columns: the grid's settings, the point's numbers, `n`, `error` (None where there is none). Raises `SettingError` for an
    empty or unknown grid, `MissingTool` without dask. Ctrl-C stops after what has finished, which is kept.
    """
    if (model is None) == (trace is None):
        raise SettingError("a sweep takes a model (real runs) or a trace (replays): give one of them")
    points = _points(grid, real=model is not None)
    with tempfile.TemporaryDirectory(prefix="colibri-sweep-") as scratch:
        folder = Path(out) if out is not None else Path(scratch)
        task = _task(model, trace, folder, prompt, repeats, warmup)
        done = _finished(folder)
        todo = [point for point in points if _key(task, point) not in done]
        parallel = workers or (1 if model is not None else os.cpu_count() or 1)
        pool = _dask(task, todo, dask) if dask else _processes(task, todo, parallel)
        with tqdm(
            pool, "sweep", len(points), initial=len(points) - len(todo), unit=" point", disable=not progress
        ) as bar:
            for point, row in bar:
                _write(folder, _key(task, point), {**point, **row})
        finished = _finished(folder)
        rows = [finished[_key(task, point)] for point in points]
        table = pd.DataFrame(rows)
        if out is not None:
            _whole(folder / "sweep.parquet", table)
        if record:
            failed = int(table.error.notna().sum())
            runs.save(
                "sweep", requested={"grid": grid, "repeats": repeats, "warmup": warmup, "prompt": prompt},
                facts={"points": len(table), "failed": failed}, tables={"sweep": table}, model=task["model"], trace=trace,
            )  # fmt: skip
    return table


def _points(grid: dict[str, list], real: bool) -> list[dict[str, Any]]:
    if not grid or not all(isinstance(values, (list, tuple)) and len(values) for values in grid.values()):
        raise SettingError(f"grid must give at least one value for at least one setting, got {grid!r}")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    names = trial.SETTINGS if real else trial.REPLAY
    for name in grid:
        if name not in names:
            raise SettingError(f"unknown setting {name!r} in the grid; {trial.did_you_mean(name, names)}")
    return points


def _task(model, trace, folder: Path, prompt: str, repeats: int, warmup: int) -> dict[str, Any]:
    """What every point shares, in a form that other processes can be sent."""
    if model is not None:
        from ..front import container_of

        path = str(container_of(model).resolve())
        return {"model": path, "prompt": prompt, "repeats": repeats, "warmup": warmup, "machine": machine_facts()["fingerprint"],
                "hash": runs.model_identity(path)["hash"]}  # fmt: skip
    if repeats < 1:
        raise SettingError(f"repeats must be at least 1, got {repeats}")
    identity = runs.trace_identity(trace)
    if not isinstance(trace, (str, os.PathLike)):
        _folder(folder)
        path = folder / f"trace-{identity['hash'][:12]}.parquet"
        if not path.exists():
            trace.save(path)
    else:
        path = Path(trace).resolve()
    return {"model": None, "trace": str(path), "hash": identity["hash"]}


def run_point(task: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """One point, in whatever process: its numbers and `error`, which names what was wrong."""
    try:
        if task["model"] is not None:
            row = trial.run_settings(task["model"], task["prompt"], point, task["repeats"], task["warmup"])
        else:
            row = {**trial.replay_settings(task["trace"], point), "n": 1}
        return {**row, "error": None}
    except (ColibriError, MemoryError, ValueError, OSError) as error:
        return {"n": 0, "error": f"{type(error).__name__}: {error}"}


def _processes(task: dict, todo: list[dict], workers: int) -> Iterator[tuple[dict, dict]]:
    """Points as they finish, from local processes. A process that dies takes its point down, not the sweep."""
    context = multiprocessing.get_context("spawn")
    left = list(todo)
    while left:
        pool = ProcessPoolExecutor(min(workers, len(left)), mp_context=context)
        running = {pool.submit(run_point, task, point): point for point in left}
        broken = None
        try:
            while running and broken is None:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    point = running.pop(future)
                    if (error := future.exception()) is None:
                        left.remove(point)
                        yield point, future.result()
                    else:
                        broken = error
        finally:
            pool.shutdown(wait=broken is None, cancel_futures=True)
        if broken is not None:  # which point it was cannot be told while several run, so they go on one by one
            if workers == 1:
                yield (
                    left.pop(0),
                    {"n": 0, "error": f"the process died: {broken}; perhaps the system was out of memory"},
                )
            workers = 1


def _dask(task: dict, todo: list[dict], address: str) -> Iterator[tuple[dict, dict]]:
    try:
        from distributed import Client, as_completed
    except ImportError as error:
        raise MissingTool(f"sweeps on a cluster need dask: pip install 'colibri-lab[dask]' ({error})") from None
    try:
        client = Client(address, timeout=PATIENCE_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise SettingError(f"no Dask scheduler answers at {address!r}: {error}") from error
    try:
        futures = {client.submit(run_point, task, point, pure=False): point for point in todo}
        for future in as_completed(futures, loop=client.loop):
            error = future.exception()
            point = futures[future]
            yield point, future.result() if error is None else {"n": 0, "error": f"{type(error).__name__}: {error}"}
    finally:
        client.close()


# ---- rows on disk


def _key(task: dict, point: dict) -> str:
    text = json.dumps(
        [{k: v for k, v in task.items() if k not in ("model", "trace")}, point], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _folder(folder: Path) -> None:
    try:
        (folder / ROWS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: {error}") from error


def _finished(folder: Path) -> dict[str, dict]:
    """Rows already there, by key; a damaged one is run again. Failures are tried again too when a sweep is resumed."""
    rows = {}
    for path in sorted((folder / ROWS).glob("*.parquet")):
        try:
            rows[path.stem] = pd.read_parquet(path).to_dict("records")[0]
        except (OSError, ValueError, IndexError):
            path.unlink(missing_ok=True)
    return rows


def _write(folder: Path, key: str, row: dict) -> None:
    _folder(folder)
    row = {
        name: str(value) if isinstance(value, (list, tuple, dict)) or callable(value) else value
        for name, value in row.items()
    }
    _whole(folder / ROWS / f"{key}.parquet", pd.DataFrame([row]))


def _whole(path: Path, table: pd.DataFrame) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        table.to_parquet(part, index=False)
        os.replace(part, path)
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error
