"""The contract of an environment: it opens an episode with messages, answers every turn, and
scores.

An `Environment` is one episode, of one rollout. Whoever writes an environment normally writes the
short form (env.py), which becomes one (env_episode.py).
Left out: where tasks come from and who shows how they are played (env_kind.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Parser
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.sandbox.base import Sandbox
from nanorl.task import Task
from nanorl.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The messages that the policy reads first, and the schemas of the tools that its chat template
    lists (None where the messages describe them, or there are none)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    parser: Parser | None = None
    """How tools are called, for loops that add some of their own; None where there are none."""


@dataclass(frozen=True, kw_only=True)
class TimeStep:
    """The environment's reply to one turn. `observation` is None exactly when the episode ends.

    TimeStep(observation="42", metrics={"num_executions": 1.0})
    TimeStep(is_done=True, answer="42")
    """

    observation: str | list[Message] | None = None
    is_done: bool = False
    answer: str | None = None
    reward: float = 0.0
    """The environment's own reward for this turn, beside the score of the whole episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.is_done == (self.observation is None), "an episode goes on or is observed"


class Environment(Protocol):
    """One episode. Every method may raise `InfrastructureError` where the policy is not to blame.

    Calls come one after the other; `close` comes once, whatever happened.
    """

    async def reset(self, task: Task) -> Opening:
        """Begin the episode."""
        ...

    async def step(self, text: str) -> TimeStep:
        """Answer a turn of the policy, given without its end-of-turn token."""
        ...

    @property
    def subject(self) -> Any:
        """The object that plays the episode, for rewards that look at its state; None where it
        lives in another process."""
        ...

    def format_observation(self, observation: str | list[Message]) -> list[Message]:
        """The messages that carry an observation to the policy."""
        ...

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        """Score the episode, which has ended or was cut off."""
        ...

    async def close(self) -> None:
        """Give back what the episode holds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services that a run lends to its episodes."""

    tokenizer: ChatTokenizer
    sandbox: Sandbox | None
    """None where nothing in the environment runs programs."""
    timeout_s: float
    """Wall-clock limit of one call of a tool."""
    is_tool_enabled: bool = True
    """False: every call of a tool is refused, to measure what the tools are worth."""


class TeacherError(ValueError):
    """A demonstrator cannot go on; the message names the environment, its teacher and the line."""
