"""All roles of a run as objects of one process: the default, and the fastest on a laptop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from kernels.memory import release_memory
from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
from nanoengine.adapters.lora_engine import LoraEngine
from nanoengine.formats.hf import load_model, replace_folder, replace_model
from nanoengine.heads.scorer import Policy
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.parallel.device import enter_device, worker_thread
from nanoengine.state.whole_engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.engine import LLMEngine
from nanorl.distributed.roles.base import RunCritic
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.distributed.roles.critic import SavedCritic
from nanorl.distributed.roles.give_sight import give_sight
from nanorl.distributed.roles.role import DirectRole
from nanorl.distributed.weights.in_process import can_share_weights, make_publisher
from nanorl.observability.store import RolloutStore
from nanorl.options.agent_kit import AgentKit
from nanorl.options.parts import Parts, num_threads
from nanorl.scorers.references import load_reference
from nanorl.task import derive_seed


class InlineEngine(Engine):
    """The training engine of this process, and its weights as a folder."""

    def write_model(self, folder: Path, extra_files_from: Path | None = None) -> None:
        """The weights as a Hugging Face folder, whole or not at all."""
        replace_model(self.model, folder, extra_files_from)

    def write_adapter(self, folder: Path, base_name: str) -> None:
        raise AssertionError("this engine trains all weights")


class InlineLoraEngine(LoraEngine, InlineEngine):
    """The same where an adapter is trained: its weights, merged, and the adapter alone."""

    def write_adapter(self, folder: Path, base_name: str) -> None:
        """The adapter as a folder in PEFT's format, whole or not at all."""
        replace_folder(folder, partial(self.adapter.save, base_name=base_name))


class InlineRoles:
    """Both engines, the agents and the store, in this process."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self.parts = parts
        self.say: Callable[[str], None] = print
        self.kit = AgentKit(
            config, parts.folder, kind=parts.kind, is_given=parts.is_env_given
        )  # first: not every machine has a sandbox
        enter_device(parts.device)
        self.engine = make_engine(parts)
        release_memory()
        model: Transformer = self.engine.model
        if not can_share_weights(config, parts.device):
            model = load_model(parts.folder, DTYPES[config.dtype], str(parts.device))
        self._see = partial(give_sight, folder=parts.folder, pictures=parts.pictures, kit=self.kit)
        for one in (self.engine.model, model):
            self._see(one)
        self.rollout_engine = LLMEngine(model, parts.infer_config(), tokenizer=parts.tokenizer)
        # All heavy work of a synchronous run shares one thread, and only that thread uses several
        # cores: for PyTorch's operations OpenMP keeps a team of workers for every thread that ever
        # ran a parallel loop, and the C++ kernels' threads serve one caller at a time.
        threads = num_threads(config)
        self.compute = worker_thread("compute", parts.device, threads)
        self.optimizer_thread = self.compute
        if config.rl.max_staleness > 0:
            self.optimizer_thread = worker_thread("optimizer", parts.device, threads)
        self.generator = AsyncEngine(self.rollout_engine, executor=self.compute)
        self.publisher = make_publisher(
            self.engine, self.generator, max_staleness=config.rl.max_staleness
        )
        make_collector = partial(
            CollectorRole, config, parts.folder, kit=self.kit, generator=self.generator
        )
        self.collector = DirectRole("collector", make_collector)
        self.store = DirectRole("store", partial(RolloutStore, config.store_address))

    @property
    def control(self) -> None:
        """There is one process."""

    async def start(self) -> None:
        """The store is opened here, so that a bad file is found before any work is done."""
        self.store.open()

    async def open_reference(self, folders: Sequence[Path]) -> Policy:
        parts = self.parts
        return load_reference(parts.config, folders, parts.device, self._see)

    async def open_critic(self, scratch: Path) -> RunCritic:
        config, policy = self.parts.config, self.engine.model
        return SavedCritic(policy, self.parts.critic_config(), value_clip=config.rl.value_clip)

    async def idle_shares(self) -> dict[str, float]:
        return {}  # the roles share a thread

    async def trainer_death(self) -> str:
        return await asyncio.Future()  # an object of this process does not die alone

    async def restart_trainer(self) -> None:
        raise AssertionError("it never died")

    async def close_loop(self) -> None:
        """Close what belongs to the running event loop; `close` ends the rest."""
        store = self.store.close()
        with suppress(Exception):  # what it could not fold into its file stays beside it
            if store is not None:
                store.close()
        await self.kit.close_loop()
        await self.generator.close()

    def close(self) -> None:
        self.kit.close()
        self.compute.shutdown()
        self.optimizer_thread.shutdown()


def make_engine(parts: Parts) -> InlineEngine:
    """The engine that trains all weights, or the run's adapter."""
    config, place, update = parts.config, str(parts.device), parts.warm_start_config()
    if not config.lora.rank:
        # Loaded in fp32: the engine keeps these values as masters and casts the model.
        return InlineEngine(load_model(parts.folder, torch.float32, place, packs=False), update)
    model = load_model(parts.folder, DTYPES[config.dtype], place, is_int8=config.lora.is_int8)
    base = LoraBase(model)
    adapter = LoraAdapter(base, config.lora, seed=derive_seed(config.seed, "lora"))
    return InlineLoraEngine(adapter, update)
