"""Builds the parts of a run from its configuration: models, engines, sandbox, agent, tasks.

Everything that can be wrong with a user's input is found here, before any work is done.
Left out: what the parts then do (run.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoengine.engine import Engine, EngineConfig, require_deterministic_cublas
from nanoengine.model.config import ModelConfig
from nanoengine.model.device import enter_device, release_memory, resolve_device, worker_thread
from nanoengine.model.hf import load_model
from nanoengine.model.sources import SMOLLM2, resolve_model
from nanoengine.model.tokenizer import ChatTokenizer
from nanoengine.model.transformer import Transformer
from nanoengine.optim import UpdateConfig
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.agents.loop import Agent, Generator
from nanorl.config import RunConfig
from nanorl.envs.code import CodeEnv
from nanorl.learner import check_reference
from nanorl.presets import Preset, get_preset
from nanorl.rewards.rule import RuleReward
from nanorl.sandbox.base import SandboxSpec
from nanorl.sandbox.pool import SandboxPool
from nanorl.sizes import sized
from nanorl.tasks.source import FileTasks, TaskSource
from nanorl.tasks.tiny_model import build_tiny_model
from nanorl.types import Rollout, Task, derive_seed

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(kw_only=True)
class Tasks:
    """The two sides of the data; training batches are a function of the step alone."""

    train: TaskSource | FileTasks
    warm_start: TaskSource  # the preset's own: only generated tasks know what a teacher can show
    heldout: Sequence[Task]
    fingerprint: str = ""  # of a user's file; generated tasks follow from the options


class Parts:
    """The parts of one run. `close()` ends the sandbox; both engines live in this process."""

    def __init__(self, config: RunConfig) -> None:
        """`self.config` is `config` with the device and the sizes that were chosen."""
        if config.deterministic:
            require_deterministic_cublas()  # before anything touches a GPU
        self.device = resolve_device(config.device)
        self.preset: Preset = get_preset(config.preset)
        self.tasks = load_tasks(config, self.preset)  # first: the model may have to be fetched
        self.folder = model_folder(config)
        shape = ModelConfig.from_folder(self.folder)
        check_positions(config, shape)
        check_reference(config, shape.vocab_size)
        self.tokenizer = ChatTokenizer.from_folder(self.folder)
        self.config = config = sized(config, shape, self.device)
        self.sandbox = SandboxPool(sandbox_spec(config), num_workers=config.tool.workers)
        # Loaded in fp32: the engine keeps these values as masters and casts the model.
        enter_device(self.device)
        self.trained = load_model(self.folder, torch.float32, str(self.device))
        self.trainer_engine = Engine(self.trained, self.warm_start_config())
        release_memory()
        model = load_model(self.folder, DTYPES[config.dtype], str(self.device))
        self.rollout_engine = self._rollout_engine(model)
        # All heavy work of a synchronous run shares one thread, and only that thread uses several
        # cores: OpenMP keeps a team of workers for every thread that ever ran a parallel loop,
        # and with more workers than cores they sleep and wake at each of thousands of small ops.
        self.compute = worker_thread("compute", self.device, num_threads(config))
        is_sync = config.rl.max_staleness == 0
        self.optimizer_thread = self.compute
        if not is_sync:
            self.optimizer_thread = worker_thread("optimizer", self.device, num_threads(config))
        self.generator = AsyncEngine(self.rollout_engine, executor=self.compute)

    def close(self) -> None:
        self.sandbox.close()
        self.compute.shutdown()
        self.optimizer_thread.shutdown()

    def _rollout_engine(self, model: Transformer) -> LLMEngine:
        limits = self.config.engine
        options = InferConfig(
            **shared(InferConfig, limits),
            cache_bytes=limits.cache_mb << 20,
            eos_ids=tuple(sorted(self.tokenizer.eos_ids)),
            deterministic=self.config.deterministic,
        )
        return LLMEngine(model, options)

    def engine_config(self, update: UpdateConfig, **options: Any) -> EngineConfig:
        """The training engine's options of one phase: those of the run, of its engines and of
        `update` that have the same names."""
        given = shared(EngineConfig, self.config, self.config.engine, update)
        return EngineConfig(**given | options)

    def warm_start_config(self) -> EngineConfig:
        warm = self.config.warm_start
        return self.engine_config(
            warm,
            warmup_steps=min(warm.warmup_steps, warm.steps // 2),
            total_steps=max(warm.steps, 1),
        )

    def rl_config(self) -> EngineConfig:
        rl = self.config.rl
        return self.engine_config(rl, total_steps=max(rl.steps * rl.epochs, 1))

    def critic_config(self) -> EngineConfig:
        """As the policy's, and one checkpoint more: the policy's last may still name the oldest."""
        rl = self.config.rl
        update = UpdateConfig(
            lr=rl.critic_lr, weight_decay=rl.weight_decay, max_grad_norm=rl.max_grad_norm
        )
        return self.engine_config(
            update, lm_head_fp32=False, keep_checkpoints=self.config.keep_checkpoints + 1
        )

    def environment(self, *, is_tool_enabled: bool = True) -> CodeEnv:
        return CodeEnv(
            self.sandbox,
            self.preset.action_format,
            timeout_s=self.config.tool.timeout_s,
            max_executions=self.config.agent.max_turns,
            is_tool_enabled=is_tool_enabled,
        )

    def agent(self, generator: Generator) -> Agent:
        """The run's agent, with the policy or a teacher as its `generator`."""
        return Agent(
            generator=generator,
            tokenizer=self.tokenizer,
            limits=self.config.agent,
            reward=RuleReward(),
        )

    async def play(
        self,
        task: Task,
        *,
        group_id: str,
        rollout_id: str,
        sampling: SamplingParams,
        is_tool_enabled: bool = True,
    ) -> Rollout:
        """One rollout of the policy."""
        return await self.agent(self.generator).play(
            task,
            self.environment(is_tool_enabled=is_tool_enabled),
            group_id=group_id,
            rollout_id=rollout_id,
            sampling=sampling,
        )

    @property
    def play_without_tool(self) -> Any:
        return partial(self.play, is_tool_enabled=False)


