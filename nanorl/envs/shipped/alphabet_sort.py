"""`alphabet_sort`: names in alphabetical order over several turns, as in prime-rl's environment.

The first turn sorts some names, by first or by last name (a name is written FirstLast); every
further one adds names, and all of them are to be sorted with the new ones marked. A turn pays how
alike its lines are to the right ones (twice their longest common subsequence over both numbers of
lines) to the power of four, and the episode pays the mean over its turns, so 1 only where every
line of every turn is right. A turn without its tags, or with two pairs, pays nothing.
The teacher is right four times in five, else swaps two lines.

    nanorl train --env alphabet_sort --env-args max_turns=2 max_names=3

Left out: two names with the same key in one task, for their order would be a matter of taste.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.envs.shipped.tagged_text import lcs_ratio, tagged
from nanorl.task import Task

_FIRST = """
Adam Alice Amir Anna Ben Bianca Carl Chloe Clara Daniel David Diana Elena Emil Erik Eva Fatima Felix
Frank Grace Greta Hanna Hugo Ian Ines Ivan Jack Jana Jonas Julia Karim Kate Lara Leo Linda Lukas
Maria Max Mei Mila Nadia Nils Nora Olga Oscar Paul Petra Quinn Rosa Ruth Sam Sofia Tara Tom Uma Vera
Victor Wanda Wei Xenia Yara Yusuf Zoe
"""
_LAST = """
Adler Allen Baker Bauer Berg Brown Chen Costa Cruz Dahl Diaz Evans Fischer Flores Garcia Gomez Gray
Hall Hill Huang Ito Jensen Jones Kaya Keller Khan Kim Klein Lang Lee Lopez Meyer Miller Moore Nagy
Novak Olsen Ortiz Park Perez Petrov Quist Reed Rossi Sato Schmidt Silva Singh Smith Tanaka Taylor
Toth Unger Vogel Wagner Walker Wang Weber White Xu Yang Young Zhang
"""
_FIRST_NAMES, _LAST_NAMES = tuple(_FIRST.split()), tuple(_LAST.split())
_NEW = " // new name!"
_POWER = 4
_SLIPS = 0.2
_FIRST_TAG, _NEXT_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"


class AlphabetSort(Env):
    """Tasks of `min_turns` to `max_turns` turns, each with `min_names` to `max_names` new names."""

    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turn_tokens": 96,
            "agent.max_context_tokens": 640,
            "agent.max_observation_tokens": 128,
            "warm_start.steps": 60,
            "rl.temperature": 1.0,
        }
    )

    def __init__(
        self, min_turns: int = 1, max_turns: int = 2, min_names: int = 2, max_names: int = 3
    ) -> None:
        most = len(_FIRST_NAMES) // max(max_names, 1)
        if not (1 <= min_turns <= max_turns <= most and 1 <= min_names <= max_names):
            raise ValueError(
                f"--env-args min_turns={min_turns} max_turns={max_turns} min_names={min_names} "
                f"max_names={max_names}: each from 1, no minimum above its maximum, and no more "
                f"than {len(_FIRST_NAMES)} names in all"
            )
        self.num_turns, self.num_names = (min_turns, max_turns), (min_names, max_names)
        self.defaults = {**self.defaults, "agent.max_turns": max_turns}
        self._scores: list[float] = []

    def tasks(self, rng: random.Random) -> Task:
        sizes = [rng.randint(*self.num_names) for _ in range(rng.randint(*self.num_turns))]
        count = sum(sizes)
        names = zip(rng.sample(_FIRST_NAMES, count), rng.sample(_LAST_NAMES, count), strict=True)
        given = [[next(names) for _ in range(size)] for size in sizes]
        by_first = rng.random() < 0.5
        right, known = [], list[tuple[str, str]]()
        for number, new in enumerate(given):
            known = sorted([*known, *new], key=lambda pair: pair[0 if by_first else 1])
            lines = ["".join(one) + (_NEW if number and one in new else "") for one in known]
            right.append("\n".join(lines))
        asked = [
            _question(["".join(one) for one in new], "FIRST" if by_first else "LAST", number)
            for number, new in enumerate(given)
        ]
        return Task(asked[0], right, kind="alphabet_sort", data={"asked": asked})

    def step(self, text: str) -> Done | str:
        number = len(self._scores)
        said = tagged(text, _FIRST_TAG if number == 0 else _NEXT_TAG) or ""
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        self._scores.append(lcs_ratio(lines, self.task.answer[number].splitlines()) ** _POWER)
        if len(self._scores) < len(self.task.answer):
            return self.task.data["asked"][number + 1]
        return self.done(reward=self._mean())

    def score(self, transcript: object) -> float:
        """Turns that a limit cut off pay nothing."""
        return self._mean()

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        """The list of this turn, now and then with two names in the wrong order."""
        number = len(observations)
        lines = self.task.answer[number].splitlines()
        if len(lines) > 1 and rng.random() < _SLIPS:
            place = rng.randrange(len(lines) - 1)
            lines[place : place + 2] = lines[place + 1], lines[place]
        tag = _FIRST_TAG if number == 0 else _NEXT_TAG
        return "\n".join([f"<{tag}>", *lines, f"</{tag}>"])

    def _mean(self) -> float:
        return sum(self._scores) / len(self.task.answer)


def _question(names: list[str], key: str, number: int) -> str:
    """The question of a turn; `number` counts from 0."""
    listed = ", ".join(names)
    if number == 0:
        return (
            f"Sort by {key} name: {listed}\n"
            f"Write a name a line between <{_FIRST_TAG}> and </{_FIRST_TAG}>."
        )
    return (
        f"Add and sort all by {key} name: {listed}\n"
        f"Write a name a line between <{_NEXT_TAG}> and </{_NEXT_TAG}>, with `{_NEW.strip()}` "
        "after each that this turn added."
    )
