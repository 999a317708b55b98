"""Environments, a tool and a reward that misbehave once: test_plugin_faults.py plugs them in.

A file NAME-NUMBER-FAULT in the folder of PLUGIN_FAULTS arms one fault; whoever removes it commits
it, so a second attempt finds nothing. Faults are those of hosted_faults.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hosted_faults

import nanorl


def armed(name: str, number: int) -> str:
    """The fault that is to be committed here and now; empty: none."""
    for path in Path(os.environ["PLUGIN_FAULTS"]).glob(f"{name}-{number}-*"):
        try:
            path.unlink()
        except FileNotFoundError:  # another rollout was quicker
            continue
        return path.name.split("-", 2)[2]
    return ""


def commit(name: str, number: int) -> Any:
    """None where nothing is armed."""
    fault = armed(name, number)
    if fault == "flood":
        return "x" * (20 << 20)
    return hosted_faults.misbehave(fault) if fault else None


def lookup(number: int) -> str:
    """Look a number up.

    Args:
        number: Which.
    """
    return commit("tool", number) or f"{number} is {number * 7919 % 1000}"


class Plain(nanorl.Env):
    """Two turns, and a reward that depends on what was said."""

    def tasks(self, rng: Any) -> nanorl.Task:
        number = rng.randrange(10**6)
        return nanorl.Task(f"Number {number}?", answer=number, data={"number": number})

    def step(self, text: str) -> Any:
        found = commit("step", self.task.data["number"])
        if found is not None:
            return found
        self.turns = getattr(self, "turns", 0) + 1
        self.metric("num_letters", len(text))
        if self.turns == 2:
            return self.done(reward=len(text) % 3 / 2)
        self.reward(-0.125)
        return f"So far {len(text)} letters."


class Tooled(Plain):
    """The same with a tool."""

    tools = (lookup,)
    parser = "hermes"


def score(text: str, task: nanorl.Task) -> Any:
    """A reward of the user's."""
    found = commit("reward", task.data["number"])
    return found if found is not None else len(text) % 5 / 4


def never_scores(text: str) -> float:
    """A reward that always raises."""
    raise ZeroDivisionError("the mean of no marks")


class NeverSteps(Plain):
    """Its step always raises."""

    def step(self, text: str) -> Any:
        raise KeyError("the board was never set up")


class NeverTrains(Plain):
    """It can be played in an evaluation, and not in training."""

    def reset(self) -> Any:
        if self.task.split == "train":
            raise KeyError("the board was never set up")
