"""Dynamic sampling: only groups whose members earned unlike rewards are trained on.

Where rewards are 0 or 1 that is DAPO's 0 < number correct < G (arXiv 2503.14476); graded ones teach
below 1 as well. Left out: groups that are replaced before a batch is complete (flow/assembly.py).
"""

from __future__ import annotations

from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batch_metrics import with_signal
from nanorl.types import Rollout


class DynamicSampling(Modifier):
    """`dynamic_sampling`: groups without a signal sit out."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec

    def select(self, rollouts: list[Rollout], metrics: dict[str, float]) -> list[Rollout]:
        """The rollouts of groups whose members earned unlike things."""
        return with_signal(rollouts, self.spec)
