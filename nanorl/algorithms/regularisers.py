"""Terms beside the policy loss of an action token: a KL to the reference, and entropy."""

from __future__ import annotations

from torch import Tensor

from nanorl.algorithms.divergences import kl
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.segments import required
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.grpo import LossBatch


class KLPenalty(Modifier):
    """`kl_coef`: the estimator `kl_estimator` of the KL to the reference, in the loss."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec

    def token_loss(self, loss_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """`+ kl_coef · KL`."""
        ref_T = required(batch.ref_logp_T, "ref_logp_T", "kl_coef")
        return loss_T + self.spec.kl_coef * kl(self.spec.kl_estimator, logp_T, ref_T, old_T)


class EntropyBonus(Modifier):
    """`entropy_coef`: what the policy leaves open, it may keep open."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.coef = spec.entropy_coef

    def token_loss(self, loss_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """`− entropy_coef · entropy`."""
        return loss_T - self.coef * required(batch.entropy_T, "entropy_T", "entropy_coef")
