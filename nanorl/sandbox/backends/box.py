"""A box: one started back end, seen from the host as a process that speaks frames.

Runs one execution at a time. What the guest says is data: the host watches the clock, counts the
bytes and ends the box from outside where the guest does not keep the limits, so a guest that a
program has taken over gains a dead box. `Launch` is all that back ends differ in.
Next: guest.py (inside), supply.py (boxes started ahead).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorl.sandbox import protocol
from nanorl.sandbox import stream_frames as frames
from nanorl.sandbox.backends import worker_frames
from nanorl.sandbox.backends.worker_frames import JobOrder
from nanorl.sandbox.base import ExecResult, SandboxSpec
from nanorl.sandbox.bwrap import last_message
from nanorl.sandbox.execution import Execution
from nanorl.sandbox.outcome import Outcome, judge

# In the order in which they import one another.
_MODULES = (
    *("protocol", "confine", "first", "program", "usage", "worker", "stream_frames", "plain"),
    *("tests_side", "program_side", "jobs"),
    *("backends.worker_frames", "backends.rights", "backends.guest"),
)
_BOOT = """
import json, os, struct, sys, types
def take(n):
    parts = []
    while n:
        part = os.read(0, min(n, 1 << 16))
        if not part:
            os._exit(0)
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
config = json.loads(take(struct.unpack("<BI", take(5))[1]))
for name in ("nanorl", "nanorl.sandbox", "nanorl.sandbox.backends"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, text in config.pop("modules"):
    module = sys.modules["nanorl.sandbox." + name] = types.ModuleType("nanorl.sandbox." + name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main(config)
"""
PYTHON_FLAGS = ("-s", "-S", "-B", "-u", "-c", _BOOT)
"""What an interpreter inside is started with: it takes its own sources from standard input."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_TICK_S = 0.05
_BACKSTOP_S = 10.0  # the guest's own limit comes first; an emulated machine is slow to answer
_SLACK_BYTES = 1 << 17
_MOST_LATE = 1 << 14  # frames: more than a pipe holds of a program's output were not there in time


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The recipe for one box: the command that starts it, and the ways to end it from outside."""

    argv: Sequence[str]
    config: Mapping[str, Any]
    """For guest.py: `root`, `user`, `rlimits`, `filter`, `landlock`, `watch_bytes`."""
    end: Callable[[bool], None] = lambda is_gone: None
    """Ends what the process that was started leaves, and clears up. Called once it is dead; True
    if it ended by itself."""
    first: bytes = b""
    """What is sent first, instead of the configuration: the guest has it already."""
    leave_s: float = 0.5
    """So long may it take to end by itself when the host closes the pipes."""
    kill: Callable[[], None] = lambda: None
    """Ends it in a hurry, beside killing that process; must not wait."""
    num_oom_kills: Callable[[], int] = lambda: 0
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    """Where it is started; None: where this process is."""


class BoxBrokenError(Exception):
    """The box ended, or said what cannot be, while it ran a program."""


class SandboxBox:
    """The process of one box and the pipes to its guest."""

    def __init__(self, launch: Launch) -> None:
        """Starts it and returns at once; `wait_until_ready` sees whether it comes up."""
        self.launch = launch
        self.num_runs = 0
        self._closing = threading.Lock()
        self._is_closed = self._is_killed = False
        self._messages = os.memfd_create("sandbox-messages", os.MFD_CLOEXEC)
        self._process = subprocess.Popen(
            list(launch.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            bufsize=0,
            env=dict(launch.environment),
            cwd=launch.folder,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._reader = frames.FrameReader(self._process.stdout.fileno(), worker_frames.MOST_BYTES)
        first = launch.first or frames.frame(worker_frames.CONFIG, _config_bytes(launch.config))
        self._outgoing = bytearray(first)

    def wait_until_ready(self, limit_s: float) -> None:
        """Waits for the guest's word. BoxBrokenError if it does not come."""
        deadline, is_late = time.monotonic() + limit_s, False
        while (found := self._next_frame(deadline)) is None:
            if is_late:
                raise BoxBrokenError(f"not ready after {limit_s:.0f} s. {self.messages()}")
            is_late = time.monotonic() >= deadline
        if found != (worker_frames.HELLO, b""):
            raise BoxBrokenError(f"its first word was {found[1][:80]!r}")

    @property
    def is_well(self) -> bool:
        """Say whether a box that waits is still there and has said nothing unasked."""
        if self._is_closed or self._process.poll() is not None or not self._reader.is_empty:
            return False
        return not select.select([self._reader.descriptor], [], [], 0)[0]

    def perform(self, execution: Execution, tier: str) -> ExecResult:
        """Has one execution done. BoxBrokenError: the box is of no more use."""
        self.num_runs += 1
        run_id = os.urandom(16)
        limit = execution.max_output_bytes
        order = JobOrder(
            *(run_id, execution.timeout_s, execution.job, execution.argument),
            *(limit, execution.stdin, execution.payload),
        )
        self._outgoing += frames.frame(worker_frames.GO, order.pack())
        num_oom_kills = self.launch.num_oom_kills()
        deadline = time.monotonic() + execution.timeout_s + _BACKSTOP_S
        outputs = {worker_frames.OUT: bytearray(), worker_frames.ERR: bytearray()}
        is_called_off, num_late = False, 0
        while True:
            if execution.future.cancelled() and not is_called_off:
                is_called_off = True
                self._outgoing += frames.frame(worker_frames.KILL, run_id)
                deadline = min(deadline, time.monotonic() + _BACKSTOP_S)
            num_late += time.monotonic() >= deadline  # before it looks: it may stand still
            found = self._next_frame(deadline)
            if num_late and (found is None or num_late > _MOST_LATE):
                raise BoxBrokenError("no answer in time")
            if found is None:
                if self.launch.num_oom_kills() > num_oom_kills and not is_called_off:
                    is_called_off = True  # the kernel has taken a process: the program is over
                    self._outgoing += frames.frame(worker_frames.KILL, run_id)
                continue
            kind, body = found
            if kind == worker_frames.RESULT:
                break
            if kind not in outputs or len(outputs[kind]) > limit + _SLACK_BYTES:
                raise BoxBrokenError("more output than was allowed, or a frame of no kind")
            outputs[kind] += body
        is_oom = self.launch.num_oom_kills() > num_oom_kills
        outcome = _believed(body, run_id, is_oom)
        return judge(
            outcome,
            bytes(outputs[worker_frames.OUT]),
            bytes(outputs[worker_frames.ERR]),
            limit,
            tier,
        )

    def _next_frame(self, deadline: float) -> tuple[int, bytes] | None:
        """The next frame, or None after a tick; meanwhile what is to go out goes out."""
        try:
            if (found := self._reader.take()) is not None:
                return found
            left_s = min(_TICK_S, max(deadline - time.monotonic(), 0))
            poller = select.poll()
            poller.register(self._reader.descriptor, select.POLLIN)
            if self._outgoing:
                poller.register(self._stdin, select.POLLOUT)
            for descriptor, _ in poller.poll(left_s * 1000 + 1):
                if descriptor == self._stdin:
                    with contextlib.suppress(BlockingIOError):
                        written = os.write(self._stdin, memoryview(self._outgoing)[: 1 << 16])
                        del self._outgoing[:written]
                else:
                    self._reader.fill()
            return self._reader.take()
        except (frames.ChannelError, OSError, ValueError) as error:
            raise BoxBrokenError(f"{error}. {self.messages()}") from error

    def messages(self) -> str:
        """The complaints of the back end and the guest, their last 4,096 bytes."""
        return "" if self._is_closed else last_message(self._messages)

    def kill(self) -> None:
        """Ends it in a hurry, from any thread: whoever waits for it sees a broken box."""
        if not self._is_closed:
            self._is_killed = True
            self.launch.kill()
            self._process.kill()

    def close(self) -> None:
        """Ends every process of the box and waits for it. May be called again."""
        with self._closing:
            if self._is_closed:
                return
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None, "both are pipes"
                stream.close()
            is_gone = self._leave()
            self._is_closed = True
            os.close(self._messages)
            self.launch.end(is_gone)

    def _leave(self) -> bool:
        """Wait until the box has ended, or kill it; True if it ended by itself. A guest that finds
        the host gone clears up first."""
        if not self._is_killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.launch.leave_s)
                return True
        self._process.kill()
        self._process.wait()
        return False


def _believed(body: bytes, run_id: bytes, is_oom: bool) -> Outcome:
    """The guest's result, if it can be one."""
    if len(body) != protocol.RESULT.size:
        raise BoxBrokenError(f"a result of {len(body)} bytes")
    outcome = Outcome.unpack(body, is_oom=is_oom)
    numbers = (outcome.cpu_s, outcome.wall_s)
    if outcome.run_id != run_id:
        raise BoxBrokenError("a result of another run")
    if not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise BoxBrokenError(f"a run of {numbers} seconds")
    try:
        _ = outcome.exit_code
    except ValueError as error:
        raise BoxBrokenError(str(error)) from error
    return outcome


def _config_bytes(config: Mapping[str, Any]) -> bytes:
    folder = Path(__file__).parents[1]
    sources = [(name, (folder / f"{name.replace('.', '/')}.py").read_text()) for name in _MODULES]
    return json.dumps({**config, "modules": sources}).encode()


def guest_config(spec: SandboxSpec, **differences: Any) -> dict[str, Any]:
    """The configuration that guest.py is told; a back end says what is different in its boxes."""
    return {
        "root": "",
        "user": -1,
        "rlimits": {},
        "filter": "",
        "landlock": None,
        "watch_bytes": spec.memory_bytes,
        "oom_files": (),
        "environment": ENVIRONMENT,
        **differences,
    }
