"""OpenEnv servers (https://github.com/meta-pytorch/OpenEnv), spoken to in their own wire form.

    nanorl train --env openenv:http://127.0.0.1:8000 --env-args action=guess observation=hint

An episode is a WebSocket at /ws: {"type": "reset", "data": {"seed": 7}} and {"type": "step",
"data": {"guess": "4"}} are answered by {"type": "observation", "data": {"observation": {...},
"reward": 1.0, "done": false}}. The HTTP routes /reset and /step make a new environment for every
call, so only the socket has episodes. An action of one field is that field's text; of several, the
policy writes a JSON object. Rewards are those of Gymnasium's form (gym_text.py).
Left out: MCP tools, the web page, and starting containers.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from nanoengine.extras import missing
from nanoengine.text.chat_template import Message
from nanoinfer.http.http_client import HttpClient
from nanorl.envs.env import Env
from nanorl.envs.images import behind_prompt
from nanorl.task import Task
from nanorl.types import InfrastructureError

MOST_SEEDS = 1 << 31
MAX_BYTES = 4 << 20
"""Of one answer."""
_PAUSE_S = 0.2  # between two tries to open an episode
FULL = "CAPACITY_REACHED"
REFUSED = "VALIDATION_ERROR"
"""What a server says of an action that is none: the policy's doing, not the server's."""


class OpenEnvText(Env):
    """One episode. `prompt` is said before the first observation.

    `action` names the field that the policy's text goes into, empty: the one that must be given;
    "json": the policy writes the whole object. `observation` names the field that it reads, empty:
    the only text among them, or else all of it as JSON.
    """

    def __init__(
        self,
        address: str,
        prompt: str = "",
        action: str = "",
        observation: str = "",
        timeout_s: float = 60.0,
        patience_s: float = 300.0,
    ) -> None:
        """`timeout_s` limits one call, `patience_s` how long an episode waits for a server that is
        away or full. ValueError for an address that is none."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"--env openenv:{address}: must look like openenv:http://HOST:8000")
        if not (timeout_s > 0 and patience_s > 0):
            raise ValueError(
                f"--env-args timeout_s={timeout_s} patience_s={patience_s}: must be positive"
            )
        self._connect, self._closed = _require_websockets()
        is_tls = parts.scheme in ("https", "wss")
        place = f"{'s' if is_tls else ''}://{parts.netloc}{parts.path.rstrip('/')}"
        self.address, self._socket_url = f"http{place}", f"ws{place}/ws"
        self.prompt = prompt
        self._action, self._observation = action, observation
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._socket: Any = None

    def tasks(self, rng: random.Random) -> Task:
        prompt = self.prompt or "Act until the episode ends."
        return Task(prompt, data={"seed": rng.randrange(MOST_SEEDS)})

    def setup(self) -> str:
        """The field of an action that takes the policy's text, or "json": by what the server says
        of its actions. ValueError where it has no such field, or does not answer."""
        try:
            client = HttpClient(self.address, None, self._timeout_s, MAX_BYTES)
            schema = json.loads(client.ask_now("GET", "/schema").body)["action"]
            fields = [name for name in schema["properties"] if name != "metadata"]
            needed = list(schema.get("required", fields))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--env openenv:{self.address}: no OpenEnv server answers at /schema ({error})"
            ) from None
        if self._action not in ("", "json", *fields):
            raise ValueError(
                f"--env-args action={self._action}: the server's actions have {', '.join(fields)}"
            )
        return self._action or (needed[0] if len(needed) == 1 else "json")

    async def reset(self) -> str | list[Message]:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                await self._open()
                reply = await self._ask("reset", self.task.data)
                return behind_prompt(self.task, self._text(reply))
            except _AwayError:
                await self.close()
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def step(self, text: str) -> Any:
        try:
            action = self._as_action(text)
            reply = await self._ask("step", action)
        except ValueError as error:
            self.metric("num_malformed_actions")
            return f"That is no action: {error}"
        reward = float(reply.get("reward") or 0.0)
        if reply.get("done"):
            return self.done(reward=reward, answer=text)
        self.reward(reward)
        return self._text(reply)

    def score(self, transcript: Any) -> float:
        """Cut off before its end, an episode has earned what its turns did."""
        return 0.0

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()  # the server closes the environment with it

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._connect(
                    self._socket_url, max_size=MAX_BYTES, proxy=None, compression=None
                )
        except (OSError, TimeoutError) as error:
            raise _AwayError(f"{self._socket_url}: {type(error).__name__}: {error}") from error
        except Exception as error:  # of the library: what answers there is no OpenEnv server
            text = f"{self._socket_url}: {type(error).__name__}: {error}"
            raise InfrastructureError(text) from error

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The data of the reply. ValueError where the server refuses an action."""
        what = f"{self.address}: {kind}"
        try:
            async with asyncio.timeout(self._timeout_s):
                with suppress(self._closed):  # a full server says so before it hangs up
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                reply = json.loads(await self._socket.recv())
            said = reply["data"]
            if reply["type"] == "error" and said.get("code") == REFUSED:
                raise _RefusedError(_why_refused(said))
            if reply["type"] == "error" and said.get("code") == FULL:
                raise _AwayError(f"{what}: {said.get('message')}")
            if reply["type"] != "observation" or not isinstance(said["observation"], dict):
                raise InfrastructureError(f"{what}: {json.dumps(reply)[:500]}")
            # NaN is no reward, and would spoil every advantage of its group.
            if not math.isfinite(float(said.get("reward") or 0.0)):
                raise InfrastructureError(f"{what}: reward {said['reward']}")
        except (InfrastructureError, _RefusedError):
            raise
        except Exception as error:  # of the socket, the clock, or a reply of another kind
            raise InfrastructureError(f"{what}: {type(error).__name__}: {error}") from error
        return said

    def _as_action(self, text: str) -> dict[str, Any]:
        if self.shared != "json":
            return {self.shared: text}
        try:
            action = json.loads(text)
        except ValueError as error:
            raise ValueError(f"write a JSON object ({error})") from None
        if not isinstance(action, dict):
            raise ValueError("write a JSON object")
        return action

    def _text(self, reply: dict[str, Any]) -> str:
        seen = reply["observation"]
        if self._observation:
            if self._observation not in seen:
                raise InfrastructureError(
                    f"--env-args observation={self._observation}: the server's have "
                    f"{', '.join(seen) or 'no fields'}"
                )
            return str(seen[self._observation])
        texts = [value for value in seen.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(seen, ensure_ascii=False)


class _RefusedError(ValueError):
    """The server does not take an action."""


class _AwayError(InfrastructureError):
    """Nobody listens, or there is no room: another try may help."""


def _why_refused(said: dict[str, Any]) -> str:
    errors = said.get("errors") or [{}]
    return "; ".join(
        f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', said.get('message'))}"
        for one in errors[:3]
    )


def _require_websockets() -> Any:
    try:
        from websockets.asyncio.client import connect  # here: an extra
        from websockets.exceptions import ConnectionClosed  # here: an extra
    except ImportError as error:
        raise missing("--env openenv:...", error.name, extra="openenv") from error
    return connect, ConnectionClosed
