"""Actors of the contract suite, in a module of their own: processes of actors import it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from nanosched import ActorHandle, Future


class Counter:
    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start={start}")
        self.value = start
        self.gate = asyncio.Event()
        self.begun: list[int] = []

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def read(self) -> int:
        return self.value

    def nothing(self) -> None:
        return None

    def fail(self) -> None:
        raise KeyError("missing")

    def kind_of(self, obj: object) -> str:
        return type(obj).__name__

    def leave(self) -> None:
        raise SystemExit(3)

    async def slow_add(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.add(amount)

    async def begin(self, number: int, _weight: object = None) -> list[int]:
        self.begun.append(number)
        await asyncio.sleep(0)
        return list(self.begun)

    async def wait_for_gate(self) -> str:
        await self.gate.wait()
        return "open"

    async def open_gate(self) -> None:
        self.gate.set()

    async def slow_fail(self) -> None:
        await asyncio.sleep(0)
        raise KeyError("missing")

    async def slow_leave(self) -> None:
        await asyncio.sleep(0)
        sys.exit(4)

    def _hidden(self) -> None: ...


class Stubborn(Exception):  # noqa: N818 - named as what it is
    """Pickles, but cannot be made again from what pickle keeps."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(f"{name} of size {size}")


class Plain:
    """Has no async method: its calls run one after the other."""

    def __init__(self, first: object = None, *, last: object = None) -> None:
        self.seen: list[object] = [] if first is None else [first]
        if last is not None:
            self.seen.append(last)

    def note(self, item: object) -> list[object]:
        self.seen.append(item)
        return list(self.seen)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self) -> None:
        raise KeyError("missing")

    def pid(self) -> int:
        return os.getpid()

    def die(self, how: str) -> None:
        if how == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        sys.exit(3)

    def write_and_die(self, path: str) -> None:
        with open(path, "a") as file:
            file.write("here\n")
        os._exit(1)

    def devices(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def fail_with_a_lock(self) -> None:
        import threading

        raise ValueError("holds a lock", threading.Lock())

    def fail_stubbornly(self) -> None:
        raise Stubborn("file", 3)

    def give_a_lock(self) -> object:
        import threading

        return threading.Lock()


class Arrays:
    """Takes and gives arrays and tensors."""

    def zeros(self, size: int) -> np.ndarray:
        return np.zeros(size)

    def total(self, array: Any) -> float:
        return float(array.sum())

    def is_writable(self, array: np.ndarray) -> bool:
        return bool(array.flags.writeable)

    def echo(self, obj: Any) -> Any:
        return obj

    def fill(self, tensor: Any) -> Any:
        tensor.fill_(1)
        return tensor


class Rank:
    """One of a group."""

    def __init__(self, rank: int, *, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def where(self, offset: int = 0) -> tuple[int, int]:
        return self.rank + offset, self.size

    def leave(self) -> None:
        sys.exit(1)

    async def wait(self) -> None:
        await asyncio.Event().wait()


class Reporter:
    """Calls another actor through a handle that it was given."""

    def __init__(self, counter: ActorHandle[Counter] | None = None) -> None:
        self.counter = counter

    async def keep(self, counter: ActorHandle[Counter]) -> None:
        self.counter = counter

    async def add(self, amount: int) -> int:
        assert self.counter is not None
        return await self.counter.call(Counter.add, amount)

    async def add_all(self, amounts: list[int]) -> list[int]:
        assert self.counter is not None
        calls = [self.counter.call(Counter.add, amount) for amount in amounts]
        return [await call for call in calls]

    async def sum_of(self, futures: list[Future[int]]) -> int:
        return sum([await future for future in futures])

    async def fail(self) -> None:
        assert self.counter is not None
        await self.counter.call(Counter.fail)
