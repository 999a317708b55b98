"""Markup of pages and pictures: `text`, the one door through which text enters it, and elements.

Escaped text has nothing invisible in it. Left out: HTML as templates (html.py writes what it
needs), and what SVG is drawn of (svg.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

# Control characters cannot be shown, and those of text direction would reorder what is read.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def text(value: object) -> str:
    """Escaped for element content and attributes; what is invisible becomes a visible escape."""
    visible = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return escape(visible, quote=True)


def element(name: str, *inside: str, **attributes: object) -> str:
    """An element; `inside` is markup already, attributes are escaped.

    `class_` stands for class, as an underscore does for a hyphen. An attribute of None is left out,
    and a float is written to a tenth: a picture's unit is about a pixel.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(inside)}</{name}>" if inside else f"<{name}{given}/>"


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    has_names: bool = True,
    class_: str | None = None,
) -> str:
    """A table under the titles `heads`, which are text; cells are markup already.

    The first cell of a row is its name, unless it has none.
    """
    titles = "".join(element("th", text(head), scope="col") for head in heads)
    lines = []
    for row in rows:
        names, cells = (row[:1], row[1:]) if has_names else ((), row)
        named = "".join(element("th", name, scope="row") for name in names)
        lines.append(f"<tr>{named}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    top = f"<thead><tr>{titles}</tr></thead>" if heads else ""
    return element("table", f"{top}<tbody>{''.join(lines)}</tbody>", class_=class_)


def _attribute(value: object) -> str:
    return tenth(value) if isinstance(value, float) else text(value)


def tenth(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
