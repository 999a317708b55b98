"""Which task comes at which step: a pure function of integers, so resuming needs only a cursor.

`TaskSource` draws from generated families, `FileTasks` from a user's JSON lines. Neither holds
state: `batch(step, n)` gives the same tasks in every process. Left out: any filtering by
difficulty, which belongs to the trainer, where the outcomes are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from nanorl.data.problem import Family, Problem

Split = Literal["train", "heldout"]


class TaskSource:
    """Generated tasks of one split; kinds take turns in shuffled rounds, so none is neglected."""

    def __init__(self, families: Sequence[Family], seed: int, split: Split = "train") -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"split={split!r} is unknown; use 'train' or 'heldout'")
        self.generators = {
            f"{family.name}/{kind}": generator
            for family in families
            for kind, generator in family.generators.items()
        }
        if not self.generators:
            raise ValueError("families is empty; name at least one, for example 'smollm2'")
        self.seed = seed
        self.split: Split = split

    def batch(self, step: int, n: int) -> list[Problem]:
        """The `n` tasks of a step, the same ones in every call and process."""
        return [self._draw(self.seed, self.split, step * n + i) for i in range(n)]

    def heldout(self, n: int, seed: int) -> list[Problem]:
        """`n` tasks whose texts never occur in training, all different, every kind alike often."""
        found: dict[str, Problem] = {}
        index = 0
        while len(found) < n:
            problem = self._draw(seed, "heldout", index)
            found.setdefault(problem.prompt, problem)
            index += 1
        return list(found.values())

    def _draw(self, seed: int, split: Split, index: int) -> Problem:
        kinds = sorted(self.generators)
        turn, place = divmod(index, len(kinds))
        random.Random(f"kinds {seed} {split} {turn}").shuffle(kinds)
        rng = random.Random(f"task {seed} {split} {index}")
        while True:
            problem = self.generators[kinds[place]](rng)
            if problem.split == split:
                return problem
