"""What test_hosting.py has run in workers: a reward and an environment that misbehave on request.

A text such as "7 hang" asks for a fault; "7" is answered. Faults that a process does not survive
leave a child behind, which must not outlive its worker either.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
from typing import Any

from nanorl.envs.base import Opening, TimeStep
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.task import Task
from nanorl.types import Rollout

FAULTS = ("hang", "hang in C", "kill", "exit", "flood", "garbage", "raise", "none")


class OnlyHere:
    """Cannot be sent anywhere."""

    lock = None

    def __init__(self) -> None:
        self.lock = threading.Lock()


def misbehave(fault: str) -> Any:
    """Do it, or return it."""
    if fault in ("kill", "exit", "hang"):
        subprocess.Popen(["sleep", os.environ["HOSTED_FAULTS_SLEEP"]])
    if fault == "hang":
        threading.Event().wait()
    elif fault == "hang in C":
        sum(itertools.count())  # never gives the lock back
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exit":
        os._exit(0)
    elif fault == "flood":
        return bytes(8 << 20)
    elif fault == "garbage":
        return OnlyHere()
    elif fault == "raise":
        raise KeyError("not here")
    return None


def expected(number: int) -> float:
    return number / 1000


def score(text: str) -> Any:
    """The number in the text, or a fault."""
    number, _, fault = text.partition(" ")
    return misbehave(fault) if fault else expected(int(number))


class Counting:
    """An episode of two turns: the number, twice over. Faults are asked for in the second."""

    def __init__(self) -> None:
        self._said: list[str] = []

    async def reset(self, task: Task) -> Opening:
        return Opening(messages=task.messages())

    async def step(self, text: str) -> Any:
        number, _, fault = text.partition(" ")
        if fault:
            return misbehave(fault)
        self._said.append(number)
        if len(self._said) < 2:
            return TimeStep(observation=f"so far {number}", reward=0.25, metrics={"num_turns": 1.0})
        return TimeStep(is_done=True, answer="+".join(self._said))

    def format_observation(self, observation: Any) -> list[dict[str, Any]]:
        return [{"role": "tool", "content": observation}]

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        return Score(expected(int(self._said[-1])), parts={"turns": float(len(self._said))})

    async def close(self) -> None:
        self._said.clear()


class CountingKind:
    """Opens them."""

    def open(self) -> Counting:
        return Counting()


class DiesAtFirst:
    """Dies so often before it is there; a file for each time."""

    def __init__(self, folder: str, num_deaths: int) -> None:
        number = len(os.listdir(folder))
        if number < num_deaths:
            os.mkdir(os.path.join(folder, str(number)))
            os.kill(os.getpid(), signal.SIGKILL)

    def answer(self) -> int:
        return 7
