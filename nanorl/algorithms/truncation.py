"""DAPO's overlong filtering: rollouts that a limit cut off are compared, and learn nothing.

Being cut off says nothing of what was said until then, so that the reward of such a rollout is
noise as a judgement of its tokens: the paper masks their loss (arXiv 2503.14476). All tokens of the
rollout are masked, those of its earlier turns as well, for the reward is of the whole and says as
little of any of them. The reward itself goes on counting in the mean and the deviation of its
group, as in TRL (`mask_truncated_completions`) and SkyRL; verl has the penalty alone (overlong.py).

In every other respect it is as a rollout without an action token: no denominator counts its tokens,
and what weighs rollouts by their tokens (opo, otb, a whitening) gives it none. It counts where an
aggregation divides by rollouts, so that a step does not grow with the number of those cut off.
"""

from __future__ import annotations

from dataclasses import replace

from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.types import Rollout, Status

CUT_OFF = frozenset({Status.TRUNCATED_TURN, Status.TRUNCATED_CONTEXT})


class TruncationMask(Modifier):
    """`mask_truncated`: rollouts that a limit cut off have no loss."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        pass

    def select(self, rollouts: list[Rollout], metrics: dict[str, float]) -> list[Rollout]:
        """All of them, masked where they were cut off; counts those."""
        metrics["num_masked_rollouts"] = float(sum(one.status in CUT_OFF for one in rollouts))
        return [masked(one) if one.status in CUT_OFF else one for one in rollouts]


def masked(rollout: Rollout) -> Rollout:
    """The rollout with a loss mask of 0 in all its sequences."""
    return replace(
        rollout,
        loss_mask=[0] * len(rollout.loss_mask),
        branches=[replace(one, loss_mask=[0] * len(one.loss_mask)) for one in rollout.branches],
    )
