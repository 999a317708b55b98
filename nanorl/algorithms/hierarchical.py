"""HGPO: a turn is compared with turns that were taken in the same situation, at several depths.

He et al., "Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks", arXiv
2602.22817. Two turns of a group are in the same situation of depth k if the last k observations
before them are equal; the shallowest comparison, depth 0, is that of whole rollouts. Ours departs
in three points from the authors' code: the comparison of rollouts always takes part (there it is
the option `base_group`), a comparison counts also where it finds no difference, and the deviation
is that of a sample, as everywhere here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.algorithms.turn_rewards import of_first_sequences, returns_to_go, turns_of
from nanorl.group_advantage import grpo
from nanorl.grpo import AdvantageBatch, GroupEstimator


def hgpo(
    estimator: GroupEstimator,
    outcome_R: Tensor,
    returns: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    group_ids: Sequence[Hashable],
    *,
    depth: int,
    power: float,
) -> tuple[Tensor, Tensor]:
    """`(Σ_k w_k·A_k of all turns, one rollout's after the other, A_0 of all rollouts)`, fp64.

    `returns` are the discounted returns from each turn of each rollout on, `states` what was
    observed before it. A_0 compares the outcomes of a group, A_k the returns of all its turns whose
    last k states are equal, repeated visits included; `w_k ∝ (k + 1)^power` over the comparisons
    that have at least two members."""
    owner_N = torch.tensor([r for r, turns in enumerate(returns) for _ in turns], dtype=torch.int64)
    return_N = torch.tensor([value for turns in returns for value in turns], dtype=torch.float64)
    advantage_R = estimator(outcome_R.double(), group_ids)
    total_N, weight_N = advantage_R[owner_N], torch.ones_like(return_N)
    for k in range(1, depth + 1):
        keys = _situations(states, group_ids, k)
        size = Counter(keys)
        is_shared_N = torch.tensor([size[key] > 1 for key in keys], dtype=torch.float64)
        share_N = is_shared_N * (k + 1) ** power
        total_N = total_N + share_N * estimator(return_N, keys)
        weight_N = weight_N + share_N
    return total_N / weight_N, advantage_R


def _situations(
    states: Sequence[Sequence[Hashable]], group_ids: Sequence[Hashable], k: int
) -> list[Hashable]:
    """The group and the last k states of every turn; a turn with fewer before it is alone."""
    return [
        (group, tuple(seen[turn + 1 - k : turn + 1])) if turn + 1 >= k else (rollout, turn)
        for rollout, (seen, group) in enumerate(zip(states, group_ids, strict=True))
        for turn in range(len(seen))
    ]


def hgpo_of_batch(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """`hgpo` of the turns of a batch, with GRPO's comparison."""
    turns = turns_of(batch)
    if turns.states is None:
        raise ValueError("turns.states is missing: advantage='hgpo' reads it")
    rewards = of_first_sequences(batch, turns.rewards)
    turn_N, rollout_R = hgpo(
        grpo,
        batch.reward_R.new_tensor([sum(one) for one in rewards], dtype=torch.float64),
        [returns_to_go(one, spec.gamma) for one in rewards],
        of_first_sequences(batch, turns.states),
        batch.group_ids,
        depth=spec.hierarchy_depth,
        power=spec.hierarchy_power,
    )
    counts = torch.tensor([len(one) for one in rewards])
    first_T = F.pad(counts.cumsum(0), (1, 0))[batch.rollout_of_token]
    is_beside_S = torch.tensor([not states for states in turns.states])
    place_T = first_T + turns.index_T.clamp(min=0)
    value_T = torch.where(
        is_beside_S[batch.sequence_ids_T], rollout_R[batch.rollout_of_token], turn_N[place_T]
    )
    return torch.where(turns.index_T >= 0, value_T, 0.0).to(batch.reward_R.dtype), None
