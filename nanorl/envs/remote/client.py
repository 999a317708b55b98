"""The environment at an address, as a run knows it: `--env http://127.0.0.1:8900`.

Every call is a connection of its own, with a deadline and a limit on what it may bring. A server
that hangs, dies, floods, answers 500 or what nobody can read is infrastructure: the rollout FAILED
and is played again, in a new episode. Opening an episode waits for a server that is away or full.
Left out: a warm start, for which a demonstrator would have to travel.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode, urlsplit

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.http.api_key import read_key
from nanoinfer.http.http_client import HttpClient, HttpReply, NoReplyError
from nanorl.envs.base import Environment, Opening, Services, TimeStep
from nanorl.envs.env_kind import Demonstrator, TaskSet
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.tasks.records import check_agent
from nanorl.rollout_json import to_json
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nanorl.envs.remote.wire import ServerInfo, Split

Reply = TypeVar("Reply", bound="BaseModel")
_PAUSE_S = 0.2  # between two tries to open an episode


class ServerAwayError(InfrastructureError):
    """Nobody listens, or there is no room: another try may help."""


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """The options of a server that `--env-args` may give."""

    api_key_file: str = ""
    """File with the key that the server wants; options are printed, so the key is none."""
    timeout_s: float = 60.0
    """Wall-clock limit of one call."""
    patience_s: float = 30.0
    """How long opening an episode waits for a server that is away or full."""
    max_bytes: int = 16 << 20
    """The most that one answer may bring."""
    may_name_code: bool = False
    """Tasks may name agents that are files or modules, which are imported here."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "patience_s", "max_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"--env-args {name}={getattr(self, name)}: must be positive and finite"
                )


class RemoteKind:
    """An environment server; `arguments` are the fields of `RemoteOptions`."""

    needs_sandbox = False  # that is the server's
    has_teacher = False

    def __init__(self, address: str, arguments: Mapping[str, Any] | None = None) -> None:
        """ValueError where no environment server answers at `address`."""
        try:
            options = RemoteOptions(**(arguments or {}))
        except TypeError as error:
            raise ValueError(
                f"--env-args {arguments}: {address} does not take them: {error}"
            ) from None
        self._line = _Line(address, options)
        info = self._ask_who()
        self.name, self.loop, self.has_tools = info.name, info.loop, info.has_tools
        self.defaults: Mapping[str, Any] = info.defaults

    def tasks(self, seed: int) -> TaskSet:
        return RemoteTasks(self._line, seed)

    def open(self, services: Services) -> Environment:
        return RemoteEnvironment(self._line, services.is_tool_enabled)

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Demonstrator:
        raise ValueError(f"{self._line.address}: nobody there shows how its tasks are played")

    def close(self) -> None:
        """Nothing is held between calls."""

    def _ask_who(self) -> ServerInfo:
        from nanorl.envs.remote.wire import ServerInfo  # here: it imports pydantic, which is slow

        try:
            return self._line.get("/health", ServerInfo)
        except InfrastructureError as error:
            raise ValueError(
                f"--env {self._line.address}: no environment server answers ({error}); start one: "
                "nanorl serve-env YOURS.py"
            ) from None


class RemoteTasks:
    """The tasks that a server draws: functions of the arguments there as well."""

    def __init__(self, line: _Line, seed: int) -> None:
        self._line, self._seed = line, seed
        self.fingerprint = self._ask("train", self._seed, n=0)[1]

    def batch(self, step: int, n: int) -> list[Task]:
        """ConnectionError where the server does not say them."""
        return self._ask("train", self._seed, n, step)[0]

    def heldout(self, n: int, seed: int) -> list[Task]:
        """ConnectionError where the server does not say them."""
        # The seed of the run chooses the set of tasks, that of the evaluation the ones out of it.
        return self._ask("heldout", self._seed, n, seed)[0]

    def _ask(self, split: Split, seed: int, n: int, place: int = 0) -> tuple[list[Task], str]:
        from nanorl.envs.remote.wire import TasksReply  # here: it imports pydantic, which is slow

        query = urlencode({"split": split, "seed": seed, "place": place, "n": n})
        try:
            reply = self._line.get(f"/tasks?{query}", TasksReply)
        except InfrastructureError as error:
            raise ConnectionError(f"the tasks of {self._line.address}: {error}") from error
        tasks = [one.task() for one in reply.tasks]
        for agent in {task.agent for task in tasks if task.agent}:
            if not self._line.options.may_name_code:
                check_agent(agent, self._line.address, "--env-args may_name_code=true")
        return tasks, reply.fingerprint


