"""`DifficultyPools`: tasks by how often they are solved, each pool with a share of what is played.

    easy      the running success m is at least `easy_from`: it is solved always
    hard      m is at most `hard_to`: it is solved never
    normal    all others, and every task that was not played yet

    --rl.curriculum pools --rl.curriculum-args easy=0.1 hard=0.3

With probability `easy` a task of the easy pool is played next, with probability `hard` one of the
hard pool, else a normal one: the first such of `candidates` that the source gives. Where there is
none, a normal one takes its place, and where there is no normal one either, the first candidate. A
task's m begins with the mean reward of its first group and goes half of the way to that of each
later one, m ← m + (r − m) / 2, so it leaves a pool as soon as the policy does otherwise.

prime-rl's buffer has the same pools, and normal tasks fill up the others. The last group alone
decides there, thresholds are off by default, and a batch has its shares rounded down.
Tasks are told apart by their ids: a source that never gives a task twice has normal ones alone.
Left out: kinds of tasks (`Learnable`, curriculum.py), which say something of tasks not yet played.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

from nanorl.bounds import check_number
from nanorl.task import Task

Pool = Literal["easy", "normal", "hard"]
POOLS: tuple[Pool, ...] = get_args(Pool)
MOST_TASKS = 100_000
"""So many tasks are remembered, those that were played last: some megabytes of a checkpoint."""
_FLAG = "--rl.curriculum-args "


class DifficultyPools:
    """A curriculum of three pools."""

    num_candidates = 8

    def __init__(
        self,
        *,
        easy: float = 0.1,
        hard: float = 0.2,
        easy_from: float = 1.0,
        hard_to: float = 0.0,
        candidates: int = num_candidates,
    ) -> None:
        """`easy` and `hard` are shares of what is played. ValueError where they are none."""
        check_number(f"{_FLAG}easy=", easy, 0, 1)
        check_number(f"{_FLAG}hard=", hard, 0, 1)
        check_number(f"{_FLAG}candidates=", candidates, 1, 4096, "all are drawn for each task")
        check_number(f"{_FLAG}easy_from=", easy_from)
        check_number(f"{_FLAG}hard_to=", hard_to)
        if easy + hard > 1:
            raise ValueError(f"{_FLAG}easy={easy} hard={hard}: must be at most 1 together")
        if hard_to >= easy_from:
            raise ValueError(
                f"{_FLAG}hard_to={hard_to} easy_from={easy_from}: a task would be of both pools; "
                "hard_to must be smaller"
            )
        self.num_candidates = int(candidates)
        self._easy, self._hard = easy, hard
        self._easy_from, self._hard_to = easy_from, hard_to
        self._running: dict[str, float] = {}  # by task id, the one that was played last at the end

    def pool_of(self, task_id: str) -> Pool:
        running = self._running.get(task_id)
        if running is None:
            return "normal"
        if running >= self._easy_from:
            return "easy"
        return "hard" if running <= self._hard_to else "normal"

    def choose(self, candidates: Sequence[Task], rng: random.Random) -> Task:
        point = rng.random()
        wanted: Pool = "normal"
        if point < self._easy:
            wanted = "easy"
        elif point < self._easy + self._hard:
            wanted = "hard"
        pools = [self.pool_of(task.task_id) for task in candidates]
        for pool in (wanted, "normal"):
            if pool in pools:
                return candidates[pools.index(pool)]
        return candidates[0]

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        if not rewards:  # the machine cost it all members: nothing is known of the policy
            return
        mean = sum(rewards) / len(rewards)
        before = self._running.pop(task.task_id, mean)
        self._running[task.task_id] = before + (mean - before) / 2
        if len(self._running) > MOST_TASKS:
            del self._running[next(iter(self._running))]

    def metrics(self) -> dict[str, float]:
        """The number of tasks in each pool, of those that were played."""
        counts = Counter(map(self.pool_of, self._running))
        return {f"pool_{pool}": float(counts[pool]) for pool in POOLS}

    def state(self) -> dict[str, Any]:
        return {"running": self._running}

    def load(self, state: dict[str, Any]) -> None:
        self._running = dict(state.get("running", {}))  # none of a run with another curriculum
