"""The contract of an environment: it opens an episode with messages and answers every action.

An environment belongs to one rollout. It does not score: the answer it hands back is compared with
the hidden one by `nanorl.rewards`, on the host, after the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanorl.envs.actions import ActionFormat
from nanorl.types import Task


@dataclass(frozen=True, kw_only=True)
class TimeStep:
    """The environment's reply to one action. `observation` is None exactly when the episode ends.

    TimeStep(observation="42", metrics={"num_executions": 1.0})
    TimeStep(is_done=True, answer="42")
    """

    observation: str | None = None
    is_done: bool = False
    answer: str | None = None
    reward: float = 0.0
    """The environment's own reward for this turn, beside the score of the final answer."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.is_done == (self.observation is None), "an episode goes on or is observed"


class Environment(Protocol):
    """One episode. `step` raises `InfrastructureError` where the program is not to blame."""

    @property
    def format(self) -> ActionFormat: ...

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        """Begin the episode and return the opening chat."""
        ...

    async def step(self, action_text: str) -> TimeStep: ...

    async def close(self) -> None:
        """Give back what the episode holds; called exactly once, whatever happened."""
        ...
