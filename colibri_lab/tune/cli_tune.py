"""The commands that measure, compare and choose: `probe`, `sweep`, `compare`, `tune`, `runs`; `plan` is in cli.py."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..cli import Parser, add_settings, command, count, given_settings, plain, print_json, reader
from ..config import SETTINGS
from ..errors import SettingError, did_you_mean


def add_commands(commands) -> None:
    """Add the commands to `commands`, the sub-parsers of the main command line."""
    p = command(commands, "probe", probe, "measure this machine: disk, page cache, memory, kernels")
    p.add_argument("--path", metavar="DIR", help="folder on the disk that models are read from")
    p.add_argument("--seconds", type=float, default=20.0, metavar="S", help="about how long to measure (default: 20)")
    p.add_argument("--out", metavar="FILE", help="also write the probe here, to plan for this machine on another one")
    p.add_argument("--json", action="store_true", help="print one JSON object")

    p = command(
        commands, "sweep", sweep, "try every combination of some settings: real runs of a model, or replays of a trace"
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="DIR", help="really run this model")
    source.add_argument("--trace", metavar="FILE", help="replay this trace")
    p.add_argument("grid", nargs="+", metavar="NAME=V1,V2", help="a setting and its values, such as slots=8,16,32")
    p.add_argument("--out", metavar="DIR", help="folder for the rows; a sweep that was stopped goes on from there")
    p.add_argument(
        "--workers", type=count, metavar="N", help="local processes (default: 1 for runs, all cores for replays)"
    )
    p.add_argument("--dask", metavar="ADDRESS", help="scheduler of a Dask cluster to use instead")
    p.add_argument(
        "--repeats", type=count, default=3, metavar="N", help="runs per point, of which medians count (default: 3)"
    )
    _add_prompt(p)
    p.add_argument("--json", action="store_true", help="print the table as JSON, a row per point")

    p = command(commands, "compare", compare, "is B faster than A? Runs in turn, both orders, and A against itself")
    p.add_argument(
        "a", metavar="A", help='settings such as "expert_cache_slots=8,policy=lru", a settings file, or a run record'
    )
    p.add_argument("b", metavar="B", help="the same for the other side")
    p.add_argument("--model", metavar="DIR", help="model to run; without it A and B are run records")
    p.add_argument("-n", "--samples", type=count, default=5, metavar="N",
                   help="pairs in each order (default: 5; 8 runs for each)")  # fmt: skip
    p.add_argument(
        "--metric", default="tokens_per_s", metavar="NAME", help="tokens_per_s, prefill_tokens_per_s or ttft_s"
    )
    p.add_argument("--max-tokens", type=count, default=64, metavar="N", help="tokens of a run (default: 64)")
    p.add_argument("--varied", metavar="LIST", help="settings that were meant to differ, for run records")
    _add_prompt(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")

    p = command(
        commands, "tune", tune, "search the settings that change speed and memory only, and confirm what was found"
    )
    p.add_argument("--model", metavar="DIR", required=True, help="container, or a Hugging Face checkpoint")
    p.add_argument("--budget", metavar="SIZE", help='most memory, as "4 GiB" (default: what is free)')
    p.add_argument("--time", default="10m", metavar="T", help="how long to search, as 90s, 10m, 1h (default: 10m)")
    p.add_argument("--out", default="colibri-settings.json", metavar="FILE",
                   help="settings file to write (default: colibri-settings.json)")  # fmt: skip
    p.add_argument("--knobs", metavar="LIST", help="settings that may vary (default: those that usually matter)")
    p.add_argument("--seed", type=count, default=0, metavar="N", help="seed of the search (default: 0)")
    p.add_argument("--trials", type=count, metavar="N", help="most settings to try")
    _add_prompt(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(p, "open")

    p = command(commands, "runs", list_runs, "the run records there are")
    p.add_argument("show", nargs="?", metavar="ID", help="show one record in full")
    p.add_argument("--kind", metavar="KIND", help="generate, plan, compare, sweep or tune")
    p.add_argument("--model", metavar="TEXT", help="only of models with this in their name")
    p.add_argument("--since", metavar="TIME", help="only from this time on, as 2026-01-31")
    p.add_argument("--where", nargs="+", default=[], metavar="NAME=VALUE", help="only with these values")
    p.add_argument("--json", action="store_true", help="print JSON, a row per record")


def add_plan_options(p: Parser) -> None:
    """What `colibri plan` takes beside the settings and --available."""
    p.description += (
        " The model may also be the name of a published shape, such as Qwen3-30B-A3B. Settings that are given are kept, the "
        "others are chosen; --memory is then all that the process and the page cache may fill."
    )
    p.add_argument("--trace", metavar="FILE", help="recorded routing of this model")
    p.add_argument("--disk", metavar="RATE", help='cold reads, as "3 GB/s", in place of what was probed')
    p.add_argument("--machine", metavar="FILE", help="probe of another machine, to plan for that one")
    p.add_argument("--formats", metavar="LIST", help="number formats to choose among, such as bf16,int8")
    p.add_argument("--policies", metavar="LIST", help="cache policies to choose among, or all")
    p.add_argument("--prompt-tokens", type=count, default=32, metavar="N", help="tokens of the prompt (default: 32)")
    p.add_argument("--measure", action="store_true", help="run the recommendation and keep both in a run record")
    p.add_argument("--measure-tokens", type=count, default=64, metavar="N", help="tokens of that run (default: 64)")
    p.add_argument("--out", metavar="FILE", help="write the settings file that `colibri run --settings` reads")
    p.add_argument("--plot", metavar="FILE", help="write the curve over slots as .png")
    _add_prompt(p)


def _add_prompt(p: Parser) -> None:
    p.add_argument("--prompt", metavar="TEXT", help="text to continue in real runs")


def _prompt(args: argparse.Namespace) -> dict[str, str]:
    return {} if args.prompt is None else {"prompt": args.prompt}


def probe(args: argparse.Namespace) -> int:
    """Measure this machine and keep the result."""
    from .probe import probe

    found = probe(args.path, seconds=args.seconds)
    if args.out:
        found.save(args.out)
    if args.json:
        print_json(found.to_json())
    else:
        print(found)
    return 0


def recommend(args: argparse.Namespace) -> int:
    """`colibri plan`: recommend settings, predict, and measure when asked."""
    from .plan import plan
    from .tuner import write_settings

    given = given_settings(args, "open")
    memory = given.pop("memory", None) or args.available
    result = plan(
        args.model, args.trace, memory=memory, disk=args.disk, machine_file=args.machine, formats=_names(args.formats),
        policies_=args.policies, prompt_tokens=args.prompt_tokens, measure=args.measure, measure_tokens=args.measure_tokens,
        **_prompt(args), **given,
    )  # fmt: skip
    if args.out:
        write_settings(args.out, result.settings, predicted=plain(result.predicted.to_json()))
    if args.plot:
        from ..ui.tune_plots import slots

        _save_picture(slots(result), args.plot)
    if args.json:
        print_json(result.to_json())
    else:
        print(result)
    return 0


def _save_picture(picture, path: str) -> None:
    from ..checkpoint.files import AtomicFile

    with AtomicFile(path) as file:
        file.write(picture.png())


def sweep(args: argparse.Namespace) -> int:
    """Run or replay a grid. Exit 1 when every point failed."""
    from .sweep import sweep

    grid = {}
    for text in args.grid:
        name, values = _assignment(text)
        grid[name] = [_value(name, each, real=args.model is not None) for each in values.split(",")]
    table = sweep(args.model, args.trace, grid=grid, out=args.out, workers=args.workers, dask=args.dask, repeats=args.repeats,
                  **_prompt(args))  # fmt: skip
    if args.json:
        print_json(table)
    else:
        print(table.to_string(index=False))
    return 1 if table.error.notna().all() else 0


def compare(args: argparse.Namespace) -> int:
    """Compare two sets of settings in turns, or two run records by what they say."""
    from .compare import compare, compare_records

    if args.model is None:
        found = compare_records(args.a, args.b, _names(args.varied))
        if args.json:
            print_json(found)
            return 0
        print(f"A {found['a']}\nB {found['b']}\nvaried: {', '.join(found['varied']) or 'nothing'}; n = 1 each")
        for name, (mine, other) in found["facts"].items():
            print(f"  {name:<24} {_shown(mine):<14} {_shown(other)}")
        print("\n".join([*(f"confounded: {each}" for each in found["confounds"]), found["reason"]]))
        return 0
    result = compare(args.model, _side(args.a), _side(args.b), n=args.samples, metric=args.metric, max_tokens=args.max_tokens,
                     **_prompt(args))  # fmt: skip
    if args.json:
        print_json(result.to_json())
    else:
        print(result)
    return 0


def tune(args: argparse.Namespace) -> int:
    """Search, confirm, and write the settings file."""
    from .tuner import tune

    result = tune(
        args.model, budget=args.budget, time_s=args.time, settings=given_settings(args, "open"), knobs=_names(args.knobs),
        seed=args.seed, trials=args.trials, **_prompt(args),
    )  # fmt: skip
    result.save(args.out)
    if args.json:
        print_json({**result.to_json(), "file": args.out})
    else:
        print(result)
        print(f"colibri run --model {args.model} --settings {args.out} --prompt …", file=sys.stderr)
    return 0


def list_runs(args: argparse.Namespace) -> int:
    """List run records, or show one."""
    from . import runs

    if args.show:
        print(json.dumps(plain(runs.load(args.show).manifest), indent=1, ensure_ascii=False))
        return 0
    where = {name: _value(name, value, real=True) for name, value in map(_assignment, args.where)}
    table = runs.runs(args.kind, args.model, args.since, **where)
    if args.json:
        print_json(table)
    elif table.empty:
        print(f"no run records in {runs.root()}; `colibri plan --measure`, compare, sweep and tune make them")
    else:
        shown = [name for name in ("id", "kind", "model", "expert_cache_slots", "policy", "storage", "tokens_per_s",
                                   "measured_tokens_per_s", "hit_rate", "winner") if name in table.columns]  # fmt: skip
        print(table[shown].to_string(index=False, na_rep="-"))
    return 0


# ---- settings on the command line


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise SettingError(f"expected NAME=VALUE, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()


def _value(name: str, text: str, real: bool) -> Any:
    """A value as the setting reads it; of settings that only replays have, whole numbers where they look like it."""
    if real and name in SETTINGS:
        setting = SETTINGS[name]
        if setting.type is bool:
            if text.lower() not in ("true", "false"):
                raise SettingError(f"{name} must be true or false, got {text!r}")
            return text.lower() == "true"
        try:
            return reader(setting)(text)
        except argparse.ArgumentTypeError as error:
            raise SettingError(str(error)) from None
    return int(text) if text.isdigit() else text


def _side(text: str) -> dict[str, Any]:
    """Settings of one side of a comparison: "name=value,…", or a settings file. "" and "defaults" are the defaults."""
    from .tuner import read_settings

    if text in ("", "defaults"):
        return {}
    if "=" not in text:
        return read_settings(text)
    settings = {}
    for part in text.split(","):
        name, value = _assignment(part)
        if name not in SETTINGS:
            raise SettingError(f"unknown setting {name!r}; {did_you_mean(name, SETTINGS)}")
        settings[name] = _value(name, value, real=True)
    return settings


def _shown(value) -> str:
    return "not measured" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
