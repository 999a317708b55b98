"""The policy role: a rank of the training engine, and the engine that its ranks are together.

    driver                                   each rank, a process
    RankedEngine.train_step(samples)  ───►   PolicyRank.train_step(its share)
                                      ◄───   metrics, log-probs of its share

`RankedEngine` looks like an `Engine` to whoever trains. It deals the samples of a batch out
(nanoengine/parallel/dealing.py) and puts the log-probs back in order; losses and gradients are sums
over all ranks divided by one weight, so the deal changes nothing but the order of sums, and of a
single rank not even that. Its methods block: they are called in a thread beside the event loop.

A rank that dies takes its group with it (a collective operation cannot go on without it), and every
call then raises `TrainerLost`: what the ranks knew since the newest checkpoint is gone, so who runs
the training makes new ones and goes back to it (run.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoengine.build import build_engine
from nanoengine.config import EngineConfig
from nanoengine.engine import LossFn, WeightFn
from nanoengine.formats.hf import copy_extra_files, replace_folder, replace_model
from nanoengine.packing import Sample, TopTokens
from nanoengine.parallel.dealing import Deal, deal
from nanoengine.parallel.device import resolve_device
from nanoengine.parallel.layout import Layout, SplitConfig
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.rendezvous import join_mesh, open_store
from nanoengine.state.export import export_hf
from nanoengine.state.whole_engine import Engine
from nanorl.distributed.roles.give_sight import share_sight
from nanorl.distributed.roles.role_ranks import results, start_ranks
from nanorl.distributed.roles.shared_folder import require_folder
from nanorl.distributed.roles.work import WorkThread
from nanorl.distributed.weights.offer import Offer, WeightSender
from nanorl.observability.monitor.vitals import vitals
from nanosched import Future, WorkerDied, WorkerGroup, meeting_address


class TrainerLost(RuntimeError):  # noqa: N818 (named as what happened)
    """A process of the trainer died; its weights since the newest checkpoint are gone."""


@dataclass(frozen=True, kw_only=True)
class PolicyRecipe:
    """All that the processes of a trainer need to make its engine; it can be pickled."""

    folder: Path
    """Hugging Face folder of the model."""
    config: EngineConfig
    layout: Layout
    split: SplitConfig
    device: str
    threads: int
    """CPU threads of each process."""
    pictures: Path | None = None
    """The folder of the run's pictures, for a model that sees."""


