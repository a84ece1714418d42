"""The commands that plan: `colibri plan`."""

from __future__ import annotations

import argparse

from ..cli import add_model, add_settings, command, given_settings, print_json
from ..units import format_size
from .cli_tune import add_plan_options, recommend


def add_commands(commands) -> None:
    """Add the planning commands to `commands`, the sub-parsers of the main command line."""
    p = command(
        commands, "plan", plan, "recommend settings for a model, and predict its speed and memory before it is opened"
    )
    add_model(p)
    add_plan_options(p)
    p.add_argument("--memory-only", action="store_true", help="memory by part, without speed")
    p.add_argument(
        "--available", metavar="SIZE", help="memory there is, such as 16GiB; default: what this machine has left"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(p, "open")


def plan(args: argparse.Namespace) -> int:
    """Print the whole plan, or the memory plan alone; one that does not fit is an error that names the largest setting that
    does."""
    if not args.memory_only:
        return recommend(args)
    from .memory_plan import memory_plan

    made = memory_plan(args.model, available=args.available, **given_settings(args, "open"))
    if args.json:
        settings = {
            name: made.settings[name] for name in ("expert_cache_slots", "scope", "max_seq_len", "max_batch_size")
        }
        print_json(
            {**made, "available_bytes": made.available_bytes, "page_cache_bytes": made.page_cache_bytes, **settings}
        )
        return 0
    s, each = made.settings, "in all" if made.settings["scope"] == "global" else "per layer"
    print(
        f"{made.facts.name}: {made.slots} slots {each} of {made.sizes.slot_bytes} bytes, max_seq_len {s['max_seq_len']}"
    )
    print(made)
    print(f"{made.available_bytes} bytes ({format_size(made.available_bytes)}) are available; "
          f"{format_size(made.page_cache_bytes)} of them stay for the page cache")  # fmt: skip
    return 0
