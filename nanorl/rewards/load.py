"""Finds the reward that `--reward` names: one of ours, or a function or class of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanorl.plugins import load_object
from nanorl.rewards.base import Reward, as_reward

REWARDS: Mapping[str, str] = MappingProxyType({"rule": "nanorl.rewards.rule:RuleReward"})
"""The rewards that come with the project and need no arguments."""


def load_reward(spec: str) -> Reward:
    """The reward of that name. ValueError says what is wrong with it."""
    return as_reward(load_object(spec, what="reward", known=REWARDS, fits=_fits))


def _fits(value: Any) -> bool:
    return callable(value) or callable(getattr(value, "score", None))
