"""A tool server that may write serves one episode; real servers, counted by their pids."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until, wait_until

import nanorl
from nanorl.envs.tools import mcp_connection
from nanorl.envs.tools.base import ToolContext
from nanorl.envs.tools.mcp import McpTool, mcp_tools
from nanorl.task import Task
from nanorl.types import InfrastructureError

pytest.importorskip("mcp")
pytestmark = pytest.mark.xdist_group("mcp")

PROGRAM = Path(__file__).with_name("mcp_notes_program.py")
TASK = Task("p", answer="a")
SOON_S = 60.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), SOON_S, told=lambda: pids)


class Servers:
    """Those that were started behind one command."""

    def __init__(self, folder: Path, how: str = "") -> None:
        self.file = folder / "pids"
        self.command = f"{sys.executable} {PROGRAM} {self.file} {how}"

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self.file.read_text().split()] if self.file.exists() else []


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def context_of() -> ToolContext:
    return ToolContext(task=TASK, timeout_s=SOON_S)


def by_name(tools: list[McpTool]) -> dict[str, McpTool]:
    return {tool.name: tool for tool in tools}


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_episodes_of_an_environment_see_their_own_notes_alone(servers: Servers) -> None:
    with no_warning():
        made = tuple(mcp_tools(servers.command))
    listing = servers.pids
    until_gone(listing)

    class Notes(nanorl.Env):
        system = "Take notes."
        tools = made

    def play(name: str) -> list[str]:
        calls = [f'{{"name": "note", "arguments": {{"text": "{name}{i}"}}}}' for i in range(2)]
        turns = [f"<tool_call>{call}</tool_call>" for call in calls]
        return nanorl.rehearse(Notes, TASK, turns=turns).observations

    assert play("a") == ["a0", "a0; a1"], "one server for the whole episode"
    assert play("b") == ["b0", "b0; b1"]
    assert len(servers.pids) == 3 and not any(map(is_alive, servers.pids)), "closed with it"
    assert nanorl.rehearse(Notes, TASK, turns=["I need none."]).observations == []
    assert len(servers.pids) == 3, "an episode that calls nothing starts nothing"


def test_calls_at_once_share_the_episodes_server_and_no_other(servers: Servers) -> None:
    tools = by_name(mcp_tools(servers.command))

    async def episode(name: str) -> tuple[set[str], str]:
        context = context_of()
        try:
            calls = [tools["pid"].run(context, {}) for _ in range(3)]
            pids = set(await asyncio.gather(*calls))
            await tools["note"].run(context, {"text": name})
            return pids, await tools["note"].run(context, {"text": name})
        finally:
            await context.close()
            await context.close()

    async def play() -> list[tuple[set[str], str]]:
        return await asyncio.gather(*(episode(str(i)) for i in range(4)))

    played = asyncio.run(play())
    assert [notes for _, notes in played] == ["0; 0", "1; 1", "2; 2", "3; 3"]
    assert all(len(pids) == 1 for pids, _ in played)
    assert len(set.union(*(pids for pids, _ in played))) == 4
    assert not any(map(is_alive, servers.pids))


def test_a_server_whose_tools_only_read_serves_all_without_a_word(tmp_path: Path) -> None:
    servers = Servers(tmp_path, "marked")
    with no_warning():
        tools = by_name(mcp_tools(servers.command))
    said = {asyncio.run(tools["pid"].run(context_of(), {})) for _ in range(3)}
    assert said == {str(pid) for pid in servers.pids} and len(said) == 1
    own = by_name(mcp_tools(servers.command, per_episode=True))
    assert {asyncio.run(one_call(own["pid"])) for _ in range(2)}.isdisjoint(said)


async def one_call(tool: McpTool) -> str:
    context = context_of()
    try:
        return await tool.run(context, {})
    finally:
        await context.close()


def test_whoever_shares_a_server_that_may_write_is_warned_once(servers: Servers) -> None:
    with pytest.warns(UserWarning, match="of its tools note may write") as said:
        tools = by_name(mcp_tools(servers.command, per_episode=False))
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert said[0].filename == __file__
    with no_warning():
        for name in ("a", "b"):
            last = asyncio.run(tools["note"].run(context_of(), {"text": name}))
    assert last == "a; b" and len(servers.pids) == 1


def test_a_server_at_an_address_is_shared_with_a_warning() -> None:
    program = Path(__file__).with_name("mcp_server_program.py")
    process = subprocess.Popen(
        [sys.executable, str(program), "http"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        with pytest.warns(UserWarning, match="reset its state"):
            tools = by_name(mcp_tools(address))
        assert int(asyncio.run(one_call(tools["pid"]))) == process.pid
        with pytest.raises(ValueError, match="give the command that starts it"):
            mcp_tools(address, per_episode=True)
    finally:
        process.kill()
        process.wait()


def test_no_more_servers_run_than_were_allowed(servers: Servers) -> None:
    tools = by_name(mcp_tools(servers.command, max_servers=2))
    running: list[int] = []

    async def episode() -> None:
        context = context_of()
        try:
            await tools["pid"].run(context, {})
            running.append(sum(map(is_alive, servers.pids)))
        finally:
            await context.close()

    async def play() -> None:
        await asyncio.gather(*(episode() for _ in range(6)))

    asyncio.run(play())
    assert len(running) == 6 and max(running) <= 2
    with pytest.raises(ValueError, match=r"max_servers=0: must be 1 or more"):
        mcp_tools(servers.command, max_servers=0)


def test_who_finds_no_free_server_in_time_is_told_of_the_bound(servers: Servers) -> None:
    tools = by_name(mcp_tools(servers.command, max_servers=1))

    async def play() -> None:
        first, second = context_of(), context_of()
        await tools["pid"].run(first, {})
        connection = tools["pid"]._server._connection(second)
        connection._start_s = 0.5  # until it has a place: to start, a server may take longer
        with pytest.raises(InfrastructureError, match="a larger max_servers"):
            await tools["pid"].run(second, {})
        connection._start_s = SOON_S
        await first.close()
        await tools["pid"].run(second, {})
        await second.close()

    asyncio.run(play())


@pytest.fixture
def limits_once_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits of starts; one is over as soon as its server is stuck, however busy the machine
    was until then."""
    limits, stuck = list[float](), tmp_path / "pids.stuck"

    def num_stuck() -> int:
        return len(stuck.read_text().split()) if stuck.exists() else 0

    async def wait_for(ready: asyncio.Future[Any], limit_s: float) -> Any:
        limits.append(limit_s)
        num_before = num_stuck()
        await until(lambda: ready.done() or num_stuck() > num_before, SOON_S)
        return await asyncio.wait_for(ready, 0.0)

    patched = SimpleNamespace(**vars(asyncio) | {"wait_for": wait_for})
    monkeypatch.setattr(mcp_connection, "asyncio", patched)
    return limits


