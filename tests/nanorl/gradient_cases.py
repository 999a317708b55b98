"""Gradients of a whole batch's loss by finite differences, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.packing import collect_all, make_micro_batches
from nanorl.batching import TrainBatch
from nanorl.grpo import Field


def checked_gradient(batch: TrainBatch, seed: int = 0) -> list[Tensor]:
    """The gradient by the log-probs of each sample's tokens, as autograd and as differences have
    it: of a policy that has moved a little from the one that sampled."""
    (micro,) = make_micro_batches(batch.samples, max_tokens=10_000, share_prefix=False)
    wide = {name: value_T.double() for name, value_T in micro.fields_T.items()}
    micro.fields_T.clear()
    micro.fields_T.update({**wide, Field.OLD_LOGP: wide[Field.ROLLOUT_LOGP]})
    generator = torch.Generator().manual_seed(seed)
    moved_T = 0.1 * torch.randn(len(wide[Field.WEIGHT]), generator=generator, dtype=torch.float64)
    logp_T = (wide[Field.ROLLOUT_LOGP] + moved_T).requires_grad_()
    assert torch.autograd.gradcheck(lambda one: batch.loss_fn(one, None, micro)[0], logp_T)
    (grad_T,) = torch.autograd.grad(batch.loss_fn(logp_T, None, micro)[0], logp_T)
    return collect_all(batch.samples, [micro], [grad_T])
