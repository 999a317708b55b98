"""Only the tokens at which the policy was least certain learn (arXiv 2506.01939).

Most tokens follow from those before them; what decides where a text goes are the few with a high
entropy, and a share of .2 teaches as much as all of them ("Beyond the 80/20 rule"). The others get
an advantage of 0 and stay in the denominators, as in the paper's objective and in TRL
(`top_entropy_quantile`); a KL to the reference and an entropy bonus hold for all.

The choice is made once, over all action tokens of the optimizer batch, from the trainer's entropies
before the update, and depends neither on the order of the tokens nor on how the work is split. The
paper's code chooses within a micro-batch, by the policy as it is then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanoengine.packing import Sample
from nanorl.algorithms.covariance import lowest
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import with_field
from nanorl.grpo import AdvantageBatch, BatchScorer, Field, OwnedSample
from nanorl.types import Rollout


class EntropyMask(Modifier):
    """`entropy_share`: the advantage is 0 but at the tokens with the highest entropy."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        pass

    def mark(
        self, samples: list[Sample], batch: AdvantageBatch, advantage_T: Tensor
    ) -> list[Sample]:
        """The samples with their advantages where `Scoring` has chosen."""
        if any(Field.CHOSEN not in sample.fields for sample in samples):
            raise ValueError("the policy's entropies are missing: entropy_share reads them")
        return [_kept(sample) for sample in samples]

    def finish(
        self,
        rollouts: Sequence[Rollout],
        owned: list[OwnedSample],
        scoring: BatchScorer | None,
        metrics: dict[str, float],
    ) -> list[OwnedSample]:
        """The same samples; counts `high_entropy_tokens`."""
        metrics["high_entropy_tokens"] = sum(sum(o.sample.fields[Field.CHOSEN]) for o in owned)
        return owned


def _kept(sample: Sample) -> Sample:
    pairs = zip(sample.fields[Field.ADVANTAGE], sample.fields[Field.CHOSEN], strict=True)
    advantages = [value * is_chosen for value, is_chosen in pairs]
    return replace(sample, fields={**sample.fields, Field.ADVANTAGE: advantages})


def with_choice(
    samples: Sequence[Sample], entropies: Sequence[Tensor], share: float
) -> list[Sample]:
    """The samples with 1 in `Field.CHOSEN` for the tokens that learn."""
    mask_T = torch.tensor([m for sample in samples for m in sample.loss_mask])
    entropy_T = torch.cat([entropy.cpu() for entropy in entropies])
    chosen_T = choose_by_entropy(entropy_T, mask_T, share)
    return with_field(samples, Field.CHOSEN, chosen_T.split([len(one.tokens) for one in samples]))


def choose_by_entropy(entropy_T: Tensor, mask_T: Tensor, share: float) -> Tensor:
    """fp32 [T], 1 for the share of the action tokens with the highest entropy, ties included, and
    for at least one where there is any."""
    is_action_T = mask_T.bool()
    chosen_T = torch.zeros(len(mask_T))
    chosen_T[is_action_T] = lowest(-entropy_T[is_action_T], share).float()
    return chosen_T
