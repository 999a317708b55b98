"""`guess`: find a number from hints, higher or lower; whoever halves the range never misses.

Every task is a range and a number in it. A turn says one number; one that is not it is answered
with a hint and costs 0.05. The number pays 1, and after the last guess the episode ends with
nothing. A turn with no number, or with several, is a guess too, so listing them all is one miss.
An episode that a limit cuts off costs all its guesses.
The teacher stays in the range that is left, but does not halve it: that is for RL to find.

    nanorl train --env guess --env-args most=30 num_guesses=5

Left out: a bonus for few guesses beside the cost of each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.task import Task

_HINT = re.compile(r"(higher|lower) than (\d+)")
_MOST_DIGITS = 9
_COST = 0.05
_CARELESS = 0.1
"""How often the teacher forgets the hints."""


class Guess(Env):
    """`most` numbers to choose from, `num_guesses` to find it. The ranges begin with 1 to 80."""

    system = "Guess the number. Say one number and nothing else."
    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turn_tokens": 8,
            "agent.max_context_tokens": 256,
            "warm_start.steps": 24,
            "rl.temperature": 1.0,
        }
    )

    def __init__(self, most: int = 20, num_guesses: int = 5) -> None:
        for name, value in (("most", most), ("num_guesses", num_guesses)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"--env-args {name}={value}: must be a whole number, at least 1")
        self.most, self.num_guesses = most, num_guesses
        self.defaults = {**self.defaults, "agent.max_turns": num_guesses}
        self._num_said = 0

    def tasks(self, rng: random.Random) -> Task:
        low = rng.randint(1, 80)
        high = low + self.most - 1
        return Task(
            f"It is from {low} to {high}.",
            rng.randint(low, high),
            kind="guess",
            data={"low": low, "high": high},
        )

    def step(self, text: str) -> Done | str:
        guess = _number_in(text)
        if guess == self.task.answer:
            return self.done(reward=1.0, answer=guess)
        self.reward(-_COST)
        self._num_said += 1
        if self._num_said == self.num_guesses:
            return self.done(reward=0.0, answer=guess)
        if guess is None:
            return "Say one number."
        return f"higher than {guess}" if guess < self.task.answer else f"lower than {guess}"

    def score(self, transcript: object) -> float:
        """An episode that a limit cut off costs the guesses that were left."""
        return -_COST * (self.num_guesses - self._num_said)

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        """Any number that the hints leave."""
        low, high = self.task.data["low"], self.task.data["high"]
        if rng.random() >= _CARELESS:
            for hint, number in _HINT.findall("\n".join(observations)):
                if hint == "higher":
                    low = max(low, int(number) + 1)
                else:
                    high = min(high, int(number) - 1)
        return str(rng.randint(low, high))


def _number_in(text: str) -> int | None:
    """The number that a turn says; None for none, for several and for absurd ones."""
    found = re.findall(r"-?[0-9]+", text)
    return int(found[0]) if len(found) == 1 and len(found[0]) <= _MOST_DIGITS else None
