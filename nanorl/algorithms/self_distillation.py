"""What a teacher with hindsight reads: its own prompt, and then the rollout's tokens.

SDFT (Shenfeld et al., arXiv 2601.19897) and SDPO (Hübotter et al., arXiv 2601.20802): the policy
samples from the plain prompt, and the same policy, with a demonstration or feedback in its prompt,
says how likely each of these tokens was in its opinion. The observations of a rollout stay, for
they are among its tokens. The prompts are written by algorithms/hindsight.py. The teacher of both
papers is an average of the policy over time (scorers/averaged_teacher.py); by default the present
one teaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nanoengine.packing import Sample, TopTokens
from nanoengine.spans import ImageSpan
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.types import Rollout


class Hindsight(Modifier):
    """`hindsight`: rollouts for which the teacher has nothing to read take no part."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        pass

    def select(self, rollouts: list[Rollout], metrics: dict[str, float]) -> list[Rollout]:
        """Those that a teacher can judge; counts the others."""
        judged = with_hindsight(rollouts)
        metrics["num_without_hindsight"] = float(len(rollouts) - len(judged))
        return judged


def with_hindsight(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those that a teacher can judge. Of their sequences only the main one counts: a history or a
    sub-agent's conversation has a prompt of its own."""
    return [
        replace(
            one,
            branches=[replace(b, loss_mask=[0] * len(b.tokens)) for b in one.branches],
        )
        for one in rollouts
        if one.hindsight and one.turn_spans
    ]


def teacher_samples(rollouts: Sequence[Rollout], samples: Sequence[Sample]) -> list[Sample]:
    """For the main sequence of each rollout what the teacher reads; `samples` are those of all
    sequences of all rollouts, in their order."""
    mains = (sample for _, sample in _mains(rollouts, samples))
    return [
        replace(
            sample,
            tokens=rollout.hindsight + rollout.tokens[_start(rollout) :],
            loss_mask=[0] * len(rollout.hindsight) + rollout.loss_mask[_start(rollout) :],
            fields={},
            images=_teacher_images(rollout),
        )
        for rollout, sample in zip(rollouts, mains, strict=True)
    ]


def _teacher_images(rollout: Rollout) -> list[ImageSpan]:
    """The pictures of the teacher's prompt, and of the turns behind it in their new places."""
    start = _start(rollout)
    by = len(rollout.hindsight) - start
    turns = [replace(one, start=one.start + by) for one in rollout.images if one.start >= start]
    return [*rollout.hindsight_images, *turns]


def aligned(
    rollouts: Sequence[Rollout], samples: Sequence[Sample], judged: Sequence[Tensor]
) -> list[Tensor]:
    """The teacher's values ([its tokens] or [its tokens, K]) at the tokens of `samples`; 0 before
    the first action and in sequences that it did not read."""
    found = [judged[0].new_zeros(len(s.tokens), *judged[0].shape[1:]) for s in samples]
    mains = [place for place, _ in _mains(rollouts, samples)]
    for rollout, place, values in zip(rollouts, mains, judged, strict=True):
        found[place][_start(rollout) :] = values[len(rollout.hindsight) :]
    return found


def aligned_top(
    rollouts: Sequence[Rollout], samples: Sequence[Sample], judged: Sequence[TopTokens]
) -> list[TopTokens]:
    """The same of top tokens."""
    ids = aligned(rollouts, samples, [top.ids for top in judged])
    logps = aligned(rollouts, samples, [top.logps for top in judged])
    return [TopTokens(*pair) for pair in zip(ids, logps, strict=True)]


def _start(rollout: Rollout) -> int:
    """The place of the first action, where the prompt ends."""
    return rollout.turn_spans[0].action_start


def _mains(rollouts: Sequence[Rollout], samples: Sequence[Sample]) -> list[tuple[int, Sample]]:
    places, place = [], 0
    for rollout in rollouts:
        places.append((place, samples[place]))
        place += len(rollout.sequences)
    return places
