"""From per-token losses to one number: a weight for every token, then a plain sum.

Weights are computed over the *whole optimizer batch, before it is split* into micro-batches or over
ranks, so the gradient cannot depend on the split; a mean of means would. A rollout that became
several samples (forked history, sub-agent) shares one denominator: give those samples the same
entry in `rollout_ids_S`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanorl.algorithms.registry import AGGREGATIONS
from nanorl.group_advantage import index_by_id, segment_sum
from nanorl.grpo import GRPO, AdvantageBatch
from nanorl.types import Rollout


def weights_of_minibatch(
    spec: GRPO, rollouts: Sequence[Rollout], batch: AdvantageBatch, is_here_T: Tensor
) -> Tensor:
    """`token_weights` of the tokens of a minibatch, which are in one piece of the batch."""
    ids_T = batch.sequence_ids_T[is_here_T]
    sequences = ids_T.unique()
    assert batch.rollout_ids_S is not None, "build_batch gives the rollout of each sequence"
    rollout_S = batch.rollout_ids_S[sequences]
    return token_weights(
        spec.aggregation,
        batch.mask_T[is_here_T],
        ids_T - int(sequences[0]),
        len(sequences),
        rollout_ids_S=index_by_id([r.rollout_id for r in rollouts])[0][rollout_S],
        prompt_ids_S=index_by_id(batch.group_ids)[0][rollout_S],
        constant_length=spec.constant_length,
    )


def token_weights(
    aggregation: str,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
    *,
    rollout_ids_S: Tensor | None = None,
    prompt_ids_S: Tensor | None = None,
    constant_length: int | None = None,
) -> Tensor:
    """fp32 weights [T], 0 outside the mask, so that the loss is `Σ weight·token_loss`.

    token_mean            `Σmℓ/Σm`
    seq_mean_token_mean   `(1/B)·Σ_i (Σmℓ/Σm)_i`
    seq_mean_token_sum    `(1/B)·Σ_i (Σmℓ)_i`
    constant              `Σmℓ/(B·constant_length)`, Dr.GRPO
    prompt_mean           mean over prompts of the token mean of all tokens of the prompt

    B counts rollouts, those without an action token included. `prompt_ids_S` (needed by
    prompt_mean) and `rollout_ids_S` (default: every sequence is one rollout) are dense indices.
    """
    mask_T = mask_T.to(torch.float32)
    rollout_ids_S, num_rollouts = _dense(rollout_ids_S, num_sequences, mask_T.device)
    if aggregation == "token_mean":
        return mask_T / mask_T.sum().clamp(min=1)
    if aggregation == "seq_mean_token_mean":
        return _mean_of_means(mask_T, rollout_ids_S[sequence_ids_T], num_rollouts)
    if aggregation == "seq_mean_token_sum":
        return mask_T / max(num_rollouts, 1)
    if aggregation == "constant":
        if constant_length is None or constant_length < 1:
            raise ValueError(f"constant_length={constant_length}: 'constant' needs a length >= 1")
        return mask_T / (max(num_rollouts, 1) * constant_length)
    if aggregation == "prompt_mean":
        if prompt_ids_S is None:
            raise ValueError("prompt_ids_S is missing: 'prompt_mean' needs each sequence's prompt")
        prompt_ids_S, num_prompts = _dense(prompt_ids_S, num_sequences, mask_T.device)
        return _mean_of_means(mask_T, prompt_ids_S[sequence_ids_T], num_prompts)
    raise ValueError(f"aggregation={aggregation!r}: choose one of {', '.join(AGGREGATIONS)}")


def _mean_of_means(mask_T: Tensor, unit_ids_T: Tensor, num_units: int) -> Tensor:
    count_U = segment_sum(mask_T, unit_ids_T, num_units).clamp(min=1)
    return mask_T / (count_U[unit_ids_T] * max(num_units, 1))


def _dense(ids_S: Tensor | None, num_sequences: int, device: torch.device) -> tuple[Tensor, int]:
    if ids_S is None:
        return torch.arange(num_sequences, device=device), num_sequences
    if ids_S.numel() != num_sequences:
        raise ValueError(f"{ids_S.numel()} ids for {num_sequences} sequences: one each")
    unique, dense_S = torch.unique(ids_S, return_inverse=True)
    return dense_S.to(device), unique.numel()
