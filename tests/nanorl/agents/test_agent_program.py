"""One life of a program whose event loop, which other rollouts share, stands still meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agent_programs import wait_until_dead
from waiting import until, wait_until

from nanorl.agents.agent_program import AgentProgram, ProgramResult, ProgramStart


def has_ended(pid: int) -> bool:
    """Whether it has, and asyncio's thread, where it has one for this, has told the loop so."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "Z"
    return state == "Z" and not any("waitpid" in one.name for one in threading.enumerate())


class Late:
    """An event loop that stands still, once, until a program has ended and every limit is over."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: time.monotonic() + self.late_s  # type: ignore[method-assign]

    def stand_still(self, program: AgentProgram) -> None:
        """From the next turn of the loop on."""
        process = program._process
        assert process is not None, "it was started"

        def until_ended() -> None:
            wait_until(lambda: has_ended(process.pid))
            self.late_s += 1e6

        self.loop.call_soon(until_ended)

    def run(self, work: Coroutine[Any, Any, ProgramResult]) -> ProgramResult:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            return runner.run(work)


def started(code: str) -> AgentProgram:
    return AgentProgram(ProgramStart(argv=[sys.executable, "-c", code], environment={}), 1 << 14)


def test_a_program_that_ended_while_the_loop_stood_still_was_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, begin = Late(), AgentProgram._begin

    async def begin_late(program: AgentProgram) -> asyncio.subprocess.Process:
        process = await begin(program)
        late.stand_still(program)
        return process

    async def play() -> ProgramResult:
        program = started("print('42')")
        try:
            return await program.run(1000.0)
        finally:
            await program.close()

    monkeypatch.setattr(AgentProgram, "_begin", begin_late)
    result = late.run(play())
    assert (result.exit_code, result.reason, result.stdout) == (0, "", "42\n")


def test_a_program_that_is_ended_while_the_loop_stands_still_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its guard has ended by the time at which the loop gives it up."""
    late, exited = Late(), BaseSubprocessTransport._process_exited  # type: ignore[attr-defined]

    def exited_late(transport: Any, code: int) -> None:
        exited(transport, code)
        late.late_s += 1e6

    async def play() -> ProgramResult:
        program = started("import time; time.sleep(600)")
        try:
            await program._begin()
            monkeypatch.setattr(BaseSubprocessTransport, "_process_exited", exited_late)
            await program._end()
            return program._result("timeout")
        finally:
            await program.close()

    assert late.run(play()).reason == "timeout"


HIDES = """
import os, subprocess, sys, time
hidden = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(hidden.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def test_a_guard_that_stands_still_for_seconds_ends_what_hides_all_the_same(
    tmp_path: Path,
) -> None:
    """Nobody else could: what hides in a session of its own is the guard's to find."""
    told = tmp_path / "pid"
    start = ProgramStart(argv=[sys.executable, "-c", HIDES, str(told)], environment={})

    async def play() -> None:
        program = AgentProgram(start, 1 << 14)
        try:
            guard = (await program._begin()).pid
            await until(told.exists)
            os.kill(guard, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(6.0, os.kill, guard, signal.SIGCONT)
            await program._end()
        finally:
            await program.close()

    asyncio.run(play())
    hidden = int(told.read_text())
    try:
        assert wait_until_dead([hidden]) == []
    finally:
        with suppress(ProcessLookupError):
            os.kill(hidden, signal.SIGKILL)
