"""The `colibri` command: each sub-command parses, calls the package and prints.

Exit codes: 0 done, 1 an error of ours (or faults found), 2 a command line that cannot be understood, 130 interrupted.
Nothing heavy is imported before a command runs, so `colibri --help` answers at once and needs nothing compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from .config import SETTINGS, Setting
from .errors import ColibriError, SettingError, StorageError, did_you_mean

# Modules that add their own sub-commands with `add_commands(subparsers)`; a command stores its function as `run`.
EXTENSIONS: tuple[str, ...] = (
    "trace.cli",
    "bench_cli",
    "checkpoint.cli",
    "checkpoint.cli_formats",
    "tune.cli",
    "tune.cli_tune",
)


class Parser(argparse.ArgumentParser):
    """argparse with `_` and `-` alike in option names, no abbreviations, and errors as `SettingError`."""

    def __init__(self, *args, **kw):
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kw)

    def parse_known_args(self, args=None, namespace=None):
        args = list(sys.argv[1:] if args is None else args)
        args = self._spell(args) if self._subparsers is None else self._check_command(args)
        namespace, extras = super().parse_known_args(args, namespace)
        if extras:
            self.error(f"unexpected argument {extras[0]!r}")
        return namespace, extras

    def _spell(self, args: list[str]) -> list[str]:
        """`args` with option names in their own spelling. An unknown one is refused before anything else is checked."""
        spelt = []
        for i, arg in enumerate(args):
            if arg == "--":
                return spelt + args[i:]
            if arg.startswith("--") and " " not in arg:  # with a space it is a value, as argparse sees it too
                name, equals, value = arg.partition("=")
                name = name.replace("_", "-")
                if name not in self._option_string_actions:
                    self.error(f"unknown option {name!r}: {did_you_mean(name, self._long_options())}")
                arg = name + equals + value
            spelt.append(arg)
        return spelt

    def _check_command(self, args: list[str]) -> list[str]:
        """`args`, once the first word among them is known to be a command."""
        commands = self._subparsers._group_actions[0].choices
        for name in [arg for arg in args if not arg.startswith("-")][:1]:
            if name not in commands:
                self.error(f"unknown command {name!r}: {did_you_mean(name, commands)}")
        return args

    def _long_options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--") and not name.startswith("--no-")]

    def error(self, message: str):
        raise SettingError(f"{message} ({self.prog} --help explains)")


def add_settings(parser: argparse.ArgumentParser, scope: str) -> None:
    """One flag for every setting of `scope`. Only flags that were given appear in the parsed namespace."""
    group = parser.add_argument_group("when the model is opened" if scope == "open" else "for this text")
    for setting in SETTINGS.values():
        if setting.scope != scope:
            continue
        text = setting.help.replace("%", "%%") + ("" if setting.default is None else f" (default: {setting.default})")
        kind: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
        if setting.type is bool:
            group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **kind)
        else:
            shown = "|".join(setting.choices) if setting.choices else {int: "N", float: "X"}.get(setting.type, "TEXT")
            group.add_argument(setting.flag, type=reader(setting), metavar=shown, **kind)


def reader(setting: Setting):
    """Function from a flag's text to the setting's checked value."""

    def read(text: str):
        try:
            value = setting.type(text) if setting.type in (int, float) else text
        except ValueError:
            value = text
        try:
            return setting.check(value)
        except SettingError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def given_settings(args: argparse.Namespace, scope: str) -> dict[str, Any]:
    """The settings of `scope` that were given on the command line, over those of the file that --settings names."""
    given = {name: value for name, value in vars(args).items() if name in SETTINGS}
    if getattr(args, "settings", None):
        from .tune.tuner import read_settings

        given = read_settings(args.settings) | given
    return {name: value for name, value in given.items() if SETTINGS[name].scope == scope}


def print_json(data: Any) -> None:
    """One JSON document on stdout; numpy scalars become numbers, NaN becomes null."""
    print(json.dumps(plain(data), ensure_ascii=False, allow_nan=False))


def plain(data: Any) -> Any:
    """`data` in JSON's types: tables as lists of rows, paths as text, anything that is not a number as null."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return [plain(row) for row in data.to_dict("records")]
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    if hasattr(data, "tolist"):
        return plain(data.tolist())
    if isinstance(data, float) and data - data != 0:  # NaN and both infinities
        return None
    return str(data) if isinstance(data, Path) else data


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from --prompt, or from --prompt-file (`-` is stdin)."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is None:
        raise SettingError("nothing to continue: give --prompt TEXT or --prompt-file FILE")
    if args.prompt_file == "-":
        return sys.stdin.read()
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read the prompt from {args.prompt_file}: {error}") from error


