"""An event loop drives the engine: the requests of all coroutines are decoded together.

A task on the running loop has the engine step while there is work, and yields to the loop after
every step, so what tools have returned joins the next step. The steps may have a thread of their
own: the loop goes on serving tools meanwhile, for torch releases the interpreter inside its ops.
Requests, aborts and new weights take effect between steps. Callers come through async_engine.py.

Event loops may follow one another (`asyncio.run` twice); what the last one left is aborted.
Left out: several event loops at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanoinfer.cancellation import to_the_end
from nanoinfer.engine_core import EngineCore
from nanoinfer.params import Output


class EngineLoop:
    """One engine, one event loop at a time."""

    def __init__(self, engine: EngineCore, executor: ThreadPoolExecutor | None = None) -> None:
        """`executor` is a thread that runs the steps; None: they run in the event loop's."""
        self.engine = engine
        self._executor = executor
        self._callers: dict[int, Any] = {}  # futures of outputs, or streams
        self._loop: asyncio.AbstractEventLoop | None = None
        self._between_steps = asyncio.Lock()
        self._can_step = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    async def submit(self, caller: Any, add: Callable[[], int]) -> int:
        """Have `add` queue a request, whose result `caller` is given; returns its handle."""
        # The engine has no locks of its own: whatever touches it waits for the end of the step that
        # its thread runs.
        async with self._between_steps:
            handle = add()
            self._callers[handle] = caller
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="nanoinfer")
        return handle

    async def sleep(self) -> None:
        """`EngineCore.sleep` between two steps; requests wait until `wake`."""
        self._bind()
        self._can_step.clear()
        async with self._between_steps:
            await self._call(self.engine.sleep)

    async def wake(self) -> None:
        self._bind()
        async with self._between_steps:
            await self._call(self.engine.wake)
        if not self.engine.is_paused:
            self._can_step.set()

    async def adopt_weights(self, version: int) -> None:
        """`EngineCore.adopt_weights` between two steps; wakes an engine that slept meanwhile."""
        self._bind()
        async with self._between_steps:
            await self._call(self.engine.adopt_weights, version)
        await self.wake()  # the trainer needed its memory no longer than this

    def _bind(self) -> None:
        """Make the running loop ours. Locks and futures of a loop that ended are of no use."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("another event loop is using this AsyncEngine: make one engine each")
        for handle in self._callers:
            self.engine.abort(handle)
        self._callers.clear()
        self._loop, self._driver = loop, None
        self._renew()

    def _renew(self) -> None:
        self._between_steps, self._can_step = asyncio.Lock(), asyncio.Event()
        if not (self.engine.is_paused or self.engine.is_asleep):
            self._can_step.set()

    async def _drive(self) -> None:
        while self._callers:
            await self._can_step.wait()
            async with self._between_steps:
                try:
                    finished = await self._call(self.engine.step)
                except Exception as error:  # whatever it is, the callers hear it
                    if not self._fail_all(error):
                        raise
                    continue
            self._answer(finished)
            await asyncio.sleep(0)  # callers that have their answer go on before the next step

    def _answer(self, finished: list[tuple[int, Output]]) -> None:
        for handle, output in finished:
            caller = self._callers.pop(handle, None)
            if caller is not None and not caller.done():
                caller.set_result(output)

    def _fail_all(self, error: Exception) -> bool:
        """Every caller gets the step's error: their requests cannot go on. False if none waits."""
        is_heard = False
        for handle, caller in self._callers.items():
            self.engine.abort(handle)
            if not caller.done():
                caller.set_exception(error)
                is_heard = True
        self._callers.clear()
        return is_heard

    async def _call(self, function, *args):  # type: ignore[no-untyped-def]
        if self._executor is None:
            return function(*args)
        loop = asyncio.get_running_loop()
        return await to_the_end(loop.run_in_executor(self._executor, function, *args))
