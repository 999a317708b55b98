"""Today's tasks of a run, and what is another one in them than in those that it stored.

A rollout is played again with the task that the run's own source gives today: the one of the same
id, or else the one that is drawn at the same place, which is how a task that was edited is found
(its id follows from its content). Left out: names for tasks that were moved and edited at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

from nanorl.flow.curriculum import candidates
from nanorl.inspection.replay.past_run import Chosen
from nanorl.options.parts import Parts
from nanorl.options.run_curriculum import run_curriculum
from nanorl.task import Task

MAX_CHARS = 60


class CurrentTasks:
    """Draws what a step, or an evaluation, is played with today."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._drawn: dict[int, Sequence[Task]] = {}

    def of(self, chosen: Chosen) -> Task | None:
        """The task of the same id, or of the same place; None where nothing is drawn there."""
        number = int(chosen.entry.group_id.rpartition("-")[2].lstrip("g"))
        if chosen.phase == "rl":
            batch, place = self._candidates(number), 0
        else:
            batch, place = self._parts.tasks.heldout, number
        same = (task for task in batch if task.task_id == chosen.entry.task_id)
        return next(same, batch[place] if place < len(batch) else None)

    def _candidates(self, number: int) -> Sequence[Task]:
        """Those among which the run chose its task of that number."""
        if number not in self._drawn:
            count = run_curriculum(self._parts.config).num_candidates
            self._drawn[number] = candidates(self._parts.tasks.train, number, count)
        return self._drawn[number]


def changes(then: Task, now: Task | None) -> str:
    """The changes of the task since then, in words; empty where there are none."""
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
