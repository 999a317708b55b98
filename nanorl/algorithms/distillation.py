"""On-policy distillation: a teacher says how likely the tokens are that the policy sampled.

Sources: OPD (arXiv 2306.13649); its k likeliest tokens: top_k.py. A joint loss
`+λ(log π_θ − log π_T)` has an expected gradient of 0: as an advantage it is right.

`distill_trust_region` δ of `opd` is DPPO's (dppo.py), with the teacher's gain log π_T − log π_θ in
the place of the advantage: a token learns no more where |π_θ − μ| > δ and the teacher would move it
farther. prime-rl masks at 0.2 too, but asks the advantages of rewards for the direction, which are
0 when it distils: what it leaves out are tokens that became less likely by more than 0.2, those
included that the teacher would bring back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanorl.algorithms.dppo import dppo_mask
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.segments import required
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.algorithms.top_k import topk_kl
from nanorl.grpo import AdvantageBatch, LossBatch
from nanorl.policy_loss import ClippedLoss


class TeacherAdvantage(Modifier):
    """`distill_coef`: the teacher's word beside the rewards, `distill`."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.coef = spec.distill_coef

    def advantages(self, batch: AdvantageBatch, advantage_T: Tensor) -> Tensor:
        """The advantages with the teacher's."""
        old_T = required(batch.old_logp_T, "old_logp_T", "distill_coef")
        ref_T = required(batch.ref_logp_T, "ref_logp_T", "distill_coef")
        return distill(advantage_T, old_T, ref_T, batch.mask_T, self.coef)


def distill(
    advantage_T: Tensor, old_logp_T: Tensor, teacher_logp_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """On-policy distillation: `A − λ·(log π_o − log π_T)` on every sampled token."""
    # Not a product with the mask: what stands outside of it may be anything, and 0·NaN is NaN.
    return advantage_T - coef * torch.where(mask_T.bool(), old_logp_T - teacher_logp_T, 0.0)


class OPD(ClippedLoss):
    """`opd` against the reference, or a teacher that reads more than the policy."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        loss_T = opd(logp_T, batch.rollout_logp_T, self._teacher(batch))
        if not self.spec.distill_trust_region:
            return loss_T
        return self._mask(logp_T, batch) * loss_T

    def is_clipped(
        self, ratio_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch
    ) -> Tensor:
        """The tokens that the trust region leaves out."""
        if not self.spec.distill_trust_region:
            return super().is_clipped(ratio_T, logp_T, old_T, batch)
        return self._mask(logp_T, batch) == 0

    def _mask(self, logp_T: Tensor, batch: LossBatch) -> Tensor:
        gain_T, most = self._teacher(batch) - logp_T, self.spec.distill_trust_region
        return dppo_mask("dppo_tv", logp_T, batch.rollout_logp_T, gain_T, (most, most))

    def _teacher(self, batch: LossBatch) -> Tensor:
        is_reference = batch.teacher_logp_T is None
        teacher_T = batch.ref_logp_T if is_reference else batch.teacher_logp_T
        return required(teacher_T, "ref_logp_T", "loss='opd'")


def opd(logp_T: Tensor, rollout_logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """`−sg[log π_T − log π_θ]·π_θ/μ`: the expected gradient is that of KL(π_θ‖π_T)."""
    gain_T = (teacher_logp_T - logp_T).detach()
    return -gain_T * (logp_T - rollout_logp_T).exp()


class TopKDistillation(ClippedLoss):
    """`topk_kl` over the tokens that the teacher holds likeliest."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        own_TK = required(batch.top_logp_TK, "top_logp_TK", "loss='opd_topk'")
        theirs = batch.teacher_top_logp_TK
        teacher_TK = required(theirs, "teacher_top_logp_TK", "loss='opd_topk'")
        return topk_kl(self.spec.distill_kl, own_TK, teacher_TK)
