"""Today's tasks of a run, and what is another one in them than in those that it stored.

A rollout is played again with the task that the run's own source gives today: the one of the same
id, or else the one that is drawn at the same place, which is how a task that was edited is found
(its id follows from its content). Left out: names for tasks that were moved and edited at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

from nanorl.parts import Parts
from nanorl.replay.past_run import Chosen
from nanorl.types import Task

MAX_CHARS = 60


class TodaysTasks:
    """Draws what a step, or an evaluation, is played with today."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._drawn: dict[tuple[str, int], Sequence[Task]] = {}

    def of(self, chosen: Chosen) -> Task | None:
        """The task of the same id, or of the same place; None where nothing is drawn there."""
        batch = self._batch(chosen)
        same = (task for task in batch if task.task_id == chosen.entry.task_id)
        place = self._place(chosen)
        return next(same, batch[place] if place < len(batch) else None)

    def _batch(self, chosen: Chosen) -> Sequence[Task]:
        step = chosen.entry.step
        key = (chosen.phase, step)
        if key not in self._drawn:
            config, tasks = self._parts.config, self._parts.tasks
            is_rl = chosen.phase == "rl"
            count = config.rl.tasks_per_step
            self._drawn[key] = tasks.train.batch(step, count) if is_rl else tasks.heldout
        return self._drawn[key]

    def _place(self, chosen: Chosen) -> int:
        """Where in the step, or in the list of the evaluation, its group stands."""
        number = int(chosen.entry.group_id.rpartition("-")[2].lstrip("g"))
        per_step = self._parts.config.rl.tasks_per_step
        return number - chosen.entry.step * per_step if chosen.phase == "rl" else number


def changes(then: Task, now: Task | None) -> str:
    """What is another thing in the task now; empty where they are equal."""
    if now is None:
        return f"the source has no task {then.task_id} any more, and none in its place"
    if then == now or then.to_json() == now.to_json():
        return ""
    found = []
    for one in fields(Task):
        old, new = getattr(then, one.name), getattr(now, one.name)
        if old == new or one.name == "task_id":
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += [
                _changed(f"{one.name}[{key!r}]", old.get(key), new.get(key))
                for key in sorted(old.keys() | new.keys())
                if old.get(key) != new.get(key)
            ]
        else:
            found.append(_changed(one.name, old, new))
    return "; ".join(found) or _changed("task_id", then.task_id, now.task_id)


def _changed(name: str, old: object, new: object) -> str:
    return f"{name}: {_short(old)} -> {_short(new)}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}...")
