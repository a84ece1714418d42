"""The commands about traces: `trace info|convert|cut|concat`, `replay`, `curve`, `locality`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..cli import command, count, plain, print_json
from ..errors import SettingError, StorageError
from ..units import format_size

PHASES = ("all", "decode", "prefill")


def add_commands(commands) -> None:
    """Add every trace command to `commands`, the sub-parsers of the main command line."""
    group = command(commands, "trace", None, "inspect, convert, cut and join routing traces")
    actions = group.add_subparsers(dest="action", metavar="ACTION", required=True)

    p = command(actions, "info", info, "what a trace holds and what cannot be computed from it")
    p.add_argument("traces", nargs="+", metavar="FILE", help="trace files of any known format")
    _add_import(p)
    p.add_argument("--json", action="store_true", help="print one JSON object per file, in a list")

    p = command(actions, "convert", convert, "write a trace as our parquet, or for libCacheSim")
    _add_input(p)
    _add_output(p)
    p.add_argument("--to", choices=("parquet", "oracle-general"), default="parquet", help="default: parquet")

    p = command(actions, "cut", cut, "write a part of a trace")
    _add_input(p)
    _add_output(p)
    p.add_argument("--phase", choices=PHASES, default="all", help="default: all")
    p.add_argument("--layers", type=numbers, metavar="LIST", help="model layers, such as 0,3,8-11")
    p.add_argument("--sequence", type=numbers, metavar="LIST", help="texts by number, such as 0,2-5")
    p.add_argument(
        "--steps", type=step_range, metavar="A:B", help="steps by position, B left out; --steps=-20: takes the last 20"
    )

    p = command(actions, "concat", concat, "write several traces one after the other")
    p.add_argument("traces", nargs="+", metavar="FILE", help="trace files of one model shape")
    _add_output(p)
    _add_import(p)

    p = command(commands, "replay", replay, "what cache policies would have hit, missed and read on a trace")
    _add_input(p)
    p.add_argument(
        "--policy", default="lru", metavar="LIST", help="policies, such as lru,belady-bypass, or all (default: lru)"
    )
    p.add_argument("--slots", type=sizes, default=[8], metavar="LIST",
                   help="slots per layer (in all under --scope global), or bytes: 4000MiB; default: 8")  # fmt: skip
    _add_contract(p)
    p.add_argument("--fit", metavar="FILE", help="trace from which static-pin and pin+lru choose their set")
    p.add_argument("--json", action="store_true", help="print one JSON object per policy and size, in a list")

    p = command(commands, "curve", curve, "hit rate at every cache size")
    _add_input(p)
    p.add_argument("--policy", default="all", metavar="LIST", help="policies, or all (default: all)")
    p.add_argument(
        "--slots", type=numbers, metavar="LIST", help="slot counts, such as 4,8,16-64 (default: all, or many)"
    )
    _add_contract(p)
    p.add_argument("--out", metavar="FILE", help="write the table: .parquet, .csv or .json")
    p.add_argument("--plot", metavar="FILE", help="write the picture: .png")
    p.add_argument("--overwrite", action="store_true", help="replace files that are already there")
    p.add_argument("--json", action="store_true", help="print the table as JSON, a row per policy and size")

    p = command(commands, "locality", locality, "how cacheable a trace is: overlap, reuse, popularity, predictability")
    _add_input(p)
    p.add_argument("--phase", choices=PHASES, help="default: decode where there is any")
    p.add_argument(
        "--sch", type=numbers, default=[], metavar="LIST", help="also SCH curves that see so many tokens ahead"
    )
    p.add_argument("--json", action="store_true", help="print every table as one JSON object")


def _add_input(p) -> None:
    p.add_argument("trace", metavar="TRACE", help="trace file of any known format")
    _add_import(p)


def _add_import(p) -> None:
    p.add_argument("--format", metavar="NAME", help="importer to use; by default the content decides")
    p.add_argument("--set", dest="options", action="append", default=[], type=option, metavar="NAME=VALUE",
                   help="what the file does not say, such as num_experts=64 (repeat for more)")  # fmt: skip


# Contract fields as flags: name -> (what to parse, choices as shown, help). Left-out flags take the contract's default.
_CONTRACT = {
    "scope": (str, "layer|global", "whether each layer owns its slots or all share one pool"),
    "lookup": (str, "atomic|serial|serial-hits-first", "how the experts of an event meet the cache"),
    "order": (str, "rank|id|random", "order of an event's experts, for the serial lookups"),
    "seed": (count, "N", "seed of everything random"),
    "admission": (str, "forced|bypass", "whether every missed block is kept"),
    "reset": (str, "never|per-sequence", "cold cache at each new text"),
    "phase": (str, "all|decode|prefill", "what is counted; both phases always run"),
    "count": (str, "union|logical", "what an access is: a distinct block of an event, or a block asked for by a token"),
    "warmup_steps": (count, "N", "first steps that run without being counted"),
    "block_size": (count, "N", "experts in one block"),
}


def _add_contract(p) -> None:
    group = p.add_argument_group("contract")
    for name, (kind, shown, text) in _CONTRACT.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=shown, default=argparse.SUPPRESS, help=text)
    group.add_argument("--threads", type=count, metavar="N", help="replays at a time (default: one per core)")


def contract(args) -> dict:
    """The contract fields that were given."""
    return {name: getattr(args, name) for name in _CONTRACT if hasattr(args, name)}


def sizes(text: str) -> list[int | str]:
    """4,8,4000MiB as slot counts and sizes in bytes."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected sizes such as 4,8,4000MiB, got {text!r}")
    return [int(part) if part.isascii() and part.isdigit() else part for part in parts]


