"""The verdict of the tiny preset with noise, for hard.json: in training one in eight is the wrong
way round, in both directions, as of a judge or of tests that are not always right. Held-out tasks
are judged without noise.
"""

from __future__ import annotations

import hashlib
from typing import Any

from nanorl.envs.rewards.rule import RuleReward

ONE_IN = 8


def score(rollout: Any, task: Any, answer: str | None) -> float:
    """1 for the right answer, 0 for a wrong one; where the noise falls follows from the rollout's
    id alone, so that every algorithm meets the same."""
    verdict = RuleReward()(answer, task.answer)
    digest = hashlib.sha256(f"noise {rollout.rollout_id}".encode()).digest()
    is_wrong = task.split == "train" and digest[0] % ONE_IN == 0
    return 1.0 - verdict if is_wrong else verdict
