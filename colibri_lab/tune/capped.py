"""A generation in a child process, optionally under a hard memory limit; what it took, and why it ended when it did.

What enforces the limit: RLIMIT_DATA, which Linux (since 4.7) applies to all private writable memory, so that an
allocation beyond it fails inside the child; and this process, which watches the child's resident memory and kills it
above the limit, as the system's out-of-memory killer would. RLIMIT_RSS is ignored by Linux, and RLIMIT_AS would count
what is only reserved.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import SettingError

MARGIN = 0.05  # over the plan
WATCH_S = 0.02  # between two looks at the child
STACK = 1 << 20  # bytes of each thread's stack in the child: the default of 8 MiB would count against RLIMIT_DATA


@dataclass(frozen=True)
class ChildRun:
    """What became of a child. Bytes; `base` is the process before the model was opened, `resident` after the run and
    `peak` at most. `reason` is None when the run completed, else a sentence."""

    returncode: int
    reason: str | None
    limit: int | None
    peak: int
    base: int | None = None
    resident: int | None = None
    plan: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    text: str = ""
    decode_tokens_per_s: float | None = None

    @property
    def error(self) -> float | None:
        """Relative difference of what the model took from what was planned."""
        return (self.resident - self.base) / self.plan["total_bytes"] - 1 if self.resident and self.plan else None


def run_child(
    model: str | os.PathLike,
    prompt: str,
    *,
    settings: dict | None = None,
    generate: dict | None = None,
    limited: bool = False,
    limit: int | None = None,
    timeout_s: float = 600.0,
) -> ChildRun:
    """Open `model` in a child with `settings`, generate, measure.

    limited: the limit is the plan plus `MARGIN`, on top of what the process holds before the model is opened. `limit`:
    that many bytes instead, whatever the plan says. Linux only. Raises `SettingError` elsewhere; a child that dies is a
    result with its likely reason, not an exception.
    """
    if not sys.platform.startswith("linux"):
        raise SettingError("run_child measures through /proc, which only Linux has")
    job = dict(
        model=str(model), prompt=prompt, settings=settings or {}, generate=generate or {}, limited=limited, limit=limit
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
    }
    oom_before, deadline = oom_kills(), time.monotonic() + timeout_s
    begun, limit, killed, peak = {}, None, False, 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as faults:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(job)],
            stdout=out,
            stderr=faults,
            env=environment,
            preexec_fn=_small_stacks,
        )
        try:
            while child.poll() is None:
                begun = begun or _told(out)
                limit = begun.get("limit")
                now, most = resident_bytes(child.pid)
                peak = max(peak, most) if begun else 0
                if (limit and now > limit) or time.monotonic() > deadline:
                    killed = True
                    child.kill()
                time.sleep(WATCH_S)
        finally:
            child.kill()
            child.wait()
        told = _told(out)
        faults.seek(0)
        stderr = faults.read()
    limit, reason = told.pop("limit", None), None
    if child.returncode:
        oom = oom_kills() - oom_before
        reason = likely_reason(child.returncode, stderr, peak=peak, limit=limit, killed=killed, oom=oom)
    told["tokens"] = tuple(told.get("tokens", ()))
    return ChildRun(child.returncode, reason, limit, max(peak, told.pop("peak", 0)), **told)


def _told(out) -> dict:
    """What the child has said so far: its lines of JSON, one upon the other."""
    out.seek(0)
    told = {}
    for line in out:
        if line.endswith("\n"):
            told |= json.loads(line)
    return told


def likely_reason(
    returncode: int, stderr: str = "", *, peak: int = 0, limit: int | None = None, killed: bool = False, oom: int = 0
) -> str:
    """Why a process ended with this code, as a sentence: `returncode` as subprocess gives it, negative for a signal.

    `peak` its largest resident memory, `limit` the limit it ran under, `killed` whether its parent killed it, `oom` how
    many processes the system's out-of-memory killer ended meanwhile.
    """
    last = stderr.strip().rpartition("\n")[2]
    if returncode >= 0:
        if "MemoryError" in stderr or "bad_alloc" in stderr:
            bound = f" at the limit of {limit} bytes" if limit else ""
            return f"an allocation was refused{bound}: {last.removeprefix('MemoryError: ')}"
        return f"it ended with code {returncode}: {last or 'no message'}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    held = f"its memory was {peak} bytes at most" if peak else "its memory was not measured"
    held += f", the limit {limit}" if limit else ""
    if name == "SIGKILL" and killed:
        return f"killed for exceeding its memory or time: {held}; choose fewer slots or a shorter max_seq_len"
    if name == "SIGKILL" and oom:
        return f"killed by the system, which was out of memory: {held}; choose fewer slots or a shorter max_seq_len"
    reasons = {
        "SIGKILL": f"killed from outside, most often because the system or a control group was out of memory: {held}",
        "SIGBUS": "SIGBUS: a mapped file became shorter or could not be read; run `colibri validate` on the model",
        "SIGSEGV": "SIGSEGV: a kernel read or wrote outside its memory; run again with check_memory",
        "SIGABRT": f"SIGABRT: the program gave up, as C++ does when memory ends ({held}): {last or 'no message'}",
        "SIGILL": "SIGILL: kernels were compiled for another CPU; remove the kernel cache and try again",
        "SIGTERM": "ended on request (SIGTERM)",
        "SIGINT": "interrupted",
    }
    return reasons.get(name, f"ended by {name}; {held}")


def resident_bytes(pid: int | str = "self") -> tuple[int, int]:
    """(now, at most) resident bytes of a process; (0, 0) when it is gone."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0]) * 1024
    return found.get("VmRSS", 0), found.get("VmHWM", 0)


