"""Silence that pays: a reward under which a rollout that is cut off earns more than one that plays.

It is the commonest mistake in a reward. A wrong move costs a little, a turn that is never finished
costs nothing, and RL soon finds out which of the two is cheaper: the model rambles until its turn
is cut off. `silence_pays` sees it in rollouts. `rehearsed_silence` sees it before there are any,
since an untrained model may never make a move at all: it compares an episode that is cut off in its
first turn with one that says a word without sense in every turn.
Left out: whether the silence was learnt already; then all rollouts are cut off and nothing is left
to compare, which alarms.py says in its own words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import Output, SamplingParams
from nanorl.observability.alarms.finding import Finding, Severity
from nanorl.options.agent_kit import AgentKit
from nanorl.task import Task
from nanorl.types import Rollout, Status

LEAST_OF_EACH = 4
"""Rollouts of either kind, without which nothing is said."""
CLEAR = 3.0
"""Standard errors between the two means: one batch in a thousand shows that by accident."""
NONSENSE = "hm"
"""What no environment asks for, and yet a turn that is read."""
_WHY = "RL reinforces what earns more, so it teaches the model to fall silent"
_REMEDY = (
    "let a turn that plays on cost nothing (leave the negative reward out), or have `score` charge "
    "an episode that was cut off as much as the worst that plays"
)


def silence_pays(rollouts: Sequence[Rollout]) -> Finding | None:
    """Rollouts of one batch: those that were cut off, in a turn or later, against the others."""
    for status in (Status.TRUNCATED_TURN, Status.TRUNCATED_CONTEXT):
        cut = [one.total_reward for one in rollouts if one.status is status and not one.is_success]
        rest = [one.total_reward for one in rollouts if one.status is not status]
        if _is_clearly_more(cut, rest):
            return _finding(
                f"{len(cut)} rollouts that were cut off earn more than the {len(rest)} that play",
                fmean(cut),
                fmean(rest),
            )
    return None


def _is_clearly_more(these: Sequence[float], those: Sequence[float]) -> bool:
    """Say whether the first mean is higher, beyond luck."""
    if min(len(these), len(those)) < LEAST_OF_EACH or not all(map(math.isfinite, (*these, *those))):
        return False
    gap = fmean(these) - fmean(those)
    variance = sum(pvariance(some) / (len(some) - 1) for some in (these, those))
    return gap > 0.0 and gap > CLEAR * math.sqrt(variance)


async def rehearse_silence(kit: AgentKit, task: Task) -> tuple[Rollout, Rollout]:
    """Two episodes of a task without a model: cut off in the first turn, and played badly."""
    silent, playing = [
        await kit.play(task, generator, group_id=name, rollout_id=name, sampling=SamplingParams())
        for name, generator in (
            ("check-silent", Silent()),
            ("check-nonsense", Nonsense(kit.tokenizer)),
        )
    ]
    return silent, playing


def rehearsed_silence(silent: Rollout, playing: Rollout) -> Finding | None:
    """The finding that silence pays, by two episodes; None if it does not, or if either failed."""
    if Status.FAILED in (silent.status, playing.status):
        return None
    if not silent.total_reward > playing.total_reward:
        return None
    return _finding(
        "an episode that is cut off in its first turn earns more than one that plays, if badly",
        silent.total_reward,
        playing.total_reward,
    )


def _finding(seen: str, cut: float, playing: float) -> Finding:
    return Finding(
        name="silence_pays",
        severity=Severity.WARNING,
        seen=f"{seen} ({cut:.3g} against {playing:.3g})",
        why=_WHY,
        remedy=_REMEDY,
    )


class Silent:
    """Answers like an inference engine whose every turn hits the limit of tokens."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        return Output(ids=ids[-1:], logps=[0.0], versions=[0], finish_reason="length")


@dataclass(frozen=True)
class Nonsense:
    """Answers like an inference engine that says `NONSENSE` and ends its turn."""

    tokenizer: ChatTokenizer

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        said = [*self.tokenizer.encode(NONSENSE), min(self.tokenizer.eos_ids)]
        zeros = [0] * len(said)
        return Output(ids=said, logps=[0.0] * len(said), versions=zeros, finish_reason="stop")
