"""A reward scores a finished rollout on the host: a total, what single turns earned, named parts.

What a reward cannot say is never zero: None, an exception, NaN and results of another kind are the
infrastructure's failure, and the rollout is played again.
Left out: plain functions as rewards (function_reward.py), and how a total becomes an advantage
(nanorl.algorithms). Next: rule.py, the plainest of those that come along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from nanoengine.text.chat_template import Message
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A rollout as a reader sees it, in words instead of tokens."""

    messages: list[Message]
    """The whole conversation, the system message and what tools said included."""
    text: str
    """The last thing that the policy said."""
    answer: str | None
    """The answer of the policy; None where it was cut off or gave none."""
    is_truncated: bool = False
    """A limit cut the policy off."""
    environment: Any = None
    """The object that played the episode, for a reward that looks at its state."""


@dataclass(frozen=True)
class Score:
    """The verdict on one rollout: `Score(0.7, turns=[0.0, 0.2], parts={"rule": 0.5})`.

    `turns`, one for each turn or none at all, is what turns earned beside the total; `parts` says
    by name what the total is made of, and is recorded, never added.
    """

    total: float
    turns: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Scores rollouts. None and whatever it raises fail the rollout, which is played again."""

    async def score(
        self, rollout: Rollout, task: Task, transcript: Transcript
    ) -> Score | float | None: ...


def as_score(result: Any, name: str) -> Score:
    """The result of the reward `name` as a Score; InfrastructureError for what is none."""
    if not isinstance(result, Score):
        return Score(_number(result, f"the reward {name} returned"))
    what = f"the reward {name} returned {{}} with"
    return Score(
        _number(result.total, what.format("a total")),
        [_number(turn, what.format("turns")) for turn in result.turns],
        {part: _number(value, what.format(part)) for part, value in result.parts.items()},
    )


def _number(value: Any, what: str) -> float:
    """Numbers, truth values, and scalars of numpy and torch; what is infinite says nothing."""
    # Rewards come from numpy and torch as well; neither has to be imported to tell.
    number = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(number, Real) and math.isfinite(number):
        return float(number)
    shown = repr(value)
    # A reward that returned the whole transcript would fill the log.
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    raise InfrastructureError(f"{what} {shown}: a score is a finite number, or a Score of them")
