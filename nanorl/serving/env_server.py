"""The environment server: episodes over HTTP, for runs in other processes and on other machines.

    async with EnvServer(kit, ServeLimits()).listening("127.0.0.1", 0) as url: ...

It plays what `--env` would play, the user's code in worker processes as there
(nanorl/envs/hosting), and holds each episode until it is closed or nobody has asked for it for a
while. The messages are in wire.py. Without a key it answers this machine alone, and no web page. A
task may say which files of this machine an episode reads (those of Harbor do), so clients may only
play what the server drew: a task that it gives away carries its seal. Left out: TLS and users (put
a proxy in front), and several processes behind one port.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanoinfer.cancellation import to_the_end
from nanoinfer.http.api_error import ApiError, application, failure, known_error
from nanoinfer.http.callers import check_key, check_keyless
from nanoinfer.http.http_io import read_body
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.http.listening import listen, require_key, url_of
from nanoinfer.http.serving import ServerInLoop
from nanorl.envs.base import Environment
from nanorl.envs.env_kind import TaskSet
from nanorl.envs.remote.wire import (
    Closed,
    EpisodeBody,
    ResetBody,
    ResetReply,
    ScoreBody,
    ScoreReply,
    ServerInfo,
    StepBody,
    StepReply,
    TasksReply,
    WireTask,
)
from nanorl.options.agent_kit import AgentKit
from nanorl.types import InfrastructureError

LOG = logging.getLogger("nanorl.envs")
MOST_TASKS = 100_000
MOST_SEEDS = 8  # whose task sets are kept
SEAL = "nanorl_seal"  # among a task's data, which travels and is kept with it
_CLOSE_S = 10.0
Handler = Callable[[Request], Awaitable[BaseModel]]
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """The most that clients may ask for."""

    max_episodes: int = 1024
    """Episodes at a time; more are answered 429."""
    idle_s: float = 900.0
    """An episode that nobody asks for this long is closed: its policy may take so long for one
    turn."""
    call_s: float = 120.0
    """A call must have ended within this time."""
    max_body_bytes: int = 16 << 20
    """Longest request body: a rollout travels to be scored."""
    takes_tasks: bool = False
    """Play what clients made up as well: its answer, files and data."""

    def __post_init__(self) -> None:
        for name in ("max_episodes", "idle_s", "call_s", "max_body_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)}: a limit of the server must be positive "
                    "and finite"
                )


@dataclass
class _Held:
    """An episode between two calls."""

    env: Environment
    used: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvServer:
    """Routes over the environment of a kit, which stays the caller's to close."""

    def __init__(
        self, kit: AgentKit, limits: ServeLimits, api_key: str | None = None, *, secret: bytes = b""
    ) -> None:
        """`secret` seals the tasks; one that is kept lets clients go on after a restart."""
        self._kit, self._limits, self._api_key = kit, limits, api_key
        self._http = HttpLimits(max_body_bytes=limits.max_body_bytes, body_timeout_s=limits.call_s)
        self._secret = secret or secrets.token_bytes(32)
        self._episodes: dict[str, _Held] = {}
        self._num_opening = 0
        self._calls: set[asyncio.Task[Any]] = set()  # under way
        self._task_sets: dict[int, TaskSet] = {}

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve inside the running loop; the address. Port 0 is any free one. ValueError for a
        network without a key, or where it cannot listen."""
        require_key(host, has_key=bool(self._api_key))
        listener = listen(host, port)
        server = ServerInLoop(self.starlette(), self._http, listener)
        expiring = asyncio.create_task(self._expire())
        try:
            await server.begin()
            yield url_of(listener, host)
        finally:
            expiring.cancel()
            await server.end(at_once=True)
            await self._end_calls()
            await asyncio.gather(expiring, return_exceptions=True)
            for name in list(self._episodes):
                await self._end(name)

    async def _end_calls(self) -> None:
        """One that went on would open an episode that nobody closes, or ask an environment whose
        kit is closed."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=_CLOSE_S)

    def starlette(self) -> Starlette:
        """The routes."""
        handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/tasks"): self._tasks,
            ("POST", "/reset"): self._reset,
            ("POST", "/step"): self._step,
            ("POST", "/score"): self._score,
            ("POST", "/close"): self._close,
        }
        routes = [
            Route(path, self._guarded(handler), methods=[method])
            for (method, path), handler in handlers.items()
        ]
        return application(routes)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            call = asyncio.current_task()
            assert call is not None, "a coroutine is run by a task"
            self._calls.add(call)
            try:
                self._check(request)
                async with asyncio.timeout(self._limits.call_s):
                    reply = await handler(request)
                return Response(reply.model_dump_json(), media_type="application/json")
            except asyncio.CancelledError:
                return ApiError(503, "the server is stopping").response()
            except Exception as error:  # a process boundary
                if isinstance(error, TimeoutError):
                    error = ApiError(504, f"not finished within {self._limits.call_s:g} s")
                known = known_error(error, {InfrastructureError: 503})
                return (known or failure(error, LOG, "the environment")).response()
            finally:
                self._calls.discard(call)

        return endpoint

    def _check(self, request: Request) -> None:
        if self._api_key:
            check_key(request, [self._api_key])
        else:
            check_keyless(request)

    # -- the routes ------------------------------------------------------------------------------

    async def _health(self, _: Request) -> ServerInfo:
        kind = self._kit.kind
        return ServerInfo(
            name=kind.name,
            loop=kind.loop,
            has_tools=kind.has_tools,
            defaults=dict(kind.defaults),
            num_episodes=len(self._episodes),
            max_episodes=self._limits.max_episodes,
        )

    async def _tasks(self, request: Request) -> TasksReply:
        seed, place, n = (_number(request, name) for name in ("seed", "place", "n"))
        if n > MOST_TASKS:
            raise ApiError(400, f"n: at most {MOST_TASKS} tasks at a time", "n")
        source = await self._task_set(seed)
        draw = source.heldout if request.query_params.get("split") == "heldout" else None
        if draw is None:
            tasks = await asyncio.to_thread(source.batch, place, n) if n else []
        else:
            tasks = await asyncio.to_thread(draw, n, place)
        sealed = [self._sealed(WireTask.of(one)) for one in tasks]
        return TasksReply(tasks=sealed, fingerprint=source.fingerprint)

    async def _reset(self, request: Request) -> ResetReply:
        body = await self._read(request, ResetBody)
        if len(self._episodes) + self._num_opening >= self._limits.max_episodes:
            raise ApiError(429, f"{self._limits.max_episodes} episodes are open; close some")
        self._num_opening += 1
        try:
            wired = body.task
            if wired is None:
                source = await self._task_set(body.seed)
                drawn = WireTask.of((await asyncio.to_thread(source.batch, 0, 1))[0])
                wired = self._sealed(drawn)
            task = self._opened(wired).task()
            env = self._kit.environment(is_tool_enabled=body.is_tool_enabled)
            try:
                opening = await env.reset(task)
            except BaseException:  # a cancellation too: the environment may hold a sandbox
                await _let_go(env)
                raise
        finally:
            self._num_opening -= 1
        name = secrets.token_hex(16)
        self._episodes[name] = _Held(env, time.monotonic())
        return ResetReply(
            episode=name,
            task=wired,
            messages=[dict(one) for one in opening.messages],
            tools=opening.tools,
        )

    async def _step(self, request: Request) -> StepReply:
        body = await self._read(request, StepBody)
        async with self._held(body.episode) as env:
            step = await env.step(body.text)
            said = step.observation
            return StepReply.of(step, [] if said is None else env.format_observation(said))

    async def _score(self, request: Request) -> ScoreReply:
        body = await self._read(request, ScoreBody)
        try:
            rollout = body.read_rollout()
        except ValueError as error:
            raise ApiError(400, str(error), "rollout") from None
        async with self._held(body.episode) as env:
            return ScoreReply.of(await env.score(rollout, body.transcript.transcript()))

    async def _close(self, request: Request) -> Closed:
        body = await self._read(request, EpisodeBody)
        async with self._held(body.episode):
            pass  # what is under way comes first
        await self._end(body.episode)
        return Closed()

    # -- episodes --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[Environment]:
        """The episode, for one call at a time."""
        if name not in self._episodes:
            raise ApiError(
                404, f"no episode {name[:80]!r}: it was closed or has expired", "episode"
            )
        held = self._episodes[name]
        async with held.lock:
            held.used = time.monotonic()
            try:
                yield held.env
            finally:
                held.used = time.monotonic()

    async def _end(self, name: str) -> None:
        held = self._episodes.pop(name, None)
        if held is not None:
            await to_the_end(_let_go(held.env))  # nobody else would close it

    async def _expire(self) -> None:
        """Close the episodes that everybody has forgotten, for as long as the server lives."""
        while True:
            await asyncio.sleep(min(self._limits.idle_s / 4, 10.0))
            now = time.monotonic()
            for name, held in list(self._episodes.items()):
                if not held.lock.locked() and now - held.used > self._limits.idle_s:
                    LOG.warning("closed an episode that was idle for %g s", now - held.used)
                    await self._end(name)

    def _sealed(self, task: WireTask) -> WireTask:
        return task.model_copy(update={"data": {**task.data, SEAL: self._seal(task)}})

    def _opened(self, sealed: WireTask) -> WireTask:
        """The task as it was drawn. ApiError for one that was not drawn here."""
        data = dict(sealed.data)
        given = str(data.pop(SEAL, ""))
        task = sealed.model_copy(update={"data": data})
        if not self._limits.takes_tasks and not hmac.compare_digest(given, self._seal(task)):
            raise ApiError(
                403,
                "this server did not draw that task; take one from /tasks, or let it play tasks of "
                "its clients (nanorl serve-env --takes-tasks)",
                "task",
            )
        return task

    def _seal(self, task: WireTask) -> str:
        # As it comes back: JSON has texts for keys and lists for tuples.
        text = json.dumps(json.loads(task.model_dump_json()), sort_keys=True)
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()

    async def _task_set(self, seed: int) -> TaskSet:
        if seed not in self._task_sets:
            found = await asyncio.to_thread(self._kit.kind.tasks, seed)
            while len(self._task_sets) >= MOST_SEEDS:
                self._task_sets.pop(next(iter(self._task_sets)))
            self._task_sets[seed] = found
        return self._task_sets[seed]

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        return await read_body(request, kind, self._http)


async def _let_go(env: Environment) -> None:
    """Close an episode; what it raises then changes nothing any more, but is told."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await env.close()
    except Exception as error:  # the boundary of a plug-in
        LOG.warning("closing an episode: %s: %s", type(error).__name__, error)


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ApiError(400, f"{name}: must be a natural number, not {text[:80]!r}", name)
    return int(text)
