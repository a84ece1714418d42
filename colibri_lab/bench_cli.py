"""`colibri bench`."""

from __future__ import annotations

import argparse

from .cli import add_settings, command, count, given_settings, print_json


def add_commands(commands) -> None:
    p = command(commands, "bench", run, "time kernels, engine and disk against what this machine can do")
    p.add_argument(
        "parts", nargs="*", metavar="WHAT", help="gemm, ffn, decode, prefill, bandwidth, disk (default: all of them)"
    )
    p.add_argument("--model", "--model-dir", metavar="DIR", default="colibri-tiny", help="for decode and prefill")
    p.add_argument(
        "--formats", metavar="A,B", help="number formats of weights for gemm and ffn (default: one of each kind)"
    )
    p.add_argument("--thread-counts", metavar="N,M", help="default: 1 and the physical cores")
    p.add_argument("--repeats", type=count, default=7, metavar="N", help="clean samples wanted of each (default: 7)")
    p.add_argument("--path", metavar="DIR", help="folder on the disk to read")
    p.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    add_settings(p, "open")


def run(args: argparse.Namespace) -> int:
    """Measure, then print the table or one JSON object."""
    from .bench import bench

    report = bench(
        tuple(args.parts),
        threads=[count(n) for n in args.thread_counts.split(",")] if args.thread_counts else None,
        number_formats=args.formats.split(",") if args.formats else None,
        rounds=args.repeats,
        model=args.model,
        settings=given_settings(args, "open"),
        path=args.path,
        progress=not args.json,
    )
    if args.json:
        print_json(report.to_json())
    else:
        print(report)
    return 0
