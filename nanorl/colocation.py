"""Two engines of one process: the weights go from one to the other, and on one GPU they take turns.

In a synchronous run nobody decodes during an optimizer step, so the memory of the rollouts' cache,
and of the CUDA graphs that read it by address, is free for activations. Afterwards the cache is
empty anyhow: its keys and values were the old weights'. The price is that graphs are captured
again. On a CPU, on two GPUs, and where rollouts go on beside the optimizer, nothing happens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nanoengine.engine import Engine
from nanoinfer.async_engine import AsyncEngine


class InlinePublisher:
    """Hands the trainer's weights to the inference engine of the same process (learner.py)."""

    def __init__(self, trainer: Engine, generator: AsyncEngine, *, max_staleness: int = 0) -> None:
        self._trainer, self._generator = trainer, generator
        self._max_staleness = max_staleness

    async def publish(self, version: int) -> float:
        """Copy the weights as policy `version`; returns seconds.

        It happens between two steps of the engine: check every name, shape and value, write in
        place, repack, bump the version, drop the KV cache. A bad update leaves the old version
        serving.
        """
        start = time.perf_counter()
        await self._generator.update_weights(self._trainer.export_state(), version)
        return time.perf_counter() - start

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Inside, the rollout engine sleeps if its cache lies on the trainer's GPU."""
        device = self._trainer.model.device
        is_shared = device.type == "cuda" and self._generator.engine.model.device == device
        if not is_shared or self._max_staleness > 0:
            yield
            return
        await self._generator.sleep()
        try:
            yield
        finally:
            await self._generator.wake()
