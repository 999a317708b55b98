"""`CallCount`: the calls of one episode, those answered and those under way, against its limit.

A call takes its place before it is sampled and keeps it once it is answered. One that nobody waits
for any more, or that failed, gives it back: a client whose timeout and retry are its own affair has
its whole number of answers. Those under way and those answered together never exceed the limit, so
who hangs up again and again has no more in the engine at a time than who waits; the time limit of
the episode bounds the rest. Where all places that are left are taken, the next call waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nanoinfer.http.api_error import ApiError


class NoCallsLeftError(ApiError):
    """The episode has had all its calls."""


class CallCount:
    """Places for `most` answers. For one event loop."""

    def __init__(self, most: int) -> None:
        self.num_answered = 0
        self.num_given_up = 0
        """Answers that nobody received."""
        self._most = most
        self._num_open = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, n: int) -> AsyncIterator[None]:
        """`n` places, which count as answers if the block ends without an exception. ApiError 400
        where the episode has not so many left."""
        await self._take(n)
        try:
            yield
            self.num_answered += n
        except asyncio.CancelledError:
            self.num_given_up += n
            raise
        finally:
            self._num_open -= n
            self._changed.set()

    async def _take(self, n: int) -> None:
        while True:
            self._check(n)
            if self.num_answered + self._num_open + n <= self._most:
                self._num_open += n  # nothing was awaited since the check
                return
            self._changed.clear()
            await self._changed.wait()

    def _check(self, n: int) -> None:
        if self.num_answered >= self._most:
            raise NoCallsLeftError(
                400, f"the episode has had its {self._most} calls (agent.max_turns)"
            )
        if n > self._most - self.num_answered:
            raise ApiError(
                400,
                f"n: {n} answers, of which each is a call; the episode has {self._most} calls "
                f"(agent.max_turns) and had {self.num_answered}",
                "n",
            )
