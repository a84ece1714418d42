"""From a kernel's source to a verified shared object in the cache.

A build is content-addressed. Its key is the hash of the kernel's source, of every project header it includes and of all
else that shapes machine code (compiler, flags, Python, CPU). The sources are mirrored to one fixed folder per kernel,
compiled there by cppimport in a process of its own, and the result goes to `<cache>/<key>/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

import filelock
from tqdm import tqdm

from colibri_lab.errors import ColibriError, CompileError, KernelError, SettingError, StorageError, did_you_mean

from . import toolchain
from .process import run
from .store import cache_root, cpp_dir, intact, put

_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_CFG_BLOCK = re.compile(r"/\*\s*<%(?!text).*?%>\s*\*/\s*\Z", re.DOTALL)
_CFG = "/*\n<%\nimport colibri_lab.kernels as k\nk.configure(cfg)\n%>\n*/\n"
_ERROR = re.compile(r"^(.+?:\d+:\d+): (?:fatal )?error: (.+)$", re.MULTILINE)


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
    if not name.isidentifier() or not (root / f"{name}.cpp").is_file():
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
                header = os.path.normpath(os.path.join(folder, os.fsdecode(include)))
                if not header.startswith(("..", "/")) and (root / header).is_file():
                    todo.append(header)
                    break
    return dict(sorted(found.items()))


def build_key(texts: dict[str, bytes], command: list[str], flags: list[str]) -> str:
    """A build's name in the cache: 16 hex digits over sources, compiler, flags, Python and CPU."""
    digest = hashlib.sha256(toolchain.identity(command, flags).encode())
    for path, text in texts.items():
        digest.update(f"\0{path}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def artefact(name: str, progress: bool = True) -> tuple[str, Path]:
    """Key and path of the kernel's shared object, compiled now if the cache does not have it whole.

    Of several processes or threads that ask at once, one compiles and the others wait.
    Raises CompileError, KernelError (it compiled but does not load), MissingTool, SettingError, StorageError.
    """
    try:
        texts = sources(name)
        command = toolchain.find_compiler()
        key = build_key(texts, command, toolchain.compile_flags(command))
        root = cache_root()
        built = root / key / f"{name}{_SUFFIX}"
        if not intact(built):
            nanobind_object(progress)
            (root / "src").mkdir(exist_ok=True)
            with filelock.FileLock(root / "src" / f"{name}.lock"):
                if not intact(built):
                    _say(progress, f"compiling {name}.cpp")
                    put(_compile(name, texts, key, root / "src" / name, command), built)
        return key, built
    except OSError as error:
        if isinstance(error, ColibriError):
            raise
        raise StorageError(
            f"{error.filename or cache_root()}: {error.strerror or error}, building kernel {name}"
        ) from error


def nanobind_object(progress: bool = True) -> Path:
    """Path of nanobind's runtime as one object file, compiled once per nanobind, compiler and Python (about 10 s)."""
    import nanobind

    command = toolchain.find_compiler()
    sections = ["-ffunction-sections", "-fdata-sections"]
    flags = [*toolchain.BASE_FLAGS, "-fPIC", "-DNDEBUG", "-DNB_COMPACT_ASSERTIONS", *sections]
    key = hashlib.sha256(toolchain.identity(command, flags).encode()).hexdigest()[:16]
    built = cache_root() / f"nanobind-{key}" / "nb_combined.o"
    if intact(built):
        return built
    built.parent.mkdir(exist_ok=True)
    with filelock.FileLock(built.parent / "lock"):
        if not intact(built):
            _say(progress, f"compiling the runtime of nanobind {nanobind.__version__} (once, about 10 s)")
            made = built.with_name(f"{os.getpid()}.o")
            includes = [*_nanobind_includes(), sysconfig.get_paths()["include"]]
            source = Path(nanobind.include_dir()).parent / "src" / "nb_combined.cpp"
            asked = [*toolchain.launcher(), *command, *flags, *(f"-I{path}" for path in includes), "-c", str(source)]
            code, log = run([*asked, "-o", str(made)], env=toolchain.environment(command))
            if code:
                fault = f"nanobind's runtime does not compile with {shlex.join(command)}: {log[-800:]}"
                raise toolchain.fault(command) or CompileError(fault, log)
            put(made, built)
    return built


def _nanobind_includes() -> list[str]:
    import nanobind

    include = Path(nanobind.include_dir())
    return [str(include), str(include.parent / "ext" / "robin_map" / "include")]


def configure(cfg) -> None:
    """For a kernel's cfg block: give cppimport the flags, include folders and nanobind runtime of all kernels."""
    given = os.environ.get("COLIBRI_BUILD_ARGS")
    for name, values in (json.loads(given) if given else _build_args()).items():
        cfg[name] += values


def _build_args() -> dict[str, list[str]]:
    """Arguments in cppimport's terms; relative include folders are relative to the kernel's source."""
    link = [str(nanobind_object()), "-pthread"]
    return {
        "include_dirs": [".", "include", *_nanobind_includes()],
        "extra_compile_args": toolchain.compile_flags(toolchain.find_compiler()),
        "extra_link_args": [*link, "-Wl,--gc-sections"] if sys.platform == "linux" else link,
    }


def _compile(name: str, texts: dict[str, bytes], key: str, mirror: Path, command: list[str]) -> Path:
    """Mirror the sources, compile them there in a child process; path of the new shared object inside the mirror."""
    # nanobind finds a class by its C++ name within a domain: a domain per build lets two versions of a class coexist.
    # It comes from a header because ccache never hits when the command line changes.
    header = f'#pragma once\n#define NB_DOMAIN colibri_{key}\n#define COLIBRI_BUILD_ID "{key}"\n'.encode()
    shutil.rmtree(mirror, ignore_errors=True)
    for path, text in {**texts, f"{name}.cpp": _shield(texts[f"{name}.cpp"]), "build_id.hpp": header}.items():
        (mirror / path).parent.mkdir(parents=True, exist_ok=True)
        (mirror / path).write_bytes(text)
    args = _build_args()
    args["extra_compile_args"] += ["-include", str(mirror / "build_id.hpp")]
    env = toolchain.environment(command) | {"COLIBRI_BUILD_ARGS": json.dumps(args), "CCACHE_BASEDIR": str(mirror)}
    child = str(Path(__file__).with_name("child.py"))
    code, log = run([sys.executable, child, str(mirror / f"{name}.cpp")], env=env, cwd=mirror)
    made = mirror / f"{name}{_SUFFIX}"
    if code or not made.exists():
        raise _explain(name, texts, code, log, mirror, made.exists())
    return made


def _shield(source: bytes) -> bytes:
    """The kernel with its C++ hidden from Mako, which would eat `##` lines, `%` and backslashes; line numbers stay."""
    text = source.decode("utf-8", errors="surrogateescape")
    block = _CFG_BLOCK.search(text)
    code, cfg = (text[: block.start()], block[0]) if block else (text + "\n", _CFG)
    return f"<%text>{code}</%text>{cfg}".encode("utf-8", errors="surrogateescape")


def _explain(name: str, texts: dict[str, bytes], code: int, log: str, mirror: Path, compiled: bool) -> ColibriError:
    """The error for a failed build, in terms of the user's files instead of their mirrored copies."""
    user = cpp_dir()
    log = log.replace(f"{mirror}/", "").replace(".rendered.", "")
    for path in texts:
        log = re.sub(
            rf"(?m)(^|\s)(?:\./)?{re.escape(path)}(?=[:,])", lambda found, path=path: f"{found[1]}{user / path}", log
        )
    if first := _ERROR.search(log):
        return toolchain.missing_header(log) or CompileError(f"{first[1]}: {first[2]}", log)
    said = log.strip()[-800:] or "no output"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if compiled:
        return KernelError(f"{user / name}.cpp compiles, but the process that tried to load it {how}: {said}")
    if code < 0:
        return KernelError(f"{user / name}.cpp: its compiler process {how}; try again. {said}")
    return CompileError(f"{user / name}.cpp:1:1: the build {how}: {said}", log)


def _say(progress: bool, message: str) -> None:
    if progress:
        tqdm.write(f"colibri-lab: {message}", file=sys.stderr)
