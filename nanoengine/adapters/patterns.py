"""Regular expressions that stand in somebody else's file, of names of modules.

Matching may take time that grows exponentially with what is matched: `(a+)+$`. Taken is what names
modules in practice: letters, digits, `.`, `\\d`, `\\w`, alternatives and groups, and a few
repeats of single characters; short names are matched.
Left out: repeated groups, sets, counted repeats, look-around, references. They are refused.
"""

from __future__ import annotations

import re

MOST_CHARS = 200
MOST_REPEATS = 3
MOST_WHOLE_CHARS = 600
MOST_WHOLE_REPEATS = 5
MOST_NAME_CHARS = 128
_TAKEN = re.compile(r"(?:[\w.|^$*+()-]|\\[.dwb-])*", re.ASCII)
_REFUSED = re.compile(r"\(\?|\)[*+]|[*+][*+]")
# other spellings of what is taken: groups that nobody refers to, short repeats before long ones
_PLAINER = (("(?:", "("), ("*?", "*"), ("+?", "+"), (r"[\d]{1,}", r"\d+"))


def matches_end(pattern: str, name: str) -> bool:
    """Say whether the pattern is the whole of a dotted name, or of its last parts. ValueError for
    one that is not taken."""
    compiled = _compiled(pattern, MOST_CHARS, MOST_REPEATS)
    if len(name) > MOST_NAME_CHARS:
        return False
    starts = [0, *(place + 1 for place, sign in enumerate(name) if sign == ".")]
    return any(compiled.fullmatch(name, start) for start in starts)


def matches_whole(pattern: str, name: str) -> bool:
    """Say whether the pattern is the whole of a dotted name. It may be longer than that of an end,
    and have more repeats, since it is tried once a name. ValueError for one that is not taken."""
    for theirs, plain in _PLAINER:
        pattern = pattern.replace(theirs, plain)
    compiled = _compiled(pattern, MOST_WHOLE_CHARS, MOST_WHOLE_REPEATS)
    return len(name) <= MOST_NAME_CHARS and compiled.fullmatch(name) is not None


def _compiled(pattern: str, most_chars: int, most_repeats: int) -> re.Pattern[str]:
    is_taken = (
        len(pattern) <= most_chars
        and _TAKEN.fullmatch(pattern) is not None
        and _REFUSED.search(pattern) is None
        and sum(pattern.count(sign) for sign in "*+") <= most_repeats
    )
    if not is_taken:
        raise ValueError("is not supported; name modules by letters, '.', '.*', and '|'")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not supported: {error}") from None
