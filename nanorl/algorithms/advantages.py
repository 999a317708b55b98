"""Advantages: how much better than expected each rollout, turn or token was.

Groups are found by `group_ids`, never by position: a batch may be shuffled, and groups may differ
in size. Suffixes: R rollouts, S token sequences, T packed tokens. `sequence_ids_T` says which
sequence a token is of; most rollouts are a single one (`AdvantageBatch.rollout_ids_S`).
Left out: the critic that provides the values (an engine computes them).
Sources: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783), RLOO (2402.14740), REINFORCE++
(2501.03262), MaxRL (2602.02710), OPO (2505.23585), GDPO (2601.05242), GAE (1506.02438).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from nanorl.algorithms.hierarchical import GroupEstimator, hgpo
from nanorl.algorithms.segments import DELTA, index_by_id, required, segment_sum
from nanorl.algorithms.spec import AlgorithmSpec, is_own, load_own
from nanorl.algorithms.token_baseline import collision, optimal_token_baseline

T = TypeVar("T")


@dataclass(frozen=True)
class _Groups:
    """Every rollout beside its group, in fp64: sums of fp32 rewards are exact there. In fp32 the
    mean of equal rewards may differ from them by a rounding error, which a division by a standard
    deviation of 0 + δ makes an advantage."""

    centred_R: Tensor  # reward less the group's mean
    mean_R: Tensor
    size_R: Tensor
    index_R: Tensor  # which group, 0 .. num_groups − 1
    num_groups: int


def _group(reward_R: Tensor, group_ids: Sequence[Hashable]) -> _Groups:
    if len(group_ids) != reward_R.numel():
        raise ValueError(f"{len(group_ids)} group ids for {reward_R.numel()} rewards: one each")
    index_R, num_groups = index_by_id(group_ids)
    index_R = index_R.to(reward_R.device)
    wide_R = reward_R.double()
    size_g = segment_sum(torch.ones_like(wide_R), index_R, num_groups)
    mean_g = segment_sum(wide_R, index_R, num_groups) / size_g
    return _Groups(
        centred_R=wide_R - mean_g[index_R],
        mean_R=mean_g[index_R],
        size_R=size_g[index_R],
        index_R=index_R,
        num_groups=num_groups,
    )


def dr_grpo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`R − mean_g`."""
    return _group(reward_R, group_ids).centred_R.to(reward_R.dtype)


def grpo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`(R − mean_g)/(std_g + δ)` with the sample standard deviation; a group of one gives 0."""
    group = _group(reward_R, group_ids)
    square_g = segment_sum(group.centred_R**2, group.index_R, group.num_groups)
    std_R = (square_g[group.index_R] / (group.size_R - 1).clamp(min=1)).sqrt()
    return (group.centred_R / (std_R + DELTA)).to(reward_R.dtype)


def rloo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`G/(G−1)·(R − mean_g)`: the baseline is the mean of the others; a group of one gives 0."""
    group = _group(reward_R, group_ids)
    factor_R = group.size_R / (group.size_R - 1).clamp(min=1)
    return (group.centred_R * factor_R).to(reward_R.dtype)


