"""The run record: one directory per run, prediction, comparison, sweep or tuning.

`manifest.json` says what was asked for and what was in force, by which versions, on which machine, with which model and
trace; tables lie beside it as parquet. `runs()` lists them as a DataFrame. A record is written whole or not at all, and
nothing ever changes one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import SettingError, StorageError, did_you_mean
from . import page_cache
from .fingerprint import machine_facts

FORMAT = 1
KINDS = ("generate", "plan", "compare", "sweep", "tune")
_VERSIONS = ("numpy", "pandas", "pyarrow", "nanobind", "tokenizers")


@dataclass(frozen=True)
class Record:
    """One stored run. `manifest` is the JSON object; `table(name)` one of its tables."""

    path: Path
    manifest: dict

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def facts(self) -> dict:
        """The numbers of the run: tokens_per_s, hit_rate, total_bytes, …"""
        return self.manifest["facts"]

    def table(self, name: str) -> pd.DataFrame:
        """A table by its name in `manifest["tables"]`. Raises `SettingError`, or `StorageError` naming the file."""
        if name not in self.manifest["tables"]:
            raise SettingError(f"record {self.id} has no table {name!r}; {did_you_mean(name, self.manifest['tables'])}")
        path = self.path / f"{name}.parquet"
        try:
            return pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise StorageError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        return f"<Record {self.id}: {self.path}>"


def root() -> Path:
    """Folder of all records: `COLIBRI_RUNS`, else `.colibri/runs` of the checkout, else the user's cache."""
    if asked := os.environ.get("COLIBRI_RUNS"):
        return Path(asked).resolve()
    from ..kernels import cache_root

    return cache_root().parent / "runs"


def save(
    kind: str,
    *,
    requested: dict[str, Any],
    effective: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    tables: dict[str, pd.DataFrame] | None = None,
    model: str | os.PathLike | None = None,
    trace=None,
    page_cache_before: float | None = None,
    page_cache_after: float | None = None,
    notes: list[str] | None = None,
    **more: Any,
) -> Record:
    """Store one record and return it. Raises `StorageError` naming the folder when the disk refuses.

    requested, effective  settings as given and as in force
    facts                 numbers and texts by which runs are listed and filtered
    model, trace          directory of the container; a `Trace` or the path of its file
    page_cache_*          share of the model's expert bytes that the page cache held, None when not measured
    more                  further JSON objects for the manifest
    """
    from ..cli import plain

    if kind not in KINDS:
        raise SettingError(f"record kind {kind!r}; {did_you_mean(str(kind), KINDS)}")
    when = datetime.datetime.now(datetime.timezone.utc)
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "time": when.isoformat(timespec="seconds"),
        "settings": {"requested": _jsonable(requested), "effective": _jsonable(effective or {})},
        "facts": facts or {},
        "versions": versions(),
        "machine": machine_facts(),
        "git_commit": git_commit(),
        "model": model_identity(model),
        "trace": trace_identity(trace),
        "page_cache": {"before": page_cache_before, "after": page_cache_after},
        "notes": notes or [],
        "tables": sorted(tables or {}),
        **more,
    }
    folder = root()
    name = f"{when:%Y%m%d-%H%M%S}-{kind}-{secrets.token_hex(4)}"
    part = folder / f".{name}.part"
    try:
        part.mkdir(parents=True)
        for table, frame in (tables or {}).items():
            _parquet_ready(frame).to_parquet(part / f"{table}.parquet", index=False)
        text = json.dumps(plain(manifest), ensure_ascii=False, indent=1, allow_nan=False)
        (part / "manifest.json").write_text(text, encoding="utf-8")
        os.replace(part, folder / name)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise StorageError(
            f"{folder}: cannot store the record of this run: {error}; set COLIBRI_RUNS to a folder that can be written"
        ) from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Record(folder / name, json.loads(text))


def save_run(run, lab=None, page_cache_before: float | None = None, notes: list[str] | None = None) -> Record:
    """Store a run of `Lab.generate`. `lab`: the model it ran on, for the model's identity, memory and page cache."""
    facts = {
        "tokens": len(run.tokens),
        "prompt_tokens": run.prompt_tokens,
        "tokens_per_s": run.decode_tokens_per_s,
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "ttft_s": run.ttft_s,
        "wall_s": run.wall_s,
        "hit_rate": run.hit_rate,
        "stop_reason": run.stop_reason,
        "text_sha256": hashlib.sha256(run.text.encode()).hexdigest(),
    }
    model = None if lab is None else lab.path
    after = None
    if lab is not None:
        facts["total_bytes"] = lab.memory()["total_bytes"]
    if model is not None:
        after = page_cache.share(expert_files(model))
    tables = {"steps": run.table, "stages": run.stages, "cache": run.cache}
    if len(run.events):
        tables["events"] = run.events.assign(victim=run.events.victim.map(lambda v: None if v is None else str(v)))
    return save(
        "generate", requested=run.requested, effective=run.settings, facts=facts, tables=tables, model=model,
        page_cache_before=page_cache_before, page_cache_after=after, notes=notes, prompt=run.prompt, history=f"{run.resident_before} experts resident at the start", text=run.text,
    )  # fmt: skip