def test_a_server_that_hangs_at_its_start_is_killed(
    tmp_path: Path, limits_once_stuck: list[float]
) -> None:
    stuck = Servers(tmp_path, "stuck")
    with pytest.raises(InfrastructureError, match="does not start"):
        mcp_tools(stuck.command, start_timeout_s=5.0)
    assert len(stuck.pids) == 1
    until_gone(stuck.pids)
    (tmp_path / "pids").unlink()
    again = Servers(tmp_path, "again")
    tools = by_name(mcp_tools(again.command, start_timeout_s=6.0, max_servers=1))

    async def play() -> None:
        for _ in range(2):  # its place is free again
            context = context_of()
            with pytest.raises(InfrastructureError, match="does not start"):
                await tools["pid"].run(context, {})
            await context.close()

    asyncio.run(play())
    assert len(again.pids) == 3 and limits_once_stuck == [5.0, 6.0, 6.0, 6.0]
    until_gone(again.pids)


@pytest.mark.parametrize("how", ["silent", "short"])
def test_a_server_that_does_not_say_its_tools_is_given_up(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = SimpleNamespace(
        **vars(asyncio) | {"wait_for": lambda ready, _: asyncio.wait_for(ready, SOON_S)}
    )
    monkeypatch.setattr(mcp_connection, "asyncio", started)  # it may take its time for that
    mute = Servers(tmp_path, how)
    with pytest.raises(InfrastructureError, match="failed: "):
        mcp_tools(mute.command, start_timeout_s=0.5 if how == "silent" else SOON_S)
    assert len(mute.pids) == 1
    until_gone(mute.pids)


def test_an_episode_that_is_cancelled_while_its_server_starts_leaves_none(tmp_path: Path) -> None:
    again = Servers(tmp_path, "again")
    tools = by_name(mcp_tools(again.command))

    async def play() -> None:
        context = context_of()
        calling = asyncio.ensure_future(tools["pid"].run(context, {}))
        await until(lambda: len(again.pids) >= 2, SOON_S)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await context.close()

    asyncio.run(play())
    until_gone(again.pids)


def test_a_server_that_ends_only_by_force_ends_with_its_episode(tmp_path: Path) -> None:
    deaf = Servers(tmp_path, "deaf")
    tools = by_name(mcp_tools(deaf.command))
    asyncio.run(one_call(tools["pid"]))
    assert len(deaf.pids) == 2 and not any(map(is_alive, deaf.pids))


def test_no_server_outlives_the_process_whose_episode_never_ended(tmp_path: Path) -> None:
    deaf = Servers(tmp_path, "deaf")
    program = f"""
import asyncio
from nanorl.envs.tools.base import ToolContext
from nanorl.envs.tools.mcp import mcp_tools
from nanorl.task import Task
tools = {{tool.name: tool for tool in mcp_tools({deaf.command!r})}}
print(asyncio.run(tools["pid"].run(ToolContext(task=Task("p", answer="a")), {{}})))
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(said.stdout) == deaf.pids[1], said.stderr
    until_gone(deaf.pids)
