"""Runs the programs of hostile_programs.py and lists what the host saw that it must not see.

Used by the tests in process (as whoever runs them) and as a script under another user:
`python sandbox_driver.py` prints one line for each violation and ends with their number.
`--sandbox NAME` does so in another back end, `--json FILE` writes what it held and what it did not.
"""

# ruff: noqa: E501 - programs keep their own line lengths

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hostile_programs import ATTACK_MODULE, BENIGN, CARRIERS, HOSTILE, Program

from nanorl.sandbox import ExecResult, SandboxSpec
from nanorl.sandbox.backends import BACKENDS, open_sandbox
from nanorl.sandbox.backends.backend_pool import BoxPool
from nanorl.sandbox.base import WorkspaceSandbox

SECRET = "host-secret-5b1f"
SPEC = SandboxSpec(timeout_s=60.0, memory_bytes=192 << 20)
# What the next program sees of the world. Nothing that a program does may change a byte of it.
PROBE = r"""
import builtins, gc, hashlib, json, math, os, random, sys, threading
print(json.dumps([
    os.getpid(), os.getppid(), os.getuid(), os.getcwd(), sorted(os.listdir("/tmp")),
    sorted(os.listdir("/dev/shm")), sorted(n for n in os.listdir("/proc") if n.isdigit()),
    sorted(os.listdir("/proc/self/fd"), key=int)[:3], len(os.listdir("/proc/self/fd")),
    json.__file__, random.random(), hash("x"), json.loads("[1]"), math.pi,
    hasattr(builtins, "planted"), sorted(os.environ.items()), os.umask(0o22),
    threading.active_count(), gc.isenabled(), os.nice(0), len(open("/proc/sysvipc/shm").readlines()),
    len(open("/proc/sysvipc/sem").readlines()), len(open("/proc/sysvipc/msg").readlines()),
    len(os.sched_getaffinity(0)), os.uname().nodename, sorted(os.listdir("/")),
    len(open("/proc/self/mountinfo").readlines()), sorted(sys.modules) == sorted(set(sys.modules)),
]))
"""
# The same where the numbers of processes, the paths and the system calls are other ones.
BOX_PROBE = r"""
import builtins, json, os, random, sys, threading
def seen(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error).__name__
def listed(path):  # where the machine's own folder is seen: what programs left there
    own = [each.name for each in os.scandir(path) if path == "." or each.stat(follow_symlinks=False).st_uid]
    return sorted(name for name in own if not name.startswith("nanorl-"))
print(json.dumps([
    listed("."), seen(listed, "/tmp"), seen(listed, "/dev/shm"), seen(listed, "/work"),
    json.__file__, random.random(), hash("x"), json.loads("[1]"), hasattr(builtins, "planted"),
    sorted(os.environ.items()), threading.active_count(), seen(lambda: os.nice(0)),
    seen(lambda: len(os.sched_getaffinity(0))), seen(lambda: len(open("/proc/sysvipc/shm").readlines())),
]))
"""
_LEFT = "\0hostile-left-behind"
ANSWERS = ("got through", "ended otherwise", "held")


def become_subreaper() -> None:
    """Orphans of this process tree come to this process, so that none can hide from `children`."""
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0, "PR_SET_CHILD_SUBREAPER"


def children(pid: int) -> list[int]:
    """All descendants of a process, from the host's process table; zombies left out, and the worker
    pools of other tests, which run under multiprocessing, and Ray, which other tests start."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                command = Path("/proc", entry, "cmdline").read_bytes()
                is_other = b"multiprocessing." in command or b"/ray/" in command
                if fields[0] != "Z" and not is_other:
                    parents.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        todo += (new := parents.get(todo.pop(), []))
        found += new
    return found


class Host:
    """Things outside that programs must not reach: sockets that listen, a file, a variable."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="sandbox-test-")
        os.chmod(self.folder.name, 0o755)
        secret = Path(self.folder.name, "secret")
        secret.write_text(SECRET)
        secret.chmod(0o644)
        os.environ["HOST_SECRET"] = SECRET
        path, abstract = f"{self.folder.name}/socket", Path(self.folder.name).name
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix, self.abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self.unix.bind(path)
        os.chmod(path, 0o777)
        self.abstract.bind("\0" + abstract)
        for listener in (self.unix, self.abstract):
            listener.listen()
        for each in (self.tcp, self.udp, self.unix, self.abstract):
            each.setblocking(False)
        self.names = {
            "@TCP@": str(self.tcp.getsockname()[1]),
            "@UDP@": str(self.udp.getsockname()[1]),
            "@UNIX@": path,
            "@ABSTRACT@": abstract,
            "@SECRET_FILE@": str(secret),
            "@HOST_PID@": str(os.getpid()),
        }

    def fill_in(self, code: str) -> str:
        for name, value in self.names.items():
            code = code.replace(name, value)
        return code

    def contacts(self) -> list[str]:
        """Who got through."""
        reached = []
        for name in ("tcp", "unix", "abstract"):
            with contextlib.suppress(BlockingIOError):
                getattr(self, name).accept()
                reached.append(name)
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(1)
            reached.append("udp")
        with socket.socket(socket.AF_UNIX) as caller, contextlib.suppress(ConnectionRefusedError):
            caller.connect(_LEFT)
            reached.append("a listener that was left")
        return reached

    def close(self) -> None:
        os.environ.pop("HOST_SECRET", None)
        for each in (self.tcp, self.udp, self.unix, self.abstract):
            each.close()
        self.folder.cleanup()


