"""The one door through which text enters the report: escaped, and with nothing invisible in it."""

from __future__ import annotations

import re
from html import escape

# Control characters cannot be shown, and those of text direction would reorder what is read.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def text(value: object) -> str:
    """Escaped for element content and attributes; what is invisible becomes a visible escape."""
    visible = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return escape(visible, quote=True)
