"""Text of any script in static pictures: fonts that have its signs where they are installed, escapes where not."""

from __future__ import annotations

import unicodedata
from functools import cache

from matplotlib.font_manager import findfont, fontManager, get_font

MONO = "DejaVu Sans Mono"  # comes with matplotlib
# Fonts with Chinese, Japanese and Korean signs that systems bring.
CJK = (
    "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "Source Han Sans CN",
    "WenQuanYi Zen Hei Mono", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "PingFang SC", "Heiti SC",
    "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "SimSun", "Arial Unicode MS",
)  # fmt: skip


@cache
def families() -> list[str]:
    """Font families for matplotlib, which takes each sign from the first that has it."""
    installed = {entry.name for entry in fontManager.ttflist}
    return [MONO, *[name for name in CJK if name in installed][:1]]


@cache
def _has(sign: str) -> bool:
    return any(get_font(findfont(name)).get_char_index(ord(sign)) for name in families())


def drawable(text: str) -> str:
    """`text`, with signs that no installed font has as escapes such as \\u4e2d."""
    return "".join(c if c == "\n" or _has(c) else c.encode("unicode_escape").decode() for c in text)


def columns(text: str) -> int:
    """Width in columns of a fixed-width font; Chinese and its like take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