class Examiner:
    """One pool, one host, and the probe's answer before any hostile program ran."""

    most_at_rest = 5
    """Bubblewrap, the process that it started, the server; the next program and its pid 1, which it
    has none of without namespaces. Those of boxes, which are started ahead, are not counted so."""
    most_that_stay = 3
    """Of these, the ones that are there for program after program."""

    def __init__(self, pool: WorkspaceSandbox) -> None:
        self.pool = pool
        self.is_box = isinstance(pool, BoxPool)
        self.num_before = len(_of_programs(pool.capabilities.tier)) if self.is_box else 0
        self.probe = BOX_PROBE if self.is_box else PROBE
        self.host = Host()
        self.clean = pool.run_sync(self.probe, timeout_s=10.0)
        assert self.clean.status == "ok", self.clean
        self.num_at_rest = self.most_at_rest - ("namespaces" in getattr(pool, "ablate", ()))
        assert self.is_box or len(self.settled()) == self.num_at_rest, self.alive()

    def run(self, program: Program) -> ExecResult:
        files = {"attack.py": ATTACK_MODULE}
        limit_s = 0.4 if program.statuses == ("timeout",) else None
        if len(program.statuses) > 1 and "timeout" in program.statuses:
            limit_s = 0.8
        code = self.host.fill_in(program.code)
        return self.pool.run_sync(code, files=files, timeout_s=limit_s)

    def violations(self, program: Program) -> list[str]:
        """Everything wrong that the host can see of one execution; empty when it was held."""
        result = self.run(program)
        found = outcome_violations(program, result)
        before = [] if self.is_box else self.settled()
        found += self.survivors() if self.is_box else self.strangers(before)
        if reached := self.host.contacts():
            found.append(f"reached the host's sockets: {reached}")
        after = self.pool.run_sync(self.probe, timeout_s=10.0)
        if not found and len(stayed := self.stayed(before)) > self.most_that_stay:
            found.append(f"{len(stayed)} processes are alive after the next program as before it")
        if after.stdout != self.clean.stdout:
            found.append(f"the next program sees {after}, not {self.clean.stdout!r}")
            if self.is_box and after.status == "ok":
                self.clean = after  # what one program left is that program's doing alone
        return [f"{program.name}: {line}" for line in found]

    def strangers(self, alive: list[int]) -> list[str]:
        if len(alive) <= self.num_at_rest:
            return []
        return [f"{len(alive)} processes are alive in the worker, {self.num_at_rest} belong there"]

    def survivors(self) -> list[str]:
        """What is alive of a box that is gone: more than the servers of the boxes that wait."""
        most = self.num_before + 1 + self.pool.spec.warm_sessions
        for _ in range(100):
            if len(found := _of_programs(self.pool.capabilities.tier)) <= most:
                return []
            time.sleep(0.05)
        return [f"{len(found)} processes are alive: {found[:5]}"]

    def carried(self, program: Program) -> list[str]:
        """What differs when one program runs three times, each after all that it did before."""
        first, *others = (self.run(program) for _ in range(3))
        found = outcome_violations(program, first)
        if not first.stdout or any(other.stdout != first.stdout for other in others):
            seen = [run.stdout.decode() for run in (first, *others)]
            found.append(f"a program sees its predecessors: {seen}")
        return [f"{program.name}: {line}" for line in found]

    def settled(self) -> list[int]:
        """Processes of the pool, once what has just ended is gone and the next child is there."""
        for _ in range(500):
            if len(alive := self.alive()) == self.num_at_rest:
                break
            time.sleep(0.01)
        return alive

    def stayed(self, before: list[int]) -> set[int]:
        """What was there before the last program and still is. For a moment, until the child of the
        next one is there, a pool may have the right number of processes, one of them a stranger."""
        for _ in range(500):
            if len(both := set(before).intersection(self.alive())) <= self.most_that_stay:
                break
            time.sleep(0.01)
        return both

    def alive(self) -> list[int]:
        """Whatever belongs to the pool."""
        return children(os.getpid())


