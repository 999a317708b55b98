"""A weighted sum of rewards, each recorded by its name.

    WeightedReward({"rule": (1.0, RuleReward()), "short": (-0.1, as_reward(length))})

The total is the sum of weight times total, the turns likewise; `parts` holds every reward's own
total before its weight. All are asked side by side. One that says nothing fails the rollout: a
total without it would be another reward.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from nanorl.envs.rewards.base import Reward, Score, Transcript
from nanorl.envs.rewards.function_reward import as_reward, score_rollout
from nanorl.task import Task
from nanorl.types import Rollout

if TYPE_CHECKING:
    from nanorl.envs.rewards.judge_questions import AsksJudge


class WeightedReward:
    """The rewards by name, each with its weight; a plain function is a reward too."""

    def __init__(self, rewards: Mapping[str, tuple[float, Reward]]) -> None:
        """ValueError without any reward, and for a weight that is no finite number or zero."""
        if not rewards:
            raise ValueError("a weighted sum of no rewards: give at least one")
        for name, (weight, _) in rewards.items():
            if not math.isfinite(weight) or weight == 0:
                raise ValueError(f"the weight of {name} is {weight}: it must be finite and not 0")
        self._rewards = {name: (weight, as_reward(one)) for name, (weight, one) in rewards.items()}

    async def score(self, rollout: Rollout, task: Task, transcript: Transcript) -> Score:
        calls = [score_rollout(one, rollout, task, transcript) for _, one in self._rewards.values()]
        scores = await asyncio.gather(*calls)
        weights = [weight for weight, _ in self._rewards.values()]
        parts: dict[str, float] = {}
        for name, score in zip(self._rewards, scores, strict=True):
            parts[name] = score.total
            parts |= {f"{name}/{part}": value for part, value in score.parts.items()}
        turns = zip_longest(*(score.turns for score in scores), fillvalue=0.0)
        return Score(
            total=_dot(weights, [score.total for score in scores]),
            turns=[_dot(weights, turn) for turn in turns],
            parts=parts,
        )

    @property
    def judges(self) -> tuple[AsksJudge, ...]:
        """Those among them, in their order."""
        found = (getattr(one, "judges", ()) for _, one in self._rewards.values())
        return tuple(judge for judges in found for judge in judges)

    def close(self) -> None:
        """Close those rewards that hold something."""
        for _, one in self._rewards.values():
            close = getattr(one, "close", None)
            if close is not None:
                close()


def _dot(weights: list[float], values: list[float] | tuple[float, ...]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))
