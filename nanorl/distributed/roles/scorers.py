"""The reference and the critic in processes of their own.

The reference has no state: one that died is started again and asked again. The critic learns, so
one that died takes the run back to the newest checkpoint, as the trainer does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.packing import Sample, TopTokens
from nanorl.distributed.roles.critic import SavedCritic
from nanorl.distributed.roles.policy_role import TrainerLost
from nanorl.distributed.roles.role import Role
from nanorl.distributed.roles.shared_folder import require_folder
from nanorl.distributed.roles.work import WorkThread
from nanorl.observability.monitor.vitals import vitals
from nanorl.options.run_config import RunConfig
from nanorl.scorers.references import load_reference
from nanosched import ActorHandle, TaskError, WorkerDied


class _Worker:
    """An actor whose heavy calls run in a thread, beside its heartbeat."""

    def __init__(self, device: str, threads: int) -> None:
        self.device = torch.device(device)
        self._work = WorkThread("scorer", self.device, threads)

    async def heartbeat(self) -> dict[str, Any]:
        return {**vitals(), **self._work.counters()}


class ReferenceRole(_Worker):
    """The frozen policy that KL terms and distillation compare with."""

    def __init__(
        self,
        config: RunConfig,
        folders: Sequence[Path],
        threads: int,
        see: Callable[[Transformer], None],
    ) -> None:
        """`see` lets a model see the run's pictures."""
        for folder in folders:
            require_folder(folder)
        super().__init__(config.device, threads)
        self._scorer = load_reference(config, folders, self.device, see)

    async def forward_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        return await self._work.run(self._scorer.forward_logprobs, samples, temperature=temperature)

    async def forward_top(
        self, samples: Sequence[Sample], k: int, temperature: float
    ) -> list[TopTokens]:
        return await self._work.run(self._scorer.forward_top, samples, k, temperature=temperature)


class CriticRole(_Worker):
    """The critic, which starts as a copy of the policy in `folder`."""

    def __init__(
        self,
        config: RunConfig,
        engine_config: EngineConfig,
        folder: Path,
        threads: int,
        see: Callable[[Transformer], None],
    ) -> None:
        """`see` lets a model see the run's pictures."""
        require_folder(folder)
        super().__init__(config.device, threads)
        policy = load_model(folder, DTYPES[config.dtype], config.device)
        see(policy)
        self._critic = SavedCritic(policy, engine_config, value_clip=config.rl.value_clip)

    async def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        return await self._work.run(self._critic.values, samples)

    async def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        return await self._work.run(self._critic.train_step, samples)

    async def save(self, path: Path) -> str:
        return await self._work.run(self._critic.save, path)

    async def load(self, path: Path) -> None:
        await self._work.run(self._critic.load, path)


class RemoteReference:
    """A reference in another process, for a thread that may wait."""

    def __init__(self, role: Role[ReferenceRole], loop: asyncio.AbstractEventLoop) -> None:
        self._role, self._loop = role, loop

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """Score as `Scorer.forward_logprobs` does."""
        call = self._role.call(ReferenceRole.forward_logprobs, samples, temperature)
        return _wait(call, self._loop)

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """Find as `Scorer.forward_top` does."""
        call = self._role.call(ReferenceRole.forward_top, samples, k, temperature)
        return _wait(call, self._loop)


class RemoteCritic:
    """A critic in another process, for a thread that may wait. Raises TrainerLost if it died."""

    def __init__(self, handle: ActorHandle[CriticRole], loop: asyncio.AbstractEventLoop) -> None:
        self._handle, self._loop = handle, loop

    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """fp32, one for each token of each sample; 0 where the loss mask is 0."""
        return self._call(CriticRole.values, samples)

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step towards the returns; its metrics."""
        return self._call(CriticRole.train_step, samples)

    def save(self, path: Path) -> str:
        """Write a checkpoint under `path`; returns its name there."""
        return self._call(CriticRole.save, path)

    def load(self, path: Path) -> None:
        """Go back to the checkpoint `path`; newer ones beside it are forgotten."""
        self._call(CriticRole.load, path)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            try:
                return await self._handle.call(method, *args)
            except TaskError as error:
                raise error.cause from None
            except WorkerDied as died:
                raise TrainerLost(f"the critic died ({died})") from died

        return _wait(call(), self._loop)


def _wait(call: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    return asyncio.run_coroutine_threadsafe(call, loop).result()
