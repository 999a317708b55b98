"""A sandbox that is kept for one episode: a working folder, an interpreter, nothing else.

    async with await pool.open_session({"src/stats.py": "..."}) as session:
        await session.shell("ls -l src", timeout_s=5)
        before = await session.snapshot()
        await session.repl("x = 6 * 7", timeout_s=5)
        await session.repl("x", timeout_s=5)                      # stdout: 42
        verdict = await grade(session, {"test_stats.py": "..."}, timeout_s=30)

The walls are those of `SandboxPool.run`. Files stay, in the folder and in /tmp; processes do not:
when `run`, `shell` or a file operation returns, all that it started is dead. Only the interpreter
of `repl` lives on, and it stands still, with its threads and children, until its next call.
Operations of one session run one after the other. Paths are relative to the folder, are resolved
inside the sandbox, and may not lead out of the folder.

A program that breaks its worker (it can only by running it out of memory or time) is answered like
one that failed, and the session starts anew with the files that it was opened with; the result's
`notice` says so. The machinery's own failures raise SandboxFailure: the session is over then.
Left out: a network, packages to install, users other than one.
Next: grading.py (a verdict about the folder), keeper.py (what runs inside), lease.py (the workers).
"""

from __future__ import annotations

import asyncio
import io
import math
import tarfile
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Protocol

from nanorl.sandbox import protocol
from nanorl.sandbox.base import ExecResult, ExecStatus, SandboxSpec
from nanorl.sandbox.execution import Execution
from nanorl.sandbox.lease import SessionLease

_FILE_LIMIT_S = 20.0
_PACK_LIMIT_S = 60.0
_BROKEN = (
    "the sandbox broke and was started anew: the files are those of the beginning, "
    "the interpreter's names are gone"
)


class WorkspaceError(ValueError):
    """A file operation that cannot be done; the message is written for the model."""


class SessionHost(Protocol):
    """Whoever holds the workers, or boxes, of sessions: lease.py's dispatcher, or a back end's."""

    spec: SandboxSpec

    def lease(self, is_grader: bool = False) -> SessionLease:
        """A right to a worker, which may have to wait."""
        ...

    def submit_to(self, lease: SessionLease, execution: Execution) -> None:
        """Has an execution done in the lease's worker, after those before it."""
        ...

    def give_back(self, lease: SessionLease) -> Future[None]:
        """Ends everything in the session; the future is done when nothing of it is left."""
        ...


