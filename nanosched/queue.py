"""A bounded queue between coroutines: back-pressure on `put`, and an end that consumers can see.

Unlike `asyncio.Queue` of Python 3.11 it can be closed: producers are refused at once, consumers
drain what is left and then get QueueClosed. FIFO for items and for waiters: only the head of a line
is ever woken, and it wakes the next. One event loop, no threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from nanosched.errors import QueueClosed

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """Holds at most `maxsize` items; `async for item in queue` ends when it is closed and empty."""

    def __init__(self, maxsize: int) -> None:
        if maxsize < 1:
            raise ValueError(
                f"maxsize={maxsize}: a bounded queue needs room for at least one item; "
                "give maxsize >= 1"
            )
        self.maxsize = maxsize
        self._items: deque[T] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def put(self, item: T) -> None:
        """Waits for room. QueueClosed if the queue is or gets closed; `item` is then not in it."""
        if self._putters or len(self._items) >= self.maxsize:
            await self._stand_in(self._putters)
        if self._is_closed:
            self._wake()
            raise QueueClosed("put on a closed queue")
        self._items.append(item)
        self._wake()

    async def get(self) -> T:
        """Waits for an item. QueueClosed once the queue is closed and drained."""
        if self._getters or not self._items:
            await self._stand_in(self._getters)
        if not self._items:
            self._wake()
            raise QueueClosed("get on a closed and drained queue")
        item = self._items.popleft()
        self._wake()
        return item

    def close(self) -> None:
        """Refuses further items and wakes everybody who waits. Closing twice is fine."""
        self._is_closed = True
        self._wake()

    async def _stand_in(self, line: deque[asyncio.Future[None]]) -> None:
        """Until woken at the head of the line; newcomers go behind, so nobody can slip in."""
        if self._is_closed and not line:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            line.remove(waiter)
            self._wake()  # it may have been woken in the same tick: hand that on
            raise
        line.remove(waiter)

    def _wake(self) -> None:
        if self._getters and (self._items or self._is_closed):
            _set(self._getters[0])
        if self._putters and (len(self._items) < self.maxsize or self._is_closed):
            _set(self._putters[0])

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                item = await self.get()
            except QueueClosed:
                return
            yield item


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
