"""`McpConnection`: one client of an MCP server, from its first call to `close`.

A command is started when something is asked of it, and ends with the connection: its input is
closed, and what has not ended soon after is killed with all that it started. A server that dies, or
that answers nothing any more, is given up as `InfrastructureError`; the next call starts or reaches
it anew. All of it runs in one event loop.
Left out: which episode a connection belongs to (mcp.py).
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Mapping
from typing import Any, TextIO, cast

from nanorl.envs.tools.base import ToolError
from nanorl.types import InfrastructureError

PROBE_S = 10.0  # a server that lists no tools within this time after a slow call is dead
STOP_S = 10.0  # more than a server has from the end of its input to the kill: the client's 4 s
MAX_LOG_CHARS = 300


def is_address(target: str) -> bool:
    """Say whether a server is reached at an address, and not started by a command."""
    return target.startswith(("http://", "https://"))


class McpConnection:
    """A way to the server behind `target`. `slots` bounds how many servers run at a time."""

    def __init__(self, target: str, start_s: float, slots: asyncio.Semaphore | None = None) -> None:
        self.target = target
        self._start_s, self._slots = start_s, slots
        self._lock = asyncio.Lock()
        self._client: Any = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._holding: set[asyncio.Task[None]] = set()  # of servers that are not gone yet
        self._log: TextIO | None = None

    async def tools(self) -> list[Any]:
        """The server's own descriptions of its tools, which it may take as long to say as to
        start."""
        client = await self._connected()
        try:
            async with asyncio.timeout(self._start_s):
                return cast("list[Any]", (await client.list_tools()).tools)
        except Exception as error:  # the boundary to a transport of another package
            raise self._lost(client, error) from error

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """The result of one call. ToolError where it is refused or takes too long."""
        from mcp import MCPError  # here: an extra
        from mcp_types import CONNECTION_CLOSED  # here: an extra

        client = await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                return await client.call_tool(name, dict(arguments))
        except TimeoutError as error:
            await self._probe(client)
            raise ToolError(f"{name} timed out after {timeout_s:g} s") from error
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise self._lost(client, error) from error
            raise ToolError(error.error.message) from error
        except Exception as error:  # the boundary to a transport of another package
            raise self._lost(client, error) from error

    async def close(self) -> None:
        """End the connection, and the server if it was started here; then it is gone."""
        self._give_up()
        if self._holding:
            await asyncio.wait(self._holding, timeout=STOP_S)
        if self._log is not None:
            self._log.close()

    async def _probe(self, client: Any) -> None:
        """Ask the server for anything at all, after a call that took too long."""
        try:
            async with asyncio.timeout(PROBE_S):
                await client.list_tools(cache_mode="bypass")
        except Exception as error:  # as above
            raise self._lost(client, error) from error

    def _lost(self, client: Any, error: Exception) -> InfrastructureError:
        """Give the connection up; the next call makes another."""
        if self._client is client:
            self._give_up()
        return InfrastructureError(f"the MCP server {self.target!r} failed: {self._why(error)}")

    def _give_up(self) -> None:
        """Let the server go; it is gone when its task is done."""
        task, is_starting = self._task, self._client is None
        self._client = self._task = None
        self._stop.set()
        if task is not None and is_starting:
            task.cancel()

    async def _connected(self) -> Any:
        async with self._lock:
            if self._client is None:
                await self._connect()
            return self._client

    async def _connect(self) -> None:
        await self._take_slot()
        self._stop = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready, self._stop))
        self._holding.add(self._task)
        self._task.add_done_callback(self._has_ended)
        try:
            self._client = await asyncio.wait_for(asyncio.shield(ready), self._start_s)
        except asyncio.CancelledError:
            self._give_up()
            raise
        except Exception as error:  # the boundary to a server that may be anything
            self._give_up()
            raise InfrastructureError(
                f"the MCP server {self.target!r} does not start: {self._why(error)}"
            ) from error

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._holding.discard(task)
        if self._slots is not None:
            self._slots.release()

    async def _take_slot(self) -> None:
        if self._slots is None:
            return
        try:
            async with asyncio.timeout(self._start_s):
                await self._slots.acquire()
        except TimeoutError:
            raise InfrastructureError(
                f"the MCP server {self.target!r}: other episodes have had all servers for "
                f"{self._start_s:g} s; give mcp_tools a larger max_servers, or play fewer episodes "
                "at a time"
            ) from None

    async def _hold(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """Enter and leave the client in one task, as its cancel scopes demand."""
        from mcp import Client  # here: an extra

        try:
            async with Client(self._transport(), cache=None) as client:
                ready.set_result(client)
                await stop.wait()
        except Exception as error:  # told to who waits; later it is noticed by a call
            if not ready.done():
                ready.set_exception(error)

    def _transport(self) -> Any:
        if is_address(self.target):
            return self.target
        from mcp import StdioServerParameters, stdio_client  # here: an extra

        command, *arguments = shlex.split(self.target)
        if self._log is not None:
            self._log.close()
        file = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._log = cast(TextIO, file)
        return stdio_client(
            StdioServerParameters(command=command, args=arguments), errlog=self._log
        )

    def _why(self, error: Exception) -> str:
        """The error, and the end of what the server wrote to its stderr."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        said = ""
        if self._log is not None and not self._log.closed:
            self._log.seek(0)
            said = self._log.read().strip()[-MAX_LOG_CHARS:]
        text = f"{type(error).__name__}: {error}"
        return f"{text}; it wrote: {said}" if said else text
