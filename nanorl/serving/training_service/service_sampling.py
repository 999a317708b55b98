"""Inference engines that serve snapshots of weights: a few at a time, each with a snapshot.

A snapshot is named by its `tinker://` path, the base model by its own name. A request holds its
engine while it samples. One for a snapshot that no engine has takes a free engine, and with it
that engine's memory: the weights are read from the snapshot's folder into it. With fewer engines
than snapshots in use, requests wait for each other, and each change costs the reading.

All engines run in one thread, the training's: nothing here depends on who is computing beside it.
Left out: weights that change under a running request (the client's kind "inflight").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from nanoinfer.async_engine import AsyncEngine
from nanoinfer.cancellation import to_the_end
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""The tensors of a snapshot, by their Hugging Face names."""
ParamsOf = Callable[[int], SamplingParams]
"""The parameters of a request, given how many tokens there is room for."""


@dataclass
class _Slot:
    engine: AsyncEngine
    snapshot: str = ""  # none yet, or one that is being replaced
    num_users: int = 0
    last_used: int = 0
    version: int = 0


class Samplers:
    """At most `max_engines` engines for all snapshots. `make_engine` is called in the thread of
    `executor`."""

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        executor: ThreadPoolExecutor,
        max_engines: int,
    ) -> None:
        self._make_engine, self._executor, self._max = make_engine, executor, max_engines
        self._slots: list[_Slot] = []
        self._freed = asyncio.Condition()
        self._clock = 0

    async def sample(
        self, snapshot: str, weights: Weights, ids: list[int], params: ParamsOf
    ) -> list[Output]:
        """The completions of one prompt. `ValueError` for a request that could never run."""
        async with self._engine(snapshot, weights) as engine:
            room = engine.engine.room(len(ids))
            if room < 1:
                raise ValueError(f"prompt: {len(ids)} tokens leave no room for one more")
            asked = params(room)
            engine.engine.validate(ids, asked)
            return list(
                await asyncio.gather(*(engine.generate(ids, one) for one in asked.members()))
            )

    async def close(self) -> None:
        for slot in self._slots:
            await slot.engine.close()

    @asynccontextmanager
    async def _engine(self, snapshot: str, weights: Weights) -> AsyncIterator[AsyncEngine]:
        slot = await self._take(snapshot, weights)
        try:
            yield slot.engine
        finally:
            # Who gives up a request may say so twice, while another snapshot is read.
            await to_the_end(self._give_back(slot))

    async def _give_back(self, slot: _Slot) -> None:
        async with self._freed:
            slot.num_users -= 1
            self._freed.notify_all()

    async def _take(self, snapshot: str, weights: Weights) -> _Slot:
        async with self._freed:
            while (slot := await self._find(snapshot)) is None:
                await self._freed.wait()
            self._clock += 1
            slot.num_users, slot.last_used = slot.num_users + 1, self._clock
            if slot.snapshot == snapshot:
                return slot
            try:  # under the lock: nobody else sees a slot between two snapshots
                slot.version += 1
                await slot.engine.update_weights(weights(), slot.version)
                slot.snapshot = snapshot
            except BaseException:  # a cancellation too: weights may be half of each
                slot.snapshot, slot.num_users = "", slot.num_users - 1
                raise
            return slot

    async def _find(self, snapshot: str) -> _Slot | None:
        """The slot that has the snapshot, else one that nobody uses; None while there is none."""
        for slot in self._slots:
            if slot.snapshot == snapshot:
                return slot
        if len(self._slots) < self._max:
            loop = asyncio.get_running_loop()
            engine = await loop.run_in_executor(self._executor, self._make_engine)
            slot = _Slot(AsyncEngine(engine, executor=self._executor))
            self._slots.append(slot)
            return slot
        idle = [slot for slot in self._slots if slot.num_users == 0]
        if not idle:
            return None
        return min(idle, key=lambda slot: slot.last_used)
