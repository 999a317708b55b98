"""`BoxPool`: a sandbox over boxes, with the methods of `SandboxPool`.

Every program gets a box that was started ahead and is thrown away after it; every session has one
box of its own. A program whose box breaks runs once more in a fresh one; if that breaks, too, it is
the program's doing. Opens only after a canary, really run, has seen what the back end promises.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from nanorl.sandbox import canary, protocol
from nanorl.sandbox.backends.box import BoxBrokenError, SandboxBox
from nanorl.sandbox.backends.supply import BoxBackend, BoxSupply
from nanorl.sandbox.base import (
    UNSAFE,
    Capabilities,
    ExecResult,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
)
from nanorl.sandbox.dispatch import fail, succeed
from nanorl.sandbox.execution import Execution
from nanorl.sandbox.lease import SessionLease
from nanorl.sandbox.outcome import blame
from nanorl.sandbox.request import program_execution
from nanorl.sandbox.session import Session, archive_of

_CANARY_LIMIT_S = 30.0
_NUM_GRADERS = 4


class BoxLease(SessionLease):
    """A session's right to a box; its executions run one after the other in a thread."""

    def __init__(self, is_grader: bool) -> None:
        super().__init__(is_grader)
        self.box: SandboxBox | None = None
        self.is_seated = False
        self.thread = ThreadPoolExecutor(1, "sandbox-session")


class BoxRunner:
    """Runs executions in boxes, single ones and those of sessions."""

    def __init__(self, backend: BoxBackend, spec: SandboxSpec, num_workers: int) -> None:
        self.backend, self.spec = backend, spec
        self.supply = BoxSupply(backend, num_workers + spec.warm_sessions)
        self._threads = ThreadPoolExecutor(num_workers, "sandbox-run")
        self._seats = threading.BoundedSemaphore(spec.max_sessions)
        self._graders_seats = threading.BoundedSemaphore(_NUM_GRADERS)
        self._leases: set[BoxLease] = set()
        self._is_closing = False
        self._owner = os.getpid()

    def submit(self, execution: Execution) -> None:
        """Runs a stateless execution as soon as a worker is free."""
        self._check_open()
        self._threads.submit(self._run, execution)

    def _check_open(self) -> None:
        if self._is_closing or os.getpid() != self._owner:
            raise SandboxFailure("the sandbox pool is closed, or belongs to the parent process")

    def _run(self, execution: Execution) -> None:
        try:
            for _ in range(2):
                if execution.future.cancelled():
                    return
                box = self.supply.take()
                try:
                    result = box.perform(execution, self.backend.tier)
                except BoxBrokenError:
                    is_oom = box.launch.num_oom_kills() > 0
                    self.supply.discard(box)
                    self._check_open()
                    continue
                self.supply.give_back(box)
                succeed(execution, result)
                return
            succeed(execution, blame(is_oom, self.backend.tier))
        except (SandboxFailure, OSError, RuntimeError) as error:
            fail(execution, SandboxFailure(str(error)))

    # Sessions: what `Session` asks of whoever holds its worker.

    def lease(self, is_grader: bool = False) -> BoxLease:
        self._check_open()
        lease = BoxLease(is_grader)
        self._leases.add(lease)
        return lease

    def submit_to(self, lease: SessionLease, execution: Execution) -> None:
        self._check_open()
        assert isinstance(lease, BoxLease), "all are made in `lease`"
        if reason := self.backend.refused_jobs.get(execution.job):
            tier = self.backend.tier
            raise SandboxUnavailable(f"--sandbox {tier}: {reason}", "use --sandbox bwrap or oci")
        if lease.is_returned:
            raise SandboxFailure("the session is closed")
        lease.thread.submit(self._run_in, lease, execution)

    def give_back(self, lease: SessionLease) -> Future[None]:
        """Ends the session's box; the future is done when nothing of it is left."""
        assert isinstance(lease, BoxLease), "all are made in `lease`"
        if not lease.is_returned:
            lease.is_returned = True
            if lease.box is not None:
                lease.box.kill()
            lease.thread.submit(self._leave, lease)
            lease.thread.shutdown(wait=False)
        return lease.returned

    def _run_in(self, lease: BoxLease, execution: Execution) -> None:
        try:
            self._sit_down(lease)
            if execution.job == protocol.UNPACK and lease.box is not None and lease.box.num_runs:
                self.supply.end(lease.box)  # the folder begins anew, so the box does
                lease.box = None
            if lease.box is None:
                lease.box = self.supply.take()
            succeed(execution, lease.box.perform(execution, self.backend.tier))
        except BoxBrokenError:
            assert lease.box is not None, "it broke"
            if lease.is_returned or self._is_closing:
                fail(execution, SandboxFailure("the session was closed"))
                return
            is_oom = lease.box.launch.num_oom_kills() > 0
            self.supply.end(lease.box)
            lease.box = None
            lease.num_breaks += 1
            succeed(execution, blame(is_oom, self.backend.tier))
        except (SandboxFailure, OSError, RuntimeError) as error:
            lease.error = str(error)
            fail(execution, SandboxFailure(str(error)))

    def _sit_down(self, lease: BoxLease) -> None:
        """Waits while too many sessions are open."""
        seats = self._graders_seats if lease.is_grader else self._seats
        while not lease.is_seated:
            if lease.is_returned or self._is_closing:
                raise SandboxFailure("the session was closed")
            lease.is_seated = seats.acquire(timeout=0.1)

    def _leave(self, lease: BoxLease) -> None:
        if lease.box is not None:
            self.supply.end(lease.box)
            lease.box = None
        if lease.is_seated:
            (self._graders_seats if lease.is_grader else self._seats).release()
        self._leases.discard(lease)
        lease.end()

    def close(self) -> None:
        """Ends all boxes and fails what was waiting. May be called again."""
        if self._is_closing or os.getpid() != self._owner:
            return
        self._is_closing = True
        for lease in list(self._leases):
            self.give_back(lease)
        self.supply.close()
        self._threads.shutdown(wait=True)


