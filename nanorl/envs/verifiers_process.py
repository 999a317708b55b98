"""`VerifiersProcess`: our end of verifiers_worker.py, which runs in a Python of its own.

    process = VerifiersProcess(python, env="my_env", config={}, folders=[])
    rows = process.tasks(100)
    result = await process.play(rows[0]["row"], ask)
    process.close()

The process is started by the first call, and anew after it died. One that dies, writes what nobody
can read, or does not let go of an episode in time is killed with all that it started; the episodes
under way raise `InfrastructureError` and are played again. A thread reads its answers, so calls may
come from any event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import threading
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanorl.envs.verifiers_worker import LETTING_GO_S, MARK, MAX_LINE_BYTES, kill_marked
from nanorl.types import InfrastructureError

WORKER = Path(__file__).with_name("verifiers_worker.py")
START_S = 300.0  # importing an environment, and a table of tasks from a slow disk
_NUM_LOG_LINES = 20

Json = dict[str, Any]


class VerifiersProcess:
    """One environment in a process of its own."""

    def __init__(
        self, python: str, *, env: str, config: Mapping[str, Any], folders: Sequence[str]
    ) -> None:
        self._python = python
        self._spec = {"env": env, "config": dict(config), "folders": list(folders)}
        self._lock = threading.Lock()
        self._life: _Life | None = None

    def tasks(self, most: int) -> list[Json]:
        """`row`, `system` and `prompt` of up to `most` tasks. ValueError where the environment
        cannot be loaded, or does not say them."""
        try:
            life = self._living()
            pending = life.pending()
            life.send(pending, {"tasks": most})
            pending.ended.result(START_S)
            return pending.tasks
        except (InfrastructureError, TimeoutError) as error:
            self.close()
            name = self._spec["env"]
            raise ValueError(f"--env verifiers env={name}: {error or 'it hangs'}") from error

    async def play(self, row: Json, ask: Json, timeout_s: float) -> Json:
        """Play one episode and return what the rubric says of it. `ask` has the model, the client
        and its key."""
        # A thread: loading may take long, and a process that hangs does not read.
        life = await asyncio.to_thread(self._living)
        pending = life.pending()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.to_thread(life.send, pending, {"play": row, **ask})
                return await asyncio.wrap_future(pending.ended)
        except TimeoutError as error:
            if pending.ended.done() and not pending.ended.cancelled():
                return pending.ended.result()  # this loop was late
            limit = f"--env-args timeout_s={timeout_s:g}"
            raise InfrastructureError(f"its episode took longer than {limit}") from error
        finally:
            if not pending.has_answered.is_set():
                life.let_go(pending)

    def close(self) -> None:
        """End the process, and all that it started. Closing twice is fine."""
        with self._lock:
            life, self._life = self._life, None
        if life is not None:
            life.close()

    def _living(self) -> _Life:
        with self._lock:
            if self._life is None or self._life.reason is not None:
                self._life = _Life(self._python, self._spec)
            return self._life


class _Pending:
    """A request under way."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_sent = False
        self.tasks: list[Json] = []
        self.ended: Future[Json] = Future()
        self.has_answered = threading.Event()

    def end(self, result: Json | None, error: str = "") -> None:
        self.has_answered.set()
        with suppress(Exception):  # whoever waited may have cancelled it
            if result is None:
                self.ended.set_exception(InfrastructureError(error))
            else:
                self.ended.set_result(result)


