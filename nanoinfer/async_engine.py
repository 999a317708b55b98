"""`LLMEngine` for coroutines: each rollout awaits its own tokens, all are decoded together.

A task on the running event loop drives the engine while there is work and yields to the loop after
every step, so what tools have returned joins the next step. With `use_thread` (the default) a step
runs in one worker thread and the loop goes on serving tools meanwhile; torch releases the
interpreter inside its ops. Requests, aborts and weight updates take effect between steps.

Event loops may follow one another (`asyncio.run` twice); what the last one left is aborted.
Left out: several event loops at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as Ids
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanoengine.parallel.device import worker_thread
from nanoinfer.cancellation import to_the_end
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

T = TypeVar("T")
_STREAM = "nanoinfer.options.streams:stream"


class AsyncEngine:
    """One engine, one event loop at a time. Use as an async context manager, or call `close`."""

    def __init__(
        self,
        engine: LLMEngine,
        use_thread: bool = True,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        """`executor` is a thread of the caller's to run the steps in, instead of an own one."""
        self.engine = engine
        self._executor = executor
        self._owns_executor = executor is None
        if use_thread and executor is None:
            num_threads = torch.get_num_threads()  # else the worker's first op would set its own
            self._executor = worker_thread("nanoinfer", engine.model.device, num_threads)
        self._callers: dict[int, Any] = {}  # futures of outputs, or streams
        self._names: dict[int, str | None] = {}  # of the same requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._between_steps = asyncio.Lock()
        self._can_step = asyncio.Event()
        self._can_add = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(
        self,
        ids: Ids[int],
        params: SamplingParams,
        priority: int = 0,
        name: str | None = None,
        sampled: Output | None = None,
    ) -> Output:
        """Complete `ids`. Cancelling the caller aborts the request; `abort(name)` ends it. With
        what an abort left as `sampled` the request goes on from there (`LLMEngine.add`)."""
        future: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        handle = await self.enter(future, ids, params, priority, name, sampled)
        try:
            return await future
        finally:
            await self.leave(handle)

    def stream(
        self, ids: Ids[int], params: SamplingParams, priority: int = 0, name: str | None = None
    ) -> AsyncGenerator[Any, None]:
        """Complete `ids`, handing out tokens as they are sampled, a `StreamChunk` of
        options/streams.py at a time; the last has the `Output`. Closing the iterator
        (`contextlib.aclosing`) or cancelling its reader aborts the request."""
        chunks: AsyncGenerator[Any, None] = resolve_name(_STREAM)(self, ids, params, priority, name)
        return chunks

    async def enter(
        self,
        caller: Any,
        ids: Ids[int],
        params: SamplingParams,
        priority: int = 0,
        name: str | None = None,
        sampled: Output | None = None,
    ) -> int:
        """Queue a request whose result `caller` is given, a future or a stream; its handle."""
        self._bind()
        await self._can_add.wait()
        # The engine has no locks of its own: whatever touches it waits for the end of the step that
        # its thread runs.
        async with self._between_steps:
            handle = self.engine.add(ids, params, priority, sampled)
            self._callers[handle], self._names[handle] = caller, name
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="nanoinfer")
        return handle

    async def leave(self, handle: int) -> None:
        """The caller is gone: a request that is still in flight is aborted."""
        del self._names[handle]
        if self._callers.pop(handle, None) is not None:
            # A cancellation that is repeated meanwhile must not leave the request in the batch.
            await to_the_end(self._abort(handle))

    async def _abort(self, handle: int) -> None:
        async with self._between_steps:
            self.engine.abort(handle)

    async def abort(self, name: str | None = None) -> int:
        """End the requests of that name, or all, between two steps; how many. Their callers get
        what they have, finish_reason "abort"."""
        self._bind()
        async with self._between_steps:
            handles = [h for h in self._callers if name is None or self._names[h] == name]
            for handle in handles:
                output = self.engine.abort(handle)
                caller = self._callers.pop(handle)
                if output is not None and not caller.done():
                    caller.set_result(output)
        return len(handles)

    async def pause(self, *, waits: bool = False) -> None:
        """No step runs after this returns; requests wait. With `waits` those in flight are
        answered first."""
        self._bind()
        if waits:
            async with self._answered(waits=True):
                return await self.pause()
        self._can_step.clear()
        async with self._between_steps:
            self.engine.pause()

    async def resume(self) -> None:
        self._bind()
        self.engine.resume()
        if not self.engine.is_asleep:
            self._can_step.set()

    async def sleep(self) -> None:
        """`LLMEngine.sleep` between two steps; requests wait until `wake`."""
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

    async def update_weights(
        self, state: Iterable[tuple[str, Tensor]], version: int, *, is_finite: bool = False
    ) -> None:
        """`LLMEngine.update_weights` between two steps; no pause needed."""
        self._bind()
        async with self._answered(), self._between_steps:
            update = partial(self.engine.update_weights, is_finite=is_finite)
            await self._call(update, state, version)

    async def adopt_weights(self, version: int) -> None:
        """`LLMEngine.adopt_weights` between two steps; wakes an engine that slept meanwhile."""
        self._bind()
        async with self._between_steps:
            await self._call(self.engine.adopt_weights, version)
        await self.wake()  # the trainer needed its memory no longer than this

    @asynccontextmanager
    async def _answered(self, *, waits: bool = False) -> AsyncIterator[None]:
        """Inside there is no request in flight, if `waits` or `InferConfig.in_flight` is "wait"."""
        self._can_add.clear()
        try:
            waits = waits or self.engine.config.in_flight == "wait"
            can_end = waits and self._can_step.is_set()
            if can_end and self._driver is not None:
                await asyncio.wait({self._driver})  # it ends with the last of them
            yield
        finally:
            self._can_add.set()

    async def load_adapter(self, name: str, source: str | Path | Mapping[str, Any]) -> None:
        """`LLMEngine.load_adapter` between two steps."""
        await self.run_between_steps(type(self.engine).load_adapter, name, source)

    async def unload_adapter(self, name: str) -> None:
        """`LLMEngine.unload_adapter` between two steps."""
        await self.run_between_steps(type(self.engine).unload_adapter, name)

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    async def run_between_steps(self, function: Callable[..., T], *args: Any) -> T:
        """`function(engine, *args)` in the thread of the steps. No step runs meanwhile."""
        self._bind()
        async with self._between_steps:
            result: T = await self._call(function, self.engine, *args)
            return result

    async def beat(self) -> dict[str, float]:
        """`LLMEngine.beat` between two steps, by the thread that runs them: an answer says that the
        engine goes on, not only the event loop beside it."""
        return await self.run_between_steps(type(self.engine).beat)

    async def close(self) -> None:
        """Stop driving; awaiting callers are cancelled."""
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        for caller in self._callers.values():
            caller.cancel()
        self._callers.clear()
        if self._executor is not None and self._owns_executor:
            self._executor.shutdown(wait=True)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
        self._between_steps, self._can_step = asyncio.Lock(), asyncio.Event()
        self._can_add = asyncio.Event()
        self._can_add.set()
        if not (self.engine.is_paused or self.engine.is_asleep):
            self._can_step.set()

    async def _drive(self) -> None:
        while self._callers:
            await self._can_step.wait()
            async with self._between_steps:
                try:
                    finished = await self._call(self.engine.step)
                except Exception as error:
                    if not self._fail_all(error):
                        raise
                    continue
            for handle, output in finished:
                caller = self._callers.pop(handle, None)
                if caller is not None and not caller.done():
                    caller.set_result(output)
            for handle, caller in self._callers.items():
                if not isinstance(caller, asyncio.Future):  # a stream, which is fed as it grows
                    caller.feed(self.engine.peek(handle))
            await asyncio.sleep(0)  # callers that have their answer go on before the next step

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
