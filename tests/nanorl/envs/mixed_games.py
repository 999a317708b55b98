"""Two environments for the tests of runs in several: other limits and rewards, one teacher."""

from __future__ import annotations

import random
from typing import ClassVar

import nanorl


class Echo(nanorl.Env):
    """The number is said again. It is shown by a teacher."""

    system = "Say it again."
    defaults: ClassVar = {"agent.max_turns": 1, "agent.max_turn_tokens": 8}

    def __init__(self, most: int = 999) -> None:
        self.most = most

    def tasks(self, rng: random.Random) -> nanorl.Task:
        return nanorl.Task(f"{rng.randint(1, self.most)}", kind="echo")

    def step(self, text: str):
        return self.done(reward=float(text.strip() == self.task.prompt))

    def teacher(self, observations: list[str], rng: random.Random) -> str:
        return self.task.prompt


class Reverse(nanorl.Env):
    """The number is said backwards, for half of the points. Nobody shows it."""

    system = "Say it backwards."
    defaults: ClassVar = {"agent.max_turns": 3, "agent.max_turn_tokens": 12}

    def tasks(self, rng: random.Random) -> nanorl.Task:
        return nanorl.Task(f"back {rng.randint(1, 999)}", kind="reverse", data={"of": "reverse"})

    def step(self, text: str):
        if text == "wait":
            return "Well?"
        return self.done(reward=0.5 * (text == self.task.prompt[:4:-1]))
