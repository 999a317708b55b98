"""`look_back` with rewards that differ whatever a policy says: every step has a gradient."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanorl.envs.env import Done
from nanorl.envs.shipped.look_back import LookBack


class Graded(LookBack):
    """The letters said decide: nothing, a half or success."""

    def reset(self) -> list[Any]:
        self._letters = 0
        return super().reset()

    def step(self, text: str) -> Done | list[Any]:
        self._letters += sum(map(ord, text))
        said = super().step(text)
        return self.done(reward=self._letters % 3 / 2) if isinstance(said, Done) else said

    def score(self, transcript: object) -> float:
        """Of an episode that a limit cut off, as most are of a model that knows nothing."""
        return sum(map(ord, str(transcript))) % 3 / 2


class Brief(Graded):
    """Its teacher says the move alone, so a policy soon ends its turns. A second turn waits for as
    long as there is a file `hold`, and says so by one beside it."""

    def __init__(self, size: int = 4, num_moves: int = 3, hold: str = "") -> None:
        super().__init__(size, num_moves)
        self._hold = Path(hold)

    def step(self, text: str) -> Done | list[Any]:
        while self._num_said == 1 and self._hold.is_file():
            Path(f"{self._hold}.held").touch()
            time.sleep(0.02)
        return super().step(text)

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        return super().teacher(observations, rng)[-1]
