"""A replica: one inference engine that answers requests, as an actor.

    replica = sched.actor(Replica, num_cpus=1).remote(ReplicaRecipe(folder=folder))
    output = await replica.call(Replica.generate, ids, params, "r0")

A replica loses nothing by a caller that goes away (`abort`), by new weights (they change between
two steps, all or none of them) or by its own end: after `drain` every request has answered with the
tokens it has, and another replica goes on from there (router.py). What it says depends on its
weights and the request alone, so it has no random state to hand over.

Left out: starting and watching replicas (the driver does), and where weights come from: a
`receiver` brings them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.model.device import enter_device, resolve_device
from nanoengine.model.hf import load_model
from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams


@dataclass(frozen=True, kw_only=True)
class ReplicaRecipe:
    """All that a process needs to make a replica's engine; it can be pickled."""

    folder: Path
    """Hugging Face folder of the model, whose weights are version `version`."""
    dtype: torch.dtype = torch.float32
    device: str = "auto"
    """auto (CUDA if there is any), cpu, cuda or cuda:N."""
    threads: int = 1
    """CPU threads of the engine's steps."""
    infer: InferConfig = field(default_factory=InferConfig)
    version: int = 0

    def make(self) -> AsyncEngine:
        """Load the model and put an engine around it."""
        device = resolve_device(self.device)
        enter_device(device, self.threads)
        model = load_model(self.folder, self.dtype, str(device))
        has_text = (self.folder / "tokenizer.json").exists()
        tokenizer = ChatTokenizer.from_folder(self.folder) if has_text else None
        engine = LLMEngine(model, self.infer, self.version, tokenizer)
        return AsyncEngine(engine)  # its thread has as many CPU threads as this one


class WeightSource(Protocol):
    """The receiving end of a transport of weights."""

    def receive(self, offer: Any) -> Iterable[tuple[str, Tensor]]:
        """All tensors of the offer by their Hugging Face names, verified; raises otherwise."""


class Replica:
    """An engine behind messages. Calls may overlap; each takes effect between two steps."""

    def __init__(
        self, recipe: ReplicaRecipe | None = None, *, generator: AsyncEngine | None = None
    ) -> None:
        """`generator` is a ready engine of the caller's, who closes it; else `recipe` makes one."""
        if (recipe is None) == (generator is None):
            raise ValueError("recipe and generator: a replica is made of one of them; give one")
        self._owns_generator = generator is None
        if recipe is not None:
            generator = recipe.make()
        assert generator is not None, "checked above"
        self._generator = generator
        self._is_drained = False

    async def generate(
        self,
        ids: list[int],
        params: SamplingParams,
        name: str | None = None,
        sampled: Output | None = None,
    ) -> Output:
        """Complete `ids`, from what is `sampled` on. Once drained: nothing new, finish_reason
        "abort". `abort(name)` ends it."""
        if self._is_drained:
            return sampled if sampled is not None else Output(finish_reason="abort")
        return await self._generator.generate(ids, params, 0, name, sampled)

    async def abort(self, name: str) -> int:
        """End the requests of that name, whose caller is gone; how many there were."""
        return await self._generator.abort(name)

    async def drain(self) -> None:
        """Take no more requests; those under way answer with what they have, finish_reason
        "abort". It is for good."""
        self._is_drained = True
        await self._generator.abort()

    async def load_weights(self, receiver: WeightSource, offer: Any) -> float:
        """Replace the weights between two steps; returns the seconds. Whatever is wrong with them
        raises, and then the old version goes on serving."""
        start = perf_counter()
        await self._generator.update_weights(receiver.receive(offer), offer.version)
        return perf_counter() - start

    async def sleep(self) -> None:
        """Lend the cache's memory to somebody else; requests wait until `wake`."""
        await self._generator.sleep()

    async def wake(self) -> None:
        await self._generator.wake()

    def metrics(self) -> dict[str, float]:
        """The engine's totals and queues, without waiting for the step that runs."""
        return self._generator.metrics() | {"is_drained": float(self._is_drained)}

    async def heartbeat(self) -> dict[str, float]:
        """`metrics` between two steps, taken by the thread that runs them: it answers if the engine
        goes on, and only then. A step takes as long as it takes, so the limit is the caller's."""
        return await self._generator.beat()

    async def close(self) -> None:
        """Cancel what is under way and end the engine's thread, unless they are the caller's."""
        if self._owns_generator:
            await self._generator.close()
