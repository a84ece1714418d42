"""The command that makes checkpoints: `colibri make-model`."""

from __future__ import annotations

import argparse
import json

from ..cli import command, count
from ..errors import SettingError

# Named here too, so that `colibri --help` loads nothing heavy; a test compares with make_model.FIELDS.
SIZES = (
    "hidden", "layers", "heads", "kv_heads", "head_dim", "experts", "top_k", "expert_width", "dense_width", "shared_width",
    "vocab", "max_seq_len",
)  # fmt: skip


def add_commands(commands) -> None:
    """Add `make-model` to `commands`, the sub-parsers of the main command line."""
    p = command(commands, "make-model", make_model, "write a random checkpoint of any supported family at any size")
    p.add_argument("--family", required=True, metavar="NAME", help="qwen3_moe, olmoe, mixtral, qwen2_moe or glm4_moe")
    p.add_argument("--output", "--output-dir", required=True, metavar="DIR", help="checkpoint directory to write")
    for size in SIZES:
        p.add_argument(
            f"--{size.replace('_', '-')}", type=count, metavar="N", help="default: the family's own, in proportion"
        )
    p.add_argument("--seed", type=count, default=0, metavar="N", help="of the weights (default: 0)")
    p.add_argument("--dtype", default="bf16", metavar="TYPE", help="bf16, fp16 or fp32 (default: bf16)")
    p.add_argument("--shard-size", default="5 GB", metavar="SIZE", help="most bytes in one file (default: 5 GB)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="any other field of config.json")
    p.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is already there")


def make_model(args: argparse.Namespace) -> int:
    """Write a random checkpoint and say what was written."""
    from .make_model import make_model

    sizes = {size: getattr(args, size) for size in SIZES}
    options = {name: getattr(args, name) for name in ("seed", "dtype", "shard_size", "overwrite")}
    print(make_model(args.output, args.family, fields=dict(map(_field, args.set)), **options, **sizes))
    return 0


def _field(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        if equals:
            return name, value
        raise SettingError(f"--set needs FIELD=VALUE, got {text!r}") from None
