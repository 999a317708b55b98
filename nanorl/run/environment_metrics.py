"""`environment_metrics`: success and reward of a step by environment, in a run of several.

    {"environment/maze/success": 0.25, "environment/maze/reward": 0.4,
     "environment/maze/num_rollouts": 16.0, "environment/sums/success": ...}

Groups that were left out of the batch count, too: they say what the agent can do. An environment
of which nothing was played has no numbers, and its curve a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from nanorl.envs.mix import environment_of
from nanorl.types import Rollout


def environment_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """The numbers of these rollouts, which did not fail."""
    played: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        played[environment_of(rollout.task_id)].append(rollout)
    found: dict[str, float] = {}
    for name, those in sorted(played.items()):
        count = len(those)
        found[f"environment/{name}/success"] = sum(one.is_success for one in those) / count
        found[f"environment/{name}/reward"] = sum(one.total_reward for one in those) / count
        found[f"environment/{name}/num_rollouts"] = float(count)
    return found
