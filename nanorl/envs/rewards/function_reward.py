"""A plain function as a reward, and what a reward says as a score.

    def mentions(text, task):
        return float(str(task.answer) in text)

    scored = await score_rollout(as_reward(mentions), rollout, task, transcript)

A function takes what it names of rollout, task, transcript, text, answer and environment (the
object that played the episode).
Left out: deadlines and processes of their own (nanorl.envs.hosting).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanorl.envs.rewards.base import Reward, Score, Transcript, as_score
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

PARAMETERS = ("rollout", "task", "transcript", "text", "answer", "environment")


@dataclass(frozen=True)
class FunctionReward:
    """A plain function as a reward. It runs in the caller's thread: a slow one belongs in a worker
    (nanorl.envs.hosting), or should be async."""

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
    """The score that the reward gives. InfrastructureError where it raises, or returns something
    that is no score."""
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


def name_of(reward: object) -> str:
    """The reward's name in messages and among parts."""
    named = reward.function if isinstance(reward, FunctionReward) else reward
    return getattr(named, "__name__", None) or type(named).__name__
