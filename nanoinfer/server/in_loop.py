"""An HTTP server as a task of an event loop that goes on with other work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class ServerInLoop(uvicorn.Server):
    """A server that leaves the process' signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_in_loop(server: ServerInLoop, listener: socket.socket) -> asyncio.Task[None]:
    """Serve as a task of the running loop; returns once connections are taken."""
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or task.done()):
        await asyncio.sleep(0.01)  # one that is told to stop before it listens leaves its socket
    return task
