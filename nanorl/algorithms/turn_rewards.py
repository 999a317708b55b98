"""Rewards of turns: what a turn earned is credited to it and to what led there, not to later ones.

r_k is what turn k earned; the outcome's reward belongs to the last turn.

    tokens (reinforce_pp, gae)   r_k stands on the last action token of turn k, and the estimator
                                 does the rest: tokens before it share in it, later ones do not
    groups (grpo, rloo, ...)     G_k = Σ_{j≥k} γ^(j−k)·r_j, compared with the G_k of the others
    batch (turn_peers="batch")   the same, compared with the G_k of all rollouts that have turn k
    hierarchy (hgpo)             G_k of turns that were taken in the same situation

A turn that some member of the group does not have would be compared with the few that live so
long, which is biased: it gets the advantage of the whole rollout, of G_0, instead. So do the
tokens of the sequences beside a rollout's own, such as a sub-agent's. With
rewards on the last turn alone and γ = 1 every G_k is the outcome, and so is the advantage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.overlong import penalties
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.grpo import AdvantageBatch, GroupEstimator
from nanorl.types import Branch, Rollout

X = TypeVar("X")


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


class TurnRewards(Modifier):
    """`reward_level` turn: each turn is rewarded for what it earned and for what came of it."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec

    def earned(self, rollout: Rollout) -> Hashable:
        """The outcome, and what every turn earned beside it."""
        turns = [one.turn_rewards for one in rollout.sequences]
        at = ((i, k, value) for i, one in enumerate(turns) for k, value in enumerate(one) if value)
        return rollout.reward, tuple(at)

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        """The batch with the rewards of turns; without them in those of outcomes."""
        reward_R = torch.tensor([r.reward for r in rollouts], dtype=torch.float32)
        if self.spec.overlong_buffer:
            reward_R = reward_R + penalties(rollouts, max_tokens, self.spec.overlong_buffer)
        return replace(batch, reward_R=reward_R, turns=turns_of_rollouts(rollouts, reward_R))

    def compare(self, estimator: GroupEstimator, batch: AdvantageBatch) -> Tensor:
        """The estimator's advantages of turns."""
        spec = self.spec
        return turn_advantages(estimator, batch, gamma=spec.gamma, peers=spec.turn_peers)


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
    turns, ids_T = turns_of(batch), batch.rollout_of_token
    returns = [
        returns_to_go(rewards, gamma) for rewards in of_first_sequences(batch, turns.rewards)
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
    ids_T, index_T = batch.rollout_of_token, turns_of(batch).index_T
    advantage_T = batch.reward_R.new_zeros(len(ids_T))
    for turn in range(max(map(len, returns), default=0)):
        compared = [one[turn] if turn < len(one) else 0.0 for one in returns]
        groups = ["all" if turn < len(one) else r for r, one in enumerate(returns)]
        advantage_R = estimator(batch.reward_R.new_tensor(compared), groups)
        advantage_T = torch.where(index_T == turn, advantage_R[ids_T], advantage_T)
    return advantage_T


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    returns, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        returns.append(later)
    return returns[::-1]


def of_first_sequences(batch: AdvantageBatch, of_S: Sequence[X]) -> list[X]:
    """The entries of `of_S` for the first sequence of each rollout."""
    if batch.rollout_ids_S is None:
        return list(of_S)
    first: dict[int, X] = {}
    for rollout, value in zip(batch.rollout_ids_S.tolist(), of_S, strict=True):
        first.setdefault(rollout, value)
    return list(first.values())


def turns_of(batch: AdvantageBatch) -> Turns:
    """The turns of a batch. `ValueError` without."""
    if not isinstance(batch.turns, Turns):
        raise ValueError("turns is missing: reward_level='turn' reads it")
    return batch.turns


def turns_of_rollouts(rollouts: Sequence[Rollout], outcome_R: Tensor) -> Turns:
    """Rewards of turns, the outcome's added to the last.

    The turns of a rollout are those of its histories and then its own: each of these sequences has
    all the rewards, so that a turn in one of them shares in what was earned in later ones. A
    sequence beside is a single turn that earned all that the rollout did; what its own turns
    earned belongs to the outcome. A sequence without turn rewards has zeros, one without spans is a
    single turn. `ValueError` for another number of turn rewards than turns.
    """
    all_rewards, index = [], []
    states: list[list[Hashable]] = []
    for rollout, outcome in zip(rollouts, outcome_R.tolist(), strict=True):
        beside = [branch for branch in rollout.branches if not branch.is_history]
        chain = [branch for branch in rollout.branches if branch.is_history]
        own = rollout.sequences[0]
        rewards = [reward for one in (*chain, own) for reward in _turn_rewards(one, rollout)]
        rewards[-1] += outcome + sum(sum(branch.turn_rewards) for branch in beside)
        first = {}  # the place of each sequence's first turn in the whole
        place = 0
        for one in (*chain, own):
            first[id(one)] = place
            place += max(len(one.turn_spans), 1)
        seen = [state for one in (*chain, own) for state in _states(one)]
        for one in (own, *rollout.branches):
            if id(one) in first:
                all_rewards.append(rewards)
                states.append(seen)
                index += _turn_index(one, first[id(one)])
            else:
                all_rewards.append([sum(rewards)])
                states.append([])
                index += [0 if m else -1 for m in one.loss_mask]
    return Turns(rewards=all_rewards, index_T=torch.tensor(index), states=states)


def _states(sequence: Branch) -> list[Hashable]:
    """Return what the policy read before each turn and after the one before it."""
    ends = [0, *(span.action_end for span in sequence.turn_spans)]
    starts = [span.action_start for span in sequence.turn_spans] or [0]
    keys = sequence.keys
    return [tuple(keys[end:start]) for end, start in zip(ends, starts, strict=False)]


def _turn_rewards(sequence: Branch, rollout: Rollout) -> list[float]:
    num_turns = len(sequence.turn_spans) or 1
    rewards = list(sequence.turn_rewards) or [0.0] * num_turns
    if len(rewards) != num_turns:
        raise ValueError(
            f"rollout {rollout.rollout_id}: {len(rewards)} turn rewards for {num_turns} "
            "turns; give one for each turn, or none at all"
        )
    return rewards


def _turn_index(sequence: Branch, first: int) -> list[int]:
    """The turn of each action token, where the sequence's first one is number `first`."""
    spans = [(span.action_start, span.action_end) for span in sequence.turn_spans]
    turn_of = [-1] * len(sequence.tokens)
    for turn, (start, end) in enumerate(spans or [(0, len(sequence.tokens))], first):
        turn_of[start:end] = [turn] * (end - start)
    return [t if m else -1 for t, m in zip(turn_of, sequence.loss_mask, strict=True)]
