"""Runs one agent program, and ends all that it started when it ends or nobody wants it any more.

    python guard.py CONTROL_FD          with a line of JSON on stdin, which then stays open

A process of its own between the run and the program. It ends the program, its children and those
that hid in sessions of their own as soon as its stdin closes: the run has closed it, or died,
however it died. In a sandbox it is pid 1, and the kernel ends the rest; there it also opens the
ports that stand for the endpoint and for the recording proxy, and hands the listening sockets out
through CONTROL_FD, so that a program without a network reaches these addresses and nothing else.

The line is an object: `argv`, `environment`, `folder`, `files` (name -> text, laid into the
folder), `answer_file`, `ports` (to be opened), `rlimits`, `watch_bytes` (0: nobody watches) and
`watch_folders` (in memory, and counted).
The report on CONTROL_FD is a line of JSON and the bytes of the answer file.
Stdlib only: it runs where nothing is installed. Left out: limits of time, which the run keeps.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_ANSWER_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
# The less is left the sooner it looks again: what is left lasts so long if two cores do nothing but
# fill memory.
_WATCH_MS, _SHORTEST_WATCH_MS, _FASTEST_BYTES_PER_MS = 100, 5, 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    # Its memory and its descriptors are not the program's affair, which could rewrite them.
    _prctl(_PR_SET_DUMPABLE, 0, "hide from the program")
    if os.getpid() != 1:  # to which orphans come anyway
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, "become the parent of orphans")
    # Beside the closing of stdin, which some child of the run may hold open.
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), "end with the run")
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's, which then closes stdin
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the run ended meanwhile
    wanted: dict[str, Any] = json.loads(line)
    _lay_files(Path(wanted["folder"]), wanted["files"])
    if wanted["ports"]:
        listeners = [
            socket.create_server(("127.0.0.1", one), backlog=64) for one in wanted["ports"]
        ]
        socket.send_fds(control, [b"L"], [one.fileno() for one in listeners])
        for listener in listeners:
            listener.close()
    pid = _start(wanted)
    report = _watch(pid, woken, wanted["watch_bytes"], wanted["watch_folders"])
    _end_all(pid)
    answer = _answer(Path(wanted["folder"], wanted["answer_file"]))
    report["has_answer"] = answer is not None
    control.sendall(json.dumps(report).encode() + b"\n" + (answer or b""))


def _prctl(option: int, value: int, what: str) -> None:
    """A guard that could not is none: OSError, and nothing is started."""
    if _libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the guard of an agent program cannot {what}: {os.strerror(number)}")


def _lay_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogatepass")


def _start(wanted: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_DUMPABLE, 1, "show the program to itself")  # else /proc/self is not its own
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), "end the program with itself")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(wanted["folder"])
        for name, value in wanted["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        with suppress(OSError):  # memory that runs out is the program's, not the guard's
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.execvpe(wanted["argv"][0], wanted["argv"], wanted["environment"])
    except OSError as error:
        os.write(2, f"{wanted['argv'][0]} does not start: {error}\n".encode())
    finally:
        os._exit(127)


def _watch(pid: int, woken: int, watch_bytes: int, folders: list[str]) -> dict[str, Any]:
    """Wait until the program has ended, its memory is too much, or stdin is closed."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(woken, select.POLLIN)
    memory, wait_ms = None, _WATCH_MS
    if watch_bytes:
        from nanorl.sandbox.usage import MemoryWatch  # here: few agents have a memory limit

        memory = MemoryWatch()
    while True:
        ready = [place for place, _ in poll.poll(wait_ms if memory else None)]
        if woken in ready and int(signal.SIGTERM) in os.read(woken, 512):
            return {"exit_code": None, "reason": "ended"}
        while (one := _next_dead()) is not None:
            if one.si_pid == pid:  # not reaped yet: its number stays its group's
                is_exit = one.si_code == os.CLD_EXITED
                return {"exit_code": one.si_status if is_exit else -one.si_status, "reason": ""}
            os.waitpid(one.si_pid, 0)  # an orphan's
        if 0 in ready:
            return {"exit_code": None, "reason": "ended"}
        if memory:
            left = watch_bytes - memory.most_bytes() - _bytes_in(folders)
            if left < 0:
                return {"exit_code": None, "reason": "memory"}
            wait_ms = max(_SHORTEST_WATCH_MS, min(_WATCH_MS, left // _FASTEST_BYTES_PER_MS))


def _bytes_in(folders: list[str]) -> int:
    """Count the bytes in folders that are kept in memory."""
    stats = [os.statvfs(folder) for folder in folders]
    return sum((one.f_blocks - one.f_bfree) * one.f_frsize for one in stats)


def _next_dead() -> os.waitid_result | None:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _end_all(pid: int) -> None:
    """Kill the program's group, at once so that it cannot outrun it by forking, then whatever is
    left: orphans come to this process."""
    if os.getpid() == 1:
        return  # the kernel does
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while True:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _children() -> list[int]:
    own, found = os.getpid(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == own:
                    found.append(int(entry))
    return found


def _answer(path: Path) -> bytes | None:
    """Read what the program left as its answer: a plain file of its own, not a link or a pipe. None
    where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            with open(descriptor, "rb") as file:
                return file.read(MAX_ANSWER_BYTES)
    except OSError:  # not to be opened, or not to be read
        return None
    return None


if __name__ == "__main__":
    main()
