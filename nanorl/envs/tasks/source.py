"""The task of each step: a pure function of integers, so resuming needs only a cursor.

`GeneratedTasks` draws tasks from random generators, `ListTasks` takes them from a list, such as
what readers.py read. Neither holds state: `batch(step, n)` gives the same tasks in every process.
Left out: any filtering by difficulty, which belongs to the trainer, where the outcomes are.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Generic, Literal, TypeVar

from nanorl.envs.tasks.problem import Problem
from nanorl.task import HELDOUT_ONE_IN, Task

Split = Literal["train", "heldout"]
AnyTask = TypeVar("AnyTask", bound=Task)

MOST_DRAWS = 1000
"""One task in four is held out: a generator of many different ones misses a split so often with
probability 0.75 ** 1000 alone."""


class GeneratedTasks(Generic[AnyTask]):
    """Tasks of one split drawn by `generators`, which are functions of a random generator.

    They take turns in shuffled rounds, so none is neglected.

        GeneratedTasks({"sum": lambda rng: Task(f"{rng.randint(1, 99)} + 1?")}, seed=0).batch(3, 8)
    """

    fingerprint = ""  # they follow from the options

    def __init__(
        self,
        generators: Mapping[str, Callable[[random.Random], AnyTask]],
        seed: int,
        split: Split = "train",
    ) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"split={split!r} is unknown; use 'train' or 'heldout'")
        if not generators:
            raise ValueError("generators is empty; name at least one, for example a family's")
        self.generators = generators
        self.seed = seed
        self.split: Split = split

    def batch(self, step: int, n: int) -> list[AnyTask]:
        """The `n` tasks of a step, the same ones in every call and process."""
        return [self._draw(self.seed, self.split, step * n + i) for i in range(n)]

    def heldout(self, n: int, seed: int) -> list[AnyTask]:
        """`n` tasks that never occur in training, all different, every generator alike often.

        They are fewer where no generator brought another one in MOST_DRAWS draws.
        """
        found: dict[str, AnyTask] = {}
        index = newest = 0
        two_rounds = 2 * len(self.generators)  # of which each generator had at least one turn
        while len(found) < n and index - newest < two_rounds:
            task = self._draw(seed, "heldout", index, found)
            index += 1
            if found.setdefault(_identity(task), task) is task:
                newest = index
        return list(found.values())

    def _draw(
        self, seed: int, split: Split, index: int, known: Container[str] = frozenset()
    ) -> AnyTask:
        """The task at a place: one that is not `known`, if its generator soon brings one."""
        drawn: AnyTask | None = None
        names = sorted(self.generators)
        turn, place = divmod(index, len(names))
        random.Random(f"kinds {seed} {split} {turn}").shuffle(names)
        rng = random.Random(f"task {seed} {split} {index}")
        for _ in range(MOST_DRAWS):
            task = self.generators[names[place]](rng)
            if task.split == split:
                drawn = task
                if _identity(task) not in known:
                    return task
        if drawn is not None:
            return drawn
        raise ValueError(
            f"{names[place]}: none of {MOST_DRAWS} tasks that it drew falls into the split "
            f"{split!r}; by default that is chosen by a hash of the content, 1 in {HELDOUT_ONE_IN} "
            "is held out: draw more different tasks, or give each Task(..., split=...)"
        )


def _identity(task: Task) -> str:
    """The text that no two held-out tasks share: problems are split by their text, others by
    content."""
    return task.prompt if isinstance(task, Problem) else task.task_id


class ListTasks:
    """Tasks from a list with the interface of `GeneratedTasks`; every epoch is shuffled anew."""

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        *,
        name: str = "tasks",
        splits: Sequence[Split] = ("train", "heldout"),
    ) -> None:
        """ValueError if one of `splits` has no task; `name` goes into its message."""
        self.seed = seed
        self.fingerprint = fingerprint(tasks)
        self.tasks = [task for task in tasks if task.split == "train"]
        self.heldout_tasks = [task for task in tasks if task.split == "heldout"]
        for split in splits:
            if not (self.tasks if split == "train" else self.heldout_tasks):
                raise ValueError(
                    f"{name}: none of its {len(tasks)} tasks falls into the split {split!r}, "
                    f"which is chosen by the hash of the prompt (1 in {HELDOUT_ONE_IN} is held "
                    "out); add more tasks, or give each a field 'split', train or heldout"
                )

    def batch(self, step: int, n: int) -> list[Task]:
        """The `n` tasks of a step, the same ones in every call and process."""
        return [self._at(step * n + i) for i in range(n)]

    def heldout(self, n: int, seed: int) -> list[Task]:
        """Draw up to `n` different held-out tasks, no more than the list has."""
        tasks = list(self.heldout_tasks)
        random.Random(f"heldout {seed}").shuffle(tasks)
        return tasks[:n]

    def _at(self, index: int) -> Task:
        epoch, place = divmod(index, len(self.tasks))
        order = list(range(len(self.tasks)))
        random.Random(f"epoch {self.seed} {epoch}").shuffle(order)
        return self.tasks[order[place]]


class HeldoutTasks(ListTasks):
    """Tasks that nobody may train on, for the reason that `batch` gives."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, name: str, reason: str) -> None:
        """ValueError if none of the tasks is held out."""
        super().__init__(tasks, seed, name=name, splits=("heldout",))
        self._refusal = f"{name} is for evaluation alone: {reason}"

    def batch(self, step: int, n: int) -> list[Task]:
        """ValueError."""
        raise ValueError(self._refusal)


def fingerprint(tasks: Sequence[Task]) -> str:
    """A hash of the tasks' content and order, which decide what each step trains on.

    The spelling of the file does not count. A resumed run must find the same hash.
    """
    return hashlib.sha256("\n".join(task.task_id for task in tasks).encode()).hexdigest()
