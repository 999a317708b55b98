"""Memory and CPU time of all processes of an execution together, read from /proc by the server.

A cgroup counts as it gives; where there is none, this watch is the memory limit. `most_bytes` is
cheap and never too small. Where it is above the limit the processes are made to stand still and
`exact_bytes` counts what they share once. Both take in what the kernel keeps for a program outside
of any process: data queued in sockets, page tables, the records of its mappings.
Left out: pipes (the kernel bounds them for each user) and files in /tmp (`tmp_bytes` does).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
# Twice a vm_area_struct, its share of the tree and of reverse mapping: the kernel also spends a
# microsecond on each when the program is killed, which makes the wall limit late.
_MAPPING_BYTES = 1024


def cpu_s() -> float:
    """CPU seconds of every process in the worker, this one left out."""
    ticks = 0
    for pid in _other_pids():
        with suppress(FileNotFoundError, ProcessLookupError):
            # utime, stime and those of reaped children
            ticks += sum(map(int, _stat_fields(pid)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """CPU seconds of one process, its ended threads included; 0 if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux: MAKE_PROCESS_CPUCLOCK
    except OSError:
        return 0.0


def tree_bytes(pid: int) -> int:
    """Memory of every process below one, seen from outside of their namespace. Pages that are
    shared after a fork count once, where they may be read."""
    todo, total = [str(pid)], 0
    while todo:
        one = todo.pop()
        todo += _children(one)
        try:
            total += _sum_kib(one, "smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")
        except PermissionError:
            total += _sum_kib(one, "status", b"RssAnon:", b"RssShmem:")
        total += _sum_kib(one, "status", b"HugetlbPages:", b"VmPTE:")
    return total


def _children(pid: str) -> list[str]:
    """The process ids of the children of all threads of a process."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [
        child.decode() for one in threads for child in _read(pid, f"task/{one}/children").split()
    ]


def stop_all() -> set[str]:
    """Makes every other process stand still; returns those that did already, for `resume`."""
    standing = {pid for pid in _other_pids() if _is_stopped(pid)}
    halt_all()
    return standing


def halt_all() -> None:
    """`stop_all` for who will not ask which of them stood still."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)


def resume(standing: set[str]) -> None:
    """Lets all go on but these; any other may have been forked just before it was stopped."""
    for pid in set(_other_pids()) - standing:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGCONT)


def resume_all() -> None:
    """Lets every process go on, whoever made it stand still."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGCONT)


class MemoryWatch:
    """The sum over all processes but this one, which must be pid 1 of their namespace."""

    def __init__(self) -> None:
        with open("/proc/sys/vm/max_map_count") as file:
            self._max_mappings = int(file.read())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send_bytes = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        # A last message of up to half a buffer may go beyond the buffer's end.
        self._socket_bytes = send_bytes * 3 // 2

    def most_bytes(self) -> int:
        """Pages shared after a fork count for each process; every socket is taken to be full."""
        total = self._sockets_bytes()
        for pid in _other_pids():
            own = _sum_kib(pid, "status", b"RssAnon:", b"RssShmem:", b"HugetlbPages:", b"VmPTE:")
            mappings = min(_sum_kib(pid, "status", b"VmSize:") // _PAGE_BYTES, self._max_mappings)
            total += own + mappings * _MAPPING_BYTES
        return total

    def exact_bytes(self, limit: int, deadline: float) -> int:
        """The same with shared pages divided and mappings counted. Slow: stops above `limit`, and
        between two processes at the `deadline`, with what it has until then."""
        total = self._sockets_bytes()
        for pid in _other_pids():
            if total > limit or time.monotonic() >= deadline:
                break
            total += _sum_kib(pid, "status", b"HugetlbPages:", b"VmPTE:")
            try:
                total += _sum_kib(pid, "smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")
                total += _read(pid, "maps").count(b"\n") * _MAPPING_BYTES
            except PermissionError:  # init, which gave up being dumpable: the upper bound
                total += _sum_kib(pid, "status", b"RssAnon:", b"RssShmem:")
        return total

    def _sockets_bytes(self) -> int:
        """All of this network namespace, those queued in a listener's backlog included."""
        with open("/proc/net/sockstat", "rb") as file:  # sockets: used 12
            return int(file.readline().split()[2]) * self._socket_bytes


def _other_pids() -> list[str]:
    return [entry for entry in os.listdir("/proc") if entry.isdigit() and entry != "1"]


def _is_stopped(pid: str) -> bool:
    try:
        return _stat_fields(pid)[0] == b"T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat_fields(pid: str) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on; the name before it may hold spaces."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _read(pid: str, name: str) -> bytes:
    """The content of /proc/PID/name; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _sum_kib(pid: str, name: str, *fields: bytes) -> int:
    """The named kilobyte lines of a file, in bytes."""
    lines = _read(pid, name).split(b"\n")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(fields))
