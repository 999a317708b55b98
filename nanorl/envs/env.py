"""`Env`, the short form of an environment: derive from it, and every part of a run knows it.

    class Guess(nanorl.Env):
        system = "Guess a number from 1 to 20."

        def tasks(self, rng):
            return nanorl.Task("First guess?", answer=rng.randint(1, 20))

        def step(self, text):
            guess = nanorl.last_number(text, default=0)
            if guess == self.task.answer:
                return self.done(reward=1.0)
            return "higher" if guess < self.task.answer else "lower"

An object of the class is one episode. Every method but `setup` and `tasks` may be a coroutine. What
is not needed may be left out: without `step` the policy's text is its answer; without `score` an
answer earns 1 if it equals `task.answer`, numbers compared by value.

A method `teacher(self, observations, rng)` shows how a task is played: it knows `self.task`, is
given all observations so far (one with pictures is a list of texts and `nanorl.Image`s), and
returns the next turn, a text or `nanorl.ToolCall("name", {...})` (or several). Runs then begin with
supervised steps on such traces; without it there are none.
Next: env_episode.py (how an `Env` becomes an `Environment`), env_class.py (how a run finds one).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, overload

from nanoinfer.chat.base import Parser
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.rewards.rule import RuleReward
from nanorl.envs.tools.base import Done, Tool, ToolContext
from nanorl.sandbox.base import WorkspaceSandbox
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

ANSWER = "Answer:"
CALLER = "nanorl.plugins:caller"
"""Finds the line of somebody's own code, for a message."""


class Env:
    """One episode of your environment. `self.task` is its task."""

    system: str = ""
    """Opens every chat; empty: there is no system message."""
    tools: Sequence[Tool | Callable[..., Any]] = ()
    """What the policy may call: functions, or methods of the class (below their `def`s), which are
    bound to the episode's object. Their schemas come from annotations and docstrings."""
    parser: str | Parser = "auto"
    """How calls are written: auto (as the model's chat template has it), fenced, hermes, llama,
    pythonic, or a parser of your own."""
    loop: str = "tool"
    """The agent loop that plays it (nanorl/agents/loops.py), or yours as "file.py:loop"."""
    data: Any = None
    """Tasks, instead of a method `tasks`: a path (JSONL, parquet, ...) or an iterable."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Options of a run of it, as {"agent.max_turns": 6}; those that the user gives win."""
    evaluation_only: str = ""
    """Why nobody may train on its tasks: then they are all held out."""

    task: Task
    rollout: Rollout
    """What `score` is asked about, once it is."""
    shared: Any = None
    """What `setup` returned. Its method `close`, if it has one, is called at the end of the run."""

    def setup(self) -> Any:
        """Make what is heavy and read-only. Called once in a process, before any episode; every
        episode finds the result as `self.shared`."""
        return None

    def tasks(self, rng: random.Random) -> Task:
        """Draw one task. Without `rng` as a parameter: all of them, as an iterable."""
        raise NotImplementedError

    def reset(self) -> Any:
        """Begin the episode of `self.task`. Return the opening text or messages; None: the task's
        prompt."""
        return None

    def step(self, text: str) -> Any:
        """Answer a turn that calls no tool: a text or messages, or `self.done(...)`.

        `text` is what the policy said, its reasoning left out.
        """
        return self.done(answer=final_answer(text))

    def score(self, transcript: Transcript) -> Any:
        """Score an episode that ended without a reward: a number or a `Score`."""
        return Score(RuleReward()(transcript.answer, self.task.answer_text))

    def close(self) -> Any:
        """Give back what the episode holds."""
        return None

    @property
    def subject(self) -> Any:
        """The object that a reward is given as `environment`."""
        return self

    async def open_session(self, sandbox: WorkspaceSandbox) -> Any:
        """Open the episode's workspace, a `nanorl.sandbox.session.Session`, when something first
        asks for it: it holds the task's files."""
        return await sandbox.open_session(self.task.files)

    # -- what the methods above may call -----------------------------------------------------

    def done(self, reward: float | None = None, answer: object = None) -> Done:
        """End the episode, with its reward, or with an answer that `score` judges. A method says so
        by returning it: `return self.done(reward=1.0)`."""
        # Checked here and not later: the message can still name the line that said it.
        number = None if reward is None else self._number(reward, "done(reward=")
        done = Done(reward=number, answer=None if answer is None else str(answer))
        # Kept as well as returned: who forgets the `return` is told so, instead of playing on.
        self.__dict__["_done"] = done
        return done

    def reward(self, amount: float) -> None:
        """Give this turn a reward of its own, beside that of the whole episode."""
        number = self._number(amount, "reward(")
        self.__dict__["_turn_reward"] = self.__dict__.get("_turn_reward", 0.0) + number

    async def session(self) -> Any:
        """The workspace that the tools of this episode share; `score` may grade it."""
        context: ToolContext = self.__dict__["_context"]
        return await context.session()

    def metric(self, name: str, value: float = 1.0) -> None:
        """Count something: it is summed over the episode, and averaged over a step's rollouts it is
        the curve env/NAME."""
        counted: dict[str, float] = self.__dict__.setdefault("_metrics", {})
        counted[name] = counted.get(name, 0.0) + self._number(float(value), f"metric({name!r}, ")

    def _number(self, given: Any, call: str) -> float:
        """A reward or a count as a number. InfrastructureError, with the line of the call, for what
        is none: it is never the policy's fault, not even in a tool."""
        try:
            number = math.nan if isinstance(given, str) else float(given)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            where = resolve_name(CALLER)(__file__)
            raise InfrastructureError(
                f"{type(self).__name__}: {call}{given!r}) is no finite number{where}"
            )
        return number

    def _take_done(self) -> Done | None:
        """The end that `done` has made since the last turn."""
        done: Done | None = self.__dict__.pop("_done", None)
        return done

    def _take(self) -> tuple[float, dict[str, float]]:
        """The turn's reward and metrics, which are then counted anew."""
        reward = self.__dict__.pop("_turn_reward", 0.0)
        return reward, self.__dict__.pop("_metrics", {})


@overload
def last_number(text: str) -> float | None: ...
@overload
def last_number(text: str, default: float) -> float: ...
def last_number(text: str, default: float | None = None) -> float | None:
    """The last decimal number in a text: an `int`, or a `float` where it is written with a point.

    `default` where there is none, or none that a float can hold: whatever the policy says, this
    does not raise.
    """
    found = re.findall(r"[-+]?[0-9]+(?:\.[0-9]+)?", text)
    # A model may write a number of a thousand digits.
    if not found or math.isinf(float(found[-1])):
        return default
    return float(found[-1]) if "." in found[-1] else int(found[-1])


def final_answer(text: str) -> str:
    """Return the text after the last "Answer:", to the end of its line; without one, all of it."""
    # The last one counts: models repeat the form of an answer while they think.
    for line in reversed(text.splitlines()):
        if ANSWER in line:
            return line.rpartition(ANSWER)[2].strip()
    return text.strip()
