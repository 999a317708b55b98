"""What an environment is: it opens an episode with messages and answers every action.

An environment belongs to one rollout. It does not score: the answer it hands back is compared with
the hidden one by `nanorl.rewards`, on the host, after the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanorl.envs.actions import ToolFormat
from nanorl.types import Task


class InfrastructureError(RuntimeError):
    """The infrastructure failed, not the program: the rollout gets status FAILED and is retried."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The answer to one action. `observation` is None exactly when the episode is over."""

    observation: str | None = None
    is_done: bool = False
    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.is_done == (self.observation is None), "an episode goes on or is observed"


class Environment(Protocol):
    """One episode. `step` raises `InfrastructureError` for what is not the program's doing."""

    @property
    def format(self) -> ToolFormat: ...

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        """The opening chat."""
        ...

    async def step(self, action_text: str) -> StepResult: ...

    async def close(self) -> None:
        """Give back what the episode holds; called exactly once, whatever happened."""
        ...


def format_observation(text: str, form: ToolFormat) -> list[dict[str, Any]]:
    """The messages that carry an observation back to the model."""
    return [{"role": form.observation_role, "content": form.observation_prefix + text}]