def load(name: str | os.PathLike) -> Record:
    """A record by its id, by the start of its id if that is enough, or by its path."""
    path = Path(name)
    if not (path / "manifest.json").is_file():
        found = [each for each in _folders() if each.name == str(name) or each.name.startswith(str(name))]
        found = found or [each for each in _folders() if each.name.endswith(str(name))]
        if len(found) != 1:
            known = ", ".join(each.name for each in found or _folders()[-5:]) or "none"
            raise SettingError(
                f"{len(found)} records match {str(name)!r} in {root()}; expected one. There are: {known}"
            )
        path = found[0]
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path / 'manifest.json'}: not the manifest of a record: {error}") from error
    return Record(path, manifest)


def runs(kind: str | None = None, model: str | None = None, since: str | None = None, **where: Any) -> pd.DataFrame:
    """All records, oldest first, as a DataFrame: id, kind, time, model, trace, machine, git_commit, the facts and the
    effective settings (requested ones where nothing ran), a column each.

    kind, since   only records of that kind; only those from that ISO time on
    model         only records whose model's name contains this text
    where         only records whose column equals the value: runs(policy="lru", expert_cache_slots=16)

    A folder that is not a record is left out. Raises `SettingError` for a column that no record has.
    """
    if kind is not None and kind not in KINDS:
        raise SettingError(f"record kind {kind!r}; {did_you_mean(kind, KINDS)}")
    rows = [row for folder in _folders() if (row := _row(folder)) is not None]
    table = (
        pd.DataFrame(rows, columns=["id", "kind", "time", "model", "trace", "machine", "git_commit"])
        if not rows
        else None
    )
    table = pd.DataFrame(rows) if table is None else table
    if kind is not None:
        table = table[table.kind == kind]
    if model is not None:
        table = table[table.model.fillna("").str.contains(model, regex=False)]
    if since is not None:
        table = table[table.time >= since]
    for name, value in where.items():
        if name not in table.columns:
            if not len(table):
                continue
            raise SettingError(f"no record has a column {name!r}; {did_you_mean(name, map(str, table.columns))}")
        table = table[table[name] == value]
    return table.reset_index(drop=True)


def _folders() -> list[Path]:
    folder = root()
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _row(folder: Path) -> dict | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        settings = manifest["settings"]["effective"] or manifest["settings"]["requested"]
        named = {name: (manifest[name] or {}).get("name") for name in ("model", "trace")}
        return {
            "id": folder.name,
            "kind": manifest["kind"],
            "time": manifest["time"],
            **named,
            "machine": manifest["machine"]["fingerprint"],
            "git_commit": manifest["git_commit"],
            **{key: value for key, value in settings.items() if not isinstance(value, (dict, list))},
            **{key: value for key, value in manifest["facts"].items() if not isinstance(value, (dict, list))},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# ---- identities


def versions() -> dict[str, str | None]:
    """Versions of colibri-lab, Python and the packages that results depend on."""
    from .. import __version__

    found = {"colibri-lab": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@cache
def git_commit() -> str | None:
    """Commit of the checkout this package runs from, with "+changes" when its code differs; None when it is installed."""
    from ..front import project_root

    here = project_root()
    if not (here / ".git").exists():
        return None
    try:
        asked = [["rev-parse", "HEAD"], ["status", "--porcelain", "--", "colibri_lab", "cpp"]]
        done = [
            subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=20)
            for args in asked
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    if any(each.returncode for each in done):
        return None
    return done[0].stdout.strip() + ("+changes" if done[1].stdout.strip() else "")


def expert_files(model: str | os.PathLike) -> list[Path]:
    """The files of a container that expert blocks are read from."""
    return sorted(Path(model).glob("layer_*/expert_*.bin"))


def model_identity(model: str | os.PathLike | None) -> dict | None:
    """name, path and hash of a container: sha256 over config.json and the names and sizes of all files."""
    if model is None:
        return None
    path = Path(model)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return {"name": path.name, "path": str(path), "hash": digest.hexdigest()}


def trace_identity(trace) -> dict | None:
    """name, path and hash of a trace: sha256 over the rows that replay reads, whatever file they came from."""
    if trace is None:
        return None
    path = None
    if isinstance(trace, (str, os.PathLike)):
        from ..trace import load_trace

        path, trace = str(trace), load_trace(trace)
    digest = hashlib.sha256()
    for column in ("step", "layer", "sequence", "phase", "experts"):
        digest.update(getattr(trace, column).tobytes())
    if trace.counts is not None:
        digest.update(trace.counts.tobytes())
    head = trace.header
    name = Path(path or head["model"] or head["engine"] or "trace").name
    return {"name": name, "path": path, "hash": digest.hexdigest(), "rows": len(trace)}


def _jsonable(settings: dict) -> dict:
    simple = (str, int, float, bool, type(None), list, tuple, dict)
    return {name: value if isinstance(value, simple) else str(value) for name, value in settings.items()}


def _parquet_ready(frame: pd.DataFrame) -> pd.DataFrame:
    """Mixed objects as text: parquet columns have one type."""
    frame = frame.copy()
    for name in frame.columns:
        kinds = (
            {type(value) for value in frame[name] if value is not None and value == value}
            if frame[name].dtype == object
            else set()
        )
        if len(kinds) > 1 and not kinds <= {int, float}:
            frame[name] = [None if value is None or value != value else str(value) for value in frame[name]]
    return frame.rename(columns=str)