class _Life:
    """One process, from its start to its end."""

    def __init__(self, python: str, spec: Mapping[str, Any]) -> None:
        """InfrastructureError where it does not come up, with what it says."""
        self.reason: str | None = None  # why it ended
        self._mark = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # of its own: a process that hangs holds a writer up
        self._log: deque[bytes] = deque(maxlen=_NUM_LOG_LINES)
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(WORKER)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, MARK: self._mark},
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureError(f"python={python}: {error.strerror}") from error
        self._first = _Pending(0)
        self._pending[0] = self._first
        self._log_reader, answers = (
            threading.Thread(target=work, daemon=True, name="verifiers")
            for work in (self._read_log, self._read_answers)
        )
        self._log_reader.start()
        answers.start()
        self._write(dict(spec))
        try:
            self._first.ended.result(START_S)
        except TimeoutError as error:
            self.kill(f"it was not loaded within {START_S:g} s")
            raise InfrastructureError(str(self.reason)) from error
        except BaseException:  # Ctrl-C too: nobody else knows of the process yet
            self.kill("it was not loaded")
            raise

    def pending(self) -> _Pending:
        """A request that is still to be sent."""
        pending = _Pending(next(self._numbers))
        with self._lock:
            if self.reason is not None:
                raise InfrastructureError(self.reason)
            self._pending[pending.number] = pending
        return pending

    def send(self, pending: _Pending, request: Json) -> None:
        """Send a request, unless it was let go. A process that hangs may hold this up until it is
        killed."""
        with self._lock:
            if pending.number not in self._pending:
                return
            pending.is_sent = True
        self._write({"id": pending.number, **request})

    def let_go(self, pending: _Pending) -> None:
        """Have an episode cancelled that nobody waits for, and the process killed where it does not
        do so."""
        with self._lock:
            if not pending.is_sent:
                self._pending.pop(pending.number, None)
                return
        # Two threads: a process that hangs holds up whoever writes to it.
        for work in (self._cancel, self._await_end):
            threading.Thread(target=work, args=(pending,), daemon=True).start()

    def _cancel(self, pending: _Pending) -> None:
        self._write({"id": pending.number, "cancel": True})

    def _await_end(self, pending: _Pending) -> None:
        if not pending.has_answered.wait(LETTING_GO_S):
            self.kill(f"it did not end an episode within {LETTING_GO_S:g} s")

    def close(self) -> None:
        """Have it end by itself, and end it otherwise."""
        assert self._process.stdin is not None
        if self._writing.acquire(timeout=LETTING_GO_S):  # else it hangs, and holds a writer up
            with suppress(OSError):
                self._process.stdin.close()
            self._writing.release()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LETTING_GO_S)
        self.kill("it was closed")

    def kill(self, reason: str) -> None:
        """End it and all that it started. Its requests fail for `reason`."""
        with self._lock:
            self.reason = self.reason or reason
            pending, self._pending = list(self._pending.values()), {}
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()  # it starts nothing more
        kill_marked(self._mark)
        for one in pending:
            one.end(None, f"the process of the verifiers environment ended: {self.reason}")

    def _write(self, message: Json) -> None:
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError):  # it has ended, which its reader finds as well
            return

    # -- in threads ------------------------------------------------------------------------------

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        reason = ""
        while line := self._process.stdout.readline(MAX_LINE_BYTES):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                reason = f"it said what nobody can read: {line[:100]!r}"
                break
        if not reason:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LETTING_GO_S)
                kill_marked(self._mark)  # what it started may hold its log open
                self._log_reader.join(LETTING_GO_S)  # or its last words would be missing
            said = b"".join(self._log).decode(errors="replace").strip()[-1500:]
            reason = f"exit code {self._process.returncode}. {said}"
        self.kill(reason)

    def _take(self, answer: Json) -> None:
        if "ready" in answer:
            self._pending.pop(0).end({})
            return
        if "refused" in answer:
            self._pending.pop(0).end(None, str(answer["refused"]))
            return
        pending = self._pending.get(answer["id"])
        if pending is None:
            return
        if "task" in answer:
            pending.tasks.append(answer["task"])
            return
        self._pending.pop(answer["id"], None)
        if "error" in answer:
            pending.end(None, str(answer["error"]))
        else:
            pending.end(dict(answer["result"]))

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(1 << 12):
            self._log.append(line)
