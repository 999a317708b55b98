"""Advantages and losses that are functions of the user's, in a file `mine.py:name`."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

from torch import Tensor

from nanorl.algorithms.option_groups import load_own
from nanorl.group_advantage import compare
from nanorl.grpo import GRPO, AdvantageBatch, LossBatch
from nanorl.policy_loss import ClippedLoss


def own_of_batch(spec: GRPO, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """A function of the user's, of rewards and groups, or of the whole batch."""
    function = load_own("advantage", spec.advantage)
    if len(signature(function).parameters) > 1:
        return compare(function, spec, batch), None
    advantage_T = function(batch)
    if advantage_T.shape != batch.mask_T.shape:
        raise ValueError(
            f"--rl.algorithm.advantage {spec.advantage}: it returned a tensor of shape "
            f"{list(advantage_T.shape)}; of a whole batch it must give each token one number, "
            f"{list(batch.mask_T.shape)}"
        )
    return advantage_T * batch.mask_T, None


class OwnLoss(ClippedLoss):
    """A function of (logp_T, batch), whose batch has the old policy's log-probs."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """The loss of each token, [T], as the function returns it."""
        loss: Tensor = load_own("loss", self.spec.loss)(logp_T, replace(batch, old_logp_T=old_T))
        return loss
