"""Requests that are answered later: accepted at once, run once, in the order of their numbers.

A client numbers the requests of a model 1, 2, 3 and may send them in any order, or one of them
twice because a connection broke. A `Line` runs each number once, after the one before, and gives a
repeated number the name of the first one's future. `Futures` holds the answers until they are
fetched, and a while longer, since a fetch may be repeated too.

Left out: answers that survive the service. What must survive is saved with save_state.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from nanoengine.engine import NonFiniteLoss
from nanoengine.state.tensor_file import CheckpointError
from nanoinfer.http.api_error import ApiError

LOG = logging.getLogger("nanorl.serving.training_service")
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class FutureAnswer:
    """The answer that a future becomes: a body, and the media type that it is written in."""

    body: bytes
    media_type: str = "application/json"

    @classmethod
    def of(cls, value: dict[str, Any]) -> FutureAnswer:
        return cls(json.dumps(value).encode())

    @classmethod
    def failed(cls, message: str, category: Literal["user", "server"]) -> FutureAnswer:
        """The client raises this as a RequestFailedError."""
        return cls.of({"error": message, "category": category})


Work = Callable[[], Awaitable[FutureAnswer]]


class Futures:
    """The futures of a service, by their names. The oldest answers go where all of them together
    take more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tasks: OrderedDict[str, asyncio.Task[FutureAnswer]] = OrderedDict()
        self._bytes = 0
        self._is_closed = False

    def start(self, name: str, work: Work) -> asyncio.Task[FutureAnswer]:
        """Run `work`; its answer is the future of that name. `ApiError` 503 once it is closed:
        connections are open a little longer."""
        if self._is_closed:
            raise ApiError(503, "the service is stopping; ask again when it is back")
        task = asyncio.create_task(_answered(name, work), name=name)
        self._tasks[name] = task
        task.add_done_callback(self._keep)
        return task

    async def fetch(self, name: str, limit_s: float) -> FutureAnswer | None:
        """The answer, or None if it is not there within `limit_s`. `ApiError` 410 for a name that
        was never given, or whose answer is gone."""
        task = self._tasks.get(name)
        if task is None:
            raise ApiError(410, f"future {name!r}: is not known here (any more); ask again")
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            return None
        return (
            FutureAnswer.failed("the request was cancelled", "user")
            if task.cancelled()
            else task.result()
        )

    def cancel(self, name: str) -> None:
        """End a request that runs; does nothing about others."""
        if name in self._tasks:
            self._tasks[name].cancel()

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _keep(self, task: asyncio.Task[FutureAnswer]) -> None:
        self._bytes += _size(task)
        while self._bytes > self._max_bytes:
            oldest = next(
                (n for n, one in self._tasks.items() if one.done() and one is not task), None
            )
            if oldest is None:
                return
            self._bytes -= _size(self._tasks.pop(oldest))


class Line:
    """The requests of one model, in the order of their numbers, from 0 on."""

    def __init__(self, name: str, futures: Futures) -> None:
        self.name, self.next = name, 0
        self._futures = futures
        self._turns: dict[int, asyncio.Event] = {}
        self._verbs: dict[int, str] = {}

    def submit(self, number: int, verb: str, work: Work) -> str:
        """The name of the request's future. `ApiError` 422 where the number is another verb's."""
        future = f"{self.name}:{number}"
        if number in self._verbs:
            if self._verbs[number] != verb:
                message = f"seq_id {number} of {self.name}: was {self._verbs[number]}, now {verb}"
                raise ApiError(422, f"{message}; number requests one after the other", "seq_id")
            return future
        if number < self.next:
            raise ApiError(
                422, f"seq_id {number} of {self.name}: must be {self.next} or more", "seq_id"
            )
        self._verbs[number] = verb
        self._futures.start(future, lambda: self._in_turn(number, work))
        return future

    def pass_over(self, number: int) -> None:
        """Let the requests behind one that was refused go on; nothing where the number is taken."""
        if number >= self.next and number not in self._verbs:
            self.submit(number, "refused", _refused)

    def close(self) -> None:
        """End the requests that wait for one that will not come any more, or are about to."""
        for number in self._verbs:
            if number > self.next:
                self._futures.cancel(f"{self.name}:{number}")

    async def _in_turn(self, number: int, work: Work) -> FutureAnswer:
        if number > self.next:
            await self._turns.setdefault(number, asyncio.Event()).wait()
        try:
            return await work()
        finally:
            self.next = number + 1
            if (turn := self._turns.pop(self.next, None)) is not None:
                turn.set()


async def _refused() -> FutureAnswer:
    return FutureAnswer.failed("the request was refused when it came", "user")


async def _answered(name: str, work: Work) -> FutureAnswer:
    """Do the work and answer. An error is an answer too: a later request of the model must not be
    held up by it."""
    try:
        return await work()
    except (ValueError, CheckpointError, NonFiniteLoss) as error:
        return FutureAnswer.failed(str(error), "user")
    except ApiError as error:
        return FutureAnswer.failed(error.message, "user" if error.status < 500 else "server")
    except Exception as error:  # logged, and told to the client
        LOG.exception("request %s failed", name)
        return FutureAnswer.failed(f"{type(error).__name__}: {error}", "server")


def _size(task: asyncio.Task[FutureAnswer]) -> int:
    """Bytes of an answer, with a little for the entry itself."""
    if task.cancelled() or task.exception() is not None:
        return 512
    return 512 + len(task.result().body)
