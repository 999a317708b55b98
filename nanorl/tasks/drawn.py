"""`DrawnTasks`: tasks that a function draws, one for each place of the run.

The task at a place is a function of (seed, split, place), so nothing has to be remembered. Where
the function knows only a few different tasks, training repeats them and fewer are held out.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from nanorl.types import Task

MOST_DRAWS = 200
"""So many draws may miss the wanted split before that is an error: with one task in four held out,
that happens to a source that has none by a chance of 1e-25."""


class DrawnTasks:
    """The tasks of `draw(rng)`."""

    fingerprint = ""  # they follow from the options

    def __init__(self, draw: Callable[[random.Random], Task], seed: int, name: str) -> None:
        self.draw, self.seed, self.name = draw, seed, name

    def batch(self, step: int, n: int) -> list[Task]:
        """The `n` tasks of a step, the same ones in every call and process."""
        return [self._at(self.seed, "train", step * n + i) for i in range(n)]

    def heldout(self, n: int, seed: int) -> list[Task]:
        """Up to `n` different held-out tasks: fewer where so many draws find no new one."""
        found: dict[str, Task] = {}
        index, num_misses = 0, 0
        while len(found) < n and num_misses < MOST_DRAWS:
            task = self._at(seed, "heldout", index)
            num_misses = num_misses + 1 if task.task_id in found else 0
            found.setdefault(task.task_id, task)
            index += 1
        return list(found.values())

    def _at(self, seed: int, split: str, index: int) -> Task:
        rng = random.Random(f"{self.name} {seed} {split} {index}")
        for _ in range(MOST_DRAWS):
            task = self.draw(rng)
            if not isinstance(task, Task):
                raise ValueError(
                    f"{self.name}.tasks(rng) returned {task!r:.200}; it must return a nanorl.Task"
                )
            if task.split == split:
                return task
        raise ValueError(
            f"{self.name}.tasks(rng): none of {MOST_DRAWS} draws falls into the split {split!r}, "
            "which follows from a hash of each task's content: draw from more different tasks, or "
            "give tasks their split"
        )
