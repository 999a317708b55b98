"""A small MCP server: over stdio, or with `http` over a free port, which it prints."""

import os
import socket
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    raise ToolError("no such row")


@server.tool()
async def slow() -> str:
    import anyio

    await anyio.sleep(60)
    return "late"


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
def die() -> str:
    print("out of luck", file=sys.stderr, flush=True)
    time.sleep(0.05)
    os._exit(3)


def serve_http() -> None:
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        serve_http()
    else:
        server.run()
