"""DAPO's soft penalty on rollouts that come close to the length limit (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.grpo import AdvantageBatch
from nanorl.types import Rollout


class OverlongPenalty(Modifier):
    """`overlong_buffer`: the reward falls over the last tokens before the limit."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.buffer = spec.overlong_buffer

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        """The batch with the penalties in its rewards."""
        penalty_R = penalties(rollouts, max_tokens, self.buffer)
        return replace(batch, reward_R=batch.reward_R + penalty_R)


def penalties(rollouts: Sequence[Rollout], max_length: int, buffer: int) -> Tensor:
    """[R] `overlong_penalty` of the longest sequence of each rollout."""
    longest_R = torch.tensor([max(len(s.tokens) for s in r.sequences) for r in rollouts])
    return overlong_penalty(longest_R, max_length, buffer)


def overlong_penalty(length_R: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty: 0 up to `max_length − buffer`, then linear to −1 at `max_length`. Both
    lengths count alike: here all tokens of a rollout, which is what its limit counts."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}: must be in 1..max_length={max_length}")
    over_R = length_R.to(torch.float32) - (max_length - buffer)
    return -(over_R / buffer).clamp(0.0, 1.0)
