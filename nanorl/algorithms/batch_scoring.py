"""Scoring: what models say of the samples of a batch, beside the policy that sampled them.

The trainer's own policy where old log-probs are read, a reference, a teacher, a critic. GRPO asks
nobody. An `AlgorithmSpec` says what it needs (`needs_ref_logp` and its like).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.packing import Sample, TopTokens
from nanorl.algorithms.entropy_mask import with_choice
from nanorl.algorithms.self_distillation import aligned, aligned_top, teacher_samples
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import samples_of, with_field
from nanorl.grpo import Field
from nanorl.types import Rollout, check_logps


class SpeechMask(Protocol):
    """Tells what an environment said from what a chat template put around it."""

    def said(self, tokens: Sequence[int]) -> list[int]:
        """1 for the tokens of an observation that the environment said, else 0."""
        ...


ScoreFn = Callable[[Sequence[Sample]], Sequence[Tensor]]
"""Samples to one tensor each, aligned with its tokens."""

TopFn = Callable[[Sequence[Sample]], Sequence[TopTokens]]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Names who scores a batch beside the policy that sampled it; each is called at most once."""

    old: ScoreFn | None = None
    """The trainer's policy before the update, where the advantages read its log-probs and it is
    not the policy that sampled; without it they read those of the rollouts."""
    sharp: ScoreFn | None = None
    """The same at half the temperature, where the advantages need to know how sharp it was."""
    reference: ScoreFn | None = None
    teacher: ScoreFn | None = None
    """Whoever reads hindsight in place of the prompts, where a loss compares sampled tokens."""
    top: TopFn | None = None
    """The teacher, with hindsight or without, where a loss compares its likeliest tokens."""
    values: ScoreFn | None = None
    entropies: ScoreFn | None = None
    """The entropies of the trainer's policy before the update, where they choose the tokens that
    learn."""
    scaffold: SpeechMask | None = None
    """Tells what an environment said from what the chat template put around it (ECHO); without it
    all counts that follows a turn."""
    known: Mapping[str, Mapping[Field, Sequence[Tensor]]] = field(default_factory=dict)
    """What somebody has said before, by rollout_id: a tensor for each sequence of the rollout. A
    field that is known of all rollouts of a batch is not asked for again."""

    def scorers(self) -> list[tuple[Field, ScoreFn]]:
        """Those who are there, with the field that each of them writes."""
        scorers = {
            Field.OLD_LOGP: self.old,
            Field.SHARP_LOGP: self.sharp,
            Field.REF_LOGP: self.reference,
            Field.VALUE: self.values,
        }
        return [(name, score) for name, score in scorers.items() if score is not None]

    def apply(
        self, spec: AlgorithmSpec, rollouts: Sequence[Rollout], samples: list[Sample]
    ) -> list[Sample]:
        """The samples with the word of everybody whom the advantages or the loss depend on."""
        samples = _scored(rollouts, samples, self)
        samples = _taught(rollouts, samples, spec, self)
        if self.entropies is None:
            return samples
        entropies = self.entropies(samples)
        _check_values(rollouts, entropies, "the model behind 'entropies'")
        return with_choice(samples, entropies, spec.entropy_share)


def score_group(
    rollouts: Sequence[Rollout], version: int, scoring: Scoring
) -> dict[str, dict[Field, list[Tensor]]]:
    """The scores that `scoring` gives rollouts before their batch is complete, as
    `Scoring.known`."""
    samples = _scored(rollouts, samples_of(rollouts, version), scoring)
    found: dict[str, dict[Field, list[Tensor]]] = {}
    rest = iter(samples)
    for rollout in rollouts:
        own = list(islice(rest, len(rollout.sequences)))
        found[rollout.rollout_id] = {
            name: [torch.tensor(sample.fields[name]) for sample in own]
            for name, _ in scoring.scorers()
        }
    return found


def _scored(rollouts: Sequence[Rollout], samples: list[Sample], scoring: Scoring) -> list[Sample]:
    """The samples with the word of everybody whom the advantages or the loss depend on."""
    for name, score in scoring.scorers():
        said = [scoring.known.get(rollout.rollout_id, {}).get(name) for rollout in rollouts]
        if all(one is not None for one in said):
            tensors: Sequence[Tensor] = [tensor for one in said for tensor in one or ()]
        else:
            tensors = score(samples)
        samples = with_field(samples, name, tensors)
        _check_values(rollouts, tensors, f"the model behind {str(name)!r}")
    return samples


def _taught(
    rollouts: Sequence[Rollout], samples: list[Sample], spec: AlgorithmSpec, scoring: Scoring
) -> list[Sample]:
    """The samples with the word of a teacher that reads hindsight, or that names its likeliest
    tokens."""
    if scoring.teacher is not None:
        judged = scoring.teacher(teacher_samples(rollouts, samples))
        values = aligned(rollouts, samples, judged)
        _check_values(rollouts, values, "the teacher")
        samples = with_field(samples, Field.TEACHER_LOGP, values)
    if scoring.top is not None:
        if spec.has_hindsight:
            tops = scoring.top(teacher_samples(rollouts, samples))
            tops = aligned_top(rollouts, samples, tops)
        else:
            tops = scoring.top(samples)
        _check_values(rollouts, [top.logps.sum(1) for top in tops], "the teacher")
        samples = [replace(one, top=top) for one, top in zip(samples, tops, strict=True)]
    return samples


def _check_values(rollouts: Sequence[Rollout], values: Sequence[Tensor], who: str) -> None:
    given = iter([value.tolist() for value in values])
    for rollout in rollouts:
        check_logps(rollout, list(islice(given, len(rollout.sequences))), who)