def run(args: argparse.Namespace) -> int:
    """Continue a prompt; text on stdout, everything about it on stderr, or all of it as one JSON object."""
    import colibri_lab as cl

    from .advice import advise
    from .front import container_of

    if args.validate:
        code = report_faults(container_of(args.model))
        if not code:
            print(cl.open(args.model, **given_settings(args, "open")).summary())
        return code
    prompt = read_prompt(args)
    if args.trace and Path(args.trace).exists():
        raise StorageError(f"{args.trace} is already there; name another file for the trace")
    lab = cl.open(args.model, **given_settings(args, "open"))
    print(lab.summary(), file=sys.stderr)
    lab.warmup(args.warmup)
    before = cached_share(lab) if args.record else None
    with lab.record() if args.trace else contextlib.nullcontext() as recorder:
        done = stream_text(lab, prompt, given_settings(args, "generate"), show=not args.json)
    if args.trace:
        print(f"trace of {len(recorder)} events in {recorder.save(args.trace)}", file=sys.stderr)
    advice = advise(done, lab)
    if args.record:
        print(f"run record {done.save(lab, page_cache_before=before).id}", file=sys.stderr)
    if args.json:
        print_json(run_record(lab, done, args.warmup, advice))
    else:
        print(speed_line(done), file=sys.stderr)
        if args.profile:
            print(profile_text(done, advice), file=sys.stderr)
    if args.verbose:
        print(settings_and_memory(lab, done), file=sys.stderr)
    return 130 if done.stop_reason == "interrupted" else 0


def cached_share(lab) -> float | None:
    """Share of the model's expert files in the page cache; None where the system does not tell."""
    from .tune import page_cache, runs

    return page_cache.share(runs.expert_files(lab.path))


def stream_text(lab, prompt: str, settings: dict[str, Any], show: bool):
    """Generate, printing text as it comes; the finished run, or after Ctrl-C the run so far."""
    with contextlib.closing(lab.stream(prompt, **settings)) as steps, contextlib.suppress(KeyboardInterrupt):
        for step in steps:
            if show:
                print(step.text, end="", flush=True)
    if show:
        print()
    return lab.last_run


def run_record(lab, done, warmup: int, advice: list[str]) -> dict:
    """What `run --json` prints. Seconds, bytes and tokens per second; null is "not measured"."""
    names = ("prompt", "text", "tokens", "prompt_tokens", "stop_reason", "settings", "wall_s", "ttft_s")
    names += ("prefill_tokens_per_s", "decode_tokens_per_s", "hit_rate", "stages", "cache")
    facts = {name: getattr(done, name) for name in names}
    return {
        "model": lab.path,
        "summary": lab.summary(),
        **facts,
        "memory": lab.memory(),
        "warmup": warmup,
        "advice": advice,
    }


def speed_line(done) -> str:
    """Tokens, speed and decode hit rate of a run in one line."""

    def known(value, form: str) -> str:
        return "not measured" if value is None else form.format(value)

    return (
        f"{len(done.tokens)} tokens ({done.stop_reason}), decode {known(done.decode_tokens_per_s, '{:.1f} tokens/s')}, "
        f"prefill {known(done.prefill_tokens_per_s, '{:.1f} tokens/s')}, "
        f"first token after {known(done.ttft_s, '{:.3f} s')}, hit rate {known(done.hit_rate, '{:.1%}')}"
    )


