"""Signal: whether the members of a group earned unlike things, and so teach anything.

What is compared is what the advantages compare: the total; with gdpo every part of the reward,
for two parts that make up for each other teach all the same; with rewards of turns those of each
turn. Dynamic sampling goes by it, and so does the count of groups with signal.
Left out: what is done with groups that have none (flow/assembly.py, batching.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from nanorl.algorithms.spec import TURN_REWARDS, AlgorithmSpec
from nanorl.finite import PART
from nanorl.types import Rollout


def earned(spec: AlgorithmSpec, rollout: Rollout) -> Hashable:
    """What a rollout earned, as `spec` tells it from what others did."""
    if spec.reward_parts:
        return tuple(part_of(rollout, name) for name in spec.part_weights)
    if spec.reward_level == "turn":
        turns = [one.turn_rewards for one in rollout.sequences]
        at = ((i, k, value) for i, one in enumerate(turns) for k, value in enumerate(one) if value)
        return rollout.reward, tuple(at)
    return rollout.total_reward


def part_of(rollout: Rollout, name: str) -> float | None:
    """A part of the reward, None where the rollout has none of that name. What turns earned beside
    the parts is one too, under a name of its own; without any it is 0."""
    if name == TURN_REWARDS:
        return sum(sum(one.turn_rewards) for one in rollout.sequences)
    return rollout.metrics.get(f"{PART}{name}")


def has_signal(things: Sequence[Hashable], group_ids: Sequence[Hashable]) -> list[bool]:
    """Dynamic sampling: True for rollouts of groups whose members earned unlike things. Where
    rewards are 0 or 1 that is DAPO's 0 < number correct < G; graded ones teach below 1 as well."""
    found: dict[Hashable, set[Hashable]] = {}
    for thing, group in zip(things, group_ids, strict=True):
        found.setdefault(group, set()).add(thing)
    return [len(found[group]) > 1 for group in group_ids]
