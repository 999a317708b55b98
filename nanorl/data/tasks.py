"""Which task comes at which step: a pure function of integers, so resuming needs only a cursor.

`TaskSource` draws from generated families, `FileTasks` from a user's JSON lines. Neither holds
state: `batch(step, n)` gives the same tasks in every process. What has been learned so far enters
as an argument (curriculum.py), so that a resumed run draws the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from nanorl.data.curriculum import draw_kinds
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

    @property
    def kinds(self) -> list[str]:
        return [name.partition("/")[2] for name in self.generators]

    def batch(self, step: int, n: int, weights: Mapping[str, float] | None = None) -> list[Problem]:
        """The `n` tasks of a step, the same ones in every call and process.

        Kinds take turns, or come in proportion to `weights` (by kind).
        """
        first = step * n
        if weights is None:
            return [self._draw(self.seed, self.split, first + i) for i in range(n)]
        by_name = {name: weights[name.partition("/")[2]] for name in self.generators}
        names = draw_kinds(by_name, n, random.Random(f"curriculum {self.seed} {self.split} {step}"))
        return [
            self._draw_of(name, self.seed, self.split, first + i) for i, name in enumerate(names)
        ]

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
        return self._draw_of(kinds[place], seed, split, index)

    def _draw_of(self, name: str, seed: int, split: Split, index: int) -> Problem:
        rng = random.Random(f"task {seed} {split} {index}")
        while True:
            problem = self.generators[name](rng)
            if problem.split == split:
                return problem
