"""`AgentProgram`: one life of a program that plays a rollout, from its start to the last of it.

    result = await run_program(start, timeout_s=300)

The program has a working folder, an environment and no stdin; its output is read to the end and
the last of it kept. Whatever happens to the caller (a limit, a cancelled rollout, `kill -9`), the
program ends with all that it started: guard.py, between the two, sees to that.
Left out: what its calls mean (nanorl/agents/endpoint), what its answer is worth (command.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorl.agents.guard import MAX_ANSWER_BYTES
from nanorl.sandbox.agent_box import AgentBox
from nanorl.types import InfrastructureError

GUARD = Path(__file__).with_name("guard.py")
ANSWER_FILE = "answer.txt"
MAX_OUTPUT_BYTES = 16 << 20
MAX_CONNECTIONS = 128  # of one program
_END_S = 30.0  # the guard has so long to end what it guards: killed, it would leave some of it
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ProgramStart:
    """The command, surroundings and sandbox that a program starts with."""

    argv: list[str]
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their names in the working folder."""
    endpoints: Sequence[tuple[str, int]] = ()
    """Host and port of each address that a program in a box reaches; inside they are ports of
    127.0.0.1."""
    box: AgentBox | None = None
    """The sandbox; None: it runs as whoever runs this."""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """The end of a program. `exit_code` is negative for a signal, None where it was ended."""

    exit_code: int | None
    reason: str = ""
    """Why it was ended: "timeout", "output", "memory"; empty: it ended by itself."""
    answer: str | None = None
    """The content of its answer file; None where it left none."""
    stdout: str = ""
    stderr: str = ""
    """The last of each."""

    @property
    def is_failed(self) -> bool:
        return self.exit_code != 0

    @property
    def how(self) -> str:
        """The way it ended, for people."""
        ended = {
            "timeout": "took too long and was ended",
            "output": f"wrote more than {MAX_OUTPUT_BYTES >> 20} MiB and was ended",
            "memory": "used too much memory and was ended",
        }
        if self.exit_code is None:
            return ended.get(self.reason, "was ended")
        code = self.exit_code
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class Tail:
    """The last `num_bytes` of a stream, and how much there was."""

    def __init__(self, num_bytes: int) -> None:
        self.total_bytes = 0
        self._num_bytes = num_bytes
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        self.total_bytes += len(data)
        self._kept += data
        del self._kept[: -self._num_bytes]

    def text(self) -> str:
        return self._kept.decode(errors="replace")


async def run_program(
    start: ProgramStart, *, timeout_s: float, kept_bytes: int = 1 << 14
) -> ProgramResult:
    """Run a program to its end, or end it after `timeout_s`. `kept_bytes` of each of its outputs
    are kept. InfrastructureError where not even its guard runs."""
    program = AgentProgram(start, kept_bytes)
    try:
        return await program.run(timeout_s)
    finally:
        await program.close()


