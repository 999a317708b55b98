"""The promise of one result: `sched.get(future)` in plain code, `await future` in a coroutine.

Settled once, by the back end. Not tied to an event loop, so that a result made without a loop can
be awaited in one. Awaiting it twice is fine; cancelling the awaiter does not cancel the call.
Left out: cancellation of a call (kill the actor) and thread safety (the inline back end has one
thread).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Future(Generic[T_co]):
    """`label` names the call in error messages; `on_await` lets the back end start lazy work."""

    __slots__ = ("_callbacks", "_error", "_is_done", "_on_await", "_value", "label")

    def __init__(self, label: str, on_await: Callable[[], None] | None = None) -> None:
        self.label = label
        self._on_await = on_await
        self._is_done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[Future[Any]], None]] = []

    def is_done(self) -> bool:
        return self._is_done

    def error(self) -> Exception | None:
        """The error that `result` would raise; None while pending or after success."""
        return self._error

    def result(self) -> T_co:
        """The value, or raises the call's error. Only for futures that are done."""
        assert self._is_done, f"result of {self.label} read before it is done"
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        """For back ends. The first settlement wins: a killed actor's late result is dropped."""
        if self._is_done:
            return
        self._is_done, self._value, self._error = True, value, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Called with the future once it is done; at once if it already is."""
        if self._is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, T_co]:
        if not self._is_done and self._on_await is not None:
            self._on_await()
        if not self._is_done:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self.add_done_callback(lambda _: _wake_soon(loop, waiter))
            yield from waiter
        return self.result()

    def __reduce__(self) -> tuple[Callable[..., Future[Any]], tuple[Any, ...]]:
        """A future deep in the arguments of a call is the callee's to read, so it has to be done;
        one that is itself an argument is replaced by its value."""
        if not self._is_done:
            raise ValueError(
                f"{self!r} is nested in what is sent, and pending: pass it as an argument itself, "
                "or get it first"
            )
        value = self.result() if self._error is None else None
        return _settled, (self.label, value, self._error)

    def __repr__(self) -> str:
        if not self._is_done:
            state = "pending"
        else:
            state = "done" if self._error is None else f"failed: {self._error}"
        return f"<Future {self.label} {state}>"


def _wake_soon(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    if asyncio._get_running_loop() is loop:
        _wake(waiter)
    elif not loop.is_closed():  # the call may outlive the loop of an awaiter that was cancelled
        loop.call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _settled(label: str, value: Any, error: Exception | None) -> Future[Any]:
    future: Future[Any] = Future(label)
    future.settle(value, error)
    return future


def futures_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Future[Any]]:
    """Find those among the arguments themselves; what is nested deeper is the callee's to read."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Future)]


def dereference(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Futures become their values; raises the error of one that failed."""

    def value_of(value: Any) -> Any:
        return value.result() if isinstance(value, Future) else value

    return tuple(map(value_of, args)), {name: value_of(value) for name, value in kwargs.items()}
