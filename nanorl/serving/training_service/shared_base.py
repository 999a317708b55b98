"""What all clients of a service share: the base model, the thread that computes, the engines that
sample, and room for a number of models.

Nothing of a client's is in here but weights that an engine holds, which are found by the folder of
a snapshot alone. Left out: shares of the room; who comes first has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from nanoinfer.cancellation import to_the_end
from nanoinfer.params import Output
from nanorl.serving.training_service.base_model import TrainableBase
from nanorl.serving.training_service.service_config import ServiceConfig
from nanorl.serving.training_service.service_sampling import ParamsOf, Samplers, Weights

T = TypeVar("T")


class SharedBase:
    """One base model and the thread that computes."""

    def __init__(
        self, config: ServiceConfig, base: TrainableBase, executor: ThreadPoolExecutor
    ) -> None:
        self.config, self.base = config, base
        self.num_models = 0
        self._executor = executor
        self._samplers: Samplers | None = None  # made in the event loop that uses it

    def take_room(self) -> None:
        """Count one more model. `ValueError` where there are as many as there may be."""
        if self.num_models >= self.config.max_models:
            raise ValueError(
                f"create_model: {self.num_models} models are here already, the most that "
                "max_models allows; unload one, or close its session"
            )
        self.num_models += 1

    def give_room(self) -> None:
        """Count one model less."""
        self.num_models -= 1

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` in the thread that computes, to its end."""
        work: Awaitable[T] = asyncio.get_running_loop().run_in_executor(
            self._executor, function, *args
        )
        return await to_the_end(work)

    async def sample(
        self, snapshot: str, weights: Weights, ids: list[int], params: ParamsOf
    ) -> list[Output]:
        """The completions of one prompt by the snapshot of that name."""
        if self._samplers is None:
            limit = self.config.max_samplers
            self._samplers = Samplers(self.base.make_sampler, self._executor, limit)
        return await self._samplers.sample(snapshot, weights, ids, params)

    async def close(self) -> None:
        if self._samplers is not None:
            await self._samplers.close()
        await asyncio.to_thread(self._executor.shutdown)