def _add_output(p) -> None:
    p.add_argument("--out", metavar="FILE", required=True, help="file to write")
    p.add_argument("--overwrite", action="store_true", help="replace a file that is already there")


def option(text: str) -> tuple[str, object]:
    """NAME=VALUE; the value is JSON where it parses as such, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def numbers(text: str) -> list[int]:
    """0,3,8-11 as a list."""
    found = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first = count(low)
        last = count(high) if dash else first
        if last < first:
            raise argparse.ArgumentTypeError(f"range {part!r} runs backwards")
        found += range(first, last + 1)
    return found


def step_range(text: str) -> slice:
    """A:B as a slice; both ends may be missing or negative."""
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return slice(int(low) if low else None, int(high) if high else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B, got {text!r}") from None


def read(args, path=None):
    """The trace of a command line."""
    from .formats import load_trace

    return load_trace(args.trace if path is None else path, format=args.format, **dict(args.options))


def output(args, name=None) -> Path:
    """The file to write, refused when it is there already or is one of the inputs."""
    path = Path(args.out if name is None else name)
    inputs = args.traces if hasattr(args, "traces") else [args.trace]
    if any(path.exists() and Path(i).exists() and path.samefile(i) for i in inputs):
        raise StorageError(f"{path} is an input of this command; write to another file")
    if path.exists() and not args.overwrite:
        raise StorageError(f"{path} is already there; give --overwrite to replace it")
    return path


def info(args) -> int:
    """`colibri trace info`."""
    reports = [{"file": path, **read(args, path).report()} for path in args.traces]
    if args.json:
        print_json(reports)
    else:
        print("\n\n".join(map(report_text, reports)))
    return 0


def report_text(report: dict) -> str:
    """A trace report for people."""
    lines = [report["file"]]
    if report["granularity"] == "counts":
        size = f"{report['assignments']} counts, {report['layers']} layers x {report['num_experts']} experts, no order"
    else:
        steps = ", ".join(f"{n} {phase} steps" for phase, n in report["steps_by_phase"].items() if n)
        texts = "1 text" if report["sequences"] == 1 else f"{report['sequences']} texts"
        size = (
            f"{report['rows']} rows in {report['events']} events ({steps}), {report['layers']} layers, "
            f"top-{report['top_k']} of {report['num_experts']}, {texts}"
        )
    lines.append(f"  {size}")
    lines.append(f"  model {report['model'] or 'not recorded'}, engine {report['engine'] or 'not recorded'}")
    if report["id_order"]:
        lines.append(
            f"  ids {report['id_order']}, {report['granularity']}" + ("" if report["complete"] else ", incomplete")
        )
    has = [name for name, there in report["has"].items() if there]
    lines.append(f"  also holds {', '.join(has) or 'nothing else'}")
    lines += [f"  no {need}: {why}" for need, why in report["lacks"].items()]
    lines += [f"  note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def convert(args) -> int:
    """`colibri trace convert`."""
    path, trace = output(args), read(args)
    if args.to == "parquet":
        trace.save(path)
    else:
        from .export import write_oracle_general

        write_oracle_general(trace, path)
    return wrote(path, trace)


def cut(args) -> int:
    """`colibri trace cut`."""
    path = output(args)
    part = read(args).select(phase=args.phase, layers=args.layers, sequence=args.sequence, steps=args.steps)
    part.save(path)
    return wrote(path, part)


def concat(args) -> int:
    """`colibri trace concat`."""
    from .table import Trace

    path = output(args)
    joined = Trace.concat([read(args, one) for one in args.traces])
    joined.save(path)
    return wrote(path, joined)


def wrote(path: Path, trace) -> int:
    print(f"{path}: {trace!r}", file=sys.stderr)
    return 0


def policies(names: str, trace):
    """The policies to run; `all` leaves out those that need what the trace lacks, and says so."""
    from ..cache.policies import POLICIES

    if names != "all":
        return names
    lacks = trace.lacks()
    left_out = [name for name, policy in POLICIES.items() if any(need in lacks for need in policy.needs)]
    if left_out:
        print(f"colibri: left out {', '.join(left_out)}: the trace lacks what it needs", file=sys.stderr)
    return [name for name in POLICIES if name not in left_out]


def replay(args) -> int:
    """`colibri replay`."""
    from .bounds import warnings
    from .replay import grid

    trace = read(args)
    for size in args.slots:
        for warning in warnings(trace, size, **contract(args)):
            print(f"colibri: warning: {warning}", file=sys.stderr)
    fit = None if args.fit is None else read(args, args.fit)
    tables = grid(trace, policies(args.policy, trace), args.slots, threads=args.threads, fit=fit, **contract(args))
    totals = [table.attrs["totals"] for table in tables]
    if args.json:
        print_json(totals)
    else:
        print(replay_text(totals))
    return 0


def replay_text(totals: list[dict]) -> str:
    """A line per policy and size, then what the rates are divided by and every note once."""
    form = "{:<16}{:>9}{:>11}{:>10}{:>13}{:>10}{:>12}{:>11}"
    lines = [form.format("policy", "slots", "admission", "hit rate", "full events", "misses", "first uses", "read")]
    for one in totals:
        size = one["slots"] if isinstance(one["slots"], int) else format_size(one["capacity_bytes"])
        rates = [("-" if one[name] is None else f"{one[name]:.2%}") for name in ("hit_rate", "full_event_hit_rate")]
        loaded = "not known" if one["bytes_loaded"] is None else format_size(one["bytes_loaded"])
        line = (one["policy"], size, one["admission"], *rates, one["misses"], one["compulsory"], loaded)
        lines.append(form.format(*line))
    first = totals[0]
    lines.append(f"\nscope {first['scope']}, lookup {first['lookup']}")
    lines += [f"{name.replace('_', ' ')}: {value}" for name, value in first["denominators"].items()]
    lines += [f"note: {note}" for note in dict.fromkeys(note for one in totals for note in one["notes"])]
    return "\n".join(lines)


def curve_text(table, rows: int = 16) -> str:
    """Hit rate in %, a line per size (some sixteen of them) and a column per policy."""
    wide = 100 * table.pivot_table(index="slots", columns="policy", values="hit_rate", sort=False).sort_index()
    shown = wide.iloc[:: max(1, -(-len(wide) // rows))]
    return "hit rate, % of accesses, by slots\n" + shown.to_string(float_format=lambda x: f"{x:.2f}")


def curve(args) -> int:
    """`colibri curve`."""
    table_path = None if args.out is None else output(args)
    plot_path = None if args.plot is None else output(args, args.plot)
    kind = None if table_path is None else table_path.suffix
    if kind not in (None, ".parquet", ".csv", ".json"):
        raise SettingError(f"--out {table_path}: the name must end in .parquet, .csv or .json")
    if plot_path is not None and plot_path.suffix != ".png":
        raise SettingError(f"--plot {plot_path}: the name must end in .png")
    table = read(args).curve(args.policy, slots=args.slots, threads=args.threads, **contract(args))
    for note in table.attrs["notes"]:
        print(f"colibri: {note}", file=sys.stderr)
    if table_path is not None:
        from .formats.common import whole_file

        with whole_file(table_path) as part:
            if kind == ".json":
                part.write_text(json.dumps(plain(table)))
            else:
                getattr(table, f"to_{kind[1:]}")(part, index=False)
    if plot_path is not None:
        from ..ui.trace_plots import curves
        from .formats.common import whole_file

        with whole_file(plot_path) as part:
            part.write_bytes(curves(table).png())
    if args.json:
        print_json(table)
    elif table_path is None and plot_path is None:
        print(curve_text(table))
    return 0


def locality(args) -> int:
    """`colibri locality`."""
    from .locality import locality

    found = locality(read(args), phase=args.phase, sch_windows=args.sch)
    if args.json:
        print_json(found)
    else:
        print(locality_text(found))
    return 0


def locality_text(found: dict) -> str:
    """The locality report as a page of text: headline numbers, then the tables that fit on one."""
    what = found["what"]
    lines = [
        f"{what['model'] or 'trace'}: {what['phase']} phase, {what['tokens']} tokens x {what['layers']} layers x "
        f"top-{what['top_k']} of {what['num_experts']} ({what['granularity']})"
    ]
    for name, value in (found["summary"] or {}).items():
        lines.append(f"  {name.replace('_', ' '):<44} {'not measured' if value is None else f'{value:.4g}'}")
    tables = {"popularity": found["popularity"]}
    if found["overlap"] is not None:
        tables["overlap by distance, mean of layers"] = (
            found["overlap"].groupby("distance", as_index=False).mean().head(4)
        )
        tables["reuse, share of assignments"] = found["reuse"]
        tables["working set, mean of layers"] = found["working_set"].groupby("window", as_index=False).mean()
        tables["SRP, all layers"] = found["srp"].query("layer == 'all'")
    if found["predictability"] is not None:
        keys = ["budget", "predictor"]
        mean = found["predictability"].groupby(keys, as_index=False)[["recall", "precision"]].mean()
        tables["next layer, judged on the second half"] = mean
    for name in ("domains", "sch"):
        if found[name] is not None:
            tables[name] = found[name]
    for name, table in tables.items():
        if table.empty:  # too short a trace for this measure
            continue
        table = table.drop(columns=[c for c in ("layer",) if c in table and name != "popularity"])
        lines += ["", name, table.to_string(index=False, float_format=lambda x: f"{x:.4g}")]
    return "\n".join(lines)
