"""Runs model-written Python behind real walls: no network, no host files, limits on everything.

    with SandboxPool(SandboxSpec(timeout_s=1.0)) as pool:
        result = pool.run_sync("print(6 * 7)")

On the host, in reading order:
    base.py          the contract: `SandboxSpec` in, `ExecResult` out, and two errors
    choice.py        `--sandbox auto`: which back end is taken on this machine
    pool.py          `SandboxPool`, the one entry; it starts only if a canary sees nothing but walls
    opening.py       finds bubblewrap and tries its walls, once for a pool
    canary.py        a program that tries to get out
    dispatch.py      the thread that feeds the workers and reads their output
    execution.py     one program on its way through a worker
    outcome.py       decides how the program ended, from kernel facts
    bwrap.py         the walls: bubblewrap's arguments, and the worker's process
    launcher.py      the few lines between the host and bubblewrap
    host_machine.py       finds bubblewrap, and explains a refusal
    interpreter.py   finds the Python that runs inside
    memory_limits.py        a memory cgroup for each worker, where one can be made
    seccomp.py       the system-call filter
    session.py       `Session`: a folder and an interpreter, kept for an episode
    lease.py         the workers of sessions
    grading.py       verdicts about a session's folder, and what each of them can promise
Inside the walls, standard library only:
    worker.py        the warm fork server; protocol.py is what it exchanges with the host
    confine.py       namespaces, mounts and the giving up of rights
    program.py       turns a confined process into the program
    keeper.py        the server of a session, and jobs.py, what it is asked for
    usage.py         the memory limit where there is no cgroup
    stream_frames.py messages over a stream of bytes, where packets do not do
"""

from nanorl.sandbox.base import (
    Capabilities,
    ExecResult,
    ExecStatus,
    Sandbox,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
)
from nanorl.sandbox.pool import SandboxPool

__all__ = [
    "Capabilities",
    "ExecResult",
    "ExecStatus",
    "Sandbox",
    "SandboxFailure",
    "SandboxPool",
    "SandboxSpec",
    "SandboxUnavailable",
]