def shared(kind: type, *records: Any) -> dict[str, Any]:
    """The fields of the dataclass `kind` that the records have by the same names; the last wins."""
    names = {field.name for field in fields(kind)}
    return {
        field.name: getattr(record, field.name)
        for record in records
        for field in fields(record)
        if field.name in names
    }


def num_threads(config: RunConfig) -> int:
    return config.threads or os.cpu_count() or 1


def model_folder(config: RunConfig) -> Path:
    """The Hugging Face folder of the run's model; builds or downloads the preset's if needed."""
    cache = config.cache_dir.expanduser()
    if config.model is not None:
        return resolve_model(config.model, cache)
    if config.preset == "tiny":
        folder = config.run_dir / "model"
        return folder if config.resume else build_tiny_model(folder, config.seed)
    return resolve_model(SMOLLM2.name, cache)


def check_positions(config: RunConfig, model: ModelConfig) -> None:
    """`ValueError` if a rollout may grow longer than the model was made for."""
    wanted, most = config.agent.max_context_tokens, model.max_position_embeddings
    if wanted > most:
        raise ValueError(
            f"--agent.max-context-tokens {wanted}: must be at most {most}, the positions that this "
            "model knows (max_position_embeddings)"
        )


def load_tasks(config: RunConfig, preset: Preset) -> Tasks:
    count, seed = config.evaluation.num_tasks, config.evaluation.seed
    families = [preset.family()]
    warm_start = TaskSource(families, derive_seed(config.seed, "warm-start"))
    if config.tasks is not None:
        source = FileTasks(config.tasks, config.seed)
        return Tasks(
            train=source,
            warm_start=warm_start,
            heldout=source.heldout(count, seed),
            fingerprint=source.fingerprint,
        )
    return Tasks(
        train=TaskSource(families, config.seed),
        warm_start=warm_start,
        heldout=TaskSource(families, config.seed, "heldout").heldout(count, seed),
    )


def sandbox_spec(config: RunConfig) -> SandboxSpec:
    return SandboxSpec(timeout_s=config.tool.timeout_s, memory_bytes=config.tool.memory_mb << 20)