def profile_text(done, advice: list[str]) -> str:
    """The stage table (exclusive stages, share of each phase's wall time), then the advisor's sentences."""
    table = done.stages.assign(
        seconds=done.stages.seconds.map("{:.4f}".format), share=done.stages.share.map("{:.1%}".format)
    )
    return "\n".join([table.to_string(index=False), *advice])


def settings_and_memory(lab, done) -> str:
    """Every effective setting and every part of the memory, a line each."""
    settings = [f"  {name:<20} {value}" for name, value in done.settings.items()]
    memory = [f"  {name:<20} {value / 1e6:.2f} MB" for name, value in lab.memory().items()]
    return "\n".join(["settings", *settings, "memory", *memory, f"  memory pool: {lab.engine.pool}"])


def convert(args: argparse.Namespace) -> int:
    """Convert a Hugging Face checkpoint into a container."""
    from .checkpoint.convert import convert

    names = ("quantize", "group_size", "tensors", "plan", "calibration_data", "calibration_tokens", "stage")
    names += ("expert_block_size", "max_seq_len", "verify", "overwrite")
    report = convert(args.input, args.output, **{name: getattr(args, name) for name in names}, progress=True)
    print(report)
    return 0


def validate(args: argparse.Namespace) -> int:
    """Check every file of a container; exit 1 when any has a fault."""
    return report_faults(args.model)


def report_faults(directory) -> int:
    """Print the faults of a container, or that it has none; the exit code."""
    from .checkpoint.validate import format_faults
    from .checkpoint.validate import validate as find_faults

    faults = find_faults(directory)
    print(format_faults(faults) if faults else f"{directory}: valid")
    return 1 if faults else 0


def doctor(args: argparse.Namespace) -> int:
    """Versions, machine, compiler, Jupyter extensions, and what is wrong with them."""
    from .doctor import examine

    report = examine()
    if args.json:
        print_json(report.to_json())
    else:
        print(report)
    return 1 if report.problems else 0


def kernels_build(args: argparse.Namespace) -> int:
    """Compile kernels into the cache, so that no first use has to wait."""
    from . import kernels

    kernels.build(args.names or None)
    return 0


def kernels_list(args: argparse.Namespace) -> int:
    """The kernels there are, and for which instruction set they are compiled."""
    from . import kernels

    print(f"sources {kernels.cpp_dir()}, builds {kernels.cache_root()}, SIMD path {kernels.simd()}")
    print("\n".join(kernels.names()))
    return 0


def kernels_check(args: argparse.Namespace) -> int:
    """Compare kernels with their plain references, all that have one by default; the first that differs is an error."""
    from . import kernels

    for name in args.names or kernels.checked():
        for case, error, tolerance in kernels.check(name):
            print(f"{name:<16} {case:<40} largest error {error:.3g}, tolerance {tolerance:.3g}")
    return 0


