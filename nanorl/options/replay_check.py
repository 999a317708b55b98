"""Says which algorithms cannot learn from groups of earlier steps (flow/replay_groups.py)."""

from __future__ import annotations

from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.flow.replay_policy import ReplayPolicy


def check_replay(policy: ReplayPolicy, spec: AlgorithmSpec, *, tasks_per_step: int) -> None:
    """ValueError where the algorithm cannot learn from tokens of many versions ago, or where the
    share is less than half a group."""
    if not policy.share:
        return
    flag = f"--rl.replay.share {policy.share}"
    if not policy.num_groups(tasks_per_step):
        raise ValueError(
            f"{flag} with --rl.tasks-per-step {tasks_per_step}: that is not one group; raise one "
            "of them, or set the share to 0"
        )
    for option, reason in _refused(spec).items():
        raise ValueError(f"{flag} with --rl.algorithm.{option}: {reason}; set the share to 0")


def _refused(spec: AlgorithmSpec) -> dict[str, str]:
    """The options, with their values, that replayed groups do not go with, and why."""
    if spec.needs_critic:
        return {
            f"advantage {spec.advantage}": "its critic would learn the returns of policies that "
            "are gone"
        }
    if spec.has_hindsight:
        return {f"hindsight {spec.hindsight}": "its teacher corrects what the policy says now"}
    if spec.loss_part.is_distillation:
        return {f"loss {spec.loss}": "the teacher answers for what the policy says now"}
    if spec.distill_coef:
        return {
            f"distill-coef {spec.distill_coef}": "the teacher answers for what the policy says now"
        }
    if spec.advantage == "reinforce_pp":
        return {
            "advantage reinforce_pp": "its baseline is the mean of the whole batch, which chosen "
            "groups would shift for the fresh ones"
        }
    if spec.turn_peers == "batch":
        return {
            "turn-peers batch": "fresh turns would be compared with those of policies that are gone"
        }
    return {}
