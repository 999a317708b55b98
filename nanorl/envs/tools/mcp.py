"""`mcp_tools`: the tools of an MCP server, started by a command or reached at an address.

    tools = [*mcp_tools("uvx mcp-server-time"), *mcp_tools("http://127.0.0.1:8000/mcp")]

A command is started once when its tools are listed. Where all of them say that they change nothing
(MCP's `readOnlyHint`), that server goes on to serve all episodes of the process. Otherwise what one
episode leaves behind another would see, so each that calls a tool has a server of its own, from its
first call to its end. A server at an address is everybody's.
One thread holds the connections, so calls may come from any event loop. A call that fails is a
`ToolError`; a server that dies is `InfrastructureError` (mcp_connection.py).
Left out: resources, prompts, sampling, and results that are not text. Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from nanoengine.extras import missing
from nanorl.bounds import check_number
from nanorl.envs.tools.base import ToolContext, ToolError
from nanorl.envs.tools.mcp_connection import STOP_S, McpConnection, is_address

START_S = 60.0  # a server may install itself first
MAX_SERVERS = 64  # a process each
T = TypeVar("T")


class McpServer:
    """The connections to one server. `close()` ends them; so does the end of the process."""

    def __init__(
        self, target: str, *, max_servers: int = MAX_SERVERS, start_timeout_s: float = START_S
    ) -> None:
        """`target` is a command line, or an address that begins with http:// or https://."""
        if not target.strip():
            raise ValueError("an MCP server is a command line or an http address; this is empty")
        check_number("mcp_tools(max_servers=", max_servers, 1)
        check_number("mcp_tools(start_timeout_s=", start_timeout_s, 0, is_open=True)
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise missing(f"MCP server {target!r}", "mcp", extra="mcp") from error
        self.target = target
        self.is_per_episode = False
        """Whether each episode has a server of its own."""
        self._start_s, self._slots = start_timeout_s, asyncio.Semaphore(max_servers)
        self._loop = asyncio.new_event_loop()
        self._shared = McpConnection(target, start_timeout_s)
        self._open: set[McpConnection] = {self._shared}
        thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="mcp")
        thread.start()
        self._end = weakref.finalize(self, _end_thread, self._loop, thread, self._open)

    def tools(self) -> list[McpTool]:
        """The server's tools. `InfrastructureError` where it cannot be reached."""
        return [McpTool(self, one) for one in self._submit(self._shared.tools()).result()]

    def serve_each_episode(self) -> None:
        """From now on each episode has a server of its own; that which listed the tools ends."""
        self.is_per_episode = True
        self._submit(self._shared.close()).result()

    async def call(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """The text of one call's result."""
        call = self._connection(context).call(name, arguments, context.timeout_s)
        result = await asyncio.wrap_future(self._submit(call))
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the connections, and the servers that were started here."""
        self._end()

    def _connection(self, context: ToolContext) -> McpConnection:
        if not self.is_per_episode:
            return self._shared
        own = context.opened.get(self)
        if own is None:
            connection = McpConnection(self.target, self._start_s, self._slots)
            self._open.add(connection)
            own = context.opened[self] = _OwnServer(self, connection)
        assert isinstance(own, _OwnServer), "this server's key"
        return own.connection

    async def _leave(self, connection: McpConnection) -> None:
        """Close an episode's connection, even if the episode is cancelled meanwhile."""
        self._open.discard(connection)
        await asyncio.shield(asyncio.wrap_future(self._submit(connection.close())))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class _OwnServer:
    """An episode's own server, which ends with the episode's `ToolContext`."""

    def __init__(self, server: McpServer, connection: McpConnection) -> None:
        self.connection = connection
        self._server = server

    async def close(self) -> None:
        await self._server._leave(self.connection)


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
        self.is_read_only: bool = bool(listed.annotations and listed.annotations.read_only_hint)
        """Whether the server says that calls change nothing."""
        self._server = server

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        """The server's answer; it checks the arguments."""
        return await self._server.call(self.name, arguments, context)


def mcp_tools(
    target: str,
    *,
    per_episode: bool | None = None,
    max_servers: int = MAX_SERVERS,
    start_timeout_s: float = START_S,
) -> list[McpTool]:
    """The tools of the server behind a command line or an address, which they keep alive.

    `per_episode`: whether each episode has a server of its own, which costs a start and the memory
    of a process for as long as the episode lasts. None: where a command is given and not all of
    its tools are marked `readOnlyHint`. At most `max_servers` run
    at a time, and each must have started after `start_timeout_s`. A server that is shared though a
    tool of it may write is warned of. ValueError where `per_episode` is asked of an address.
    """
    if per_episode and is_address(target):
        raise ValueError(
            f"mcp_tools({target!r}, per_episode=True): a server at an address was started "
            "elsewhere, and each episode would reach the same; give the command that starts it"
        )
    server = McpServer(target, max_servers=max_servers, start_timeout_s=start_timeout_s)
    tools = server.tools()
    writing = [tool.name for tool in tools if not tool.is_read_only]
    if per_episode or (per_episode is None and writing and not is_address(target)):
        server.serve_each_episode()
    elif writing:
        warnings.warn(_shared_warning(target, writing), stacklevel=2)
    return tools


def _shared_warning(target: str, writing: list[str]) -> str:
    mend = "reset its state between episodes" if is_address(target) else "leave per_episode out"
    return (
        f"the MCP server {target!r} is shared by all episodes, and of its tools "
        f"{', '.join(writing)} may write: what one rollout leaves behind another reads. {mend}, or "
        "mark the tools readOnlyHint if they change nothing"
    )


def _end_thread(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, open_: set[McpConnection]
) -> None:
    """End all servers, then the thread. It may be the thread itself that collects the garbage."""

    async def close_all() -> None:
        await asyncio.gather(*(one.close() for one in open_), return_exceptions=True)

    ended = asyncio.run_coroutine_threadsafe(close_all(), loop)
    ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:
        thread.join(2 * STOP_S)


def _text(result: Any) -> str:
    parts = [getattr(block, "text", f"({block.type} left out)") for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
