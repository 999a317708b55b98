"""ECHO: a cross-entropy on what tools and environments answered (arXiv 2605.24517)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanoengine.packing import Sample
from nanorl.algorithms.batch_scoring import Scoring, SpeechMask
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.segments import required
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.grpo import BatchScorer, Field, LossBatch, OwnedSample
from nanorl.types import Branch, Rollout


class ObservationLoss(Modifier):
    """`observation_coef` λ: `λ·Σ share·(−log π_θ)` over the tokens of observations."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.coef = spec.observation_coef

    def finish(
        self,
        rollouts: Sequence[Rollout],
        owned: list[OwnedSample],
        scoring: BatchScorer | None,
        metrics: dict[str, float],
    ) -> list[OwnedSample]:
        """The samples with observations in their loss masks; counts `observed_tokens`."""
        scaffold = scoring.scaffold if isinstance(scoring, Scoring) else None
        trained = with_observations(rollouts, owned, scaffold)
        shares = [share for sample in trained for share in sample.fields[Field.OBSERVATION]]
        metrics["observed_tokens"] = float(sum(share > 0 for share in shares))
        pairs = zip(owned, trained, strict=True)
        return [one._replace(sample=sample) for one, sample in pairs]

    def term(self, logp_T: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum, and it without λ."""
        share_T = required(batch.observation_T, "observation_T", "observation_coef")
        # Not a product of all: 0·inf would be NaN.
        loss = -(share_T * torch.where(share_T > 0, logp_T, 0.0)).sum()
        return self.coef * loss, {"observation_loss": loss.detach()}


def with_observations(
    rollouts: Sequence[Rollout], owned: Sequence[OwnedSample], scaffold: SpeechMask | None
) -> list[Sample]:
    """The samples with the tokens of observations in their loss masks, each with the same share of
    a cross-entropy over all of its minibatch."""
    by_id = {rollout.rollout_id: rollout.sequences for rollout in rollouts}
    found = [_observations(by_id[one.place[0]][one.place[1]], scaffold) for one in owned]
    totals: Counter[int] = Counter()
    for one, observed in zip(owned, found, strict=True):
        totals[one.minibatch] += sum(observed)
    shares = [1 / max(totals[one.minibatch], 1) for one in owned]
    return [
        replace(
            one.sample,
            loss_mask=[int(m or o) for m, o in zip(one.sample.loss_mask, observed, strict=True)],
            fields={**one.sample.fields, Field.OBSERVATION: [share * o for o in observed]},
        )
        for one, observed, share in zip(owned, found, shares, strict=True)
    ]


def _observations(sequence: Branch, scaffold: SpeechMask | None) -> list[int]:
    """1 for the tokens of what a turn of the policy was answered, before its next."""
    is_observed = [0] * len(sequence.tokens)
    for span in sequence.turn_spans:
        place = slice(span.action_end, span.observation_end)
        tokens = sequence.tokens[place]
        is_observed[place] = [1] * len(tokens) if scaffold is None else scaffold.said(tokens)
    return [o if not m else 0 for o, m in zip(is_observed, sequence.loss_mask, strict=True)]
