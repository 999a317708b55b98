"""`answer`: one turn, and what the policy says in it is its answer. The plainest environment, for
tasks and a reward of your own.

    nanorl train --env answer --tasks questions.jsonl --reward score.py

Without a reward of yours, an answer that equals the task's earns 1, numbers compared by value; of a
text with "Answer:" only what follows it counts. There is no teacher, so training begins with RL.
Left out: tasks; --tasks brings them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Env


class Answer(Env):
    """`system` opens every chat."""

    loop = "single_turn"
    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turns": 1,
            "agent.max_turn_tokens": 32,
            "agent.max_context_tokens": 256,
            "rl.temperature": 0.8,
        }
    )

    def __init__(self, system: str = "") -> None:
        self.system = system
