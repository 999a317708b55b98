"""What the server saw becomes one status: the strongest fact wins."""

from __future__ import annotations

import signal

import pytest

from nanorl.sandbox import ExecStatus, protocol
from nanorl.sandbox.outcome import Outcome, judge

RUN_ID = bytes(range(16))
EXITED_0, EXITED_3 = 0, 3 << 8


def outcome(flags: int, wait_status: int, *, is_oom: bool = False) -> Outcome:
    packet = protocol.RESULT.pack(RUN_ID, flags, wait_status, 0.25, 0.5, 2048)
    return Outcome.unpack(packet, is_oom=is_oom)


@pytest.mark.parametrize(
    ("flags", "wait_status", "num_bytes", "status", "exit_code"),
    [
        (0, EXITED_0, 4, ExecStatus.OK, 0),
        (0, EXITED_3, 4, ExecStatus.ERROR, 3),
        (0, signal.SIGSEGV | 128, 4, ExecStatus.SIGNAL, -11),
        (0, signal.SIGXCPU, 4, ExecStatus.TIMEOUT, -24),
        (protocol.FLAG_TIMEOUT, protocol.NO_STATUS, 4, ExecStatus.TIMEOUT, -9),
        (protocol.FLAG_KILLED, protocol.NO_STATUS, 5, ExecStatus.OUTPUT_LIMIT, -9),
        (protocol.FLAG_TIMEOUT, protocol.NO_STATUS, 5, ExecStatus.OUTPUT_LIMIT, -9),
        (protocol.FLAG_MEMORY, protocol.NO_STATUS, 5, ExecStatus.OOM, -9),
        (0, EXITED_0, 5, ExecStatus.OUTPUT_LIMIT, 0),
    ],
)
def test_the_strongest_fact_is_the_status(
    flags: int, wait_status: int, num_bytes: int, status: ExecStatus, exit_code: int
) -> None:
    for stdout, stderr in ((b"x" * num_bytes, b""), (b"", b"x" * num_bytes)):
        result = judge(outcome(flags, wait_status), stdout, stderr, 4, "bwrap")
        assert (result.status, result.exit_code) == (status, exit_code)
        assert result.truncated == (num_bytes > 4)
        assert max(len(result.stdout), len(result.stderr)) == 4


def test_a_kill_by_the_cgroup_is_out_of_memory_whatever_the_program_returned() -> None:
    result = judge(outcome(0, EXITED_0, is_oom=True), b"", b"", 4, "bwrap")
    assert result.status is ExecStatus.OOM


def test_units_are_bytes_and_seconds() -> None:
    result = judge(outcome(0, EXITED_0), b"", b"", 4, "bwrap")
    assert (result.cpu_s, result.wall_s, result.maxrss_bytes) == (0.25, 0.5, 2 << 20)
