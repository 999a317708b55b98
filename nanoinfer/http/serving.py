"""A server that runs: as a program of its own, or as a task of a loop that goes on with other work.

The second leaves the process' signals and its logging alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from nanoinfer.http.connection import server_config
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.http.listening import url_at


class ProgramServer(uvicorn.Server):
    """A server that says where it listens once it does: port 0 is any free one. uvicorn names a
    socket that it was given by its number only."""

    def __init__(self, config: uvicorn.Config, say: Callable[[str], None]) -> None:
        """`say` is told the URL."""
        super().__init__(config)
        self._say = say

    @property
    def url(self) -> str:
        """The URL at which it listens; valid once it has `started`."""
        return url_at(*self.servers[0].sockets[0].getsockname()[:2])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._say(self.url)


class ServerInLoop(uvicorn.Server):
    """A server in the running loop, which takes connections of `listener` from `begin` to `end`."""

    def __init__(
        self, app: Starlette, limits: HttpLimits, listener: socket.socket, close_s: int = 1
    ) -> None:
        """Clients that still read at the end have `close_s` for it, where it is not at once."""
        super().__init__(server_config(app, limits, is_program=False, close_s=close_s))
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """True while it takes connections in the running loop."""
        if self._task is None or self._task.done():
            return False
        return self._task.get_loop() is asyncio.get_running_loop()

    async def begin(self) -> None:
        """Take connections; returns once it does."""
        self._task = asyncio.create_task(self.serve(sockets=[self._listener]))
        # One that is told to stop before it listens leaves its socket.
        while not (self.started or self._task.done()):
            await asyncio.sleep(0.01)

    async def end(self, *, at_once: bool) -> None:
        """Stop listening. What ended a server is no reason for its loop to fail."""
        self.should_exit, self.force_exit = True, at_once
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
