"""`look_back`: go to a door that was seen once, at the beginning.

A room of `size` x `size` squares is drawn before each move: the agent is red, and in the first
picture alone the door is green. A turn moves by its one capital letter, N, S, W or E; a wall stops
it. The door pays 1, the last of `num_moves` moves ends the episode with nothing. So every move
needs the first picture as much as the last: where it is hidden, as every run of a model that sees
tries, success falls to what a walk that does not know the door finds (17 % in 8 moves of a 6 x 6
room, of walks that never turn back; a random one finds 6 %).

The teacher says where it is ("b3N": on the second row's third square, going up), and shows a
shortest way, rows first, on slippery ground: while it plays, four moves of ten go elsewhere, so
that its traces have seen places that a good player would never be at. A million parameters from
nothing do not learn it in 900 steps; `recall` is a game of that size (docs/log.md).

    nanorl train --model FOLDER --env look_back --env-args size=4 num_moves=6

Left out: walls inside of the room, which would need more moves and a larger model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.envs.images import Image
from nanorl.envs.shipped.room import Place, drawn, named
from nanorl.task import Task

MOVES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"N": (-1, 0), "S": (1, 0), "W": (0, -1), "E": (0, 1)}
)
_SLIPS = 0.4
_LETTER = re.compile(r"[A-Z]")


class LookBack(Env):
    """A room, a door that is shown once, and pictures of where one is."""

    system = ""
    defaults: Mapping[str, Any] = MappingProxyType(
        {"agent.max_turn_tokens": 6, "agent.max_context_tokens": 256, "rl.temperature": 1.0}
    )

    def __init__(self, size: int = 6, num_moves: int = 8) -> None:
        for name, value, least in (("size", size, 2), ("num_moves", num_moves, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"--env-args {name}={value}: must be a number of at least {least}")
        if size % 2:
            raise ValueError(f"--env-args size={size}: must be even, for squares of 2 x 2 patches")
        self.size, self.num_moves = size, num_moves
        self.defaults = {**self.defaults, "agent.max_turns": num_moves}
        self._at: Place = (0, 0)
        self._num_said = 0
        self._slips: random.Random | None = None

    def tasks(self, rng: random.Random) -> Task:
        """A start and a door that can be reached in time, two moves apart or more."""
        squares = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            start, door = rng.sample(squares, 2)
            if 2 <= distance(start, door) <= min(self.num_moves, self.size - 1):
                data = {"start": list(start), "door": list(door)}
                return Task("Go to the door.", kind="look_back", data=data)

    def reset(self) -> list[Any]:
        row, column = self.task.data["start"]
        self._at = (row, column)
        return [Image(drawn(self.size, self._at, self._door))]

    def step(self, text: str) -> Done | list[Any]:
        found = _LETTER.findall(text)
        move = MOVES.get(found[0]) if len(found) == 1 else None
        self._num_said += 1
        if move is not None:
            if self._slips is not None and self._slips.random() < _SLIPS:
                move = self._slips.choice(list(MOVES.values()))
            self._at = moved(self._at, move, self.size)
        if self._at == self._door:
            return self.done(reward=1.0)
        if self._num_said == self.num_moves:
            return self.done(reward=0.0)
        return [Image(drawn(self.size, self._at))]

    def score(self, transcript: object) -> float:
        """An episode that a limit cut off has not reached the door."""
        return 0.0

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        """Where it is, and a move that shortens the way: up or down as long as either does."""
        self._slips = rng
        here = distance(self._at, self._door)
        shorter = (
            word
            for word, move in MOVES.items()
            if distance(moved(self._at, move, self.size), self._door) < here
        )
        return named(self._at) + next(shorter)

    @property
    def _door(self) -> Place:
        row, column = self.task.data["door"]
        return (row, column)


def distance(a: Place, b: Place) -> int:
    """Moves between two squares."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def moved(place: Place, move: tuple[int, int], size: int) -> Place:
    """The square after a move; a wall stops it."""
    row, column = (min(max(at + by, 0), size - 1) for at, by in zip(place, move, strict=True))
    return row, column
