"""Regular expressions that stand in somebody else's file, of names of modules.

Matching may take time that grows exponentially with what is matched: `(a+)+$`. Taken is what names
modules in practice: letters, digits, `.`, `\\d`, `\\w`, alternatives and groups, and three repeats
of single characters; short names are matched, part by part.
Left out: repeated groups, sets, counted repeats, look-around, references. They are refused.
"""

from __future__ import annotations

import re

MOST_CHARS = 200
MOST_REPEATS = 3
MOST_NAME_CHARS = 128
_TAKEN = re.compile(r"(?:[\w.|^$*+()-]|\\[.dw-])*", re.ASCII)
_REFUSED = re.compile(r"\(\?|\)[*+]|[*+][*+]")


def matches_end(pattern: str, name: str) -> bool:
    """Whether the pattern is the whole of a dotted name, or of its last parts. ValueError for one
    that is not taken."""
    is_taken = (
        len(pattern) <= MOST_CHARS
        and _TAKEN.fullmatch(pattern) is not None
        and _REFUSED.search(pattern) is None
        and sum(pattern.count(sign) for sign in "*+") <= MOST_REPEATS
    )
    if not is_taken:
        raise ValueError("is not supported; name modules by letters, '.', '.*', and '|'")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not supported: {error}") from None
    if len(name) > MOST_NAME_CHARS:
        return False
    starts = [0, *(place + 1 for place, sign in enumerate(name) if sign == ".")]
    return any(compiled.fullmatch(name, start) for start in starts)
