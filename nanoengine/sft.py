"""Supervised fine-tuning as a loss for `Engine.train_step`: cross-entropy on the masked tokens.

    engine.train_step(samples, sft_loss, num_loss_tokens)      # mean over the tokens of the batch

A sample may carry a field "weight" (per token); without one every masked token weighs 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.packing import MicroBatch, Sample


def sft_loss(
    logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of -logp * mask * weight; the stat `num_tokens` counts the masked tokens."""
    weight_T = micro.loss_mask_T
    if "weight" in micro.fields_T:
        weight_T = weight_T * micro.fields_T["weight"]
    return -(logp_T * weight_T).sum(), {"num_tokens": torch.count_nonzero(micro.loss_mask_T)}


def num_loss_tokens(samples: Sequence[Sample]) -> float:
    """The denominator of a mean over the weighted tokens of the whole batch."""
    total = 0.0
    for sample in samples:
        weights = sample.fields.get("weight")
        for t, is_counted in enumerate(sample.loss_mask):
            if is_counted:
                total += weights[t] if weights is not None else 1.0
    return total
