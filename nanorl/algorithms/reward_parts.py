"""Parts of a reward, which GDPO (arXiv 2601.05242) normalises apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.option_groups import TURN_REWARDS
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.grpo import AdvantageBatch
from nanorl.types import REWARD_PART, Rollout


class RewardParts(Modifier):
    """`reward_parts`: each part of the reward that is named is compared for itself."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.names = tuple(spec.part_weights)

    def earned(self, rollout: Rollout) -> Hashable:
        """Every part: two that make up for each other teach all the same."""
        return tuple(part_of(rollout, name) for name in self.names)

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        """The batch with the parts of its rewards."""
        return replace(batch, reward_parts=parts_of(rollouts, self.names))


def part_of(rollout: Rollout, name: str) -> float | None:
    """A part of the reward, None where the rollout has none of that name. What turns earned beside
    the parts is one too, under a name of its own; without any it is 0."""
    if name == TURN_REWARDS:
        return sum(sum(one.turn_rewards) for one in rollout.sequences)
    return rollout.metrics.get(f"{REWARD_PART}{name}")


def parts_of(rollouts: Sequence[Rollout], names: Iterable[str]) -> dict[str, Tensor]:
    """[R] each part of the reward that the algorithm names. `ValueError` for a rollout without."""
    found = {}
    for name in names:
        values = [part_of(rollout, name) for rollout in rollouts]
        for rollout, value in zip(rollouts, values, strict=True):
            has = [
                key.removeprefix(REWARD_PART)
                for key in rollout.metrics
                if key.startswith(REWARD_PART)
            ]
            if value is None:
                raise ValueError(
                    f"rollout {rollout.rollout_id}: its reward has no part {name!r}; there are: "
                    f"{', '.join(sorted(has)) or 'none'}; correct --rl.algorithm.reward-parts"
                )
            if name == TURN_REWARDS in has:
                raise ValueError(
                    f"rollout {rollout.rollout_id}: its reward has a part {name!r}, which is what "
                    "gdpo calls the rewards of turns; give the part another name"
                )
        found[name] = torch.tensor(values, dtype=torch.float32)
    return found
