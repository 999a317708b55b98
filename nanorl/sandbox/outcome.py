"""Turns the server's fixed struct into a result: the only place where a status is decided."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from nanorl.sandbox import protocol
from nanorl.sandbox.base import ExecResult, ExecStatus

_NOTE = b"the program broke its sandbox\n"
_FORGOT = "the interpreter was ended: its names are gone, a new one starts with the next call"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The kernel facts that the server saw, and nothing that the program said."""

    run_id: bytes
    flags: int
    wait_status: int  # of waitpid(2); NO_STATUS when it was killed from outside
    cpu_s: float
    wall_s: float
    maxrss_bytes: int
    is_oom: bool

    @classmethod
    def unpack(cls, packet: bytes, *, is_oom: bool) -> Outcome:
        run_id, flags, status, cpu_s, wall_s, maxrss = protocol.RESULT.unpack(packet)
        return cls(
            run_id=run_id,
            flags=flags,
            wait_status=status,
            cpu_s=cpu_s,
            wall_s=wall_s,
            maxrss_bytes=maxrss * 1024,
            is_oom=is_oom or bool(flags & protocol.FLAG_MEMORY),
        )

    @property
    def exit_code(self) -> int:
        if self.wait_status == protocol.NO_STATUS:
            return -int(signal.SIGKILL)
        return os.waitstatus_to_exitcode(self.wait_status)


def judge(
    outcome: Outcome, stdout: bytes, stderr: bytes, max_output_bytes: int, backend: str
) -> ExecResult:
    """The result of a run that the server reported; output beyond the limit is cut."""
    is_truncated = max(len(stdout), len(stderr)) > max_output_bytes
    return ExecResult(
        status=_status(outcome, is_truncated),
        exit_code=outcome.exit_code,
        stdout=stdout[:max_output_bytes],
        stderr=stderr[:max_output_bytes],
        truncated=is_truncated,
        cpu_s=outcome.cpu_s,
        wall_s=outcome.wall_s,
        maxrss_bytes=outcome.maxrss_bytes,
        backend=backend,
        notice=_FORGOT if outcome.flags & protocol.FLAG_FORGOT else "",
    )


def blame(is_oom: bool, backend: str) -> ExecResult:
    """The result of a program that broke its workers: its own failure, so nothing is gained."""
    return ExecResult(
        status=ExecStatus.OOM if is_oom else ExecStatus.ERROR,
        exit_code=-int(signal.SIGKILL),
        stdout=b"",
        stderr=_NOTE,
        truncated=False,
        cpu_s=0.0,
        wall_s=0.0,
        maxrss_bytes=0,
        backend=backend,
    )


def _status(outcome: Outcome, is_truncated: bool) -> ExecStatus:
    if outcome.is_oom:
        return ExecStatus.OOM
    if is_truncated:
        return ExecStatus.OUTPUT_LIMIT
    if outcome.flags & protocol.FLAG_TIMEOUT or outcome.exit_code == -signal.SIGXCPU:
        return ExecStatus.TIMEOUT
    if outcome.exit_code < 0:
        return ExecStatus.SIGNAL
    return ExecStatus.OK if outcome.exit_code == 0 else ExecStatus.ERROR
