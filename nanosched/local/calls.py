"""The caller's side of a channel: futures that wait for results, and results that wait for readers.

Driver and actors share it: the driver calls actors, and an actor that was given a handle calls the
other one by the same messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nanosched.errors import SchedulerError, TaskError, WorkerDied
from nanosched.future import Future, futures_in
from nanosched.local.actor_messages import Exiting, Failure, FutureSlot, Invoke, Result
from nanosched.local.channel import Channel
from nanosched.local.payload import Packer, Payload, unpack

T_co = TypeVar("T_co", covariant=True)


class LocalFuture(Future[T_co]):
    """Keeps its result as it arrived: reading unpacks it, and passing it on does not."""

    __slots__ = ("_is_read", "payload")

    def __init__(self, label: str, on_await: Callable[[], None] | None = None) -> None:
        super().__init__(label, on_await)
        self.payload: Payload | None = None
        self._is_read = False

    def settle_payload(self, payload: Payload) -> None:
        """Like `settle`, with a value that is unpacked when somebody reads it."""
        if not self.is_done():
            self.payload = payload
            self.settle()

    def result(self) -> T_co:
        if self.payload is not None and not self._is_read:
            self._is_read = True
            try:
                self._value = unpack(self.payload)
            except Exception as error:  # the boundary of the process: recorded, raised below
                self._error = TaskError(self.label, error)
        return super().result()


class Connection:
    """Calls that are under way over one channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._ids = itertools.count()
        self._futures: dict[int, LocalFuture[Any]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def call(self, method: str, payloads: Sequence[Payload], future: LocalFuture[Any]) -> None:
        call_id = next(self._ids)
        self._futures[call_id] = future
        self.channel.send(Invoke(call_id, method), payloads)

    def settle(self, message: Result | Failure | Exiting, payloads: Sequence[Payload]) -> None:
        """The future that the message answers gets its result or error."""
        future = self._futures.pop(message.call_id, None)
        if future is None:  # the constructor's
            return
        if isinstance(message, Result):
            future.settle_payload(payloads[0])
        elif isinstance(message, Failure):
            future.settle(error=task_error(future.label, message, payloads))
        else:
            future.settle(error=WorkerDied(message.reason))

    def fail(self, error: WorkerDied) -> None:
        """The other side is gone: what it has not answered it may or may not have done."""
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.settle(error=error)


def task_error(label: str, failure: Failure, payloads: Sequence[Payload]) -> TaskError:
    """The error that the method raised, or its text where the exception itself does not travel."""
    cause: BaseException | None = None
    if payloads:
        try:
            cause = unpack(payloads[0])
        except Exception as error:  # the boundary of the process: told in a note
            cause = RuntimeError(failure.text)
            cause.add_note(f"the exception itself cannot be unpickled: {error}")
    if not isinstance(cause, BaseException):
        cause = RuntimeError(failure.text)
    if isinstance(cause, TaskError) and not failure.traceback:
        return cause  # of the constructor, which has a label of its own
    cause.add_note(f"in the actor's process:\n{failure.traceback}")
    return TaskError(label, cause)


def pack_arguments(
    packer: Packer, label: str, args: tuple[Any, ...], kwargs: dict[str, Any], *head: Any
) -> tuple[Payload, list[Future[Any]]]:
    """(*head, args, kwargs) with slots where futures are, and those futures. ValueError, naming
    the call, for what cannot be pickled."""
    futures = futures_in(args, kwargs)
    if futures:
        slots = {id(future): FutureSlot(number) for number, future in enumerate(futures, start=1)}
        args = tuple(slots.get(id(value), value) for value in args)
        kwargs = {name: slots.get(id(value), value) for name, value in kwargs.items()}
    try:
        return packer.pack((*head, args, kwargs)), futures
    except Exception as error:  # whatever pickle raises
        raise ValueError(
            f"the arguments of {label} cannot be pickled for its process: {error}"
        ) from error


def payloads_of(packer: Packer, futures: Sequence[Future[Any]]) -> list[Payload]:
    """The values of futures that are done, as they arrived if they came from another process."""
    return [
        future.payload
        if isinstance(future, LocalFuture) and future.payload is not None
        else packer.pack(future.result())
        for future in futures
    ]


def fill_slots(arguments: Any, payloads: Sequence[Any]) -> Any:
    """The (args, kwargs) of a call, or a constructor's (class, args, kwargs), with the values of
    the futures in their places."""
    *head, args, kwargs = arguments
    values = [unpack(payload) for payload in payloads[1:]]

    def value_of(value: Any) -> Any:
        return values[value.number - 1] if isinstance(value, FutureSlot) else value

    return *head, tuple(map(value_of, args)), {k: value_of(v) for k, v in kwargs.items()}


def first_error(futures: Sequence[Future[Any]]) -> SchedulerError | None:
    """The error of an argument, which is the error of the call."""
    for future in futures:
        error = future.error()
        if error is not None:
            return error if isinstance(error, SchedulerError) else TaskError(future.label, error)
    return None
