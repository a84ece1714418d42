"""Mixed precision: which number format each matrix takes, by rules in a JSON file or by a function.

A plan file is an object {"rules": [...]}. Of the rules that fit a matrix the last one decides; where none fits, the
conversion's own format stays.

    {"rules": [{"format": "int4-g64"},
               {"layers": [1, 2], "experts": [0, 7, 12], "format": "int8"},
               {"matrices": ["down"], "format": "int8-g64"},
               {"part": "dense", "matrices": ["q", "k", "v", "o"], "format": "int8"}]}

`layers` are numbered as in the model, `experts` within their layer; a key left out fits all. `part` is "experts" unless it
says "dense": attention, dense layers, shared experts ("shared_gate", …), embeddings ("embed") and head ("head").
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..config import ModelConfig
from ..errors import ColibriError, SettingError, did_you_mean
from . import container, formats, layout
from .files import read_object

Rule = Callable[["int | None", "int | None", str], "str | None"]
KEYS = ("part", "layers", "experts", "matrices", "format")


def find_rule(plan: str | os.PathLike | dict | Rule | None, config: ModelConfig) -> Rule:
    """The function (layer, expert, matrix) → format name or None that a plan stands for.

    `plan`: a file, its contents, a function, or None. expert is None for matrices that are always in memory, layer is None
    for embeddings and head. Raises `SettingError` naming the rule that cannot be.
    """
    if plan is None:
        return lambda layer, expert, matrix: None
    if callable(plan):
        return plan
    where = "plan" if isinstance(plan, dict) else str(plan)
    data = plan if isinstance(plan, dict) else read_object(Path(plan), SettingError)
    rules = data.get("rules")
    if not isinstance(rules, list) or set(data) != {"rules"}:
        raise SettingError(
            f"{where}: expected an object with a list rules and nothing else, found keys {', '.join(data)}"
        )
    checked = [_checked(rule, f"{where}: rule {number}", config) for number, rule in enumerate(rules)]

    def decide(layer: int | None, expert: int | None, matrix: str) -> str | None:
        found = None
        for rule in checked:
            if (rule["part"] == "dense") == (expert is None) and all(
                value in rule[key]
                for key, value in (("layers", layer), ("experts", expert), ("matrices", matrix))
                if key in rule
            ):
                found = rule["format"]
        return found

    return decide


def _checked(rule, where: str, config: ModelConfig) -> dict:
    if not isinstance(rule, dict):
        raise SettingError(f"{where}: expected an object, found {rule!r}")
    for key in rule:
        if key not in KEYS:
            raise SettingError(f"{where}: unknown key {key!r}; {did_you_mean(key, KEYS)}")
    rule = {"part": "experts", **rule}
    if rule["part"] not in ("experts", "dense"):
        raise SettingError(f"{where}: part must be experts or dense, found {rule['part']!r}")
    if "experts" in rule and rule["part"] == "dense":
        raise SettingError(f"{where}: part dense has no experts")
    routed, matrices = _matrices(config)
    for key, known in (
        ("layers", config.moe_layers if rule["part"] == "experts" else range(config.num_layers)),
        ("experts", range(config.num_experts)),
        ("matrices", routed if rule["part"] == "experts" else matrices),
    ):
        chosen = rule.get(key, [])
        unknown = [each for each in chosen if each not in known] if isinstance(chosen, list) else chosen
        if unknown or not isinstance(chosen, list):
            shown = f"{known[0]} to {known[-1]}" if key != "matrices" else ", ".join(known)
            raise SettingError(f"{where}: {key} must be a list out of {shown}, found {unknown!r}")
    if "format" not in rule:
        raise SettingError(f"{where}: a format is missing")
    try:
        return {**rule, "format": _allowed(rule["format"])}
    except ColibriError as error:
        raise SettingError(f"{where}: {error}") from None


def _matrices(config: ModelConfig) -> tuple[list[str], list[str]]:
    """Names of a routed expert's matrices, and of all others."""
    specs = [(file, name) for file, tensors in layout.container_files(config, 1).items() for name, spec in tensors.items()
             if spec.part == "dense"]  # fmt: skip
    return ["gate", "up", "down"], sorted({name for _, name in specs})


def _allowed(name: str) -> str:
    format = formats.format_name(name)
    if format not in container.PLANNED:
        raise SettingError(f"format {name!r} cannot be planned; {did_you_mean(str(name), container.PLANNED)}")
    return format


def choose_formats(
    files: dict[str, dict[str, layout.Spec]], default: Callable[[str, str], str], rule: Rule
) -> dict[str, dict[str, str]]:
    """`.bin` file → tensor → format: what `rule` says, else default(file, tensor). Raises `SettingError` for a format that
    cannot be."""
    chosen = {}
    for file, specs in files.items():
        layer = layout.layer_of(file)
        chosen[file] = {}
        for name, spec in specs.items():
            expert, _, matrix = name.rpartition(".")
            ruled = None if spec.part == "float" else rule(layer, int(expert) if expert else None, matrix)
            chosen[file][name] = default(file, name) if ruled is None else _allowed(ruled)
    return chosen


def summary(files: dict[str, dict[str, layout.Spec]], chosen: dict[str, dict[str, str]]) -> dict[str, str]:
    """part → its one format, or "mixed"."""
    found: dict[str, set[str]] = {"expert": set(), "dense": set(), "float": set()}
    for file, specs in files.items():
        for name, spec in specs.items():
            found[spec.part].add(chosen[file][name])
    return {part: names.pop() if len(names) == 1 else container.MIXED for part, names in found.items()}


def hot_cold(
    counts: np.ndarray, moe_layers: tuple[int, ...], hot: str = "int8", cold: str = "int4", hot_share: float = 0.25
) -> dict:
    """A plan: in every layer the `hot_share` most used experts take format `hot`, the others `cold`.

    counts (moe layers, experts): how often each was chosen, as `lab.routes` or a trace gives them. Ties: the lower number.
    """
    if not 0 <= hot_share <= 1:
        raise SettingError(f"hot_share must be within 0 and 1, got {hot_share!r}")
    number = round(hot_share * counts.shape[1])
    rules: list[dict] = [{"format": cold}]
    for layer, row in zip(moe_layers, counts, strict=True):
        experts = np.sort(np.argsort(-row, kind="stable")[:number]).tolist()
        rules += [{"layers": [int(layer)], "experts": experts, "format": hot}] if experts else []
    return {"rules": rules}
