"""An environment whose rollouts a judge compares, group by group, after they were played.

While a group is played, each episode is scored by the environment itself and its transcript is
noted. Then the judge is asked once about all of them, and its scores become their rewards. If it
ranks them not, the group has failed as a whole: it is what `--rl.batch.spoilt` says of groups that
the machine cost members. An episode of no group, as in an evaluation, keeps the environment's own
score: to be better than others says nothing of one rollout.
Left out: what the judge is asked (rewards/group_judge.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from nanorl.envs.base import Environment, Services
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.judged import JudgedEpisode, JudgedKind
from nanorl.envs.rewards.base import Reward, Score, Transcript
from nanorl.envs.rewards.group_judge import GroupJudgeReward
from nanorl.task import Task
from nanorl.types import REWARD_PART, InfrastructureError, Rollout, Status

JUDGED, OWN = f"{REWARD_PART}group_judge", f"{REWARD_PART}own"
"""Metrics of a rollout: the judge's score, and the environment's."""


class GroupJudgedKind(JudgedKind):
    """`kind`, with groups that `reward` compares."""

    def __init__(self, kind: EnvKind, reward: Reward) -> None:
        super().__init__(kind, reward)
        assert isinstance(reward, GroupJudgeReward), "no other reward scores groups"
        self.notes = Notes(reward)

    def open(self, services: Services) -> Environment:
        return NotedEpisode(self.kind.open(services), self.reward, self.notes)


class Noted(NamedTuple):
    """An episode that was played in a group."""

    transcript: Transcript
    own: float


class NotedEpisode(JudgedEpisode):
    """Notes what the judge will read, and gives the environment's own score."""

    def __init__(self, env: Environment, reward: Reward, notes: Notes) -> None:
        super().__init__(env, reward)
        self._notes = notes

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        own = await self._env.score(rollout, transcript)
        self._notes.add(rollout, Noted(transcript, own.total))
        return own


class Notes:
    """The transcripts of the groups that are being played, for the judge."""

    def __init__(self, reward: GroupJudgeReward) -> None:
        self.reward = reward
        self._groups: dict[str, dict[str, Noted]] = {}  # by group_id, then by rollout_id

    @contextmanager
    def of(self, group_id: str) -> Iterator[None]:
        """Inside, the episodes of a group are noted."""
        self._groups[group_id] = {}
        try:
            yield
        finally:
            del self._groups[group_id]

    def add(self, rollout: Rollout, noted: Noted) -> None:
        """Note an episode, if it is of such a group; a retry replaces the attempt before it."""
        if rollout.group_id in self._groups:
            self._groups[rollout.group_id][rollout.rollout_id] = noted

    async def judged(self, task: Task, group_id: str, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with the judge's scores; FAILED, all of them, where it gives none. Those
        that were played in another environment stay as they are."""
        noted = self._groups[group_id]
        if not all(one.rollout_id in noted for one in rollouts) or not rollouts:
            return list(rollouts)
        seen = [noted[one.rollout_id] for one in rollouts]
        try:
            scores = await self.reward.score_group(task, group_id, [one.transcript for one in seen])
        except InfrastructureError as error:
            return [replace(one, status=Status.FAILED, error=str(error)) for one in rollouts]
        return [
            replace(
                one,
                reward=self.reward.total(score, note.own),
                metrics=one.metrics | {JUDGED: score, OWN: note.own},
            )
            for one, note, score in zip(rollouts, seen, scores, strict=True)
        ]


def notes_of(kind: EnvKind) -> list[Notes]:
    """The notes of an environment whose groups are judged; those of each, where it is several."""
    members = getattr(kind, "members", {"": kind}).values()
    return [one.notes for one in members if isinstance(one, GroupJudgedKind)]


def before_judging(rollout: Rollout) -> Rollout:
    """A judged rollout as it was when it had been played alone; any other as it is."""
    if JUDGED not in rollout.metrics:
        return rollout
    metrics = {name: x for name, x in rollout.metrics.items() if name not in (JUDGED, OWN)}
    return replace(rollout, reward=rollout.metrics[OWN], metrics=metrics)
