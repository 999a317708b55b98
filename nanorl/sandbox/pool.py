"""The pool of warm workers: the one entry to the sandbox for environments.

    with SandboxPool(SandboxSpec(timeout_s=1.0)) as pool:
        result = await pool.run("print(6 * 7)")

Starts only if a canary, really run, sees nothing but walls; otherwise `SandboxUnavailable`, with
the reason and what to do. There is no weaker mode. Every run is stateless; what is to be kept for
an episode, a folder or an interpreter, is a session's (session.py).
Next: dispatch.py (the thread that feeds the workers).
"""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any, ClassVar

from nanorl.sandbox import canary, memory
from nanorl.sandbox.base import (
    Capabilities,
    ExecResult,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
)
from nanorl.sandbox.bwrap import TIER
from nanorl.sandbox.dispatch import Dispatcher, Size
from nanorl.sandbox.interpreter import find_python
from nanorl.sandbox.machine import explain, find_bwrap
from nanorl.sandbox.protocol import FOLDERS
from nanorl.sandbox.request import program_execution

_CANARY_TIMEOUT_S = 10.0
# Most runs open no session, so what they need is loaded with the first one.
_ARCHIVE = "nanorl.sandbox.session:archive_of"
_SESSION = "nanorl.sandbox.session:Session"
_SESSIONS = "nanorl.sandbox.lease:SessionDispatcher"


class SandboxPool:
    """`num_workers` warm workers, each running one program at a time. Usable from any thread.

    With `max_workers`, as many more as are needed while programs wait; each of those ends when it
    has had nothing to do for `idle_s`. An idle worker that died or hangs is found and replaced.
    Raises SandboxUnavailable if this machine cannot isolate, ValueError for impossible settings.
    """

    # Walls to leave out, so that tests can show that they would notice. Never set it otherwise.
    ablate: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        spec: SandboxSpec,
        num_workers: int = 1,
        *,
        max_workers: int | None = None,
        idle_s: float = 30.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be at least 1; use one per CPU core")
        most = num_workers if max_workers is None else max_workers
        if most < num_workers:
            raise ValueError(
                f"max_workers={max_workers} must be at least num_workers={num_workers}; "
                "leave it out for a pool of fixed size"
            )
        if not idle_s > 0:
            raise ValueError(f"idle_s={idle_s} must be a positive number of seconds")
        self.spec = spec
        self._dispatcher = self._open(Size(num_workers, most, idle_s))
        self._finalizer = weakref.finalize(self, self._dispatcher.close)
        self._sessions: Any = None  # the dispatcher of sessions, once one was opened
        self._sessions_lock = threading.Lock()
        self._is_session_probed = False
        self.capabilities = Capabilities(
            tier=TIER,
            isolates=frozenset({"fs", "net", "pid", "mem", "kernel"}),
            memory=self._dispatcher.memory_tier,
            details={
                "bwrap": str(self._dispatcher.bwrap),
                "python": str(self._dispatcher.python.path),
            },
        )
        if self.capabilities.memory == "watcher":
            logging.getLogger(__name__).warning(
                "no memory cgroup can be created: the sandbox watches memory itself, at least "
                "every 50 ms, with at most 128 descriptors and 32 processes a program"
            )

    def _open(self, size: Size) -> Dispatcher:
        """The first bubblewrap in which the canary sees only walls."""
        if sys.platform != "linux":
            raise SandboxUnavailable(
                f"the sandbox needs Linux namespaces, this is {sys.platform}",
                "run on Linux, or in a Linux virtual machine",
            )
        if platform.machine() not in ("x86_64", "aarch64"):
            raise SandboxUnavailable(
                f"no system-call table for {platform.machine()}", "run on x86_64 or aarch64"
            )
        memory.sweep()
        python = find_python(self.spec)
        refusals = []
        for bwrap in find_bwrap(self.spec):
            dispatcher = Dispatcher(self.spec, bwrap, python, size, self.ablate)
            try:
                self._probe(dispatcher)
                return dispatcher
            except SandboxUnavailable as refusal:
                refusals.append(refusal)
                dispatcher.close()
            except BaseException:
                dispatcher.close()
                raise
        raise refusals[0]

    def _probe(self, dispatcher: Dispatcher) -> None:
        execution = program_execution(self.spec, canary.CODE, {}, timeout_s=_CANARY_TIMEOUT_S)
        dispatcher.submit(execution)
        try:
            result = execution.future.result()
        except SandboxFailure as failure:
            raise explain(dispatcher.start_error) from failure
        leak = canary.find_leak(result)
        if leak and not self.ablate:
            raise explain(leak)

    async def run(
        self,
        code: str,
        *,
        files: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Runs `code` as `program.py` in a fresh folder that also holds `files` (name to text).

        Cancelling the await kills the program. Raises SandboxFailure when the machinery, not the
        program, is at fault, and ValueError for file names that are not plain names.
        """
        return await asyncio.wrap_future(self._submit(code, files, stdin, timeout_s))

    def run_sync(
        self,
        code: str,
        *,
        files: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """`run` for callers without an event loop; blocks."""
        return self._submit(code, files, stdin, timeout_s).result()

    async def open_session(
        self, files: Mapping[str, str | bytes] | None = None, *, folder: str = "/work"
    ) -> Any:
        """A sandbox for one episode, whose folder holds `files` (relative path to contents): a
        `Session` (session.py).

        Waits while `max_sessions` are open. Close it: else it lives until it is collected. The
        first one is trusted, as the pool is, only after a canary in it saw nothing but walls.
        """
        if folder not in FOLDERS:
            raise ValueError(f"folder={folder!r} is none of {', '.join(FOLDERS)}")
        archive = resolve_name(_ARCHIVE)(files or {}, self.spec)
        session = resolve_name(_SESSION)(self._session_dispatcher(), archive, folder)
        try:
            if not self._is_session_probed:
                await self._probe_session(session)
            else:
                await session.lay()
        except BaseException:
            await session.close()
            raise
        return session

    async def _probe_session(self, session: Any) -> None:
        result = await session.run(canary.CODE, _CANARY_TIMEOUT_S)
        leak = canary.find_leak(result, files_in_tmp=[])
        if leak and not self.ablate:
            raise explain(leak)
        self._is_session_probed = True

    def _session_dispatcher(self) -> Any:
        with self._sessions_lock:
            if not self._finalizer.alive:
                raise SandboxFailure("the sandbox pool is closed")
            if self._sessions is None:
                of_runs = self._dispatcher
                size = Size(0, 0, math.inf)  # it makes and ends its workers with its sessions
                arguments = (self.spec, of_runs.bwrap, of_runs.python, size, self.ablate)
                self._sessions = resolve_name(_SESSIONS)(*arguments)
                weakref.finalize(self, self._sessions.close)
            return self._sessions

    def _submit(
        self,
        code: str,
        files: Mapping[str, str] | None,
        stdin: bytes,
        timeout_s: float | None,
    ) -> Future[ExecResult]:
        execution = program_execution(self.spec, code, files or {}, stdin, timeout_s)
        self._dispatcher.submit(execution)
        return execution.future

    def close(self) -> None:
        """Ends all workers, sessions and everything in them. May be called again."""
        if self._sessions is not None:
            self._sessions.close()
        self._finalizer()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
