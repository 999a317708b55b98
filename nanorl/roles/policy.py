"""The policy role: a rank of the training engine, and the engine that its ranks are together.

    driver                                   each rank, a process
    RankedEngine.train_step(samples)  ───►   PolicyRank.train_step(its share)
                                      ◄───   metrics, log-probs of its share

`RankedEngine` looks like an `Engine` to whoever trains. It deals the samples of a batch out
(nanoengine/dealing.py) and puts the log-probs back in order; losses and gradients are sums over all
ranks divided by one weight, so the deal changes nothing but the order of sums, and of a single rank
not even that. Its methods block: they are called in a thread beside the event loop.

A rank that dies takes its group with it (a collective operation cannot go on without it), and every
call then raises `TrainerLost`: what the ranks knew since the newest checkpoint is gone, so who runs
the training makes new ones and goes back to it (run.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from nanoengine.build import SplitConfig, build_engine
from nanoengine.config import EngineConfig
from nanoengine.dealing import Deal, deal
from nanoengine.engine import Engine, LossFn, WeightFn
from nanoengine.model.device import enter_device, resolve_device, worker_thread
from nanoengine.model.hf import copy_extra_files, replace_folder, replace_model
from nanoengine.packing import Sample
from nanoengine.parallel.mesh import Layout
from nanoengine.parallel.rendezvous import MeshRank
from nanoengine.state.export import export_hf
from nanorl.roles.ranks import results
from nanosched import Future, WorkerDied, WorkerGroup

R = TypeVar("R")


class TrainerLost(RuntimeError):  # noqa: N818 (named as what happened)
    """A process of the trainer died; its weights since the newest checkpoint are gone."""


@dataclass(frozen=True, kw_only=True)
class PolicyRecipe:
    """All that the processes of a trainer need to make its engine; it can be pickled."""

    folder: Path
    """Hugging Face folder of the model."""
    config: EngineConfig
    split: SplitConfig
    device: str
    threads: int
    """CPU threads of each process."""


class PolicyRank(MeshRank):
    """One rank of the training engine. Heavy work runs in a thread, one call after another, while
    the actor goes on answering heartbeats."""

    def __init__(self, layout: Layout, rank: int, recipe: PolicyRecipe) -> None:
        super().__init__(layout, rank)
        self.recipe = recipe
        device = resolve_device(recipe.device)
        enter_device(device, recipe.threads)
        self._thread = worker_thread("policy", device, recipe.threads)
        self._engine: Engine | None = None
        self._num_running = 0

    async def build(self) -> None:
        """Make the engine; every rank at the same time. `ValueError` for what it refuses."""
        await self._work(self._build)

    def _build(self) -> None:
        recipe = self.recipe
        self._engine = build_engine(recipe.folder, recipe.config, self.mesh, recipe.split)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "`build` comes first"
        return self._engine

    async def _work(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        self._num_running += 1
        try:
            return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        finally:
            self._num_running -= 1

    async def train_step(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight_fn: WeightFn | None,
        temperature: float,
        entropy: bool,
    ) -> tuple[dict[str, float], list[Tensor]]:
        """`Engine.train_step` on this rank's share; its metrics and the share's log-probs."""
        metrics = await self._work(
            self.engine.train_step,
            samples,
            loss_fn,
            weight_fn,
            temperature=temperature,
            entropy=entropy,
        )
        return metrics, self.engine.last_logps

    async def forward_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        return await self._work(self.engine.forward_logprobs, samples, temperature=temperature)

    async def restart(self, config: EngineConfig) -> None:
        await self._work(self.engine.restart, config)

    async def save(self, path: Path, cursor: Mapping[str, Any]) -> None:
        await self._work(self.engine.save, path, cursor)

    async def load(self, path: Path) -> dict[str, Any]:
        return await self._work(self.engine.load, path)

    async def write_model(self, folder: Path, extra_files_from: Path | None) -> None:
        """All ranks write one Hugging Face folder, whole or not at all."""
        await self._work(self._write_model, folder, extra_files_from)

    def _write_model(self, folder: Path, extra_files_from: Path | None) -> None:
        engine = self.engine
        if engine.mesh.size() == 1:
            replace_model(engine.model, folder, extra_files_from)
            return

        def export(draft: Path) -> None:
            with engine.optimizer.gathered():
                export_hf(engine.mesh, engine.models, draft)
            copy_extra_files(extra_files_from, draft)

        if self.rank == 0:
            replace_folder(folder, export)
        else:  # it hands over its slices, and writes nothing
            with engine.optimizer.gathered():
                export_hf(engine.mesh, engine.models, folder)

    async def send_weights(self, sender: Any, version: int) -> Any:
        """Hand the weights to a transport as policy `version`; rank 0 returns the offer."""
        return await self._work(sender.send, self.engine, version)

    async def heartbeat(self) -> dict[str, float]:
        """Answers from the loop that takes the calls."""
        return {"pid": float(os.getpid()), "num_running": float(self._num_running)}


class RankedEngine:
    """The ranks of a `WorkerGroup[PolicyRank]` as one engine. Call it from a thread."""

    def __init__(
        self,
        group: WorkerGroup[PolicyRank],
        layout: Layout,
        loop: asyncio.AbstractEventLoop,
        *,
        share_prefix: bool,
    ) -> None:
        """`share_prefix` is that of the ranks' engines."""
        self.group = group
        self.last_logps: list[Tensor] = []
        self._layout, self._loop, self._share_prefix = layout, loop, share_prefix

    def train_step(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight_fn: WeightFn | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> dict[str, float]:
        """Update the weights once, as `Engine.train_step` does. `loss_fn` and `weight_fn` travel:
        functions of a module, or objects that can be pickled."""
        dealt = self._deal(samples)
        options = (loss_fn, weight_fn, temperature, entropy)
        answers = self._call_each(
            PolicyRank.train_step, lambda rank: (dealt.hand(samples, rank), *options)
        )
        self.last_logps = dealt.collect([logps for _, logps in answers])
        return answers[0][0]

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        dealt = self._deal(samples)
        return dealt.collect(
            self._call_each(
                PolicyRank.forward_logprobs,
                lambda rank: (dealt.hand(samples, rank), temperature),
            )
        )

    def restart(self, config: EngineConfig) -> None:
        self._call(PolicyRank.restart, config)

    def save(self, path: Path, cursor: Mapping[str, Any]) -> None:
        self._call(PolicyRank.save, path, cursor)

    def load(self, path: Path) -> Mapping[str, Any]:
        return self._call(PolicyRank.load, path)[0]

    def write_model(self, folder: Path, extra_files_from: Path | None = None) -> None:
        self._call(PolicyRank.write_model, folder, extra_files_from)

    def _deal(self, samples: Sequence[Sample]) -> Deal:
        return deal(samples, self._layout, share_prefix=self._share_prefix)

    def _call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self._call_each(method, lambda _: args)

    def _call_each(
        self, method: Callable[..., Any], args_of: Callable[[int], Sequence[Any]]
    ) -> list[Any]:
        """Call all ranks, each with its own arguments, and wait; results in order of rank."""

        async def calls() -> list[Any]:
            return await answers(self.group, self.group.call_each(method, args))

        args = [args_of(rank) for rank in range(len(self.group))]
        return asyncio.run_coroutine_threadsafe(calls(), self._loop).result()


async def answers(group: WorkerGroup[PolicyRank], calls: Sequence[Future[R]]) -> list[R]:
    """The ranks' results, in order; the first error of a method, or TrainerLost."""
    try:
        return await results(group, calls)
    except WorkerDied as died:
        raise TrainerLost(f"the trainer died ({died})") from died
