"""Rule rewards: 1.0 if the answer equals the hidden one, else 0.0.

Numbers are compared as exact fractions of their decimal text, never as floats, and only texts that
are plain decimal numbers count as numbers. `eval` has no place here: the answer is hostile input.
Left out: partial credit (a format bonus is learned instead of the task).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from nanorl.envs.rewards.base import Score, Transcript
from nanorl.task import Task
from nanorl.types import Rollout

_NUMBER = re.compile(r"([+-]?)(?:(\d+)(?:\.(\d*))?|\.(\d+))(?:[eE]([+-]?\d+))?")
_MAX_DIGITS = 1000
_MAX_EXPONENT = 400


@dataclass(frozen=True, kw_only=True)
class RuleReward:
    """Compares texts after normalisation, and numbers by value."""

    ignore_case: bool = False
    """Fold upper and lower case before comparing texts."""
    rel_tolerance: str = "0"
    """Relative tolerance for numbers with a fraction, a decimal text such as "1e-6"."""

    def __post_init__(self) -> None:
        tolerance = parse_number(self.rel_tolerance)
        if tolerance is None or not 0 <= tolerance < 1:
            raise ValueError(f"rel_tolerance={self.rel_tolerance!r}: must be a decimal in [0, 1)")

    async def score(self, rollout: Rollout, task: Task, transcript: Transcript) -> Score:
        """1.0 or 0.0. `ValueError` for a task without an answer."""
        if task.answer is None or not (expected := str(task.answer)).strip():
            raise ValueError(
                f"task {task.task_id} has no answer to compare with: give the task one, or score "
                "it with another reward"
            )
        return Score(self(transcript.answer, expected))

    def __call__(self, answer: str | None, expected: str) -> float:
        """1.0 or 0.0; no answer is wrong."""
        return float(answer is not None and self.matches(answer, expected))

    def matches(self, answer: str, expected: str) -> bool:
        if self._normalise(answer) == self._normalise(expected):
            return True
        given, wanted = parse_number(answer), parse_number(expected)
        if given is None or wanted is None:
            return False
        # A whole number is exact: a tolerance would let 1000 pass for 1001.
        if wanted.denominator == 1 and not re.search(r"[.eE]", expected):
            return given == wanted
        tolerance = parse_number(self.rel_tolerance)
        assert tolerance is not None, "checked on construction"
        return abs(given - wanted) <= tolerance * abs(wanted)

    def _normalise(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


def parse_number(text: str) -> Fraction | None:
    """The exact value of a decimal number, or None for any other or an absurdly long text."""
    text = text.strip()
    # isascii: other scripts have digits too, which a checker of answers need not know.
    match = _NUMBER.fullmatch(text) if len(text) <= _MAX_DIGITS and text.isascii() else None
    if match is None:
        return None
    exponent = match.group(5)
    # 1e999999999 would be a fraction of a billion digits.
    if exponent is not None and (len(exponent) > 4 or abs(int(exponent)) > _MAX_EXPONENT):
        return None
    return Fraction(text)
