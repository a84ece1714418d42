"""Colours, names and order of everything the views draw, so that one colour means one thing in every picture.

The palette is Okabe and Ito's (jfly.uni-koeln.de/color), readable with any colour vision. Each colour has a twin for
dark backgrounds. Nothing is told by colour alone: lines also differ in dash, cells in a mark, areas carry their name.
"""

from __future__ import annotations

LIGHT = {
    "hit": "#0072B2",
    "miss": "#D55E00",
    "attention": "#009E73",
    "router": "#CC79A7",
    "prefetch": "#E69F00",
    "shared": "#7FB5D8",
    "head": "#F0E442",
    "other": "#9A9A9A",
    "kept": "#7A7A7A",
    "sky": "#56B4E9",
    "resident": "#A9CFE8",
    "absent": "#EFEFEF",
    "oracle": "#000000",
    "ink": "#222222",
    "rule": "#D8D8D8",
}
DARK = LIGHT | {
    "hit": "#3D9BD9",
    "miss": "#EE7A2B",
    "attention": "#22B88C",
    "shared": "#9CC7E3",
    "kept": "#A8A8A8",
    "resident": "#27506B",
    "absent": "#2B2B2B",
    "oracle": "#FFFFFF",
    "ink": "#E4E4E4",
    "rule": "#4A4A4A",
}

# What a stacked picture shows, bottom to top: (name, stages of telemetry.STAGES in it, colour).
STAGE_GROUPS = (
    ("expert compute", ("expert_compute",), "hit"),
    ("expert load wait", ("expert_load_wait",), "miss"),
    ("shared expert", ("shared_expert",), "shared"),
    ("attention", ("attention",), "attention"),
    ("router", ("router",), "router"),
    ("head", ("head",), "head"),
    ("other", ("tokenize", "embed", "sample", "other"), "other"),
)

# A policy keeps its colour and dash wherever it appears; policies without an entry take the default.
POLICY = {"lru": ("hit", ()), "weighted-lru": ("sky", (7, 3))}
POLICY_DEFAULT = ("attention", (9, 2, 2, 2))

FONT_PT = 9  # smallest size in any picture


def both(name: str) -> list[str]:
    """[on light, on dark] of a colour, as the browser side wants it."""
    return [LIGHT[name], DARK[name]]


def policy_style(policy: str) -> tuple[str, tuple[int, ...]]:
    """(colour name, dash in pixels; () is solid) of a cache policy."""
    return POLICY.get(policy, POLICY_DEFAULT)


def bytes_text(size: float) -> str:
    """`14.2 MB`; powers of ten, as everywhere."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


CSS = """<style>
.colibri p {margin: 0; font-size: 13px; line-height: 1.4; color: var(--jp-ui-font-color1, inherit)}
.colibri p.colibri-verdict {font-weight: 500}
.colibri p.colibri-error {border-left: 4px solid #D55E00; padding-left: 8px; font-weight: bold}
.colibri table {width: 100%; margin: 2px 0}
.colibri td {padding: 0 6px 0 0; font-size: 12px; line-height: 1.5; text-align: left; white-space: nowrap;
  color: var(--jp-ui-font-color1, inherit)}
.colibri .colibri-said {min-height: 38px}
.colibri .colibri-text {height: 190px; overflow-y: auto; display: flex; flex-direction: column-reverse; padding: 6px 8px;
  border: 1px solid var(--jp-border-color2, #bbb)}
.colibri pre {white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: 0; background: none;
  flex: none; overflow: visible;
  font: 12px/1.35 monospace; color: var(--jp-ui-font-color1, inherit)}
.colibri pre b {font-weight: normal; opacity: .7}
.colibri button:focus-visible, .colibri canvas:focus-visible {outline: 2px solid #0072B2; outline-offset: -2px}
</style>"""
