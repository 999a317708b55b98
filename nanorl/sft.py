"""The warm start: supervised steps on traces that a scripted teacher plays in the real environment.

The teacher takes the engine's place in the ordinary agent loop (`ScriptedGenerator`), so its traces
obey the same token rules as rollouts: its text is encoded once, ends with the end-of-turn token,
and alone carries loss; observations are what the sandbox really printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nanoengine.model.tokenizer import ChatTokenizer
from nanoengine.packing import Sample
from nanoinfer.sampling import Output, SamplingParams
from nanorl.types import Rollout


class Script(Protocol):
    """A teacher's trace in the making (data/teachers.py)."""

    def next_action(self, history: Sequence[str]) -> str: ...


class RecordingEnv:
    """Passes everything on to an environment and keeps the observations for the script."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observations: list[str] = []

    async def step(self, action: str) -> Any:
        result = await self.env.step(action)
        if result.observation is not None:
            self.observations.append(result.observation)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class ScriptedGenerator:
    """Answers like an inference engine, with a script's text instead of a model's."""

    def __init__(
        self,
        script: Script,
        observations: Callable[[], Sequence[str]],
        tokenizer: ChatTokenizer,
        end_of_turn_id: int,
    ) -> None:
        self.script = script
        self.observations = observations
        self.tokenizer = tokenizer
        self.end_of_turn_id = end_of_turn_id

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        text = self.script.next_action(self.observations())
        new_ids = [*self.tokenizer.encode(text, allow_special=True), self.end_of_turn_id]
        return Output(
            ids=new_ids,
            logps=[0.0] * len(new_ids),
            versions=[0] * len(new_ids),
            finish_reason="stop",
        )


def sft_samples(rollouts: Sequence[Rollout]) -> list[Sample]:
    """Samples whose loss is on the action tokens; rollouts without one are left out. All are of
    one group: the system prompt that they begin with is forwarded once."""
    return [
        Sample(tokens=rollout.tokens, loss_mask=rollout.loss_mask, group="traces")
        for rollout in rollouts
        if rollout.num_action_tokens
    ]


def drill_samples(drills: Sequence[tuple[list[int], list[int]]]) -> list[Sample]:
    """Samples of (ids, loss mask) pairs (data/drills.py)."""
    return [Sample(tokens=ids, loss_mask=mask) for ids, mask in drills]
