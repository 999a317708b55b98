"""OTB: a baseline for each token, by what was uncertain up to it (arXiv 2602.07078)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorl.algorithms.returns import gae, token_rewards
from nanorl.algorithms.segments import required
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.group_advantage import DELTA, index_by_id, segment_sum
from nanorl.grpo import AdvantageBatch


def collision(logp_T: Tensor, sharp_logp_T: Tensor) -> Tensor:
    """Σπ² over the vocabulary, from a token's log-prob and that at half the temperature.

    With logits z and temperature τ these are `z/τ − lse(z/τ)` and `2z/τ − lse(2z/τ)`, and Σπ² is
    `exp(lse(2z/τ) − 2·lse(z/τ))`: whatever token it is, its logit cancels."""
    return (2 * logp_T - sharp_logp_T).exp()


def optimal_token_baseline(
    return_T: Tensor,
    energy_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    group_of_S: Sequence[Hashable],
) -> Tensor:
    """`G_t − Σ G_t·W_t/Σ W_t` over the sequences of a group, at each place t among their action
    tokens; `W_t` is the sum of the energies `1 − 2π + Σπ²` up to there, what the gradient of the
    log-probs has gathered. Where a sequence has outlived all others nothing is subtracted; a group
    of one gives 0."""
    is_action_T = mask_T.bool()
    owner_A = sequence_ids_T[is_action_T]
    group_S, num_groups = index_by_id(group_of_S)
    group_A = group_S.to(owner_A.device)[owner_A]
    place_A, weight_A = _places(owner_A), _sums_so_far(energy_T[is_action_T].double(), owner_A)
    return_A = return_T[is_action_T].double()
    width = int(place_A.max()) + 1 if len(place_A) else 1
    cell_A, num_cells = group_A * width + place_A, num_groups * width
    ones_A = torch.ones_like(return_A)
    # Of what is centred, so that equal returns give exactly 0.
    mean_A = (
        segment_sum(return_A, cell_A, num_cells)
        / segment_sum(ones_A, cell_A, num_cells).clamp(min=1)
    )[cell_A]
    total_A = segment_sum(weight_A, cell_A, num_cells)[cell_A]
    drift_A = segment_sum(weight_A * (return_A - mean_A), cell_A, num_cells)[cell_A]
    advantage_A = return_A - mean_A - drift_A / total_A.clamp(min=DELTA)
    is_alone_A = segment_sum(ones_A, cell_A, num_cells)[cell_A] == 1
    size_g = segment_sum(torch.ones(len(group_S), dtype=torch.double), group_S, num_groups)
    has_others_A = size_g.to(owner_A.device)[group_A] > 1
    advantage_A = torch.where(is_alone_A & has_others_A, return_A, advantage_A)
    result_T = torch.zeros_like(return_T)
    return result_T.masked_scatter(is_action_T, advantage_A.to(return_T.dtype))


def _places(owner_A: Tensor) -> Tensor:
    """The place of each token among those of its owner, whose tokens stand together."""
    lengths = owner_A.unique_consecutive(return_counts=True)[1]
    starts = F.pad(lengths.cumsum(0), (1, 0))[:-1]
    return torch.arange(len(owner_A), device=owner_A.device) - starts.repeat_interleave(lengths)


def _sums_so_far(value_A: Tensor, owner_A: Tensor) -> Tensor:
    """The sum of an owner's values up to each token, it included."""
    lengths = owner_A.unique_consecutive(return_counts=True)[1].tolist()
    return torch.cat([part.cumsum(0) for part in value_A.split(lengths)] or [value_A])


def otb_of_batch(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """The baseline of each token of a batch, off its return."""
    old_T = required(batch.old_logp_T, "old_logp_T", "advantage='otb'")
    sharp_T = required(batch.sharp_logp_T, "sharp_logp_T", "advantage='otb'")
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    reward_T, zero_T = token_rewards(spec, batch), torch.zeros_like(mask_T)
    return_T, _ = gae(reward_T, zero_T, mask_T, ids_T, gamma=spec.gamma, lam=1.0)
    energy_T = 1 - 2 * old_T.exp() + collision(old_T, sharp_T)
    ids_S = batch.rollout_ids_S
    groups = batch.group_ids if ids_S is None else [batch.group_ids[r] for r in ids_S.tolist()]
    return optimal_token_baseline(return_T, energy_T, mask_T, ids_T, groups), None