class AgentProgram:
    """The guard and the program behind it. For one event loop and one run."""

    def __init__(self, start: ProgramStart, kept_bytes: int) -> None:
        self._start = start
        self._tails = (Tail(kept_bytes), Tail(kept_bytes))
        self._is_flooded = asyncio.Event()
        self._control, self._theirs = socket.socketpair()
        self._lifeline, self._stdin = socket.socketpair()  # its end is the guard's sign to end
        for one in (self._control, self._lifeline):
            one.setblocking(False)
        self._folder = "" if start.box else tempfile.mkdtemp(prefix="nanorl-agent-")
        self._process: asyncio.subprocess.Process | None = None
        self._pipes: list[asyncio.ReadTransport] = []
        self._readers: list[asyncio.Task[None]] = []
        self._relays: list[Relay] = []

    async def run(self, timeout_s: float) -> ProgramResult:
        reason = ""
        try:
            async with asyncio.timeout(timeout_s):
                process = await self._begin()
                ended = asyncio.ensure_future(process.wait())
                flooded = asyncio.ensure_future(self._is_flooded.wait())
                waiting: dict[asyncio.Future[Any], str] = {ended: "", flooded: "output"}
                if (box := self._start.box) is not None:
                    waiting[asyncio.ensure_future(box.overrun(process.pid))] = "memory"
                try:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    reason = next(why for one, why in waiting.items() if one.done())
                    if reason == "memory":
                        _kill(process)  # no time for the guard, which should have seen it
                finally:
                    for one in waiting:
                        one.cancel()
        except TimeoutError:
            reason = "timeout"
        await self._end()
        return self._result(reason)

    async def close(self) -> None:
        """End everything. Closing twice is fine."""
        process, box = self._process, self._start.box
        self._lifeline.close()  # at once: whoever waits below may be cancelled again
        try:
            if process is not None and process.returncode is None:
                await self._end()
        finally:
            for reader in self._readers:
                reader.cancel()
            for pipe in self._pipes:
                pipe.close()
            for relay in self._relays:
                relay.close()
            for one in (self._control, self._theirs, self._stdin):
                one.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
            if box is not None:
                box.close()

    async def _begin(self) -> asyncio.subprocess.Process:
        start, box, theirs = self._start, self._start.box, self._theirs
        guarded = [str(theirs.fileno())]
        descriptors: tuple[int, ...] = (theirs.fileno(),)
        if box is None:
            argv = [sys.executable, "-I", "-S", str(GUARD), *guarded]
        else:
            argv, more = box.command(GUARD, guarded)
            descriptors += more
        # Pipes of its own: asyncio's would keep wait() waiting for whoever else holds them open.
        outputs = [await self._output(tail) for tail in self._tails]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=self._stdin.fileno(),
                stdout=outputs[0],
                stderr=outputs[1],
                pass_fds=descriptors,
                env={},
            )
        finally:
            for descriptor in outputs:
                os.close(descriptor)
        theirs.close()
        self._stdin.close()
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            await loop.sock_sendall(self._lifeline, json.dumps(self._order()).encode() + b"\n")
        if box is not None:
            for endpoint, listener in zip(start.endpoints, await self._listeners(), strict=True):
                self._relays.append(Relay(listener, endpoint))
                await self._relays[-1].start()
        return self._process

    def _order(self) -> dict[str, Any]:
        """The line that guard.py reads."""
        start, box = self._start, self._start.box
        return {
            "argv": start.argv,
            "environment": dict(start.environment),
            "folder": box.folder if box else self._folder,
            "files": dict(start.files),
            "answer_file": ANSWER_FILE,
            "ports": [port for _, port in start.endpoints] if box else [],
            "rlimits": box.rlimits() if box else {},
            "watch_bytes": box.watch_bytes if box else 0,
            "watch_folders": box.watch_folders if box else [],
        }

    async def _listeners(self) -> list[socket.socket]:
        """The listening sockets that the guard opened inside."""
        loop = asyncio.get_running_loop()
        is_there = asyncio.Event()
        loop.add_reader(self._control, is_there.set)
        try:
            await is_there.wait()
        finally:
            loop.remove_reader(self._control)
        wanted = len(self._start.endpoints)
        _, descriptors, _, _ = socket.recv_fds(self._control, 1, wanted)
        if not descriptors:
            await self._end()
            said = self._tails[1].text().strip() or "no message"
            raise InfrastructureError(f"the sandbox of an agent program does not start: {said}")
        return [socket.socket(fileno=one) for one in descriptors]

    async def _output(self, tail: Tail) -> int:
        """The end of a pipe to write to; what comes out of it is kept in `tail`."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        stream = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
        )
        self._pipes.append(pipe)
        self._readers.append(asyncio.ensure_future(self._read(stream, tail)))
        return writing

    async def _read(self, stream: asyncio.StreamReader, tail: Tail) -> None:
        while data := await stream.read(_CHUNK_BYTES):
            tail.add(data)
            if sum(one.total_bytes for one in self._tails) > MAX_OUTPUT_BYTES:
                self._is_flooded.set()

    async def _end(self) -> None:
        """Let the guard end everything, then read what is left of the output."""
        process = self._process
        if process is None:
            return
        self._lifeline.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            _kill(process)
            await process.wait()
        if self._readers:
            await asyncio.wait(self._readers, timeout=1.0)  # somebody else may hold a pipe open

    def _result(self, reason: str) -> ProgramResult:
        report, answer = self._report()
        if reason == "timeout" and report.get("reason") == "":
            reason = ""  # it had ended by itself, and this loop was late
        box = self._start.box
        if not reason and box is not None and box.is_out_of_memory:
            reason = "memory"
        reason = reason or str(report.get("reason", ""))
        code = report.get("exit_code")
        return ProgramResult(
            exit_code=code if isinstance(code, int) and not reason else None,
            reason=reason,
            answer=answer.decode(errors="replace") if report.get("has_answer") else None,
            stdout=self._tails[0].text(),
            stderr=self._tails[1].text(),
        )

    def _report(self) -> tuple[dict[str, Any], bytes]:
        """Read the guard's report and the answer. The report of one that was killed, by the program
        or for its memory, says that it was."""
        data = b""
        with suppress(BlockingIOError, ConnectionError):
            while part := self._control.recv(2 * MAX_ANSWER_BYTES):
                data += part
        head, _, answer = data.partition(b"\n")
        with suppress(ValueError):
            report = json.loads(head)
            if isinstance(report, dict):
                return report, answer
        return {"exit_code": -signal.SIGKILL}, b""


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it has ended, and this loop was late
        process.kill()


class Relay:
    """Takes connections on a socket from inside of a box to the endpoint, and to nowhere else. More
    than MAX_CONNECTIONS at a time are closed at once: the endpoint has so many for all episodes."""

    def __init__(self, listener: socket.socket, endpoint: tuple[str, int]) -> None:
        listener.setblocking(False)
        self._listener, self._endpoint = listener, endpoint
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection(*self._endpoint)
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(reader, far_writer))
                    group.create_task(_copy(far_reader, writer))
        finally:
            self._tasks.discard(task)
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
