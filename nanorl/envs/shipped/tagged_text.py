"""What several environments read in a turn: the text between two tags, and how alike two texts are.

The rules are strict on purpose. Whoever says several answers has said none, so listing all that
might be right pays nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CELLS = 1_000_000
"""The most comparisons of one `lcs_ratio`: a policy may write a lot."""


def tagged(text: str, tag: str) -> str | None:
    """The text between `<tag>` and `</tag>`, without blanks at its ends; None unless the text has
    exactly one such pair."""
    marks = list(re.finditer(rf"<(/?){re.escape(tag)}>", text))
    if [mark.group(1) for mark in marks] != ["", "/"]:
        return None
    return text[marks[0].end() : marks[1].start()].strip()


def lcs_ratio(given: Sequence[str], expected: Sequence[str]) -> float:
    """Twice the length of the longest common subsequence over both lengths: 1.0 for equals alone.

    0.0 where one is empty, or so long that it cannot be much alike.
    """
    if not given or not expected or len(given) * len(expected) > _CELLS:
        return 0.0
    row = [0] * (len(expected) + 1)
    for one in given:
        diagonal = 0
        for place, other in enumerate(expected, 1):
            above = row[place]
            row[place] = diagonal + 1 if one == other else max(above, row[place - 1])
            diagonal = above
    return 2 * row[-1] / (len(given) + len(expected))
