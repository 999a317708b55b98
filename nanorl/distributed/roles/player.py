"""A policy that plays and does not learn: the inference engine, the agents and the sandbox.

What an evaluation needs, in one process: there is no training engine, so the weights are in memory
once, in the dtype in which they are read. Left out: several processes, as a run has them.
"""

from __future__ import annotations

from nanoengine.formats.hf import load_model
from nanoengine.optim import DTYPES
from nanoengine.parallel.device import enter_device, worker_thread
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.distributed.roles.give_sight import give_sight
from nanorl.options.agent_kit import AgentKit
from nanorl.options.parts import Parts, num_threads
from nanorl.task import Task
from nanorl.types import Rollout


class Player:
    """Plays rollouts of the model in `parts.folder`. `close_loop`, then `close`, end it."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        # First: not every machine has a sandbox.
        self.kit = AgentKit(config, parts.folder, kind=parts.kind, is_given=parts.is_env_given)
        try:
            enter_device(parts.device)
            model = load_model(parts.folder, DTYPES[config.dtype], str(parts.device))
            give_sight(model, parts.folder, parts.pictures, self.kit)
            self.compute = worker_thread("compute", parts.device, num_threads(config))
            self.generator = AsyncEngine(
                LLMEngine(model, parts.infer_config(), tokenizer=parts.tokenizer),
                executor=self.compute,
            )
        except BaseException:  # whatever fails, the kit's processes run already
            self.kit.close()
            raise

    async def play(
        self, task: Task, *, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout:
        """One rollout."""
        return await self.kit.play(
            task, self.generator, group_id=group_id, rollout_id=rollout_id, sampling=sampling
        )

    async def close_loop(self) -> None:
        """Close what belongs to the running event loop; `close` ends the rest."""
        await self.kit.close_loop()
        await self.generator.close()

    def close(self) -> None:
        self.kit.close()
        self.compute.shutdown()
