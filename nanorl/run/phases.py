"""The phases of a run, by the names that its cursor has for them.

untrained -> warm_start -> before -> rl -> after -> no_tool -> blind -> first_hidden -> done
"""

from __future__ import annotations

from typing import Protocol

from nanorl.observability.results import Phase
from nanorl.run.evaluation_phase import EvaluationPhase
from nanorl.run.rl_phase import RLPhase
from nanorl.run.run_checkpoints import RunCheckpoints
from nanorl.run.state import RunState
from nanorl.run.warm_start_phase import WarmStartPhase


class RunPhase(Protocol):
    """A part of a run."""

    async def play(self) -> None:
        """Do what is left of it, then move the cursor to the next phase."""
        ...


def make_phases(state: RunState, checkpoints: RunCheckpoints) -> dict[Phase, RunPhase]:
    """All phases but "done", in which nothing is left to do."""
    config, evaluation = state.config, state.config.evaluation
    # Without a warm start RL begins with these weights; what there is none of cannot be withheld.
    num_untrained = evaluation.num_tasks_untrained if config.warm_start.steps else 0
    num_no_tool = evaluation.num_tasks_no_tool if state.parts.kind.has_tools else 0
    num_hidden = evaluation.num_tasks_hidden if state.parts.pictures else 0
    return {
        "untrained": EvaluationPhase(state, "untrained", num_untrained),
        "warm_start": WarmStartPhase(state, checkpoints),
        "before": EvaluationPhase(state, "before", evaluation.num_tasks),
        "rl": RLPhase(state, checkpoints),
        "after": EvaluationPhase(state, "after", evaluation.num_tasks),
        "no_tool": EvaluationPhase(state, "no_tool", num_no_tool),
        "blind": EvaluationPhase(state, "blind", num_hidden),
        "first_hidden": EvaluationPhase(state, "first_hidden", num_hidden),
    }