def outcome_violations(program: Program, result: ExecResult) -> list[str]:
    """What the result itself says against the program's expectation."""
    found = []
    if result.status.value not in program.statuses:
        found.append(f"status {result.status}, expected one of {program.statuses}: {result}")
    for stream in (result.stdout, result.stderr):
        if b"ESCAPED" in _without_sources(stream) and b"print(" not in stream:
            found.append(f"escaped: {stream[:500]!r}")
        if SECRET.encode() in stream:
            found.append("the host's secret came out")
        if len(stream) > SPEC.max_output_bytes:
            found.append(f"{len(stream)} bytes of output")
    if program.stdout is not None and result.stdout != program.stdout:
        found.append(f"stdout {result.stdout[:200]!r}, expected {program.stdout[:200]!r}")
    if program.stderr_part not in result.stderr:
        found.append(f"stderr {result.stderr!r} lacks {program.stderr_part!r}")
    if program.exit_code is not None and result.exit_code != program.exit_code:
        found.append(f"exit code {result.exit_code}, expected {program.exit_code}")
    return found


def _without_sources(stream: bytes) -> bytes:
    """Without the lines of a program that a traceback shows."""
    return b"\n".join(line for line in stream.splitlines() if not line.startswith(b"    "))


def _of_programs(tier: str) -> list[str]:
    """Processes in the memory groups of our boxes, or of the user that containers have."""
    found = []
    own = f"nanorl-sandbox-{os.getpid()}-"
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit():
                continue
            is_in_container = tier == "oci" and entry.stat().st_uid == 1000
            if is_in_container or own in (entry / "cgroup").read_text():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")[:60]
                found += [f"{entry.name} {command!r}"] * (state not in "ZX")
    return found


@contextlib.contextmanager
def examination(spec: SandboxSpec = SPEC, sandbox: str = "bwrap") -> Iterator[Examiner]:
    pool = open_sandbox(sandbox, spec, allow_unsafe=True)
    try:
        examiner = Examiner(pool)
        try:
            yield examiner
        finally:
            examiner.host.close()
    finally:
        pool.close()


def applicable(programs: tuple[Program, ...]) -> list[Program]:
    return [p for p in programs if p.machine in ("", platform.machine())]


def is_breach(violation: str, kind: str) -> bool:
    """Whether the program got something; else it only ended otherwise than it would in bwrap. One
    that could fill memory or a disk until its time was over did get something."""
    got = ("escaped: ", "secret came out", "reached the host", "are alive", "next program sees")
    is_filling = kind in ("memory", "files") and "status timeout" in violation
    return is_filling or any(words in violation for words in got)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-v", action="store_true")
    parser.add_argument("--sandbox", default="bwrap", choices=("bwrap", *BACKENDS))
    parser.add_argument("--image")
    parser.add_argument("--engine", choices=("podman", "docker"), help="of oci")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--every", type=int, default=1, help="of so many programs only the first")
    arguments = parser.parse_args()
    become_subreaper()
    found, rows = [], []
    limit_s = 30.0 if arguments.sandbox == "microvm" else 5.0  # it may be emulated
    spec = replace(SPEC, image=arguments.image, engine=arguments.engine, timeout_s=limit_s)
    with examination(spec, arguments.sandbox) as examiner:
        for program in [*applicable(HOSTILE), *applicable(BENIGN)][:: arguments.every]:
            start = time.monotonic()
            seen = examiner.violations(program)
            found += seen
            kind = program.kind if program in HOSTILE else "benign"
            answers = [
                "got through" if is_breach(line, kind) else "ended otherwise" for line in seen
            ]
            rows.append([program.name, kind, min(answers, key=ANSWERS.index, default="held")])
            if arguments.v:
                print(f"{time.monotonic() - start:.2f} {program.name} {rows[-1][2]}", flush=True)
        if not examiner.is_box:
            for program in applicable(CARRIERS):
                found += examiner.carried(program)
        capabilities = examiner.pool.capabilities
    if alive := children(os.getpid()):
        found.append(f"alive after close: {alive}")
    print("\n".join(found))
    print(f"uid {os.geteuid()} violations {len(found)}")
    if arguments.json:
        report = {
            "sandbox": " ".join(filter(None, (arguments.sandbox, arguments.engine))),
            "details": capabilities.details,
            "memory": capabilities.memory,
            "uid": os.geteuid(),
            "machine": f"{platform.machine()}, Linux {platform.release().split('-')[0]}",
            "programs": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1))
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
