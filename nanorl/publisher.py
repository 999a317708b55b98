"""How trained weights become those that sample: the rollout engine adopts the trainer's model.

Two engines that take turns can read one set of weights, parameters and prepacked copies: on a CPU
the rollout engine is given the trainer's own model (4 bytes a weight in bf16). Nothing is copied,
and an update is complete when the trainer has repacked its model. Until it is published the
rollout engine sleeps, and would refuse to run a step if it were asked to.
Left out: engines that share no weights, because they have a GPU each or go on during a step
(distributed/weights/in_process.py), or live in other processes (distributed/weights/).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from nanoinfer.engine_loop import EngineLoop


class Publisher(Protocol):
    """The way from the trainer's weights to the engines that sample with them."""

    async def publish(self, version: int) -> float:
        """Hand them over as policy `version`; returns seconds. An engine that refuses them goes on
        with its old version."""
        ...

    def lent(self) -> AbstractAsyncContextManager[None]:
        """Inside, the trainer may use the devices that it shares with those engines."""
        ...


class SharedWeights:
    """The publisher where trainer and rollout engine read one model."""

    def __init__(self, generator: EngineLoop) -> None:
        self._generator = generator

    async def publish(self, version: int) -> float:
        """Have the rollout engine take the weights for policy `version`; returns seconds.

        It happens between two steps of the engine, which checks every value, bumps its version and
        drops the KV cache: the keys in it were computed by the old weights.
        ValueError for a weight that is not finite; the engine serves none of them.
        """
        start = time.perf_counter()
        await self._generator.adopt_weights(version)
        return time.perf_counter() - start

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Inside, the rollout engine sleeps, and its cache's memory is free for activations: what
        it held would be worthless after the update anyway."""
        await self._generator.sleep()
        try:
            yield
        finally:
            # A trainer that has written leaves weights of no version: `publish` wakes the engine.
            if self._generator.engine.is_current:
                await self._generator.wake()
