"""What truncation had kept, token by token, from an engine's answers into the rollout.

    kept = KeptNotes(generator)
    rollout = kept.noted(await replace(agent, generator=kept).play(task, env, ...))

A rollout is made of tokens by whoever plays it, a loop, sub-agents, a program behind an endpoint;
none of them carries what was kept. So it is taken from what the engine has answered to this
rollout, and found again by the tokens: a sampled token stands in a sequence behind the prompt that
it was asked for with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nanoengine.spans import content_ids
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.context import Generator
from nanorl.agents.loop import Agent
from nanorl.envs.base import Environment
from nanorl.task import Task
from nanorl.types import Branch, Rollout


class _Answer(NamedTuple):
    prompt: list[int]
    ids: list[int]
    logps: list[float]
    kept: list[list[int]]


class KeptNotes:
    """The generator of one rollout, which notes what every answer says was kept."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._answers: list[_Answer] = []

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        output = await self._generator.generate(ids, params)
        if len(output.top_logps) != len(output.ids):
            raise ValueError(
                f"an answer of {len(output.ids)} tokens says what was kept at "
                f"{len(output.top_logps)}: the engine does not report it (logps_mode='kept')"
            )
        kept = [sorted(one for one, _ in top) for top in output.top_logps]
        self._answers.append(
            _Answer(content_ids(list(ids), params.images), output.ids, output.logps, kept)
        )
        return output

    def noted(self, rollout: Rollout) -> Rollout:
        """The rollout, with what was kept in all its sequences. `ValueError` where a trained token
        is none of the answers'."""
        rollout.kept = self._kept(rollout.sequences[0], rollout.rollout_id)
        for branch in rollout.branches:
            branch.kept = self._kept(branch, rollout.rollout_id)
        return rollout

    def _kept(self, sequence: Branch, rollout_id: str) -> list[list[int]]:
        keys = sequence.keys
        kept: list[list[int]] = [[] for _ in keys]
        for answer in self._answers:
            start = len(answer.prompt)
            if keys[:start] != answer.prompt:
                continue
            rows = zip(answer.ids, answer.logps, answer.kept, strict=True)
            for place, (token, logp, ids) in enumerate(rows, start):
                # Two answers to one prompt may begin alike, under other weights: each log-prob is
                # that of its own answer. A turn's end may have been taken back (tokens.py).
                if not _is_here(sequence, place, token, logp):
                    break
                if sequence.loss_mask[place]:
                    kept[place] = ids
        for place, is_action in enumerate(sequence.loss_mask):
            if is_action and sequence.tokens[place] not in kept[place]:
                raise ValueError(
                    f"rollout {rollout_id}: nothing says what was kept when its token {place} was "
                    "drawn, so it has no log-prob to train with; leave --rl.top-p, --rl.min-p and "
                    "--rl.top-k out with this agent"
                )
        return kept


def _is_here(sequence: Branch, place: int, token: int, logp: float) -> bool:
    if place >= len(sequence.tokens) or sequence.tokens[place] != token:
        return False
    return not sequence.loss_mask[place] or sequence.logps[place] == logp


@dataclass(frozen=True, kw_only=True)
class NotingAgent(Agent):
    """An agent whose rollouts hold what was kept, where their sampling asks for it."""

    inner: Agent
    """Plays them."""

    async def play(
        self,
        task: Task,
        env: Environment,
        *,
        group_id: str,
        rollout_id: str,
        sampling: SamplingParams,
    ) -> Rollout:
        """One rollout, as `Agent.play`."""
        names = {"group_id": group_id, "rollout_id": rollout_id}
        if sampling.logps_mode != "kept":  # an evaluation's, or a demonstrator's
            return await self.inner.play(task, env, sampling=sampling, **names)
        kept = KeptNotes(self.inner.generator)
        inner = replace(self.inner, generator=kept)
        return kept.noted(await inner.play(task, env, sampling=sampling, **names))


def noting(make_agent: Callable[..., Agent]) -> Callable[..., Agent]:
    """Make the same agents, with what was kept in their rollouts."""

    def make(**parts: Any) -> Agent:
        inner = make_agent(**parts)
        return NotingAgent(
            generator=inner.generator, tokenizer=inner.tokenizer, limits=inner.limits, inner=inner
        )

    return make
