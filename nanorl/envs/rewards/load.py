"""Finds a reward by what a user calls it: a name of ours, `module:name` or a file of the user's.

    load_reward("rule", {"ignore_case": True})
    load_reward("my_rewards:by_length", {})

Left out: the processes in which a user's own may run (nanorl.envs.hosting).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanorl.envs.rewards.base import Reward
from nanorl.envs.rewards.function_reward import as_reward
from nanorl.plugins import load_object

REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "rule": "nanorl.envs.rewards.rule:RuleReward",
        "group_judge": "nanorl.envs.rewards.group_judge:GroupJudgeReward",
        "judge": "nanorl.envs.rewards.judge:JudgeReward",
        "math": "nanorl.envs.rewards.math_reward:MathReward",
        "model": "nanorl.envs.rewards.reward_model:ModelReward",
        "tests": "nanorl.envs.rewards.tests:UnitTestReward",
    }
)
"""The rewards that come along, by name."""


def load_reward(spec: str, arguments: Mapping[str, Any]) -> Reward:
    """The reward that `spec` names; a class is made with `arguments`. ValueError where there is
    none, where it cannot be imported, and for arguments that it does not take."""
    found = load_object(spec, what="reward", known=REWARDS, fits=is_reward)
    if not isinstance(found, type):
        if arguments:
            raise ValueError(f"--reward {spec}: only a class takes arguments, given {arguments}")
        return as_reward(found)
    try:
        return as_reward(found(**arguments))
    except TypeError as error:
        raise ValueError(
            f"--reward {spec}: {found.__name__} refuses {arguments}: {error}"
        ) from None


def is_reward(value: Any) -> bool:
    """A function, an object or a class that scores."""
    return callable(getattr(value, "score", None) or value)