class PolicyRank:
    """One rank of the training engine. Heavy work runs in a thread, one call after another, while
    the actor goes on answering heartbeats."""

    def __init__(self, recipe: PolicyRecipe, rank: int) -> None:
        self.recipe, self.rank = recipe, rank
        self.device = resolve_device(recipe.device)
        self._work = WorkThread("policy", self.device, recipe.threads)
        self._store: MeetingStore | None = None
        self._engine: Engine | None = None
        self._sender: WeightSender | None = None
        self._version = -1  # that was handed over last

    async def open_store(self) -> MeetingPoint:
        """For rank 0: where the others find it, on this machine or another one of the cluster."""
        self._store, meeting = open_store(meeting_address())
        return meeting

    async def build(self, meeting: MeetingPoint | None) -> None:
        """Make the engine; every rank at the same time. `ValueError` for what it refuses."""
        await self._work.run(self._build, meeting)

    def _build(self, meeting: MeetingPoint | None) -> None:
        recipe, mesh = self.recipe, None
        require_folder(recipe.folder)
        if meeting is not None:
            mesh = join_mesh(
                meeting, recipe.layout, self.rank, store=self._store, device=self.device
            )
        self._engine = build_engine(recipe.folder, recipe.config, mesh, recipe.split)
        for model in self._engine.models:
            share_sight(model, recipe.folder, recipe.pictures)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "`build` comes first"
        return self._engine

    async def train_step(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight_fn: WeightFn | None,
        temperature: float,
        entropy: bool,
    ) -> tuple[dict[str, float], list[Tensor], list[Tensor]]:
        """`Engine.train_step` on this rank's share; its metrics, the share's log-probs and, where
        they were asked for, entropies."""
        metrics = await self._work.run(
            self.engine.train_step,
            samples,
            loss_fn,
            weight_fn,
            temperature=temperature,
            entropy=entropy,
        )
        return metrics, self.engine.last_logps, self.engine.last_entropies

    async def forward_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        return await self._work.run(self.engine.forward_logprobs, samples, temperature=temperature)

    async def forward_entropies(
        self, samples: Sequence[Sample], temperature: float
    ) -> list[Tensor]:
        return await self._work.run(self.engine.forward_entropies, samples, temperature=temperature)

    async def forward_top(
        self, samples: Sequence[Sample], k: int, temperature: float
    ) -> list[TopTokens]:
        return await self._work.run(self.engine.forward_top, samples, k, temperature=temperature)

    async def average_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        return await self._work.run(self.engine.average_logprobs, samples, temperature=temperature)

    async def average_top(
        self, samples: Sequence[Sample], k: int, temperature: float
    ) -> list[TopTokens]:
        return await self._work.run(self.engine.average_top, samples, k, temperature=temperature)

    async def keep_average(self, rate: float) -> None:
        await self._work.run(self.engine.keep_average, rate)

    async def restart(self, config: EngineConfig) -> None:
        await self._work.run(self.engine.restart, config)

    async def save(
        self, path: Path, cursor: Mapping[str, Any], in_background: bool = False
    ) -> None:
        await self._work.run(self.engine.save, path, cursor, in_background=in_background)

    async def wait_saved(self) -> None:
        await self._work.run(self.engine.wait_saved)

    async def load(self, path: Path) -> dict[str, Any]:
        return await self._work.run(self.engine.load, path)

    async def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the whole weights; every rank takes part."""
        return await self._work.run(self.engine.fingerprints)

    async def offload(self) -> None:
        """Park the optimizer's state in host memory (of a CPU: in a file) until `reload`; the
        weights stay. What needs that state refuses until then."""
        await self._work.run(self.engine.offload)

    async def reload(self) -> None:
        await self._work.run(self.engine.reload)

    async def write_model(self, folder: Path, extra_files_from: Path | None) -> None:
        """All ranks write one Hugging Face folder, whole or not at all."""
        await self._work.run(self._write_model, folder, extra_files_from)

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

    async def send_weights(self, sender: WeightSender, version: int) -> Offer:
        """Hand the weights to a transport as policy `version`; rank 0's offer is the one that
        counts. Of two senders with one key the first is used: it knows what was sent before."""
        if self._sender is None or self._sender.key != sender.key:
            self._sender = sender
        offer = await self._work.run(self._sender.send, self.engine, version)
        self._version = version
        return offer

    async def heartbeat(self) -> dict[str, Any]:
        """Answers from the loop that takes the calls."""
        return {**vitals(), **self._work.counters(), "version": float(self._version)}


class RankedEngine:
    """The ranks of a `WorkerGroup[PolicyRank]` as one engine. Call it from a thread."""

    def __init__(
        self,
        group: WorkerGroup[PolicyRank],
        recipe: PolicyRecipe,
        loop: asyncio.AbstractEventLoop,
        *,
        turn: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """Inside `turn` the ranks have the devices that they share with somebody. Whoever calls
        `train_step` and `forward_logprobs` has taken it for all of them together."""
        self.group = group
        self.num_steps_begun = 0
        """Optimizer steps, those that are under way too: whoever wants the weights of a version
        that was published before the last one comes too late."""
        self.last_logps: list[Tensor] = []
        self.last_entropies: list[Tensor] = []
        self._recipe, self._loop, self._turn = recipe, loop, turn

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
        self.num_steps_begun += 1
        dealt = self._deal(samples)
        options = (loss_fn, weight_fn, temperature, entropy)
        answers = self._call_each(
            PolicyRank.train_step, lambda rank: (dealt.hand(samples, rank), *options)
        )
        self.last_logps = dealt.collect([logps for _, logps, _ in answers])
        shares = [entropies for _, _, entropies in answers]
        self.last_entropies = dealt.collect(shares) if any(shares) else []
        return answers[0][0]

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        return self._dealt(PolicyRank.forward_logprobs, samples, temperature)

    def forward_entropies(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        dealt = self._deal(samples)
        return dealt.collect(
            self._call_each(
                PolicyRank.forward_entropies,
                lambda rank: (dealt.hand(samples, rank), temperature),
            )
        )

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        return self._dealt(PolicyRank.forward_top, samples, k, temperature)

    def average_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        return self._dealt(PolicyRank.average_logprobs, samples, temperature)

    def average_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        return self._dealt(PolicyRank.average_top, samples, k, temperature)

    def keep_average(self, rate: float) -> None:
        self._call_in_turn(PolicyRank.keep_average, rate)

    def _dealt(self, method: Callable[..., Any], samples: Sequence[Sample], *args: Any) -> Any:
        """Gather what the ranks say of their shares of the samples, in the order of the batch."""
        dealt = self._deal(samples)
        return dealt.collect(
            self._call_each(method, lambda rank: (dealt.hand(samples, rank), *args))
        )

    def restart(self, config: EngineConfig) -> None:
        self._call_in_turn(PolicyRank.restart, config)

    def save(self, path: Path, cursor: Mapping[str, Any], *, in_background: bool = False) -> None:
        self._call_in_turn(PolicyRank.save, path, cursor, in_background)

    def wait_saved(self) -> None:
        self._call(PolicyRank.wait_saved)

    def load(self, path: Path) -> Mapping[str, Any]:
        return self._call_in_turn(PolicyRank.load, path)[0]

    def fingerprints(self) -> dict[str, str]:
        return self._call_in_turn(PolicyRank.fingerprints)[0]

    def write_model(self, folder: Path, extra_files_from: Path | None = None) -> None:
        self._call(PolicyRank.write_model, folder, extra_files_from)

    def write_adapter(self, folder: Path, base_name: str) -> None:
        raise AssertionError("adapters are trained in one process; the options say so")

    def _deal(self, samples: Sequence[Sample]) -> Deal:
        recipe = self._recipe
        return deal(samples, recipe.layout, share_prefix=recipe.config.share_prefix)

    def _call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self._call_each(method, lambda _: args)

    def _call_in_turn(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        async def call() -> list[Any]:
            async with self._turn():
                return await settled(self.group, self.group.call(method, *args))

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _call_each(
        self, method: Callable[..., Any], args_of: Callable[[int], Sequence[Any]]
    ) -> list[Any]:
        """Call all ranks, each with its own arguments, and wait; results in order of rank."""

        async def call() -> list[Any]:
            return await settled(self.group, self.group.call_each(method, args))

        args = [args_of(rank) for rank in range(len(self.group))]
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()


async def settled(group: WorkerGroup[PolicyRank], calls: Sequence[Future[Any]]) -> list[Any]:
    """Wait for the ranks and return their results, in order; TrainerLost if one of them died, else
    the first error."""
    try:
        return await results(group, calls)
    except WorkerDied as died:
        raise TrainerLost(f"the trainer died ({died})") from died


async def start_trainer(group: WorkerGroup[PolicyRank]) -> None:
    """Introduce the ranks to each other and have them build the engine."""
    try:
        await start_ranks(group)
    except WorkerDied as died:
        raise TrainerLost(f"the trainer died ({died})") from died
