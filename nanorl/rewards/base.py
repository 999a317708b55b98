"""A reward scores a finished rollout on the host: a total, what single turns earned, named parts.

A plain function is enough; it takes what it names of rollout, task, transcript, text, answer and
environment (the object that played the episode):

    def mentions(text, task):
        return float(str(task.answer) in text)

    scored = await score_rollout(as_reward(mentions), rollout, task, transcript)

What a reward cannot say is never zero: None, an exception, NaN and results of another kind are the
infrastructure's failure, and the rollout is played again.
Left out: deadlines and processes of their own (nanorl.hosting), and how a total becomes an
advantage (nanorl.algorithms). Next: rule.py, the plainest of those that come along.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from nanoengine.text.chat_template import Message
from nanorl.types import InfrastructureError, Rollout, Task

PARAMETERS = ("rollout", "task", "transcript", "text", "answer", "environment")


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


@dataclass(frozen=True)
class FunctionReward:
    """A plain function as a reward. It runs in the caller's thread: a slow one belongs in a worker
    (nanorl.hosting), or should be async."""

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            if name not in PARAMETERS or parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.VAR_POSITIONAL,
            ):
                raise ValueError(
                    f"the reward {name_of(self.function)} has a parameter {name!r}; it is called "
                    f"by name with what it wants of: {', '.join(PARAMETERS)}"
                )

    async def score(
        self, rollout: Rollout, task: Task, transcript: Transcript
    ) -> Score | float | None:
        given = {
            "rollout": rollout,
            "task": task,
            "transcript": transcript,
            "text": transcript.text,
            "answer": transcript.answer,
            "environment": transcript.environment,
        }
        parameters = inspect.signature(self.function).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        result = self.function(
            **{name: value for name, value in given.items() if takes_all or name in parameters}
        )
        return await result if inspect.isawaitable(result) else result


def as_reward(given: Any) -> Reward:
    """The reward that a user gave: one that it is already, a class that makes one, or a function.

    ValueError for anything else, and for a function with a parameter that nobody fills.
    """
    if isinstance(given, type):
        return as_reward(given())
    if callable(getattr(given, "score", None)):
        return given
    if callable(given):
        return FunctionReward(given)
    raise ValueError(
        f"{given!r} is no reward: give a function of {', '.join(PARAMETERS)}, or an object with "
        "`async score(rollout, task, transcript)`"
    )


async def score_rollout(
    reward: Reward, rollout: Rollout, task: Task, transcript: Transcript
) -> Score:
    """What the reward says. InfrastructureError where it raises or says nothing that is a score."""
    name = name_of(reward)
    try:
        result = await reward.score(rollout, task, transcript)
    except InfrastructureError:
        raise
    except (Exception, SystemExit) as error:  # the boundary of a plug-in
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise InfrastructureError(
            f"the reward {name} raised {type(error).__name__}: {error} "
            f"({where.filename}:{where.lineno})"
        ) from error
    return as_score(result, name)


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


def name_of(reward: object) -> str:
    """The reward's name in messages and among parts."""
    named = reward.function if isinstance(reward, FunctionReward) else reward
    return getattr(named, "__name__", None) or type(named).__name__


def _number(value: Any, what: str) -> float:
    """Numbers, truth values, and scalars of numpy and torch; what is infinite says nothing."""
    number = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(number, Real) and math.isfinite(number):
        return float(number)
    shown = repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    raise InfrastructureError(f"{what} {shown}: a score is a finite number, or a Score of them")
