"""Games of other libraries for test_env_adapters.py: one of Gymnasium's form, one of OpenEnv's.

Run as a program it serves the second one until its standard input ends, and prints where.
"""

from __future__ import annotations

import random
import sys
from typing import Any


class Countdown:
    """Gymnasium's form without the package: say the number that is shown, three times."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.rng, self.left = random.Random(seed), 3
        return self._shown(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        reward = 1.0 if action.strip() == str(self.number) else -0.5
        return self._shown(), reward, self.left == 0, False, {}

    def close(self) -> None:
        self.left = 0

    def _shown(self) -> str:
        self.number = self.rng.randrange(100)
        return f"say {self.number}"


def serve() -> None:
    """An OpenEnv server of a guessing game, made with that package."""
    import asyncio
    import socket
    import threading

    import uvicorn
    from fastapi import FastAPI
    from openenv.core.env_server.http_server import HTTPEnvServer
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class GuessAction(Action):
        guess: str

    class GuessObservation(Observation):
        hint: str

    class Guess(Environment[GuessAction, GuessObservation, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, **_: Any
        ) -> GuessObservation:
            self.answer = random.Random(seed).randint(1, 20)
            return GuessObservation(hint="a number from 1 to 20")

        def step(
            self, action: GuessAction, timeout_s: float | None = None, **_: Any
        ) -> GuessObservation:
            if action.guess == "stop":
                raise RuntimeError("the game broke")
            guess = int(action.guess)
            if guess == self.answer:
                return GuessObservation(hint="right", done=True, reward=1.0)
            hint = "higher" if guess < self.answer else "lower"
            return GuessObservation(hint=hint, reward=-0.125)

        @property
        def state(self) -> State:
            return State()

    app = FastAPI()
    # register_routes resolves their annotations in this module.
    HTTPEnvServer(Guess, GuessAction, GuessObservation, max_concurrent_envs=2).register_routes(app)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))

    def until_told() -> None:
        sys.stdin.read()
        server.should_exit = server.force_exit = True

    threading.Thread(target=until_told, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    asyncio.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    serve()
