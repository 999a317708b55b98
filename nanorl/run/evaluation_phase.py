"""`EvaluationPhase`: the score on held-out tasks at one place of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.observability.report.observer import Evaluated, PhaseBegun
from nanorl.observability.report.summary import EVALUATIONS, HIDING
from nanorl.observability.results import WITHHELD, Phase
from nanorl.run.heldout_success import evaluate
from nanorl.run.state import RunState
from nanorl.task import Task


class EvaluationPhase:
    """Plays the first `num_tasks` held-out tasks once each, greedily; none where it is 0."""

    def __init__(self, state: RunState, name: Phase, num_tasks: int) -> None:
        self._state, self._name, self._num_tasks = state, name, num_tasks

    async def play(self) -> None:
        tasks = self._state.parts.tasks.heldout[: self._num_tasks]
        if tasks and not self._has_nothing_to_hide():
            await self._evaluate(tasks)
        self._state.cursor.next_phase()

    def _has_nothing_to_hide(self) -> bool:
        pictures = self._state.parts.pictures
        return self._name in HIDING and not (pictures and any(pictures.glob("*")))

    async def _evaluate(self, tasks: Sequence[Task]) -> None:
        state, name = self._state, self._name
        title = f"evaluation, {EVALUATIONS[name]}"
        play = partial(
            state.roles.collector.call,
            CollectorRole.play_task,
            withheld=WITHHELD.get(name, ""),
        )
        start = time.perf_counter()
        async with state.timed(PhaseBegun(phase=name, title=title, total=len(tasks), num_lines=4)):
            result = await evaluate(
                play,
                tasks,
                name=name,
                on_rollout=lambda _: state.observers.on_progress(title, {}),
            )
        seconds, cursor = time.perf_counter() - start, state.cursor
        cursor.results[name] = result.to_json()
        await state.observers.on_evaluation(
            Evaluated(phase=name, step=cursor.rl_steps_done, seconds=seconds, result=result)
        )