def maxrl(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`(R − mean_g)/(mean_g + δ)`. `ValueError` for a negative reward: a mean near or below 0 would
    give advantages without bound, or of the wrong sign."""
    if bool((reward_R < 0).any()):
        raise ValueError(
            f"reward {float(reward_R.min()):g}: advantage='maxrl' divides by the mean of a group, "
            "so rewards must be 0 or more; shift them, or choose another advantage"
        )
    group = _group(reward_R, group_ids)
    return (group.centred_R / (group.mean_R + DELTA)).to(reward_R.dtype)


def opo(reward_R: Tensor, group_ids: Sequence[Hashable], length_R: Tensor) -> Tensor:
    """`R − Σ l·R/Σ l` over the group: the baseline of least variance where the gradient of a
    rollout grows with the number l of its action tokens. A group without any: `R − mean_g`."""
    group = _group(reward_R, group_ids)
    sums = (group.index_R, group.num_groups)
    total_g = segment_sum(length_R.double(), *sums)
    # Of centred rewards, so that equal ones give exactly 0.
    drift_g = segment_sum(length_R.double() * group.centred_R, *sums) / total_g.clamp(min=1)
    return (group.centred_R - drift_g[group.index_R]).to(reward_R.dtype)


def gdpo(
    parts: Mapping[str, Tensor], weights: Mapping[str, float], group_ids: Sequence[Hashable]
) -> Tensor:
    """`grpo` of each part of the reward alone, summed by weight, then `(x − mean)/(std + δ)` over
    all rollouts of the batch. Rewards that are added first would give a rare part no say beside a
    common one of the same sum. Parts and result are [R]."""
    apart = [weight * grpo(parts[name], group_ids).double() for name, weight in weights.items()]
    total_R = torch.stack(apart).sum(0)
    centred_R = total_R - total_R.mean()
    std = (centred_R.square().sum() / max(len(total_R) - 1, 1)).sqrt()
    return (centred_R / (std + DELTA)).to(next(iter(parts.values())).dtype)


def broadcast(advantage_R: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Every action token gets its rollout's advantage; other tokens get 0."""
    return advantage_R[sequence_ids_T] * mask_T.to(advantage_R.dtype)


def whiten(value_T: Tensor, mask_T: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit (population) variance over the masked-in tokens of the whole batch.

    `(x − mean)/sqrt(variance + eps)`, as in verl: values that differ by rounding errors stay
    near 0. In fp64, so exactly 0 where all values are equal fp32 numbers.
    """
    is_action_T = mask_T.bool()
    value_A = value_T[is_action_T].double()
    if not value_A.numel():
        return torch.zeros_like(value_T)
    centred_A = value_A - value_A.mean()
    white_A = centred_A / (centred_A.square().mean() + eps).sqrt()
    return torch.zeros_like(value_T).masked_scatter(is_action_T, white_A.to(value_T.dtype))


def last_action_tokens(mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """1 at the last action token of every sequence that has one, else 0; fp32."""
    action = mask_T.nonzero().squeeze(-1)
    last_T = torch.zeros(mask_T.numel(), dtype=torch.float32, device=mask_T.device)
    if action.numel():
        owner = sequence_ids_T[action]
        is_last = torch.ones_like(owner, dtype=torch.bool)
        is_last[:-1] = owner[1:] != owner[:-1]
        last_T[action[is_last]] = 1.0
    return last_T


def outcome_rewards(reward_S: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """The reward of each sequence placed on its last action token."""
    return reward_S[sequence_ids_T] * last_action_tokens(mask_T, sequence_ids_T).to(reward_S.dtype)


def kl_penalised(
    reward_T: Tensor, old_logp_T: Tensor, ref_logp_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """`r − β·k1` on every action token, `k1 = log π_o − log π_ref`."""
    return reward_T - coef * torch.where(mask_T.bool(), old_logp_T - ref_logp_T, 0.0)


def reinforce_pp(
    reward_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """Discounted return over action tokens only, then whitened globally. The KL penalty, if any,
    is in the rewards already (`kl_penalised`)."""
    zero_T = torch.zeros_like(reward_T)
    return_T, _ = gae(reward_T, zero_T, mask_T, sequence_ids_T, gamma=gamma, lam=1.0)
    return whiten(return_T, mask_T)


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns on each sequence compressed to its action tokens.

    The value after an action token is that of the next *action* token: tool output in between
    neither discounts nor bootstraps. Both results are 0 outside the mask.
    """
    lengths = sequence_ids_T.unique_consecutive(return_counts=True)[1]
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return kernels.gae(reward_T, value_T, cu_seqlens, gamma, lam, mask_T=mask_T)


def distill(
    advantage_T: Tensor, old_logp_T: Tensor, teacher_logp_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """On-policy distillation: `A − λ·(log π_o − log π_T)` on every sampled token."""
    # Not a product with the mask: what stands outside of it may be anything, and 0·NaN is NaN.
    return advantage_T - coef * torch.where(mask_T.bool(), old_logp_T - teacher_logp_T, 0.0)


def overlong_penalty(length_R: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty: 0 up to `max_length − buffer`, then linear to −1 at `max_length`. Both
    lengths count alike: here all tokens of a rollout, which is what its limit counts."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}: must be in 1..max_length={max_length}")
    over_R = length_R.to(torch.float32) - (max_length - buffer)
    return -(over_R / buffer).clamp(0.0, 1.0)


# Advantages of one whole optimizer batch, as an `AlgorithmSpec` asks for them.


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Holds what `reward_level="turn"` adds to a batch. A rollout of two turns that was praised for
    the first and solved its task, and one of a single turn that failed:

        Turns(rewards=[[0.2, 1.0], [0.0]], index_T=tensor([-1, 0, 0, -1, 1, -1, 0]))
    """

    rewards: Sequence[Sequence[float]]
    """One for each turn of each sequence; the last one's holds the reward of the outcome too. The
    sequences that a rollout went through one after the other have all their turns in common; one
    beside them (a sub-agent's) is a single turn, which earned all that the rollout did."""
    index_T: Tensor
    """int64, the turn of every action token, a place in its sequence's `rewards`; −1 for other
    tokens."""
    states: Sequence[Sequence[Hashable]] | None = None
    """What was observed before each turn of each sequence; none of a sequence beside. hgpo reads
    them."""


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """The whole optimizer batch, packed: T tokens of S sequences of R rollouts, a rollout's one
    after the other. Two rollouts of one task, of one and two action tokens after a prompt token:

        AdvantageBatch(
            reward_R=tensor([1.0, 0.0]),
            group_ids=["s0-g0", "s0-g0"],
            mask_T=tensor([0.0, 1.0, 0.0, 1.0, 1.0]),
            sequence_ids_T=tensor([0, 0, 1, 1, 1]),
        )
    """

    reward_R: Tensor
    group_ids: Sequence[Hashable]
    mask_T: Tensor
    sequence_ids_T: Tensor
    rollout_ids_S: Tensor | None = None
    """The rollout of each sequence; None: every sequence is one."""
    turns: Turns | None = None
    reward_parts: Mapping[str, Tensor] | None = None
    """[R] each, by name; gdpo reads them."""
    old_logp_T: Tensor | None = None
    sharp_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    value_T: Tensor | None = None

    @property
    def rollout_of_token(self) -> Tensor:
        """[T]"""
        ids_T = self.sequence_ids_T
        return ids_T if self.rollout_ids_S is None else self.rollout_ids_S[ids_T]

    @property
    def sequence_reward(self) -> Tensor:
        """[S] Its rollout's."""
        return self.reward_R if self.rollout_ids_S is None else self.reward_R[self.rollout_ids_S]

    def of_first_sequences(self, of_S: Sequence[T]) -> list[T]:
        """What belongs to the first sequence of each rollout."""
        if self.rollout_ids_S is None:
            return list(of_S)
        first: dict[int, T] = {}
        for rollout, value in zip(self.rollout_ids_S.tolist(), of_S, strict=True):
            first.setdefault(rollout, value)
        return list(first.values())


def compute_advantages(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, Tensor | None]:
    """`(advantage_T, return_T)`; returns (the critic's targets) only for "gae"."""
    if is_own(spec.advantage):
        advantage_T, return_T = _own(spec, batch), None
    else:
        advantage_T, return_T = ADVANTAGES[spec.advantage](spec, batch)
    if spec.distill_coef:
        old_T = required(batch.old_logp_T, "old_logp_T", "distill_coef")
        ref_T = required(batch.ref_logp_T, "ref_logp_T", "distill_coef")
        advantage_T = distill(advantage_T, old_T, ref_T, batch.mask_T, spec.distill_coef)
    return advantage_T, return_T


Advantages = tuple[Tensor, Tensor | None]


def _compared(
    estimator: GroupEstimator,
) -> Callable[[AlgorithmSpec, AdvantageBatch], Advantages]:
    """An estimator that compares the members of a group, for every action token of a batch."""

    def advantages(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
        return compare(estimator, spec, batch), None

    return advantages


def compare(estimator: GroupEstimator, spec: AlgorithmSpec, batch: AdvantageBatch) -> Tensor:
    """The estimator's advantages of whole rollouts, or of turns, on their action tokens."""
    if spec.reward_level == "outcome":
        advantage_R = estimator(batch.reward_R, batch.group_ids)
        return broadcast(advantage_R, batch.mask_T, batch.rollout_of_token)
    return turn_advantages(estimator, batch, gamma=spec.gamma, peers=spec.turn_peers)


def _opo(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    rollouts = (batch.rollout_of_token, batch.reward_R.numel())
    length_R = segment_sum(batch.mask_T.double(), *rollouts)
    return compare(lambda reward_R, ids: opo(reward_R, ids, length_R), spec, batch), None


def _gdpo(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    if batch.reward_parts is None:
        raise ValueError("reward_parts is missing: advantage='gdpo' reads it")
    advantage_R = gdpo(batch.reward_parts, spec.part_weights, batch.group_ids)
    return broadcast(advantage_R, batch.mask_T, batch.rollout_of_token), None


def _otb(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    old_T = required(batch.old_logp_T, "old_logp_T", "advantage='otb'")
    sharp_T = required(batch.sharp_logp_T, "sharp_logp_T", "advantage='otb'")
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    reward_T, zero_T = token_rewards(spec, batch), torch.zeros_like(mask_T)
    return_T, _ = gae(reward_T, zero_T, mask_T, ids_T, gamma=spec.gamma, lam=1.0)
    energy_T = 1 - 2 * old_T.exp() + collision(old_T, sharp_T)
    ids_S = batch.rollout_ids_S
    groups = batch.group_ids if ids_S is None else [batch.group_ids[r] for r in ids_S.tolist()]
    return optimal_token_baseline(return_T, energy_T, mask_T, ids_T, groups), None


def _hgpo(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    turns = _turns(batch)
    if turns.states is None:
        raise ValueError("turns.states is missing: advantage='hgpo' reads it")
    rewards = batch.of_first_sequences(turns.rewards)
    turn_N, rollout_R = hgpo(
        grpo,
        batch.reward_R.new_tensor([sum(one) for one in rewards], dtype=torch.float64),
        [_returns_to_go(one, spec.gamma) for one in rewards],
        batch.of_first_sequences(turns.states),
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


def _reinforce_pp(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    return reinforce_pp(token_rewards(spec, batch), mask_T, ids_T, gamma=spec.gamma), None


def _reinforce_pp_baseline(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    """`R − mean_g` on every action token, then whitened globally; KL is a separate k2 loss."""
    return whiten(compare(dr_grpo, spec, batch), batch.mask_T), None


def _gae(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    value_T = required(batch.value_T, "value_T", "advantage='gae'")
    reward_T = token_rewards(spec, batch)
    advantage_T, return_T = gae(reward_T, value_T, mask_T, ids_T, gamma=spec.gamma, lam=spec.lam)
    return whiten(advantage_T, mask_T) if spec.whiten_gae else advantage_T, return_T


def _own(spec: AlgorithmSpec, batch: AdvantageBatch) -> Tensor:
    """A function of the user's, of rewards and groups, or of the whole batch."""
    function = load_own("advantage", spec.advantage)
    if len(signature(function).parameters) > 1:
        return compare(function, spec, batch)
    advantage_T = function(batch)
    if advantage_T.shape != batch.mask_T.shape:
        raise ValueError(
            f"--rl.algorithm.advantage {spec.advantage}: it returned a tensor of shape "
            f"{list(advantage_T.shape)}; of a whole batch it must give each token one number, "
            f"{list(batch.mask_T.shape)}"
        )
    return advantage_T * batch.mask_T


def _none(spec: AlgorithmSpec, batch: AdvantageBatch) -> Advantages:
    zero_R = torch.zeros_like(batch.reward_R)
    return broadcast(zero_R, batch.mask_T, batch.rollout_of_token), None


ADVANTAGES: Mapping[str, Callable[[AlgorithmSpec, AdvantageBatch], Advantages]] = MappingProxyType(
    {
        "grpo": _compared(grpo),
        "dr_grpo": _compared(dr_grpo),
        "rloo": _compared(rloo),
        "maxrl": _compared(maxrl),
        "opo": _opo,
        "gdpo": _gdpo,
        "otb": _otb,
        "hgpo": _hgpo,
        "reinforce_pp": _reinforce_pp,
        "reinforce_pp_baseline": _reinforce_pp_baseline,
        "gae": _gae,
        "none": _none,
    }
)
"""(spec, batch) -> (advantage_T, return_T or None), by `AlgorithmSpec.advantage`."""


def token_rewards(spec: AlgorithmSpec, batch: AdvantageBatch) -> Tensor:
    """Rewards at the tokens that earned them, less the KL penalty if there is one."""
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    if spec.reward_level == "outcome":
        reward_T = outcome_rewards(batch.sequence_reward, mask_T, ids_T)
    else:
        reward_T = turn_token_rewards(_turns(batch), ids_T)
    if spec.kl_reward_coef:
        old_T = required(batch.old_logp_T, "old_logp_T", "kl_reward_coef")
        ref_T = required(batch.ref_logp_T, "ref_logp_T", "kl_reward_coef")
        reward_T = kl_penalised(reward_T, old_T, ref_T, mask_T, spec.kl_reward_coef)
    return reward_T


# Rewards of turns. r_k is what turn k earned; the outcome's reward belongs to the last turn.
#
#     tokens (reinforce_pp, gae)   r_k stands on the last action token of turn k, and the estimator
#                                  does the rest: tokens before it share in it, later ones do not
#     groups (grpo, rloo, ...)     G_k = Σ_{j≥k} γ^(j−k)·r_j, compared with the G_k of the others
#     batch (turn_peers="batch")   the same, compared with the G_k of all rollouts that have turn k
#     hierarchy (hgpo)             G_k of turns that were taken in the same situation
#
# A turn that some member of the group does not have would be compared with the few that live so
# long, which is biased: it gets the advantage of the whole rollout, of G_0, instead. So do the
# tokens of the sequences beside a rollout's own, such as a sub-agent's. With
# rewards on the last turn alone and γ = 1 every G_k is the outcome, and so is the advantage.


def turn_token_rewards(turns: Turns, sequence_ids_T: Tensor) -> Tensor:
    """fp32, r_k at the last action token of turn k. A turn without a token leaves its reward to the
    turn before it; what precedes every action token was earned by none, and is left out."""
    owners = zip(sequence_ids_T.tolist(), turns.index_T.tolist(), strict=True)
    last = {owner: token for token, owner in enumerate(owners)}  # the later token wins
    reward_T = torch.zeros(len(sequence_ids_T), device=sequence_ids_T.device)
    for sequence, rewards in enumerate(turns.rewards):
        place = None
        for turn, reward in enumerate(rewards):
            place = last.get((sequence, turn), place)
            if place is not None:
                reward_T[place] += reward
    return reward_T


def turn_advantages(
    estimator: GroupEstimator,
    batch: AdvantageBatch,
    *,
    gamma: float = 1.0,
    peers: str = "group",
) -> Tensor:
    """The estimator on returns of turns, G_k, for the action tokens of each turn k, among the
    members of a group or (`peers` "batch") all rollouts."""
    turns, ids_T = _turns(batch), batch.rollout_of_token
    returns = [
        _returns_to_go(rewards, gamma) for rewards in batch.of_first_sequences(turns.rewards)
    ]
    if peers == "batch":
        return _among_all(estimator, batch, returns)
    num_shared: dict[Hashable, int] = {}  # turns that every member of a group has
    for group, turn_returns in zip(batch.group_ids, returns, strict=True):
        num_shared[group] = min(num_shared.get(group, len(turn_returns)), len(turn_returns))
    advantage_T = batch.reward_R.new_zeros(len(ids_T))
    for turn in range(max(map(len, returns), default=0)):
        compared_R = batch.reward_R.new_tensor(
            [
                turn_returns[turn if turn < num_shared[group] else 0] if turn_returns else 0.0
                for group, turn_returns in zip(batch.group_ids, returns, strict=True)
            ]
        )
        advantage_R = estimator(compared_R, batch.group_ids)
        advantage_T = torch.where(turns.index_T == turn, advantage_R[ids_T], advantage_T)
    return advantage_T


def _among_all(
    estimator: GroupEstimator, batch: AdvantageBatch, returns: Sequence[Sequence[float]]
) -> Tensor:
    """Turn k of all rollouts that have one as a single group, whatever their tasks."""
    ids_T, index_T = batch.rollout_of_token, _turns(batch).index_T
    advantage_T = batch.reward_R.new_zeros(len(ids_T))
    for turn in range(max(map(len, returns), default=0)):
        compared = [one[turn] if turn < len(one) else 0.0 for one in returns]
        groups = ["all" if turn < len(one) else r for r, one in enumerate(returns)]
        advantage_R = estimator(batch.reward_R.new_tensor(compared), groups)
        advantage_T = torch.where(index_T == turn, advantage_R[ids_T], advantage_T)
    return advantage_T


def _returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    returns, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        returns.append(later)
    return returns[::-1]


def _turns(batch: AdvantageBatch) -> Turns:
    if batch.turns is None:
        raise ValueError("turns is missing: reward_level='turn' reads it")
    return batch.turns
