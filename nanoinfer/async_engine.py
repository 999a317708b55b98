"""The asyncio front: many coroutines await `generate`, one task drives the steps.

A step runs inline on the event loop: it is the work that the loop is waiting for. Between two steps
the loop gets its turn, so tool results are picked up and new turns join the next step; tools
themselves run in other processes meanwhile.
"""

from __future__ import annotations

import asyncio

from nanoinfer.engine import LLMEngine
from nanoinfer.sampling import Output, SamplingParams


class AsyncEngine:
    """Wraps an `LLMEngine`. Works on whichever event loop calls it, one at a time."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._waiters: dict[int, asyncio.Future[Output]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        """Complete one prompt. A cancelled call takes its request out of the engine."""
        handle = self.engine.add(ids, params)
        waiter: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._waiters[handle] = waiter
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await waiter
        finally:
            if self._waiters.pop(handle, None) is not None and not waiter.done():
                self.engine.abort(handle)
            elif waiter.cancelled():
                self._forget(handle)

    def _forget(self, handle: int) -> None:
        try:
            self.engine.abort(handle)
        except ValueError:
            return  # it had finished in the same turn of the loop

    async def _drive(self) -> None:
        try:
            while self.engine.has_work:
                for handle, output in self.engine.step():
                    waiter = self._waiters.get(handle)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(output)
                # Two turns: one wakes the waiting coroutines, the next lets what they start run.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except Exception as error:
            for waiter in self._waiters.values():
                if not waiter.done():
                    waiter.set_exception(error)
            raise
