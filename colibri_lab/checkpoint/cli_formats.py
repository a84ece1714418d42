"""The commands about containers: `quantize`, `calibration-data`, `quality` and `export`."""

from __future__ import annotations

import argparse

from ..cli import add_settings, command, count, given_settings, print_json


def add_commands(commands) -> None:
    """Add all four to `commands`, the sub-parsers of the main command line."""
    p = command(commands, "quantize", quantize, "make a quantised container from a 16-bit one")
    _add_directory(p, "16-bit container")
    p.add_argument("--output", "--output-dir", metavar="DIR", required=True, help="container to write")
    p.add_argument(
        "--quant-type", default="int8", metavar="FORMAT",
        help="int8, int4, or exactly: int8-tensor, int4-row, int4-g32-sym, mxfp4, … (default: int8)",
    )  # fmt: skip
    add_format_options(p)
    p.add_argument("--overwrite", action="store_true", help="replace a container that is already there")

    p = command(commands, "calibration-data", calibration_data, "texts to calibrate on, where there are no better ones")
    p.add_argument("--output", metavar="FILE", required=True, help="calibration file to write")
    p.add_argument(
        "--texts", type=count, default=1024, metavar="N", help="how many, of Python's own library (default: 1024)"
    )
    p.add_argument("--model", "--model-dir", metavar="DIR", help="model whose own continuations are to be among them")
    p.add_argument("--prompts", metavar="FILE", help='what it continues: JSON {"kind": [{"name": …, "text": …}]}')
    p.add_argument("--own", type=count, default=128, metavar="N", help="continuations, with --model (default: 128)")
    p.add_argument("--seed", type=count, default=0, metavar="N", help="of the continuations (default: 0)")

    p = command(commands, "quality", quality, "what a quantised model loses against its 16-bit original")
    _add_directory(p, "model to measure")
    p.add_argument("--against", metavar="DIR", required=True, help="the same model in 16 bits")
    text = p.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", metavar="FILE", help="text in UTF-8 to measure on")
    text.add_argument("--source", metavar="NAME", help="stdlib: source files of Python's own library")
    p.add_argument(
        "--tokens", type=count, default=32768, metavar="N", help="tokens of it, evenly spread (default: 32768)"
    )
    p.add_argument("--window", type=count, default=256, metavar="N", help="tokens of context (default: 256)")
    p.add_argument(
        "--weights", action=argparse.BooleanOptionalAction, default=True, help="look at every matrix too (default)"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(p, "open")

    p = command(commands, "export", export, "pack a container with its tokenizer into one tar file to hand on")
    _add_directory(p, "container to pack")
    p.add_argument("--output", metavar="FILE", required=True, help="tar file to write")
    p.add_argument("--overwrite", action="store_true", help="replace a file that is already there")


def add_format_options(p: argparse.ArgumentParser) -> None:
    """What `quantize` and `convert` both ask about a format."""
    p.add_argument(
        "--group-size", type=count, metavar="N",
        help="columns that share a scale: 32, 64, 128, or 0 for one scale per output channel "
        "(default: 0 for int8, 64 for int4)",
    )  # fmt: skip
    p.add_argument("--tensors", default="experts", metavar="WHICH", help="what to quantise: experts or all")
    p.add_argument(
        "--plan", metavar="FILE", help="JSON rules that give single layers, experts or matrices another format"
    )
    p.add_argument(
        "--calibration-data", metavar="FILE", help='JSON array of {"text": …} to calibrate weights and routers on'
    )
    p.add_argument(
        "--calibration-tokens", type=count, default=65536, metavar="N", help="of the texts at most (default: 65536)"
    )


def _add_directory(p: argparse.ArgumentParser, text: str) -> None:
    group = p.add_mutually_exclusive_group(required=True)
    group.add_argument("model", nargs="?", metavar="DIR", help=text)
    group.add_argument("--model", "--model-dir", dest="model", metavar="DIR", help=text)


def quantize(args: argparse.Namespace) -> int:
    """Quantise a container and say what was written."""
    from .convert import quantize

    names = ("group_size", "tensors", "plan", "calibration_data", "calibration_tokens", "overwrite")
    print(quantize(args.model, args.output, args.quant_type, **{name: getattr(args, name) for name in names}))
    return 0


def calibration_data(args: argparse.Namespace) -> int:
    """Write a calibration file."""
    from ..front import open_model
    from ..quality.calibration_texts import write_calibration
    from ..quality.texts import prompt_texts

    prompts = prompt_texts(args.prompts) if args.prompts else None
    lab = open_model(args.model) if args.model else None
    number = write_calibration(args.output, args.texts, lab=lab, prompts=prompts, own=args.own, seed=args.seed)
    print(f"{args.output}: {number} texts")
    return 0


def export(args: argparse.Namespace) -> int:
    """Pack a container."""
    from .export import export

    names = export(args.model, args.output, args.overwrite)
    print(f"{args.output}: {len(names)} files; tar -xf {args.output} unpacks them into {names[0].split('/')[0]}")
    return 0


def quality(args: argparse.Namespace) -> int:
    """Measure a model against its original."""
    from ..quality import quality_report

    options = {name: getattr(args, name) for name in ("text", "source", "tokens", "window", "weights")}
    report = quality_report(args.model, args.against, **options, progress=not args.json, **given_settings(args, "open"))
    if args.json:
        print_json(report.to_json())
    else:
        print(report)
    return 0
