"""A tiny model that sees and plays: real rollouts of any environment, and their gap to training."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model
from nanoengine.state.whole_engine import Engine
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanoengine.vision.sight import Sight
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent, AgentLoop, tool
from nanorl.batching import samples_of
from nanorl.envs.base import Environment
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.task import Task
from nanorl.types import Rollout


@dataclass
class EndsTurns:
    """An engine whose outputs end by themselves: a random model hardly ever ends its turns."""

    engine: AsyncEngine

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        return replace(await self.engine.generate(ids, params), finish_reason="stop")


@dataclass
class Seer:
    """The model, with weights four times as large as it begins with, so that what it says depends
    on what it sees."""

    model: Any
    tokenizer: SeeingTokenizer

    @classmethod
    def make(cls, folder: Path) -> Seer:
        path = build_tiny_vision_model(folder / "model")
        model: Any = load_model(path, dtype=torch.float32)
        with torch.no_grad():
            for one in model.parameters():
                if one.dim() > 1:
                    one.mul_(4.0)
        model.repack()
        tokenizer = seeing_tokenizer(path, folder / "pictures")
        model.sight = Sight(model, tokenizer.store)
        return cls(model, tokenizer)

    def play(
        self, env: Environment, task: Task, loop: AgentLoop = tool, seed: int = 7, **limits: Any
    ) -> Rollout:
        """One rollout of what the model itself says, whatever that is."""
        sizes = {"max_turns": 3, "max_turn_tokens": 6, "max_context_tokens": 900}
        options: dict[str, Any] = {
            "num_blocks": 300,
            "block_size": 4,
            "max_batch_tokens": 64,
            "max_num_seqs": 4,
        }

        async def played() -> Rollout:
            engine = LLMEngine(self.model, InferConfig(**options), tokenizer=self.tokenizer)
            async with AsyncEngine(engine, use_thread=False) as generator:
                agent = Agent(
                    generator=EndsTurns(generator),
                    tokenizer=self.tokenizer,
                    limits=Limits(**{**sizes, **limits}),
                    loop=loop,
                )
                return await agent.play(
                    task, env, group_id="g", rollout_id="r", sampling=SamplingParams(seed=seed)
                )

        return asyncio.run(played())

    def gap(self, rollout: Rollout) -> float:
        """The largest difference between what sampling and training say of a sampled token."""
        samples = samples_of([rollout], version=0)
        assert len(samples) == len(rollout.sequences)
        engine = Engine(self.model, EngineConfig(dtype="fp32", micro_batch_tokens=200))
        return max(
            abs(ours - said)
            for scored, one in zip(engine.forward_logprobs(samples), rollout.sequences, strict=True)
            for ours, said, mask in zip(scored.tolist(), one.logps, one.loss_mask, strict=True)
            if mask
        )


def square(level: int, side: int = 48) -> np.ndarray:
    """A grey picture, uint8 [side, side, 3]; the level is its top left, the rest a ramp."""
    ramp = np.linspace(level, 255 - level, side).astype(np.uint8)
    return np.repeat(np.broadcast_to(ramp, (side, side))[..., None], 3, axis=2).copy()


def png(level: int) -> bytes:
    return write_png(square(level))
