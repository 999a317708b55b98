"""A replica: one inference engine that answers requests, as an actor.

    replica = sched.actor(Replica, num_cpus=1).remote(ReplicaRecipe(folder=folder))
    output = await replica.call(Replica.generate, ids, params, "r0")

A replica loses nothing by a caller that goes away (`abort`), by new weights (they change between
two steps, all or none of them) or by its own end: after `drain` every request has answered with the
tokens it has, and another replica goes on from there (router.py). What it says depends on its
weights and the request alone, so it has no random state to hand over.

A model that is split over tensor-parallel ranks has a replica on each, made of one recipe with the
ranks' `Seat`s. Rank 0 answers for all; the others only `follow`. Weights come to rank 0.

Left out: starting and watching replicas (the driver does), and where weights come from
(nanorl/distributed/weights).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nanoengine.formats.hf import load_model
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.device import enter_process, resolve_device
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.meeting_store import MeetingPoint
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import join_mesh
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.led_engine import LedEngine, follow
from nanorl.distributed.roles.give_sight import share_sight
from nanorl.distributed.roles.shared_folder import require_folder
from nanorl.distributed.weights.offer import Offer, WeightReceiver
from nanorl.observability.monitor.vitals import vitals


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
    pictures: Path | None = None
    """The folder of the run's pictures, for a model that sees."""

    def make(self, mesh: Mesh | None = None) -> LLMEngine:
        """Load the model, or this rank's part of it, and make an engine of it."""
        require_folder(self.folder)
        enter_process(self.place, self.threads)
        split = None
        if mesh is not None:
            split = TensorParallel.of(mesh, ModelConfig.from_folder(self.folder))
        model = load_model(self.folder, self.dtype, str(self.place), split=split)
        share_sight(model, self.folder, self.pictures)
        has_text = (self.folder / "tokenizer.json").exists()
        tokenizer = ChatTokenizer.from_folder(self.folder) if has_text else None
        given = (model, self.infer, self.version, tokenizer)
        leads = mesh is not None and mesh.rank("tp") == 0
        return LedEngine(*given, mesh=mesh) if mesh is not None and leads else LLMEngine(*given)

    @property
    def place(self) -> torch.device:
        return resolve_device(self.device)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One rank of a replica that is split over `tp` of them, and where they meet.

    `Seat(rank=1, tp=2, meeting=meeting, name="r0")`, where `store, meeting = open_store()`
    (nanoengine.parallel.rendezvous) lives with the driver. Groups that share a store need different
    names, a restarted one too."""

    rank: int
    tp: int
    meeting: MeetingPoint
    name: str
    timeout_s: float = 120.0
    """A rank that says nothing for this long is lost; heartbeats come more often."""

    def mesh(self, device: torch.device) -> Mesh:
        """Connect with the others; all ranks do it at a time."""
        return join_mesh(
            self.meeting,
            Layout(tp=self.tp),
            self.rank,
            device=device,
            name=self.name,
            timeout_s=self.timeout_s,
        )


class Replica:
    """An engine behind messages. Calls may overlap; each takes effect between two steps."""

    def __init__(
        self,
        recipe: ReplicaRecipe | None = None,
        *,
        seat: Seat | None = None,
        generator: AsyncEngine | None = None,
    ) -> None:
        """`generator` is a ready engine of the caller's, who closes it; else `recipe` makes one,
        or with a `seat` the part of one."""
        if (recipe is None) == (generator is None):
            raise ValueError("recipe and generator: a replica is made of one of them; give one")
        self._is_drained = False
        self._num_active = 0
        self._is_idle = asyncio.Event()
        self._receiver: WeightReceiver | None = None
        self._owns_generator = generator is None
        self._mesh: Mesh | None = None
        if recipe is not None:
            self._mesh = seat.mesh(recipe.place) if seat is not None else None
            # The engine's own thread will have as many CPU threads as `make` sets in this one.
            generator = AsyncEngine(recipe.make(self._mesh))
        assert generator is not None, "checked above"
        self._generator = generator

    async def follow(self) -> None:
        """For the ranks of a split replica but the first: do what that does, until it is closed.
        `RanksLost` if it is gone. Heartbeats go to the first alone; here they wait for the end."""
        assert self._mesh is not None, "a replica without a seat has nobody to follow"
        await self._generator.run_between_steps(follow, self._mesh)

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
        self._num_active += 1
        try:
            return await self._generator.generate(ids, params, 0, name, sampled)
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._is_idle.set()

    async def abort(self, name: str | None = None) -> int:
        """End the requests of that name, or all, whose caller is gone; how many there were."""
        return await self._generator.abort(name)

    async def drain(self) -> None:
        """Take no more requests; those under way answer with what they have, finish_reason
        "abort". It is for good. When this returns they have answered, and it may be killed."""
        self._is_drained = True
        await self._generator.abort()
        while self._num_active:
            self._is_idle.clear()
            await self._is_idle.wait()

    async def load_weights(self, receiver: WeightReceiver, offer: Offer) -> float:
        """Replace the weights between two steps; returns the seconds. Whatever is wrong with them
        raises, and then the old version goes on serving."""
        start = perf_counter()
        if self._receiver is None or self._receiver.key != receiver.key:
            self._receiver = receiver  # it keeps what it has opened, so the first one stays
        state = self._receiver.receive(offer)
        await self._generator.update_weights(
            state, offer.version, is_finite=self._receiver.refuses_nan
        )
        return perf_counter() - start

    async def sleep(self) -> None:
        """Lend the cache's memory to somebody else; requests wait until `wake`."""
        await self._generator.sleep()

    async def wake(self) -> None:
        await self._generator.wake()

    def metrics(self) -> dict[str, float]:
        """The engine's totals and queues, without waiting for the step that runs."""
        return self._generator.metrics() | {"is_drained": float(self._is_drained)}

    async def heartbeat(self) -> dict[str, Any]:
        """`metrics` between two steps, taken by the thread that runs them: it answers if the engine
        goes on, and only then. A step takes as long as it takes, so the limit is the caller's."""
        return {**vitals(), **await self._generator.beat()}

    async def close(self) -> None:
        """Cancel what is under way and end the engine's thread, unless they are the caller's."""
        if not self._owns_generator:
            return
        if isinstance(self._generator.engine, LedEngine):
            await self._generator.run_between_steps(LedEngine.dismiss)
        await self._generator.close()
