"""Tools of a real MCP server process: listed, called, and what happens when it fails."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from nanorl.envs.tools.base import ToolContext, ToolError
from nanorl.envs.tools.mcp import McpServer, McpTool, mcp_tools
from nanorl.task import Task
from nanorl.types import InfrastructureError

pytest.importorskip("mcp")
pytestmark = pytest.mark.xdist_group("mcp")

PROGRAM = Path(__file__).with_name("mcp_server_program.py")
COMMAND = f"{sys.executable} {PROGRAM}"


def run(tool: McpTool, timeout_s: float = 60.0, **arguments: object) -> str:
    context = ToolContext(task=Task("p", answer="a"), timeout_s=timeout_s)
    return asyncio.run(tool.run(context, arguments))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int) -> bool:
    return eventually(lambda: not is_alive(pid))


def test_a_server_is_listed_called_restarted_and_ended() -> None:
    server = McpServer(COMMAND)
    try:
        tools = {tool.name: tool for tool in server.tools()}
        assert set(tools) == {"add", "fail", "slow", "pid", "die"}
        function = tools["add"].schema["function"]
        assert function["description"] == "Add two numbers."
        assert function["parameters"]["required"] == ["a", "b"]
        assert run(tools["add"], a=2, b=3) == "5"
        with pytest.raises(ToolError, match="no such row"):
            run(tools["fail"])
        with pytest.raises(ToolError, match="valid integer"):
            run(tools["add"], a="x", b=3)
        with pytest.raises(ToolError, match=r"slow timed out after 0\.2 s"):
            run(tools["slow"], timeout_s=0.2)
        first = int(run(tools["pid"]))
        with pytest.raises(InfrastructureError, match=r"(?s)failed.*out of luck"):
            run(tools["die"])
        assert gone(first)
        second = int(run(tools["pid"]))
        assert second != first and run(tools["add"], a=1, b=1) == "2"
    finally:
        server.close()
        server.close()
    assert gone(second)


def test_a_command_that_is_no_server_says_what_it_wrote() -> None:
    with pytest.raises(InfrastructureError, match=r"does not start.*wrong door"):
        mcp_tools(f"{sys.executable} -c \"raise SystemExit('wrong door')\"")
    with pytest.raises(InfrastructureError, match="does not start: FileNotFoundError"):
        mcp_tools("/nowhere/server")
    with pytest.raises(ValueError, match="this is empty"):
        mcp_tools(" ")


@pytest.fixture
def address() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "http"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_at_an_address_is_called_over_http(address: str) -> None:
    server = McpServer(address)
    tools = {tool.name: tool for tool in server.tools()}
    assert run(tools["add"], a=2, b=3) == "5"
    with pytest.raises(InfrastructureError):
        run(tools["die"])
    server.close()
