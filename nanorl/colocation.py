"""Two engines of one process: weights go from one to the other, and on one device they take turns.

In a synchronous run nobody decodes during an optimizer step, so the memory of the rollouts' cache,
and of the CUDA graphs that read it by address, is free for activations. Afterwards the cache is
empty anyhow: its keys and values were the old weights'. The price is that graphs are captured
again. On two GPUs, and where rollouts go on beside the optimizer, nothing happens.

Two engines that take turns can read one set of weights, parameters and prepacked copies: on a CPU
the rollout engine is given the trainer's own model (`can_share_weights`; 4 bytes a weight in bf16).
Then nothing is copied, and an update is complete when the trainer has repacked its model. Until it
is published the rollout engine sleeps, and would refuse to run a step if it were asked to.
Left out: sharing on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from nanoengine.engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanorl.config import RunConfig


def can_share_weights(config: RunConfig, device: torch.device) -> bool:
    """Say whether both engines of this process may read one set of weights: they take turns in one
    thread, no request waits for its end before an update, and rollouts read what the trainer
    trains (not a quantised copy, nor a base and an adapter, whose trainer merges as it likes; over
    an int8 base it adds, and the rollout engine with it)."""
    return (
        device.type == "cpu"
        and config.rl.max_staleness == 0
        and config.engine.in_flight != "wait"
        and config.engine.quantization == "none"
        and (not config.lora.rank or config.lora.is_int8)
    )


class InlinePublisher:
    """Hands the trainer's weights to the inference engine of the same process (learner.py)."""

    def __init__(self, trainer: Engine, generator: AsyncEngine, *, max_staleness: int = 0) -> None:
        self._trainer, self._generator = trainer, generator
        self._max_staleness = max_staleness

    async def publish(self, version: int) -> float:
        """Hand over the weights as policy `version`; returns seconds.

        It happens between two steps of the engine: check every name, shape and value, write in
        place, repack, bump the version, drop the KV cache. A bad update leaves the old version
        serving. Of shared weights only the values are checked; bad ones are not served.
        """
        start = time.perf_counter()
        if self._trainer.model is self._generator.engine.model:
            await self._generator.adopt_weights(version)
        else:
            await self._generator.update_weights(self._trainer.export_state(), version)
        return time.perf_counter() - start

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Inside, the rollout engine sleeps if its cache lies on the trainer's device. Where the
        trainer has written into the weights that both read, it sleeps on until `publish`."""
        engine = self._generator.engine
        if engine.model.device != self._trainer.model.device or self._max_staleness > 0:
            yield
            return
        await self._generator.sleep()
        try:
            yield
        finally:
            if engine.is_current:
                await self._generator.wake()