class RemoteEnvironment:
    """One episode there, opened at `reset`."""

    def __init__(self, line: _Line, is_tool_enabled: bool) -> None:
        self._line, self._is_tool_enabled = line, is_tool_enabled
        self._episode = ""
        self._read: tuple[Any, list[Message]] = (None, [])

    async def reset(self, task: Task) -> Opening:
        # Here: it imports pydantic, which is slow.
        from nanorl.envs.remote.wire import ResetBody, ResetReply, WireTask

        body = ResetBody(task=WireTask.of(task), is_tool_enabled=self._is_tool_enabled)
        until = time.monotonic() + self._line.options.patience_s
        while True:
            try:
                reply = await self._line.post("/reset", body, ResetReply)
                break
            except ServerAwayError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_PAUSE_S)
        self._episode = reply.episode
        return reply.opening()

    async def step(self, text: str) -> TimeStep:
        # Here: it imports pydantic, which is slow.
        from nanorl.envs.remote.wire import StepBody, StepReply

        body = StepBody(episode=self._episode, text=text)
        reply = await self._line.post("/step", body, StepReply)
        try:
            step = reply.time_step()
        except ValueError as error:
            raise InfrastructureError(f"{self._line.address}/step: {error}") from error
        self._read = (step.observation, list(reply.messages))
        return step

    @property
    def subject(self) -> None:
        """It lives in the server."""

    def format_observation(self, observation: str | list[Message]) -> list[Message]:
        """As the server formats its own observations; those of others are what a user says."""
        said, messages = self._read
        if observation == said:
            return messages
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        return observation

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        # Here: it imports pydantic, which is slow.
        from nanorl.envs.remote.wire import ScoreBody, ScoreReply, WireTranscript

        body = ScoreBody(
            episode=self._episode,
            rollout=to_json(rollout),
            transcript=WireTranscript.of(transcript),
        )
        return (await self._line.post("/score", body, ScoreReply)).score()

    async def close(self) -> None:
        # Here: it imports pydantic, which is slow.
        from nanorl.envs.remote.wire import Closed, EpisodeBody

        episode, self._episode = self._episode, ""
        if episode:
            await self._line.post("/close", EpisodeBody(episode=episode), Closed)


class _Line:
    """The line to one server. InfrastructureError for whatever brings no answer of its kind."""

    def __init__(self, address: str, options: RemoteOptions) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"--env {address}: an address looks like http://127.0.0.1:8900")
        self.address, self.options = address.rstrip("/"), options
        file = options.api_key_file
        self._key = read_key(Path(file), flag="--env-args api_key_file") if file else None

    def get(self, path: str, kind: type[Reply]) -> Reply:
        """For what a run asks before and between its rollouts."""
        with self._lost(path):
            reply = self._client.ask_now("GET", path)
        return self._read(path, reply, kind)

    async def post(self, path: str, body: BaseModel, kind: type[Reply]) -> Reply:
        """For what an episode asks."""
        written = json.dumps(body.model_dump(), allow_nan=False).encode()
        with self._lost(path):
            reply = await self._client.ask("POST", path, written)
        return self._read(path, reply, kind)

    @property
    def _client(self) -> HttpClient:
        return HttpClient(self.address, self._key, self.options.timeout_s, self.options.max_bytes)

    @contextmanager
    def _lost(self, path: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            limit = f"{self.options.timeout_s:g} s"
            raise InfrastructureError(f"{self.address}{path} took longer than {limit}") from error
        except NoReplyError as error:
            kind = ServerAwayError if error.is_away else InfrastructureError
            raise kind(f"{self.address}{path}: {error}") from error

    def _read(self, path: str, reply: HttpReply, kind: type[Reply]) -> Reply:
        status, _, raw = reply
        if status == HTTPStatus.OK:
            try:
                return kind.model_validate_json(raw)
            except ValueError as error:  # pydantic's is one
                first = str(error).replace("\n", " ")[:300]
                raise InfrastructureError(
                    f"{self.address}{path} talks nonsense: {first}"
                ) from error
        message = f"{self.address}{path} answers {status}: {raw[:500].decode(errors='replace')}"
        is_away = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY)
        raise (ServerAwayError if is_away else InfrastructureError)(message)
