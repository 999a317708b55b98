"""Small environments of which each gives a run one disease, with the options of a run that has it.

A turn is a letter or two, and the teacher's letters decide what a policy does when RL begins: the
model is made on the spot, learns them in half a minute of a CPU's second, and then RL is real.
"""

from __future__ import annotations

import random
from typing import Any

import nanorl

SMALL: dict[str, Any] = {
    **{"dtype": "fp32", "threads": 1, "save_every": 1000, "keep_start": False},
    **{"warm_start.steps": 40, "warm_start.traces_per_step": 8, "warm_start.drill_fraction": 0.0},
    **{"warm_start.epochs": 1, "warm_start.lr": 3e-3, "warm_start.warmup_steps": 4},
    **{"rl.steps": 12, "rl.tasks_per_step": 8, "rl.group_size": 4, "rl.lr": 1e-3},
    **{"rl.temperature": 1.0, "rl.schedule": "constant"},
    **{"agent.max_turns": 1, "agent.max_turn_tokens": 4, "agent.max_context_tokens": 96},
    **{"evaluation.num_tasks": 24, "evaluation.num_tasks_untrained": 0},
    **{"evaluation.num_tasks_no_tool": 0, "evaluation.num_tasks_each": 16, "evaluation.k": 4},
}


class Letters(nanorl.Env):
    """A letter is asked for, and the teacher says one of `said`, in which letters may be twice."""

    said = "xy"
    system = ""

    def tasks(self, rng: random.Random) -> nanorl.Task:
        return nanorl.Task(f"say {rng.randint(0, 999)}", answer=self.wanted(rng))

    def wanted(self, rng: random.Random) -> str:
        return "x"

    def teacher(self, observations: list[str], rng: random.Random) -> str:
        return rng.choice(self.said)


class Well(Letters):
    """Right half of the time as RL begins, and nearly always at its end."""


class TooHard(Letters):
    """What is wanted is never said."""

    def wanted(self, rng: random.Random) -> str:
        return "z"


class Solved(Letters):
    """What is wanted is always said."""

    said = "x"


class AllOrNothing(Letters):
    """Half of the tasks want what is always said, half what is never said."""

    said = "x"

    def wanted(self, rng: random.Random) -> str:
        return rng.choice("xz")


class Lucky(Letters):
    """One rollout in sixteen is right."""

    said = "xyyyyyyyyyyyyyyy"


class Faint(Letters):
    """Everything earns a half, and one letter a thousandth more."""

    def step(self, text: str) -> Any:
        return self.done(reward=0.5 + 0.001 * (text == "x"))


class NearMiss(Letters):
    """The letter beside the right one earns seven tenths, and the right one is rarely said."""

    said = "xyyyyyyyyyyzzzzzzzzzzzzz"

    def step(self, text: str) -> Any:
        return self.done(reward={"x": 1.0, "y": 0.7}.get(text, 0.0))


class Rambling(Letters):
    """The longer, the better, whether it ends or not."""

    said = ("a", "aa", "aaa")  # type: ignore[assignment]

    def score(self, transcript: Any) -> float:
        return 0.1 * transcript.text.count("a")


class Hacked(Letters):
    """A reward of one's own that looks at the answer alone."""

    def tasks(self, rng: random.Random) -> nanorl.Task:
        return nanorl.Task(f"write of {rng.randint(0, 999)}")

    def step(self, text: str) -> Any:
        return self.done(reward=float("x" in text))


class Against(Letters):
    """Thanks are worth more than being right."""

    def step(self, text: str) -> Any:
        if text == "y":
            self.reward(1.5)
        return self.done(reward=float(text == "x"))


class Half(Letters):
    """Half of the tasks want what is mostly said, half what is never said."""

    said = "xxxyy"

    def wanted(self, rng: random.Random) -> str:
        return rng.choice("xz")


LETTERS = "abcdefgh"


class ByHeart(nanorl.Env):
    """Each task has an answer that nothing but memory tells. Some are for training, the others are
    held out, and the teacher shows those of training."""

    num_train = 24

    def tasks(self) -> list[nanorl.Task]:  # type: ignore[override]
        rng = random.Random(7)
        return [
            nanorl.Task(
                f"{number}",
                answer=rng.choice(LETTERS),
                split="train" if place < self.num_train else "heldout",
            )
            for place, number in enumerate(rng.sample(range(100, 1000), self.num_train + 24))
        ]

    def teacher(self, observations: list[str], rng: random.Random) -> str:
        right = self.task.answer_text
        return right if rng.random() < self.sure else rng.choice(LETTERS)

    sure = 1.0


class FewTasks(ByHeart):
    """The teacher is seldom right, so that RL must find out by itself."""

    sure, num_train = 0.6, 8
