"""`recall`: say where things are, and at the end where the one was that the first picture showed.

A red square jumps about in a room of `size` x `size` squares; in the first picture alone there is a
green ring as well. A turn names the red square's place ("b3": the second row's third). The last of
`num_pictures` is empty, and asks where the ring was. Every right name leads to the next picture and
the last one pays 1; a wrong one ends the episode with nothing. So the last turn needs the first
picture, of which no turn before it has said anything: without it one guess of `size` ** 2 is right.

The teacher says what is right. With `teacher_squares` less than all of them it remembers the ring
exactly in the first so many squares, row by row. Of a ring in a later one it knows in which half of
which row it was, and names a square of that half at random. Who imitates it learns to look back,
and has to find out alone what exactly was there.

    nanorl train --model FOLDER --env recall --env-args size=6 num_pictures=4

Left out: several rings, which would have to be told apart by what is asked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.envs.images import Image
from nanorl.envs.shipped.argument_checks import check_count
from nanorl.envs.shipped.room import Place, drawn, named
from nanorl.task import Task


class Recall(Env):
    """A red square to be followed, and a ring to be remembered."""

    system = ""
    defaults: Mapping[str, Any] = MappingProxyType(
        {"agent.max_turn_tokens": 4, "agent.max_context_tokens": 256, "rl.temperature": 1.0}
    )

    def __init__(
        self, size: int = 6, num_pictures: int = 4, teacher_squares: int | None = None
    ) -> None:
        check_count("size", size, 2, 26)  # rows have letters
        check_count("num_pictures", num_pictures, 2, size * size)
        if size % 2:
            raise ValueError(f"--env-args size={size}: must be even, for squares of 2 x 2 patches")
        self.size, self.num_pictures = size, num_pictures
        self.teacher_squares = size * size if teacher_squares is None else teacher_squares
        check_count("teacher_squares", self.teacher_squares, 0, size * size)
        self.defaults = {**self.defaults, "agent.max_turns": num_pictures}
        self._num_named = 0

    def tasks(self, rng: random.Random) -> Task:
        """Squares that all differ: those of the red one in order, and at last the ring's."""
        squares = [[row, column] for row in range(self.size) for column in range(self.size)]
        places = rng.sample(squares, self.num_pictures)
        return Task("Say where it is.", kind="recall", data={"places": places})

    def reset(self) -> list[Any]:
        return [Image(drawn(self.size, self._place(0), self._place(-1)))]

    def step(self, text: str) -> Done | list[Any]:
        if text.strip() != self._right:
            return self.done(reward=0.0)
        self._num_named += 1
        if self._num_named == self.num_pictures:
            return self.done(reward=1.0)
        is_last = self._num_named == self.num_pictures - 1
        return [Image(drawn(self.size, None if is_last else self._place(self._num_named)))]

    def score(self, transcript: object) -> float:
        """An episode that a limit cut off has not named the ring."""
        return 0.0

    def teacher(self, observations: Sequence[Any], rng: random.Random) -> str:
        """The right name, or what it remembers of it."""
        row, column = self._place(self._num_named)
        is_known = row * self.size + column < self.teacher_squares
        if is_known or self._num_named < self.num_pictures - 1:
            return self._right
        half = self.size // 2
        return named((row, column // half * half + rng.randrange(half)))

    @property
    def _right(self) -> str:
        return named(self._place(self._num_named))

    def _place(self, number: int) -> Place:
        row, column = self.task.data["places"][number]
        return (row, column)
