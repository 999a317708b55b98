"""What a run keeps of its rollouts, evaluations and weights: observers that write to its store.

rollouts.sqlite     every rollout of RL by its step, tasks, numbers of single tokens
the same            fingerprints of the policy's weights, the facts `weights/N`
evaluations.sqlite  the rollouts of evaluations, and eval-NAME.json for `nanorl compare`
evaluations-rl.sqlite   those of evaluations while RL goes on, and eval-step-N.json
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from nanorl.distributed.roles.base import Roles
from nanorl.distributed.roles.role import Role
from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.report.observer import (
    Evaluated,
    PhaseBegun,
    RLEvaluated,
    RunObserver,
    attempts,
)
from nanorl.observability.report.summary import EVALUATIONS
from nanorl.observability.results import PHASES
from nanorl.observability.store import RolloutStore
from nanorl.options.run_config import RunConfig
from nanorl.options.store_address import EVALUATIONS_FILE, RL_EVALUATIONS_FILE

if TYPE_CHECKING:
    from nanorl.observability.results import StepResult


class KeptRollouts(RunObserver):
    """Stores the rollouts of every step of RL, and deletes those that the options let go."""

    def __init__(self, config: RunConfig, store: Role[RolloutStore]) -> None:
        self._config, self._store = config, store

    async def on_restore(self, first_step: int) -> None:
        await self._store.call(RolloutStore.delete_from_step, first_step)

    async def on_step(self, step: StepResult) -> None:
        store = self._store
        await store.call(RolloutStore.add_tasks, list(step.tasks.values()))
        await store.call(RolloutStore.add_group, attempts(step), step=step.step)
        await store.call(RolloutStore.add_token_stats, step.token_stats)
        steps = self._config.keep_rollout_steps
        days, mebibytes = self._config.keep_rollout_days, self._config.keep_rollout_mb
        if steps or days or mebibytes:
            await store.call(
                RolloutStore.expire,
                steps or None,
                days=days or None,
                max_bytes=mebibytes << 20 or None,
            )


class KeptEvaluations(RunObserver):
    """Keeps evaluations for `nanorl compare`. Their rollouts go into a file of their own: whatever
    reads the training's by step, counts them or deletes them, never meets these."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        config, name, played = self._config, evaluated.phase, evaluated.result.played
        with RolloutStore(config.run_dir / EVALUATIONS_FILE) as store:
            store.add_tasks([task for task, _ in played])
            store.add_group([rollout for _, rollout in played], step=PHASES.index(name))
        about = {
            **_several(config),
            "model": config.model or config.preset,
            "phase": name,
            "samples_per_task": 1,
            "temperature": 0.0,
        }
        title = f"{config.run_dir} ({EVALUATIONS[name]})"
        kept = Evaluation.of(played, title=title, about=about, seconds=evaluated.seconds)
        kept.write(config.run_dir / f"eval-{name}.json")


class KeptRLEvaluations(RunObserver):
    """Keeps the evaluations between steps of RL: the rollouts by the steps that were done, the
    held-out ones also for `nanorl compare`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._file = config.run_dir / RL_EVALUATIONS_FILE

    async def on_restore(self, first_step: int) -> None:
        if self._file.is_file():
            with RolloutStore(self._file) as store:
                store.delete_from_step(first_step + 1)

    async def on_rl_evaluation(self, evaluated: RLEvaluated) -> None:
        config, step = self._config, evaluated.step
        with RolloutStore(self._file) as store:
            for played in evaluated.played.values():
                store.add_tasks([task for task, _ in played])
                store.add_group([rollout for _, rollout in played], step=step)
        about = {
            **_several(config),
            "model": config.model or config.preset,
            "phase": "rl",
            "step": step,
            "samples_per_task": evaluated.samples,
            "temperature": evaluated.temperature,
        }
        kept = Evaluation.of(
            evaluated.played["heldout"],
            title=f"{config.run_dir} (after {step} steps of RL)",
            about=about,
            seconds=evaluated.seconds,
        )
        kept.write(config.run_dir / f"eval-step-{step}.json")


def _several(config: RunConfig) -> dict[str, Any]:
    """The environments of a run that has several, by which scores are then shown, too."""
    return {"env": list(config.env)} if isinstance(config.env, tuple) else {}


class KeptWeights(RunObserver):
    """Records fingerprints of the weights with which every step of RL begins."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles

    async def on_phase(self, phase: PhaseBegun) -> None:
        if phase.phase == "rl":
            await self._note(phase.num_done)

    async def on_step(self, step: StepResult) -> None:
        await self._note(step.step + 1)

    async def _note(self, step: int) -> None:
        loop, roles = asyncio.get_running_loop(), self._roles
        found = await loop.run_in_executor(roles.optimizer_thread, roles.engine.fingerprints)
        await roles.store.call(RolloutStore.put_fact, f"weights/{step}", found)