def build_parser() -> Parser:
    from .checkpoint.cli_formats import add_format_options

    parser = Parser("colibri", description="A laboratory for Mixture-of-Experts inference on a CPU.")
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    p = command(commands, "run", run, "continue a prompt with a model")
    add_model(p)
    p.add_argument("--prompt", metavar="TEXT", help="text to continue")
    p.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file; - is stdin")
    p.add_argument(
        "--warmup",
        type=count,
        default=0,
        metavar="N",
        help="fill the cache first with N short generations that do not count",
    )
    p.add_argument(
        "--settings", metavar="FILE", help="settings file, as `colibri tune` and `plan --out` write it; flags win"
    )
    p.add_argument("--record", action="store_true", help="keep a run record, see `colibri runs`")
    p.add_argument("--trace", metavar="FILE", help="write which experts each token went to, for `colibri replay`")
    p.add_argument("--profile", action="store_true", help="print the share of time of each stage, and advice")
    p.add_argument("--validate", action="store_true", help="check the model's files and exit, without generating")
    p.add_argument("--verbose", action="store_true", help="print every effective setting and the memory by part")
    p.add_argument("--json", action="store_true", help="print one JSON object in place of the text")
    add_settings(p, "open")
    add_settings(p, "generate")

    p = command(commands, "convert", convert, "turn a Hugging Face checkpoint into a container")
    p.add_argument(
        "--input", "--model-name", metavar="DIR", required=True, help="folder with config.json and safetensors"
    )
    p.add_argument("--output", "--output-dir", metavar="DIR", required=True, help="container to write")
    p.add_argument(
        "--quantize",
        default="auto",
        metavar="FORMAT",
        help="auto (keep 16-bit formats), fp16, bf16, int8, int4, or exactly: int8-tensor, int4-g32-sym, mxfp4, … "
        "(fp32 for tests)",
    )
    add_format_options(p)
    p.add_argument(
        "--stage", default="all", metavar="STAGE", help="all (repack, then quantize), repack, quantize, together"
    )
    p.add_argument("--expert-block-size", type=count, default=1, metavar="N", help="experts in one block, read at once")
    p.add_argument("--max-seq-len", type=count, metavar="N", help="longest sequence, stored as the model's default")
    p.add_argument("--verify", action="store_true", help="compare sampled experts with the source afterwards")
    p.add_argument("--overwrite", action="store_true", help="replace a container that is already there")

    p = command(commands, "validate", validate, "check every file of a container")
    add_model(p, positional=True)

    p = command(commands, "doctor", doctor, "what this machine and installation are, and what is wrong with them")
    p.add_argument("--json", action="store_true", help="print one JSON object")

    kernels = command(commands, "kernels", None, "compile, list or check the C++ kernels")
    actions = kernels.add_subparsers(dest="action", metavar="ACTION", required=True)
    command(actions, "list", kernels_list, "the kernels there are, and what they are compiled for")
    for p in (
        command(actions, "build", kernels_build, "compile kernels now, so that no first use has to wait"),
        command(actions, "check", kernels_check, "compare kernels with their plain numpy references"),
    ):
        p.add_argument("names", nargs="*", metavar="NAME", help="kernels, all by default")

    for module in EXTENSIONS:
        __import__(f"{__package__}.{module}", fromlist=["add_commands"]).add_commands(commands)
    return parser


def command(commands, name: str, function, text: str) -> Parser:
    """A sub-command that calls `function(args) -> exit code`."""
    p = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    if function:
        p.set_defaults(run=function)
    return p


def add_model(parser: argparse.ArgumentParser, positional: bool = False) -> None:
    text = "container, or a Hugging Face checkpoint to convert on first use"
    if positional:
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument("model", nargs="?", metavar="DIR", help=text)
        group.add_argument("--model", "--model-dir", dest="model", metavar="DIR", help=text)
    else:
        parser.add_argument("--model", "--model-dir", metavar="DIR", required=True, help=text)


def count(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


class Version(argparse.Action):
    """--version, which asks the installation only when it is used."""

    def __call__(self, parser, namespace, values, option_string=None):
        from .doctor import colibri_version

        print(f"colibri-lab {colibri_version()}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        args = build_parser().parse_args(argv)
    except SettingError as error:
        return say(error, 2)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"colibri: warning: {message}", file=sys.stderr)
        try:
            code = args.run(args)
            sys.stdout.flush()
            return code
        except ColibriError as error:
            return say(error, 1)
        except KeyboardInterrupt:
            print("colibri: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader (head, less) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141


def say(error: ColibriError, code: int) -> int:
    print(f"colibri: error: {error}", file=sys.stderr)
    return code
