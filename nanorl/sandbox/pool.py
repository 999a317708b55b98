"""The pool of warm workers: the one entry to the sandbox for environments.

    with SandboxPool(SandboxSpec(timeout_s=1.0)) as pool:
        result = await pool.run("print(6 * 7)")

Starts only if a canary, really run, sees nothing but walls; otherwise `SandboxUnavailable`, with
the reason and what to do. There is no weaker mode. Every run is stateless; what is to be kept for
an episode, a folder or an interpreter, is a session's (session.py).
Next: dispatch.py (the thread that feeds the workers), opening.py (how the walls are tried).
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any, ClassVar

from nanorl.sandbox.base import Capabilities, ExecResult, SandboxFailure, SandboxSpec
from nanorl.sandbox.dispatch import Dispatcher, Size
from nanorl.sandbox.protocol import FOLDERS
from nanorl.sandbox.request import program_execution

_OPENING = "nanorl.sandbox.opening:open_pool"
"""Finds bubblewrap and tries the walls: once, so it is no part of running a program."""
# Most runs open no session, so what they need is loaded with the first one.
_ARCHIVE = "nanorl.sandbox.session:archive_of"
_SESSION = "nanorl.sandbox.session:Session"


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
        opened = resolve_name(_OPENING)(spec, Size(num_workers, most, idle_s), self.ablate)
        self._dispatcher: Dispatcher = opened.dispatcher
        self._opened = opened
        self._finalizer = weakref.finalize(self, self._dispatcher.close)
        self._sessions: Any = None  # the dispatcher of sessions, once one was opened
        self._sessions_lock = threading.Lock()
        self._is_session_probed = False
        self.capabilities: Capabilities = opened.capabilities

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
        # The dispatcher's thread settles the future; this loop goes on decoding until then.
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
                await self._opened.probe_session(session)
                self._is_session_probed = True
            else:
                await session.lay()
        except BaseException:  # a cancellation too: the worker is taken
            await session.close()
            raise
        return session

    def _session_dispatcher(self) -> Any:
        with self._sessions_lock:
            if not self._finalizer.alive:
                raise SandboxFailure("the sandbox pool is closed")
            if self._sessions is None:
                self._sessions = self._opened.open_sessions()
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