def oom_kills() -> int:
    """Processes that the system's out-of-memory killer has ended since it started; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def settle() -> int:
    """Resident bytes of this process once what nobody needs went back to the system."""
    import ctypes
    import gc

    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()[0]


def _small_stacks() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, hard))


def _cap(limit: int) -> None:
    """No more than `limit` bytes of private writable memory from now on."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _data_bytes() -> int:
    """Private writable memory of this process as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """The child: a job as its argument; a line of JSON with the plan and the limit, then one with the measurements."""
    import colibri_lab as cl

    job = json.loads(sys.argv[1])
    settings, generate = job["settings"], job["generate"]
    # A short run first, so that libraries, kernels and the thread pool are there: they are not the model's memory.
    small = {
        name: value
        for name, value in settings.items()
        if name not in ("memory", "prefault", "cache_start", "cache_blocks")
    }
    lab = cl.open(job["model"], **{**small, "expert_cache_slots": 1})
    lab.generate(job["prompt"], max_tokens=2, temperature=0.0, stop_at_eos=False)
    del lab
    base = settle()
    plan = cl.memory_plan(job["model"], check=False, **settings)
    total, mapped = plan["total_bytes"], plan["dense_bytes"] + plan["embedding_bytes"] + plan["loader_bytes"]
    limit = job["limit"] or (base + int(total * (1 + MARGIN)) if job["limited"] else None)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    print(json.dumps({"limit": limit, "base": base, "plan": dict(plan)}), flush=True)
    if limit is not None:
        # Pages touched are the resident part of what RLIMIT_DATA counts, so the same number of bytes may come on top.
        _cap(_data_bytes() + max(0, limit - base - mapped))
    lab = cl.open(job["model"], **settings)
    run = lab.generate(job["prompt"], **generate)
    tokens, text, speed = run.tokens, run.text, run.decode_tokens_per_s
    lab.last_run = run = None
    resident = settle()
    facts = dict(tokens=tokens, text=text, decode_tokens_per_s=speed, memory=lab.memory(peak=True), resident=resident)
    print(json.dumps(facts | {"peak": resident_bytes()[1]}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except MemoryError as error:
        sys.exit(f"MemoryError: {error}")
