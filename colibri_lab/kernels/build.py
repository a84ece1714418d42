"""From a kernel's source to a verified shared object in the cache.

A build is content-addressed. Its key is the hash of the kernel's source, of every header it includes from the project
and of all that shapes machine code (compiler, flags, Python, CPU). Sources are mirrored to one fixed folder per kernel,
compiled there by cppimport in a process of its own, and the result is copied to `<cache>/<key>/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import filelock
from tqdm import tqdm

from colibri_lab.errors import CompileError, KernelError, SettingError, StorageError, did_you_mean

from . import toolchain

_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_CFG_BLOCK = re.compile(r"/\*\s*<%.*?%>\s*\*/\s*\Z", re.DOTALL)
_CFG = "/*\n<%\nimport colibri_lab.kernels as k\nk.configure(cfg)\n%>\n*/\n"
_ERROR = re.compile(r"^(.+?:\d+:\d+): (?:fatal )?error: (.+)$", re.MULTILINE)
_running: set[subprocess.Popen] = set()


def cpp_dir() -> Path:
    """Folder of the kernels' sources: `COLIBRI_CPP`, else the wheel's own copy, else `cpp` of the checkout."""
    if asked := os.environ.get("COLIBRI_CPP"):
        return Path(asked).resolve()
    shipped = _PACKAGE / "_cpp"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "cpp"


def cache_root() -> Path:
    """Folder of everything built: `COLIBRI_CACHE`, else `.colibri/kernels` of a writable checkout, else the user's cache."""
    if asked := os.environ.get("COLIBRI_CACHE"):
        return _make(Path(asked).resolve())
    if not (_PACKAGE / "_cpp").is_dir():
        try:
            return _make(_PACKAGE.parent / ".colibri" / "kernels")
        except StorageError:
            pass
    return _make(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colibri-lab" / "kernels")


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
    except OSError as error:
        raise StorageError(
            f"{folder}: kernels cannot be cached here ({error.strerror}); set COLIBRI_CACHE to a writable folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise StorageError(
            f"{folder}: kernels cannot be cached here (not writable); set COLIBRI_CACHE to a writable folder"
        )
    return folder


def names() -> list[str]:
    """Names of the kernels there are: every `cpp/NAME.cpp` whose first line contains the word cppimport."""
    found = []
    for path in sorted(cpp_dir().glob("*.cpp")):
        with path.open("rb") as file:
            if b"cppimport" in file.readline():
                found.append(path.stem)
    return found


def sources(name: str) -> dict[str, bytes]:
    """The kernel's source and the project headers it reaches through #include, by path relative to the source folder.

    Raises SettingError for a kernel that does not exist.
    """
    root = cpp_dir()
    if not (root / f"{name}.cpp").is_file():
        raise SettingError(f"no kernel {name!r} in {root}; {did_you_mean(name, names())}")
    found: dict[str, bytes] = {}
    todo = [f"{name}.cpp"]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = (root / path).read_bytes()
        for include in _INCLUDE.findall(found[path]):
            for folder in (os.path.dirname(path), "", "include"):
                candidate = os.path.normpath(os.path.join(folder, os.fsdecode(include)))
                if not candidate.startswith("..") and not os.path.isabs(candidate) and (root / candidate).is_file():
                    todo.append(candidate)
                    break
    return dict(sorted(found.items()))


def build_key(texts: dict[str, bytes], command: list[str], flags: list[str]) -> str:
    """The build's name in the cache: 16 hex digits over sources, compiler, flags, Python and CPU."""
    digest = hashlib.sha256(toolchain.identity(command, flags).encode())
    for path, text in texts.items():
        digest.update(f"\0{path}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def artefact(name: str, progress: bool = True) -> tuple[str, Path]:
    """Key and path of the kernel's shared object, compiled now if the cache does not have it.

    Raises CompileError, KernelError (it compiled but does not load), MissingTool, SettingError, StorageError.
    """
    texts = sources(name)
    command = toolchain.find_compiler()
    flags = toolchain.compile_flags(command)
    key = build_key(texts, command, flags)
    root = cache_root()
    built = root / key / f"{name}{_SUFFIX}"
    if not _intact(built):
        nanobind_object(progress)
        (root / "src").mkdir(exist_ok=True)
        with filelock.FileLock(root / "src" / f"{name}.lock"):
            if not _intact(built):
                _say(progress, f"compiling {name}.cpp")
                made = _compile(name, texts, key, root / "src" / name, command)
                _store(made, built)
    return key, built


def configure(cfg) -> None:
    """For a kernel's cfg block: give cppimport the flags, include folders and nanobind runtime all kernels share."""
    import nanobind

    command = toolchain.find_compiler()
    here = Path(nanobind.include_dir())
    cfg["include_dirs"] += [".", "include", str(here), str(here.parent / "ext" / "robin_map" / "include")]
    cfg["extra_compile_args"] += toolchain.compile_flags(command)
    if build_id := os.environ.get("COLIBRI_BUILD_ID_HEADER"):
        cfg["extra_compile_args"] += ["-include", build_id]
    cfg["extra_link_args"] += [str(nanobind_object()), "-pthread"]
    if sys.platform == "linux":
        cfg["extra_link_args"] += ["-Wl,--gc-sections"]


def nanobind_object(progress: bool = True) -> Path:
    """Path of nanobind's runtime as one object file, compiled once per nanobind, compiler and Python (about 10 s)."""
    import nanobind

    command = toolchain.find_compiler()
    include = Path(nanobind.include_dir())
    flags = [
        *toolchain.BASE_FLAGS,
        "-fPIC",
        "-DNDEBUG",
        "-DNB_COMPACT_ASSERTIONS",
        "-ffunction-sections",
        "-fdata-sections",
    ]
    key = hashlib.sha256(toolchain.identity(command, flags).encode()).hexdigest()[:16]
    built = cache_root() / f"nanobind-{key}" / "nb_combined.o"
    if _intact(built):
        return built
    built.parent.mkdir(exist_ok=True)
    with filelock.FileLock(built.parent / "lock"):
        if not _intact(built):
            _say(progress, f"compiling the runtime of nanobind {nanobind.__version__} (once, about 10 s)")
            made = built.with_suffix(".tmp.o")
            includes = [include, include.parent / "ext" / "robin_map" / "include", sysconfig.get_paths()["include"]]
            source = include.parent / "src" / "nb_combined.cpp"
            asked = [*toolchain.launcher(), *command, *flags, *(f"-I{path}" for path in includes), "-c", str(source)]
            code, log = run([*asked, "-o", str(made)], env=toolchain.environment(command))
            if code:
                raise toolchain.missing_header(log) or CompileError(
                    f"nanobind's runtime does not compile with {shlex.join(command)}: {log[-800:]}", log
                )
            _store(made, built)
    return built


def _compile(name: str, texts: dict[str, bytes], key: str, mirror: Path, command: list[str]) -> Path:
    """Mirror the sources, compile them there in a child process; path of the new shared object inside the mirror."""
    shutil.rmtree(mirror, ignore_errors=True)
    # nanobind looks classes up by C++ name within a domain; a domain per build lets two versions of a class live together.
    # It comes from a header because ccache never hits when the command line changes.
    header = f'#pragma once\n#define NB_DOMAIN colibri_{key}\n#define COLIBRI_BUILD_ID "{key}"\n'.encode()
    for path, text in {**texts, f"{name}.cpp": _shield(texts[f"{name}.cpp"]), "build_id.hpp": header}.items():
        (mirror / path).parent.mkdir(parents=True, exist_ok=True)
        (mirror / path).write_bytes(text)
    env = toolchain.environment(command)
    env |= {"COLIBRI_CPP": str(cpp_dir()), "COLIBRI_CACHE": str(cache_root()), "CCACHE_BASEDIR": str(mirror)}
    env |= {"COLIBRI_BUILD_ID_HEADER": str(mirror / "build_id.hpp"), "CXX": shlex.join(command)}
    code, log = run(
        [sys.executable, str(Path(__file__).with_name("child.py")), str(mirror / f"{name}.cpp")], env=env, cwd=mirror
    )
    made = mirror / f"{name}{_SUFFIX}"
    if code == 0 and made.exists():
        return made
    user = cpp_dir()
    log = log.replace(f"{mirror}/", "").replace(".rendered.", "")
    for path in texts:
        log = re.sub(rf"(?m)(^|\s){re.escape(path)}(?=[:,])", lambda found, path=path: f"{found[1]}{user / path}", log)
    if first := _ERROR.search(log):
        raise toolchain.missing_header(log) or CompileError(f"{first[1]}: {first[2]}", log)
    if made.exists():
        how = f"crashed ({signal.Signals(-code).name})" if code < 0 else "failed"
        raise KernelError(
            f"{user}/{name}.cpp compiled, but loading it {how} in a trial process: {log.strip()[-800:] or 'no output'}"
        )
    raise CompileError(
        f"{user}/{name}.cpp:1:1: the build failed: {log.strip()[-800:] or f'exit code {code}, no output'}", log
    )


def _shield(source: bytes) -> bytes:
    """The kernel's C++ hidden from Mako, which would eat `##` lines, `%` lines and line continuations; line numbers stay."""
    text = source.decode("utf-8", errors="surrogateescape")
    block = _CFG_BLOCK.search(text)
    code, cfg = (text[: block.start()], block[0]) if block else (text + "\n", _CFG)
    return f"<%text>{code}</%text>{cfg}".encode("utf-8", errors="surrogateescape")


def run(command: list[str], **options) -> tuple[int, str]:
    """Exit code and merged output of a command that dies, with all it started, when this process is interrupted."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    _running.add(process)
    try:
        # Not communicate(): that would close stdin, which the child takes for the end of this process.
        output = process.stdout.read()
        return process.wait(), output.decode("utf-8", errors="replace")
    except BaseException:
        _kill(process)
        raise
    finally:
        _running.discard(process)
        process.stdin.close()
        process.stdout.close()


def cancel() -> None:
    """Kill every compiler process this process has started, from any thread."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _say(progress: bool, message: str) -> None:
    if progress:
        tqdm.write(f"colibri-lab: {message}", file=sys.stderr)


def _store(made: Path, built: Path) -> None:
    """Move a finished file into the cache: file first, then its size and hash, each in one step."""
    built.parent.mkdir(exist_ok=True)
    part = built.with_name(f"{built.name}.{os.getpid()}.part")
    shutil.copyfile(made, part)
    data = part.read_bytes()
    record = json.dumps({"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    os.replace(part, built)
    part.write_text(record)
    os.replace(part, built.with_suffix(".json"))
    made.unlink()


def _intact(built: Path) -> bool:
    """Whether the file is there, whole, and the one that was stored."""
    try:
        record = json.loads(built.with_suffix(".json").read_bytes())
        data = built.read_bytes()
        return record == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    except (OSError, ValueError):
        return False
