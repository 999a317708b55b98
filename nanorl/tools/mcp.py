"""`mcp_tools`: the tools of an MCP server, started by a command or reached at an address.

    tools = [*mcp_tools("uvx mcp-server-time"), *mcp_tools("http://127.0.0.1:8000/mcp")]

The server is started when its tools are listed. It serves all episodes of the process: what one
leaves behind another sees. One thread holds the connection, so calls may come from any event loop.
A call that fails is a `ToolError`. A server that dies, or that answers nothing any more, is
`InfrastructureError`; the next call starts or reaches it anew.
Left out: resources, prompts, sampling, and results that are not text. Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
import threading
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

from nanoengine.extras import missing
from nanorl.tools.base import ToolContext, ToolError
from nanorl.types import InfrastructureError

START_S = 60.0  # a server may install itself first
PROBE_S = 10.0  # a server that lists no tools within this time after a slow call is dead
STOP_S = 10.0
MAX_LOG_CHARS = 300


@dataclass(eq=False)
class _Connection:
    """A client that is connected for as long as nobody sets `stop`."""

    client: Any
    stop: asyncio.Event
    task: asyncio.Task[None] | None = None


class McpServer:
    """A connection to one server. `close()` ends it; so does the end of the process."""

    def __init__(self, target: str) -> None:
        """`target` is a command line, or an address that begins with http:// or https://."""
        if not target.strip():
            raise ValueError("an MCP server is a command line or an http address; this is empty")
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise missing(f"MCP server {target!r}", "mcp", extra="mcp") from error
        self.target = target
        self._loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None
        file = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._log = cast(TextIO, file)
        thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="mcp")
        thread.start()
        self._end = weakref.finalize(self, _end_thread, self._loop, thread)

    def tools(self) -> list[McpTool]:
        """The server's tools. `InfrastructureError` where it cannot be reached."""
        listed = self._submit(self._list()).result()
        return [McpTool(self, one) for one in listed]

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """The text of one call's result."""
        call = self._call(name, dict(arguments), timeout_s)
        return await asyncio.wrap_future(self._submit(call))

    def close(self) -> None:
        """End the connection, and the server if it was started here."""
        if self._end.alive:
            self._submit(self._disconnect()).result(STOP_S)
            self._end()
            self._log.close()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- in the thread of the connection ---------------------------------------------------------

    async def _list(self) -> list[Any]:
        connection = await self._connected()
        return (await connection.client.list_tools()).tools

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        connection = await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                result = await connection.client.call_tool(name, arguments)
        except TimeoutError as error:
            await self._probe(connection)
            raise ToolError(f"{name} timed out after {timeout_s:g} s") from error
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise await self._lost(connection, error) from error
            raise ToolError(error.error.message) from error
        except Exception as error:  # the boundary to a transport of another package
            raise await self._lost(connection, error) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _probe(self, connection: _Connection) -> None:
        """Ask the server for anything at all, after a call that took too long."""
        try:
            async with asyncio.timeout(PROBE_S):
                await connection.client.list_tools(cache_mode="bypass")
        except Exception as error:  # as above
            raise await self._lost(connection, error) from error

    async def _lost(self, connection: _Connection, error: Exception) -> InfrastructureError:
        """Give the connection up; the next call makes another."""
        connection.stop.set()
        if self._connection is connection:
            self._connection = None
        return InfrastructureError(f"the MCP server {self.target!r} failed: {self._why(error)}")

    async def _connected(self) -> _Connection:
        async with self._lock:
            if self._connection is None:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> _Connection:
        ready: asyncio.Future[_Connection] = self._loop.create_future()
        task = self._loop.create_task(self._hold(ready))
        try:
            connection = await asyncio.wait_for(asyncio.shield(ready), START_S)
        except Exception as error:  # the boundary to a server that may be anything
            task.cancel()
            raise InfrastructureError(
                f"the MCP server {self.target!r} does not start: {self._why(error)}"
            ) from error
        connection.task = task
        return connection

    async def _hold(self, ready: asyncio.Future[_Connection]) -> None:
        """Enter and leave the client in one task, as its cancel scopes demand."""
        from mcp import Client

        connection = None
        try:
            async with Client(self._transport(), cache=None) as client:
                connection = _Connection(client, asyncio.Event())
                ready.set_result(connection)
                await connection.stop.wait()
        except Exception as error:  # told to who waits; later it is noticed by a call
            if not ready.done():
                ready.set_exception(error)

    def _transport(self) -> Any:
        if self.target.startswith(("http://", "https://")):
            return self.target
        from mcp import StdioServerParameters, stdio_client

        command, *arguments = shlex.split(self.target)
        self._log.seek(0)
        self._log.truncate()
        return stdio_client(
            StdioServerParameters(command=command, args=arguments), errlog=self._log
        )

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.task is not None:
            connection.stop.set()
            await asyncio.wait([connection.task], timeout=STOP_S)

    def _why(self, error: Exception) -> str:
        """The error, and the end of what the server wrote to its stderr."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        self._log.seek(0)
        said = self._log.read().strip()[-MAX_LOG_CHARS:]
        text = f"{type(error).__name__}: {error}"
        return f"{text}; it wrote: {said}" if said else text


class McpTool:
    """One tool of a server, behind the contract of a tool."""

    def __init__(self, server: McpServer, listed: Any) -> None:
        """`listed` is the server's own description of it."""
        self.name: str = listed.name
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": listed.name,
                "description": listed.description or "",
                "parameters": listed.input_schema,
            },
        }
        self._server = server

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        """The server's answer; it checks the arguments."""
        return await self._server.call(self.name, arguments, context.timeout_s)


def mcp_tools(target: str) -> list[McpTool]:
    """The tools of the server behind a command line or an address, which they keep alive."""
    return McpServer(target).tools()


def _end_thread(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """A server that was started by a command ends when its input does, with this process."""
    loop.call_soon_threadsafe(loop.stop)
    thread.join(STOP_S)


def _text(result: Any) -> str:
    parts = [getattr(block, "text", f"({block.type} left out)") for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
