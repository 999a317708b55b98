"""What a run tells its observers (run/observers.py): the phase it is in, what a step gave, and what
an evaluation found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from nanorl.task import Task
from nanorl.types import Rollout, TokenStats, Withheld

Phase = Literal[
    "untrained", "warm_start", "before", "rl", "after", "no_tool", "blind", "first_hidden", "done"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
WITHHELD: Mapping[str, Withheld] = MappingProxyType(
    {"no_tool": "tools", "blind": "pictures", "first_hidden": "first picture"}
)
"""What the policy goes without in an evaluation, by its name; in the others nothing."""


@dataclass(kw_only=True)
class StepResult:
    """Holds what one optimizer batch gave: its metrics and the rollouts it was made of.

    StepResult(step=3, metrics={"reward": 0.6, "grad_norm": 1.2}, groups=[[...], [...]], failed=[],
               tasks={"sum-1f2e": task}, token_stats={})
    """

    step: int
    metrics: dict[str, Any]
    groups: list[list[Rollout]]  # those left out, too
    failed: list[Rollout]  # attempts that the machine spoilt; they were repeated
    tasks: dict[str, Task]  # by task_id, of all groups
    token_stats: dict[str, TokenStats]  # by rollout_id, of those that were scored
    replayed: list[Sequence[Rollout]] = field(default_factory=list)  # of earlier steps, trained on


@dataclass(kw_only=True)
class EvaluationResult:
    """`success` is the share of rollouts with reward 1, `per_kind` counts rollouts; failed ones are
    retried, never counted. `played` has the samples of a task beside each other."""

    success: float
    num_tasks: int
    per_kind: dict[str, tuple[int, int]]  # kind -> (solved, played)
    mean_turns: float
    mean_action_tokens: float
    played: list[tuple[Task, Rollout]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "success": self.success,
            "num_tasks": self.num_tasks,
            "per_kind": {kind: list(counts) for kind, counts in sorted(self.per_kind.items())},
            "mean_turns": self.mean_turns,
            "mean_action_tokens": self.mean_action_tokens,
        }