class Session:
    """One episode's sandbox. Made by `SandboxPool.open_session`; for one event loop at a time."""

    def __init__(
        self, dispatcher: SessionHost, archive: bytes, folder: str, is_grader: bool = False
    ) -> None:
        self.folder = folder
        self.turn = asyncio.Lock()
        """Held by whoever does several operations that belong together, as the tools do."""
        self._dispatcher = dispatcher
        self._opening = archive
        self._lease: SessionLease = dispatcher.lease(is_grader)
        self._num_breaks = -1  # the folder is laid before the first operation
        self._snapshots: dict[str, bytes] = {}
        self._lock = asyncio.Lock()
        self._finalizer = weakref.finalize(self, dispatcher.give_back, self._lease)

    @property
    def spec(self) -> SandboxSpec:
        return self._dispatcher.spec

    async def run(self, code: str, timeout_s: float) -> ExecResult:
        """Runs a program in a fresh Python process in the folder."""
        return await self.perform(protocol.PYTHON, {"code": code}, timeout_s)

    async def shell(self, command: str, timeout_s: float) -> ExecResult:
        """Runs a command line with bash, or sh where there is none, in the folder."""
        return await self.perform(protocol.SHELL, {"command": command}, timeout_s)

    async def repl(self, code: str, timeout_s: float) -> ExecResult:
        """Runs code in the one interpreter that keeps its names; prints a last expression's value.

        One that exits, hangs or is killed is replaced at the next call: the `notice` says so.
        """
        return await self.perform(protocol.REPL, {"code": code}, timeout_s)

    async def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """The contents of a regular file. WorkspaceError if it is none, or larger than `max_bytes`
        (by default `tmp_bytes`)."""
        limit = self.spec.tmp_bytes if max_bytes is None else max_bytes
        parts = {"root": self.folder, "path": path}
        result = await self.perform(protocol.READ, parts, _FILE_LIMIT_S, limit)
        if result.truncated:
            raise WorkspaceError(f"{path}: the file is larger than {limit} bytes")
        self._expect(result, path)
        return result.stdout

    async def write(self, path: str, data: str | bytes) -> None:
        """Makes or replaces a regular file, with the folders above it."""
        content = _encoded(data)
        if len(content) > self.spec.tmp_bytes:
            raise WorkspaceError(f"{path}: {len(content)} bytes are more than the folder can hold")
        parts: dict[str, str | bytes] = {"root": self.folder, "path": path, "data": content}
        self._expect(await self.perform(protocol.WRITE, parts, _FILE_LIMIT_S), path)

    async def snapshot(self) -> str:
        """Keeps a copy of the folder (not of /tmp, nor of the interpreter); its id."""
        if len(self._snapshots) >= self.spec.max_snapshots:
            raise WorkspaceError(f"a session keeps at most {self.spec.max_snapshots} snapshots")
        archive = await self.pack()
        name = f"snapshot-{len(self._snapshots) + 1}"
        self._snapshots[name] = archive
        return name

    async def restore(self, snapshot: str) -> None:
        """Makes the folder what it was; /tmp is emptied and the interpreter ended."""
        if snapshot not in self._snapshots:
            known = ", ".join(self._snapshots) or "there is none"
            raise WorkspaceError(f"no snapshot {snapshot!r} ({known})")
        async with self._lock:
            await self._lay(self._snapshots[snapshot])

    async def close(self) -> None:
        """Ends every process and forgets every file. May be called again."""
        self._snapshots.clear()
        await asyncio.wrap_future(self._dispatcher.give_back(self._lease))

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def lay(self) -> None:
        """Puts the opening files in place; every operation does so where it has not been done."""
        async with self._lock:
            await self._lay(self._opening)

    # What grading needs besides.

    async def pack(self) -> bytes:
        """The folder as a tar archive. WorkspaceError if it is too large for one."""
        limit = 2 * self.spec.tmp_bytes
        result = await self.perform(protocol.PACK, {}, _PACK_LIMIT_S, limit)
        if result.truncated:
            raise WorkspaceError(f"the folder takes more than {limit} bytes as an archive")
        self._expect(result, "the folder")
        return result.stdout

    async def copy(self) -> Session:
        """Another session with the files as they are now; a grader's, to be closed soon."""
        return Session(self._dispatcher, await self.pack(), self.folder, is_grader=True)

    async def perform(
        self,
        job: int,
        parts: Mapping[str, str | bytes],
        timeout_s: float,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """Has one job (protocol.py) done, after those asked for before it."""
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds")
        async with self._lock:
            if self._num_breaks != self._lease.num_breaks:
                await self._lay(self._opening)
            result = await self._execute(job, parts, timeout_s, max_output_bytes)
            if self._num_breaks != self._lease.num_breaks:
                return replace(result, notice=_BROKEN)
            return result

    async def _lay(self, archive: bytes) -> None:
        """Makes the folder hold the archive's files and nothing else."""
        self._num_breaks = self._lease.num_breaks
        argument = protocol.FOLDERS.index(self.folder)
        parts = {"archive": archive}
        result = await self._execute(protocol.UNPACK, parts, _PACK_LIMIT_S, argument=argument)
        self._expect(result, "the folder's files")

    async def _execute(
        self,
        job: int,
        parts: Mapping[str, str | bytes],
        timeout_s: float,
        max_output_bytes: int | None = None,
        argument: int = 0,
    ) -> ExecResult:
        payload = protocol.pack([(name, _encoded(part)) for name, part in parts.items()])
        limit = self.spec.max_output_bytes if max_output_bytes is None else max_output_bytes
        execution = Execution(payload, b"", timeout_s, limit, job, argument)
        self._dispatcher.submit_to(self._lease, execution)
        return await asyncio.wrap_future(execution.future)

    def _expect(self, result: ExecResult, what: str) -> None:
        if result.status is not ExecStatus.OK:
            reason = result.stderr.decode(errors="replace").strip() or str(result.status)
            raise WorkspaceError(f"{what}: {reason}")


def archive_of(files: Mapping[str, str | bytes], spec: SandboxSpec) -> bytes:
    """A tar archive of path -> contents; a text that opens with #! becomes executable.

    Raises ValueError for a path that is not relative, or for more than half of what fits.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            content = _encoded(data)
            info = tarfile.TarInfo(_checked(name))
            info.size = len(content)
            info.mode = 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(info, io.BytesIO(content))
    if 2 * sum(len(_encoded(data)) for data in files.values()) > spec.tmp_bytes:
        raise ValueError("files: they may fill half of tmp_bytes at most; raise tmp_bytes")
    if 4 * len(files) > spec.tmp_inodes:
        raise ValueError(f"files: {len(files)} are too many; raise tmp_inodes")
    return buffer.getvalue()


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    is_plain = path.parts and not path.is_absolute() and ".." not in path.parts
    if not is_plain or "\0" in name or max(len(p.encode()) for p in path.parts) > 255:
        raise ValueError(
            f"files: {name!r} must be a relative path without '..', each part at most 255 bytes"
        )
    return str(path)


def _encoded(data: Any) -> bytes:
    return data.encode(errors="surrogatepass") if isinstance(data, str) else bytes(data)
