"""What an environment server and its client say to each other, in JSON.

    GET  /health                          who is there                      -> ServerInfo
    GET  /tasks?split=train&seed=&place=&n=   of a step; or of a seed,
               split=heldout               that draws held-out ones         -> TasksReply
    POST /reset  ResetBody                a task, or a seed that draws one  -> ResetReply
    POST /step   StepBody                 a turn of the policy              -> StepReply
    POST /score  ScoreBody                the rollout and its transcript    -> ScoreReply
    POST /close  EpisodeBody                                                -> Closed

Errors are {"error": {"message": ...}}: 400 and 422 the client's doing, 401 the key, 404 no such
episode, 429 no room for another, 5xx the environment's. Both sides read with these models, so what
is of another kind is refused where it arrives.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanoengine.text.chat_template import Message
from nanorl.envs.base import Opening, TimeStep
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.rollout_json import from_json
from nanorl.task import Task
from nanorl.types import Rollout

Split = Literal["train", "heldout"]
Said = str | list[Message]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ServerInfo(_Wire):
    """The facts that a run has to know of the environment before it begins."""

    name: str
    loop: str
    has_tools: bool
    defaults: dict[str, Any]
    num_episodes: int
    max_episodes: int


class WireTask(_Wire):
    """A `Task`; what subclasses add stays where the task was drawn."""

    prompt: Said
    answer: Any = None
    kind: str = "task"
    files: dict[str, str] = {}
    data: dict[str, Any] = {}
    agent: str = ""
    task_id: str = ""
    split: str = ""

    @classmethod
    def of(cls, task: Task) -> WireTask:
        if task.pictures:
            raise ValueError(
                f"task {task.task_id} shows pictures, which do not travel to or from an "
                "environment at an address: play it in the run itself"
            )
        return cls(**{name: getattr(task, name) for name in cls.model_fields})

    def task(self) -> Task:
        return Task(**{name: getattr(self, name) for name in WireTask.model_fields})


class TasksReply(_Wire):
    tasks: list[WireTask]
    fingerprint: str = ""


class ResetBody(_Wire):
    """`task`, or else the first one of `seed`."""

    task: WireTask | None = None
    seed: int = Field(default=0, ge=0)
    is_tool_enabled: bool = True


class ResetReply(_Wire):
    episode: str
    task: WireTask
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def opening(self) -> Opening:
        return Opening(messages=self.messages, tools=self.tools)


class EpisodeBody(_Wire):
    episode: str


class StepBody(EpisodeBody):
    text: str


class StepReply(_Wire):
    """A `TimeStep`, with the messages that carry the observation to the policy."""

    observation: Said | None
    messages: list[Message]
    is_done: bool
    answer: str | None
    reward: float
    metrics: dict[str, float]

    @classmethod
    def of(cls, step: TimeStep, messages: list[Message]) -> StepReply:
        return cls(
            observation=step.observation,
            messages=[dict(one) for one in messages],
            is_done=step.is_done,
            answer=step.answer,
            reward=step.reward,
            metrics=dict(step.metrics),
        )

    def time_step(self) -> TimeStep:
        """ValueError for one that neither ends nor goes on."""
        if self.is_done != (self.observation is None):
            raise ValueError("an episode goes on or is observed")
        return TimeStep(
            observation=self.observation,
            is_done=self.is_done,
            answer=self.answer,
            reward=self.reward,
            metrics=self.metrics,
        )


class WireTranscript(_Wire):
    messages: list[Message]
    text: str
    answer: str | None
    is_truncated: bool

    @classmethod
    def of(cls, transcript: Transcript) -> WireTranscript:
        return cls(
            messages=[dict(one) for one in transcript.messages],
            text=transcript.text,
            answer=transcript.answer,
            is_truncated=transcript.is_truncated,
        )

    def transcript(self) -> Transcript:
        return Transcript(**{name: getattr(self, name) for name in WireTranscript.model_fields})


class ScoreBody(EpisodeBody):
    rollout: dict[str, Any]
    """As of `rollout_json.to_json`."""
    transcript: WireTranscript

    def read_rollout(self) -> Rollout:
        """ValueError where it is none."""
        try:
            return from_json(self.rollout)
        except (AssertionError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"rollout: {type(error).__name__}: {error}") from error


class Closed(_Wire):
    """The episode is gone."""


class ScoreReply(_Wire):
    total: float
    turns: list[float] = []
    parts: dict[str, float] = {}

    @classmethod
    def of(cls, score: Score) -> ScoreReply:
        return cls(total=score.total, turns=score.turns, parts=score.parts)

    def score(self) -> Score:
        return Score(self.total, self.turns, self.parts)
