"""Real processes of train_agent.py, forked from one that has imported everything.

A `Slow` makes one optimizer step slow and touches a marker when the weights have changed and the
run does not know it yet, the most awkward moment for a signal.
A run on processes gets its fork server the same way, where a user's imports everything for seconds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0  # of any wait, on a loaded machine; a test may take longer, so that this one speaks
SMALL = (
    *("--preset", "tiny", "--dtype", "fp32", "--threads", "1", "--tool.workers", "1"),
    *("--warm-start.steps", "3", "--warm-start.traces-per-step", "2"),
    *("--rl.steps", "3", "--rl.tasks-per-step", "2", "--rl.group-size", "2"),
    *("--evaluation.num-tasks", "2", "--evaluation.num-tasks-untrained", "0"),
    *("--evaluation.num-tasks-no-tool", "1", "--agent.max-turn-tokens", "16"),
    # So short a warm start solves nothing: the entropy bonus makes every RL step move the weights.
    *("--rl.algorithm.entropy-coef", "0.01", "--save-every", "100"),
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "nanorl.run.run",
        "nanorl.distributed.roles.cluster",
        "tyro",
        "torch.utils.tensorboard",
        "forked_runs",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Update (or request to a replica) number `update` of a process takes `seconds` longer, or
    until somebody removes the marker; once, in the first process that comes so far."""

    update: int
    seconds: float
    marker: Path
    is_request: bool = False

    def begins(self, number: int) -> bool:
        """Whether this one is slow; then the marker says so."""
        once = Path(f"{self.marker}.once")
        if number != self.update or once.exists():
            return False
        once.touch()
        self.marker.touch()
        return True

    def is_over(self, since: float) -> bool:
        return not self.marker.exists() or time.monotonic() > since + self.seconds


class RunProcess:
    """One process of train_agent.py; what it prints goes to a file."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        slow: Slow | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        **limits: int,
    ) -> None:
        """`limits` are resource limits by their names, such as RLIMIT_FSIZE; `environment` is added
        to the one that there is. `prepare` is called before the run, of all of whose processes it
        may change the code."""
        self.log = log
        variables = dict(environment or {})
        self.process = _context.Process(
            target=_main, args=(log, arguments, slow, limits, variables, prepare)
        )
        self.process.start()

    def signal(self, number: int = signal.SIGINT) -> None:
        os.kill(self.process.pid, number)  # type: ignore[arg-type]

    def wait(self, timeout_s: float = LIMIT_S) -> int | None:
        """The exit status; -9 after SIGKILL."""
        self.process.join(timeout_s)
        return self.process.exitcode

    def output(self) -> str:
        return self.log.read_text()

    def await_file(self, path: Path, timeout_s: float = LIMIT_S) -> None:
        wait_until(path.exists, timeout_s, alive=self.process.is_alive, told=self.output)

    def await_true(self, is_so: Callable[[], object], timeout_s: float = LIMIT_S) -> None:
        wait_until(is_so, timeout_s, alive=self.process.is_alive, told=self.output)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _main(
    log: Path,
    arguments: tuple[str, ...],
    slow: Slow | None,
    limits: dict[str, int],
    environment: dict[str, str],
    prepare: Callable[[], None] | None = None,
) -> None:
    import resource

    os.environ.update(environment)

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "scripts"))
    import train_agent

    if slow is not None:
        (_slow_down_request if slow.is_request else _slow_down)(slow)
    if prepare is not None:
        prepare()
    if "local" in arguments:
        import nanosched.local.forkserver as module

        replaced = {**vars(subprocess), "Popen": _ForkedServer()}
        module.subprocess = SimpleNamespace(**replaced)  # type: ignore[assignment]
    for name, value in limits.items():
        number = getattr(resource, name)
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))
    sys.argv = ["scripts/train_agent.py", *arguments]
    sys.exit(train_agent.main())


def _slow_down(slow: Slow) -> None:
    from nanoengine.state.kept_adamw import AdamW

    update, num_updates = AdamW.step, 0

    def slow_update(self: AdamW, grad_norm: float) -> None:
        nonlocal num_updates
        update(self, grad_norm)
        num_updates += 1
        if slow.begins(num_updates):
            since = time.monotonic()
            while not slow.is_over(since):
                time.sleep(0.01)

    AdamW.step = slow_update  # type: ignore[method-assign]


def _slow_down_request(slow: Slow) -> None:
    from nanorl.distributed.roles.replica_role import Replica

    generate, num_requests = Replica.generate, 0

    @wraps(generate)  # a method is called by its name
    async def slow_generate(self: Replica, *args: Any, **options: Any) -> Any:
        nonlocal num_requests
        num_requests += 1
        if slow.begins(num_requests):
            since = time.monotonic()
            while not slow.is_over(since):
                await asyncio.sleep(0.01)
        return await generate(self, *args, **options)

    Replica.generate = slow_generate  # type: ignore[method-assign]


class _ForkedServer:
    """Stands for `subprocess.Popen`: a process that was forked early and waits for its program."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            self._run(theirs)

    def _run(self, theirs: socket.socket) -> None:
        """Never returns. It ends with its driver, also with one that never asked for it."""
        try:
            message, received, _, _ = socket.recv_fds(theirs, 1 << 16, 1)
            if message:
                program, number = pickle.loads(message)
                os.dup2(received[0], number)
                exec(program, {})
        finally:
            os._exit(0)

    def __call__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], stdin: int
    ) -> _ForkedServer:
        socket.send_fds(self._socket, [pickle.dumps((command[-1], pass_fds[0]))], pass_fds)
        self._socket.close()
        return self

    def wait(self, timeout: float | None = None) -> None:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the forked server", timeout or 0)
            time.sleep(0.005)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
