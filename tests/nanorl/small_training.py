"""Whole training loops over a small model and a task without tools: say token 7 among four."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.state.whole_engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.agents.collector import RolloutCollector
from nanorl.distributed.weights.in_process import make_publisher
from nanorl.flow.curriculum import InOrder, TaskChooser
from nanorl.flow.journal import Journal
from nanorl.flow.replay_groups import ReplayGroups
from nanorl.observability.results import StepResult
from nanorl.options.agent_config import AgentConfig
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.run.trainer import Trainer
from nanorl.scorers.scored_learner import choose_learner
from nanorl.task import Task
from nanorl.types import Rollout, Status
from nanosched import Scheduler

PROMPT = [1, 2, 3]
STRAGGLER_S = 1.0
Score = Callable[[list[int]], float]


class Sevens:
    """Task i of step s is called s-i."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step

    def batch(self, step: int, n: int) -> list[Task]:
        """One task of number `step`: whoever chooses asks for n = 1."""
        name = "{}-{}".format(*divmod(step, self.per_step))
        return [Task(task_id=name, kind="seven", prompt="", answer="7")] * n


def make_model() -> Transformer:
    model = Transformer(
        ModelConfig(
            vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2,
            num_kv_heads=1, head_dim=16, tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.init_weights(seed=0, std=0.1)
    return model


def says_seven(ids: list[int]) -> float:
    return float(7 in ids)


def train(
    score: Score = says_seven,
    *,
    failing_step: int | None = None,
    journal: Journal | None = None,
    saved: Mapping[str, Any] | None = None,
    after: Callable[[Trainer, Engine, StepResult], None] | None = None,
    played: list[str] | None = None,
    straggler: str = "",
    until_step: int = 0,
    measures_gap: bool = True,
    seed: int = 0,
    kept: ReplayGroups | None = None,
    **options: Any,
) -> tuple[list[StepResult], Engine]:
    """The steps of a run, and its engine; every rollout of `failing_step` fails. It goes on from
    what is `saved`, if anything is, calls `after` each step, and notes what was `played`; the task
    `straggler` ends after so many steps, or after STRAGGLER_S if they wait for it. `seed` is the
    sampling's; `kept` are groups that are trained on again."""
    rl = RLConfig(**{"steps": 4, "tasks_per_step": 2, "group_size": 4, "lr": 1e-2, **options})
    config = RunConfig(rl=rl, agent=AgentConfig(max_turn_tokens=4, max_context_tokens=8))
    engine = Engine(make_model(), EngineConfig(dtype="fp32", lr=rl.lr))
    steps: list[StepResult] = []
    if saved and "checkpoint" in saved:  # optimizer and all
        engine.load(saved["checkpoint"])
    elif saved:
        engine.load_weights(saved["weights"].items())

    async def run() -> None:
        limits = InferConfig(cache_bytes=1 << 20, max_num_seqs=16, max_batch_tokens=64)
        async with AsyncEngine(LLMEngine(make_model(), limits)) as generator:

            async def play(
                task: Task, *, group_id: str, rollout_id: str, sampling: SamplingParams
            ) -> Rollout:
                output = await generator.generate(PROMPT, replace(sampling, max_tokens=4))
                if task.task_id == straggler:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(STRAGGLER_S):
                            while len(steps) < until_step:
                                await asyncio.sleep(0.001)
                if played is not None:
                    played.append(rollout_id)
                has_failed = task.task_id.startswith(f"{failing_step}-")
                return Rollout(
                    task_id=task.task_id,
                    group_id=group_id,
                    rollout_id=rollout_id,
                    tokens=PROMPT + output.ids,
                    loss_mask=[0] * 3 + [1] * len(output.ids),
                    logps=[0.0] * 3 + output.logps,
                    versions=[-1] * 3 + output.versions,
                    reward=score(output.ids),
                    status=Status.FAILED if has_failed else Status.FINISHED,
                )

            with ThreadPoolExecutor(1) as thread, Scheduler(backend="inline") as scheduler:
                chosen = choose_learner(
                    config,
                    engine=engine,
                    publisher=make_publisher(engine, generator),
                    thread=thread,
                )
                trainer = Trainer(
                    config,
                    learner=scheduler.actor(chosen.func).remote(*chosen.args, **chosen.keywords),
                    collector=scheduler.actor(RolloutCollector).remote(
                        play, run_seed=seed, max_retries=0, most_lost=2 * 2 * 4
                    ),
                    tasks=TaskChooser(Sevens(rl.tasks_per_step), InOrder(), seed=0),
                    journal=journal,
                    measures_gap=measures_gap,
                )
                trainer.replay = kept
                if saved:
                    trainer.load(saved["state"])

                async def on_step(result: StepResult) -> None:
                    steps.append(result)
                    if after is not None:
                        after(trainer, engine, result)

                await trainer.fit(saved["step"] if saved else 0, on_step)

    asyncio.run(run())
    return steps, engine
