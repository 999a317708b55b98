"""`FinishedGroup`: the rollouts of one task, with what a batch has to know of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nanorl.rollout_json import from_json
from nanorl.task import Task
from nanorl.types import Rollout


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """All rollouts of a task that were played to their end. A group of four that lost one:

    FinishedGroup(index=17, task=task, rollouts=[first, second, fourth], size=4)
    """

    index: int
    """The number of its task, counted over the whole run."""
    task: Task
    rollouts: list[Rollout]
    size: int
    """How many rollouts it was to have."""

    @property
    def is_whole(self) -> bool:
        """False if the machine, not the program, cost it members."""
        return len(self.rollouts) == self.size

    @property
    def oldest_version(self) -> int:
        """The policy that sampled the first of its tokens; -1 without any."""
        return min((r.version for r in self.rollouts if r.version >= 0), default=-1)

    @property
    def newest_version(self) -> int:
        """The newest policy that sampled one of its tokens; -1 without any."""
        sequences = [sequence for rollout in self.rollouts for sequence in rollout.sequences]
        last = (next((v for v in reversed(s.versions) if v >= 0), -1) for s in sequences)
        return max(last, default=-1)

    @property
    def num_action_tokens(self) -> int:
        return sum(rollout.num_action_tokens for rollout in self.rollouts)

    def to_text(self) -> str:
        """JSON; `from_text` is its inverse. The lists of tokens are not copied first, as by
        `rollout_json.to_json`, which takes five times as long."""
        whole = {
            "index": self.index,
            "task": self.task.to_json(),
            "rollouts": self.rollouts,
            "size": self.size,
        }
        return json.dumps(whole, default=vars)

    @classmethod
    def from_text(cls, text: str | bytes) -> FinishedGroup:
        data: dict[str, Any] = json.loads(text)
        return cls(
            index=data["index"],
            task=Task.from_json(data["task"]),
            rollouts=[from_json(one) for one in data["rollouts"]],
            size=data["size"],
        )
