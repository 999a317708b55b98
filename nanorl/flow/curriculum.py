"""Which task is played next: `Curriculum`, and how one is found.

    in_order    the tasks as their source gives them, each epoch shuffled anew
    learnable   of some candidates the one whose kind earns rewards that vary most, which with 0
                and 1 is one that is solved half of the time: differences are what is learnt from
    pools       by task: those that are solved always, never and sometimes have shares of what is
                played (difficulty_pools.py)

A curriculum of your own is a class in a file, `--rl.curriculum mine.py:Hardest`:

    class Hardest:
        num_candidates = 4
        def choose(self, candidates, rng): return max(candidates, key=lambda task: len(task.prompt))
        def observe(self, task, rewards): pass
        def state(self): return {}
        def load(self, state): pass

A task's number is its place among all that the run plays, so a run without one that looks at
outcomes is a function of the seed. What a curriculum has learnt goes into every checkpoint.
In a run of several environments the candidates are of the one whose turn it is.
Left out: held-out tasks, which nobody chooses.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from nanorl.plugins import load_object
from nanorl.task import Task, derive_seed


class TaskSource(Protocol):
    """The source of tasks (tasks/source.py): a pure function of two integers."""

    def batch(self, step: int, n: int) -> Sequence[Task]: ...


class Curriculum(Protocol):
    """Chooses among candidates, and may learn from what came of its choices."""

    num_candidates: int

    def choose(self, candidates: Sequence[Task], rng: random.Random) -> Task: ...

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """The rewards of the rollouts of a task that was chosen, in the order of training."""
        ...

    def state(self) -> dict[str, Any]:
        """The things that it has learnt, as JSON; `load` is the inverse."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...


class InOrder:
    """Plays the tasks as they come."""

    num_candidates = 1

    def choose(self, candidates: Sequence[Task], rng: random.Random) -> Task:
        return candidates[0]

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """It learns nothing."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """There is nothing to take over."""


class Learnable:
    """Prefers kinds of tasks whose rewards vary. For rewards of 0 and 1 the variance is p(1 − p),
    largest where half are solved.

    Mean and variance of a kind are of a running window, which begins with one rollout that earned 0
    and one that earned 1. One choice in five is left to chance, so that no kind is forgotten.
    """

    num_candidates = 4
    decay = 0.98  # of what was seen, for each further rollout: about the last fifty count
    chance = 0.2

    def __init__(self) -> None:
        # by kind, decayed: sum of rewards, of their squares, number of rollouts
        self._seen: dict[str, list[float]] = {}

    def choose(self, candidates: Sequence[Task], rng: random.Random) -> Task:
        if rng.random() < self.chance:
            return rng.choice(candidates)
        return max(candidates, key=lambda task: self._variance(task.kind))  # of equals the first

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        for reward in rewards:
            seen = self._seen.get(task.kind, [0.0, 0.0, 0.0])
            more = (reward, reward * reward, 1.0)
            self._seen[task.kind] = [a * self.decay + b for a, b in zip(seen, more, strict=True)]

    def _variance(self, kind: str) -> float:
        total, squares, count = self._seen.get(kind, [0.0, 0.0, 0.0])
        mean = (total + 1) / (count + 2)
        return (squares + 1) / (count + 2) - mean * mean

    def state(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load(self, state: dict[str, Any]) -> None:
        # of a run of 0.1.0: successes and rollouts, and the square of a success is itself
        self._seen = {
            kind: [seen[0], *seen] if len(seen) == 2 else list(seen)
            for kind, seen in state["seen"].items()
        }


KNOWN: Mapping[str, str] = MappingProxyType(
    {
        "in_order": "nanorl.flow.curriculum:InOrder",
        "learnable": "nanorl.flow.curriculum:Learnable",
        "pools": "nanorl.flow.difficulty_pools:DifficultyPools",
    }
)


def load_curriculum(name: str, arguments: Mapping[str, Any] | None = None) -> Curriculum:
    """One of ours, or a class of the user's. ValueError where there is none, or it takes other
    arguments."""
    found = load_object(name, what="rl.curriculum", known=KNOWN, fits=_is_curriculum)
    given = dict(arguments or {})
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"--rl.curriculum-args {given}: {name} does not take them: {error}; it takes "
            f"{inspect.signature(found)}"
        ) from None
    made: Curriculum = found(**given)
    return made


def _is_curriculum(found: Any) -> bool:
    return isinstance(found, type) and all(
        hasattr(found, name) for name in ("num_candidates", "choose", "observe", "state", "load")
    )


def candidates(source: TaskSource, number: int, count: int) -> Sequence[Task]:
    """The `count` tasks among which task `number` of a run is chosen: of one environment, where the
    source has several (envs/mix.py)."""
    draw = getattr(source, "candidates", source.batch)
    drawn: Sequence[Task] = draw(number, count)
    return drawn


class TaskChooser:
    """The task of each number of a run."""

    def __init__(self, source: TaskSource, curriculum: Curriculum, *, seed: int) -> None:
        self._source, self._curriculum, self._seed = source, curriculum, seed

    def task(self, number: int) -> Task:
        """The task that is played as number `number`, counted over the whole run."""
        drawn = candidates(self._source, number, self._curriculum.num_candidates)
        rng = random.Random(derive_seed(self._seed, "curriculum", number))
        return self._curriculum.choose(drawn, rng)

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        self._curriculum.observe(task, rewards)

    def metrics(self) -> dict[str, float]:
        """The numbers that the curriculum has of itself, for the metrics of a step."""
        numbers = getattr(self._curriculum, "metrics", None)
        return {} if numbers is None else numbers()

    def state(self) -> dict[str, Any]:
        return self._curriculum.state()

    def load(self, state: dict[str, Any]) -> None:
        self._curriculum.load(state)