class BoxPool:
    """`num_workers` programs at a time, each in a box of its own. Usable from any thread.

    Raises SandboxUnavailable if the back end does not run here or does not keep what it promises.
    """

    def __init__(self, backend: BoxBackend, spec: SandboxSpec, num_workers: int = 1) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be at least 1; use one per CPU core")
        self.spec = spec
        self._runner = BoxRunner(backend, spec, num_workers)
        self._finalizer = weakref.finalize(self, self._runner.close)
        try:
            probe = self._probe(backend)
        except BaseException:  # Ctrl-C too: the boxes run already
            self.close()
            raise
        self.capabilities = Capabilities(
            tier=backend.tier,
            isolates=probe.isolates,
            memory=backend.memory,
            details=backend.details,
        )
        if backend.tier in UNSAFE:
            logging.getLogger(__name__).warning(
                "the sandbox is %s: model-written programs are NOT isolated from this machine "
                "(%s); only for programs that you would run yourself",
                *(backend.tier, UNSAFE[backend.tier]),
            )

    def _probe(self, backend: BoxBackend) -> ExecResult:
        with tempfile.TemporaryDirectory(prefix="nanorl-canary-") as folder:
            os.chmod(folder, 0o755)
            secret = Path(folder, "secret")
            secret.write_text("a file of the host")
            code = backend.question.replace("@SECRET@", str(secret))
            try:
                result = self.run_sync(code, timeout_s=_CANARY_LIMIT_S)
            except SandboxFailure as failure:
                raise backend.explain(str(failure)) from failure
        if leak := canary.find_leak(result, promises=backend.promises):
            raise backend.explain(leak)
        return result

    async def run(
        self,
        code: str,
        *,
        files: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """As `SandboxPool.run`."""
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
    ) -> Session:
        """As `SandboxPool.open_session`."""
        if folder not in protocol.FOLDERS:
            raise ValueError(f"folder={folder!r} is none of {', '.join(protocol.FOLDERS)}")
        session = Session(self._runner, archive_of(files or {}, self.spec), folder)
        try:
            await session.lay()
        except BaseException:  # a cancellation too: the box is taken
            await session.close()
            raise
        return session

    def _submit(
        self, code: str, files: Mapping[str, str] | None, stdin: bytes, timeout_s: float | None
    ) -> Future[ExecResult]:
        execution = program_execution(self.spec, code, files or {}, stdin, timeout_s)
        self._runner.submit(execution)
        return execution.future

    def close(self) -> None:
        """Ends all boxes, sessions and everything in them. May be called again."""
        self._finalizer()

    def __enter__(self) -> BoxPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
