"""Two engines of one process: whether they can share the trainer's weights, and how these are
copied where they cannot.

Engines on one GPU take turns as those on a CPU do: nobody decodes during a synchronous optimizer
step, so the memory of the rollouts' cache, and of the CUDA graphs that read it by address, is free
for activations. The price is that graphs are captured again. On two GPUs, and where rollouts go on
beside the optimizer, nothing sleeps.
Left out: sharing on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from nanoengine.state.whole_engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanorl.learner import SharedWeights
from nanorl.options.run_config import RunConfig


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


class CopiedWeights(SharedWeights):
    """The publisher where the rollout engine has a model of its own."""

    def __init__(self, trainer: Engine, generator: AsyncEngine, *, max_staleness: int = 0) -> None:
        super().__init__(generator)
        self._writer = generator
        self._trainer, self._max_staleness = trainer, max_staleness

    async def publish(self, version: int) -> float:
        """Copy the weights over as policy `version`; returns seconds.

        It happens between two steps of the engine: check every name, shape and value, write in
        place, repack, bump the version, drop the KV cache. A bad update leaves the old version
        serving.
        """
        start = time.perf_counter()
        await self._writer.update_weights(self._trainer.export_state(), version)
        return time.perf_counter() - start

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Inside, the rollout engine sleeps if its cache lies on the trainer's device."""
        is_apart = self._generator.engine.model.device != self._trainer.model.device
        if is_apart or self._max_staleness > 0:
            yield
            return
        async with super().lent():
            yield


def make_publisher(
    trainer: Engine, generator: AsyncEngine, *, max_staleness: int = 0
) -> SharedWeights:
    """The publisher between two engines of this process."""
    if trainer.model is generator.engine.model:
        return SharedWeights(generator)
    return CopiedWeights(trainer, generator, max_staleness=max_staleness)
