"""Gymnasium-style environments whose observations are read and whose actions are written as text.

    nanorl train --env gymnasium:FrozenLake-v1 --env-args render_mode=ansi is_slippery=false \\
        'actions=["left", "down", "right", "up"]'
    nanorl train --env gymnasium:mine.py:Maze

After the colon stands an id that `gymnasium.make` knows, or a class or function of a file or module
that makes one: `reset(seed=)` returns (observation, info), `step(action)` returns (observation,
reward, terminated, truncated, info). A task is a seed. The reward of the step that ends an episode
is the score of the rollout, those before it are rewards of their turns; their sum is the return.
Left out: action spaces other than Discrete and Text, and vectors of environments.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from nanoengine.extras import missing
from nanoengine.text.chat_template import Message
from nanorl.envs.env import Env, last_number
from nanorl.envs.images import behind_prompt
from nanorl.plugins import load_object
from nanorl.task import Task

MOST_SEEDS = 1 << 31


class GymText(Env):
    """One episode. `make` is what stands after the colon; `prompt` is said before the first
    observation; `actions` names the actions of a Discrete space in their order; all else goes to
    whatever makes the environment."""

    def __init__(
        self, make: str, prompt: str = "", actions: Sequence[str] = (), **options: Any
    ) -> None:
        """ValueError for an unknown environment, or one whose actions cannot be written as text."""
        self._make, self._options = make, options
        self.prompt, self.actions = prompt, [str(name) for name in actions]
        self._env: Any = None
        # Every episode has one of its own; made here, so that a wrong name is told before a run.
        env = self._made()
        try:
            self._check(getattr(env, "action_space", None))
        finally:
            env.close()

    def tasks(self, rng: random.Random) -> Task:
        return Task(self.prompt or self._say_how(), data={"seed": rng.randrange(MOST_SEEDS)})

    def reset(self) -> str | list[Message]:
        self._env = self._made()
        observation, _ = self._env.reset(seed=self.task.data["seed"])
        return behind_prompt(self.task, self._text(observation))

    def step(self, text: str) -> Any:
        action = self._action(text)
        if action is None:
            self.metric("num_malformed_actions")
            return f"There is no action in that. {self._say_how()}"
        observation, reward, is_terminated, is_truncated, _ = self._env.step(action)
        if is_terminated or is_truncated:
            return self.done(reward=float(reward), answer=text)
        self.reward(float(reward))
        return self._text(observation)

    def score(self, transcript: Any) -> float:
        """Cut off before its end, an episode has earned what its turns did."""
        return 0.0

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _made(self) -> Any:
        if ".py" in (self._make[-3:], self._make.rpartition(":")[0][-3:]):
            return load_object(self._make, what="env", known={}, fits=callable)(**self._options)
        gymnasium = _require_gymnasium()
        try:
            return gymnasium.make(self._make, disable_env_checker=True, **self._options)
        except gymnasium.error.Error as error:
            raise ValueError(f"--env gymnasium:{self._make}: {error}") from None

    def _check(self, space: Any) -> None:
        kind = type(space).__name__
        if kind not in ("Discrete", "Text", "NoneType"):
            raise ValueError(
                f"--env gymnasium:{self._make}: actions of a space {kind} cannot be written as "
                "text; wrap the environment so that they are Discrete or Text"
            )
        self._first = int(space.start) if kind == "Discrete" else 0
        self._num_actions = int(space.n) if kind == "Discrete" else None
        if self.actions and len(self.actions) != self._num_actions:
            raise ValueError(
                f"--env-args actions={self.actions}: {self._make} has {self._num_actions} of them"
            )

    def _say_how(self) -> str:
        if self._num_actions is None:
            return "Say what to do."
        last = self._first + self._num_actions - 1
        listed = ", ".join(self.actions) or f"a number from {self._first} to {last}"
        return f"Say one action: {listed}."

    def _action(self, text: str) -> Any:
        """The last one that is named; None where none is."""
        if self._num_actions is None:
            return text
        if self.actions:
            names = "|".join(map(re.escape, sorted(self.actions, key=len, reverse=True)))
            found = re.findall(rf"(?<!\w)(?:{names})(?!\w)", text, re.IGNORECASE)
            lower = [name.lower() for name in self.actions]
            return self._first + lower.index(found[-1].lower()) if found else None
        number = last_number(text)
        if not isinstance(number, int):
            return None
        return number if 0 <= number - self._first < self._num_actions else None

    def _text(self, observation: Any) -> str:
        """A text as it is, else the picture of `render_mode=ansi`, else as Python writes it."""
        if isinstance(observation, str):
            return observation
        if getattr(self._env, "render_mode", None) == "ansi":
            picture = str(self._env.render()).strip("\n")
            # Colours mark where the player is: put what is coloured into brackets.
            return re.sub(r"\x1b\[[\d;]*m", "[", picture.replace("\x1b[0m", "]"))
        to_list = getattr(observation, "tolist", None)
        return str(to_list() if to_list is not None else observation)


def _require_gymnasium() -> Any:
    try:
        import gymnasium  # here: an extra
        import gymnasium.error  # here: an extra
    except ImportError as error:
        raise missing("--env gymnasium:...", error.name, extra="gymnasium") from error
    return gymnasium
