"""`LLMEngine` for coroutines: each rollout awaits its own tokens, all are decoded together.

engine_loop.py drives the engine. With `use_thread` (the default) a step runs in one worker thread
and the loop goes on serving tools meanwhile. Requests have names here by which they are aborted,
may be streamed, and wait while the engine is paused.
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
from nanoinfer.engine_loop import EngineLoop
from nanoinfer.params import Output, SamplingParams

T = TypeVar("T")
_STREAM = "nanoinfer.options.streams:stream"


class AsyncEngine(EngineLoop):
    """One engine, one event loop at a time. Use as an async context manager, or call `close`."""

    engine: LLMEngine

    def __init__(
        self,
        engine: LLMEngine,
        use_thread: bool = True,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        """`executor` is a thread of the caller's to run the steps in, instead of an own one."""
        self._owns_executor = executor is None
        if use_thread and executor is None:
            num_threads = torch.get_num_threads()  # else the worker's first op would set its own
            executor = worker_thread("nanoinfer", engine.model.device, num_threads)
        super().__init__(engine, executor)
        self._names: dict[int, str | None] = {}  # of the requests in flight
        self._can_add = asyncio.Event()

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
        add = partial(self.engine.add, ids, params, priority, sampled)
        handle = await self.submit(caller, add)
        self._names[handle] = name
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

    async def update_weights(
        self, state: Iterable[tuple[str, Tensor]], version: int, *, is_finite: bool = False
    ) -> None:
        """`LLMEngine.update_weights` between two steps; no pause needed."""
        self._bind()
        async with self._answered(), self._between_steps:
            update = partial(self.engine.update_weights, is_finite=is_finite)
            await self._call(update, state, version)

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

    def _renew(self) -> None:
        super()._renew()
        self._can_add = asyncio.Event()
        self._can_add.set()

    def _answer(self, finished: list[tuple[int, Output]]) -> None:
        super()._answer(finished)
        for handle, caller in self._callers.items():
            if not isinstance(caller, asyncio.Future):  # a stream, which is fed as it grows
                caller.feed(self.engine.peek(handle))
