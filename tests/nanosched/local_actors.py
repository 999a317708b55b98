"""Actors of the tests of local processes, in a module that those processes import."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from nanosched import ActorHandle, WorkerDied


class Worker:
    """Has no async method."""

    def __init__(self) -> None:
        self.count = 0

    def pid(self) -> int:
        return os.getpid()

    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def sleep_and_say(self, begun: str) -> None:
        """Makes the file `begun`, then sleeps for longer than any test."""
        Path(begun).touch()
        time.sleep(1000)

    def echo(self, obj: Any) -> Any:
        return obj

    def size_of(self, obj: Any) -> int:
        return len(obj)

    def ones(self, size: int) -> np.ndarray:
        return np.ones(size)

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    def fail(self, length: int) -> None:
        raise ValueError("x" * length)


class SlowStarter(Worker):
    """Makes the file `begun` while it is constructed, and waits for one called `go` beside it."""

    def __init__(self, begun: str) -> None:
        super().__init__()
        Path(begun).touch()
        while not Path(begun).with_name("go").exists():
            time.sleep(0.01)


class Caller:
    """Uses a handle that it was given."""

    def __init__(self) -> None:
        self.worker: ActorHandle[Worker] | None = None

    async def keep(self, worker: ActorHandle[Worker]) -> None:
        self.worker = worker

    async def drop(self) -> None:
        self.worker = None

    async def add(self) -> int:
        assert self.worker is not None
        return await self.worker.call(Worker.add)

    async def send(self, size: int) -> float:
        assert self.worker is not None
        return await self.worker.call(Worker.total, np.ones(size))

    async def outlive(self, begun: str) -> str:
        """Waits for a call that does not end until its actor does; the file `begun` exists as soon
        as that call is under way."""
        assert self.worker is not None
        try:
            await self.worker.call(Worker.sleep_and_say, begun)
        except WorkerDied as error:
            return str(error)
        return "nothing happened"

    async def hang(self) -> None:
        await asyncio.Event().wait()


def children_of(pid: int) -> list[int]:
    """The living processes of nanosched whose parent is `pid`: a test process may have started
    others for other tests, whose ends nobody has waited for, and a fork server's command line names
    what they put on `sys.path`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and b"nanosched.local" in command:  # a zombie has none
                found.append(int(folder.name))
    return found
