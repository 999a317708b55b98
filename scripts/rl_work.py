"""The work of bench_rl.py that goes through roles, each piece in a process of its own.

    inline_load        the agents' load on one engine in this process
    replicas_load      the same on two replicas, in processes with half the threads each
    sleeping_tools     rollouts whose tool sleeps, beside the same without it, and the tool alone
    inline_steps       GRPO steps in one process, rollouts and training in turns
    apart_steps        the same with learner and replica in processes of their own, which go on at
                       the same time (`--rl.max-staleness 1`)

A model of few tokens, as tiny_model.py makes it, gets a shrunken load: to try the benchmark out.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import workload

from nanoengine.formats.hf import load_model
from nanoengine.model.config import ModelConfig
from nanoengine.optim import DTYPES
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.agents.collector import RolloutCollector
from nanorl.agents.context import Generator
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.distributed.roles.base import Roles
from nanorl.distributed.roles.choose_roles import make_roles
from nanorl.distributed.roles.cluster import PRELOAD
from nanorl.distributed.roles.inline_roles import InlineRoles
from nanorl.distributed.roles.replica_clients import ActorClient
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe
from nanorl.distributed.roles.router import Router
from nanorl.envs.base import Services
from nanorl.envs.env import Env
from nanorl.envs.env_episode import EnvEpisode
from nanorl.flow.curriculum import InOrder, TaskChooser
from nanorl.observability.results import StepResult
from nanorl.options.cluster_config import ClusterConfig, LearnerConfig, RolloutConfig
from nanorl.options.parts import Parts
from nanorl.options.phase_config import RLConfig
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.run.trainer import Trainer
from nanorl.scorers.scored_learner import choose_learner
from nanorl.task import Task
from nanorl.types import Rollout
from nanosched import Scheduler

NUM_REPLICAS = 2
TOOL_S = 0.3
WARM_STEPS, STEPS = 2, 4  # with staleness 1 the second step is the first that overlaps another
INFER = InferConfig(populate_cache=True, cache_bytes=256 << 20)


@dataclass(frozen=True)
class Load:
    """Contexts of the rollouts, what is appended after each turn, and the tokens of a turn."""

    contexts: list[list[int]]
    observations: list[list[list[int]]]  # [turn][rollout], one fewer than turns
    turn: int

    @classmethod
    def of(cls, folder: str) -> Load:
        """That of `rollout-agent`, or a small one for a model that has not those tokens."""
        contexts, observations = workload.agent_prompts(), workload.agent_observations()
        if not is_small(folder):
            return cls(contexts, observations, workload.TURN)
        size = ModelConfig.from_folder(Path(folder)).vocab_size

        def few(ids: list[int]) -> list[int]:
            return [workload.FIRST_ID + token % (size - workload.FIRST_ID) for token in ids[:24]]

        return cls(
            [few(ids) for ids in contexts[::8]],
            [[few(ids) for ids in turn[::8]] for turn in observations],
            turn=8,
        )

    @property
    def num_sampled(self) -> int:
        return len(self.contexts) * (len(self.observations) + 1) * self.turn


def is_small(folder: str) -> bool:
    return ModelConfig.from_folder(Path(folder)).vocab_size < workload.VOCAB


# -- rollouts --------------------------------------------------------------------------------------


async def play_load(load: Load, generator: Generator) -> dict[str, float]:
    """All rollouts at once, each turn as soon as the one before is there."""

    async def play(number: int) -> None:
        ids = load.contexts[number]
        for turn in range(len(load.observations) + 1):
            seed = 1000 * turn + number
            params = SamplingParams(max_tokens=load.turn, ignore_eos=True, seed=seed)
            output = await generator.generate(ids, params)
            seen = load.observations[turn][number] if turn < len(load.observations) else []
            ids = ids + output.ids + seen

    start = time.perf_counter()
    await asyncio.gather(*(play(number) for number in range(len(load.contexts))))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_s": load.num_sampled / seconds}


async def warm_up(load: Load, generator: Generator, num_requests: int) -> None:
    """Different prompts, so that every replica gets one."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    ids = load.contexts[-1]
    await asyncio.gather(
        *(generator.generate(ids[number : number + 16], params) for number in range(num_requests))
    )


def make_engine(folder: str, dtype: str, threads: int) -> AsyncEngine:
    torch.set_num_threads(threads)
    return AsyncEngine(LLMEngine(load_model(folder, DTYPES[dtype]), INFER))


def inline_load(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """One engine with all threads."""

    async def run() -> dict[str, float]:
        load = Load.of(folder)
        async with make_engine(folder, dtype, threads) as engine:
            await warm_up(load, engine, NUM_REPLICAS)
            return await play_load(load, engine)

    return asyncio.run(run())


def replicas_load(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Two replicas behind a router, as a collector has them."""

    async def run() -> dict[str, float]:
        load, router = Load.of(folder), Router()
        recipe = ReplicaRecipe(
            folder=Path(folder),
            dtype=DTYPES[dtype],
            device="cpu",
            threads=max(1, threads // NUM_REPLICAS),
            infer=INFER,
        )
        with Scheduler(backend="local", preload=PRELOAD) as scheduler:
            handles = [scheduler.actor(Replica).remote(recipe) for _ in range(NUM_REPLICAS)]
            await asyncio.gather(*(handle.call(Replica.heartbeat) for handle in handles))
            router.set_replicas({f"r{n}": ActorClient(one) for n, one in enumerate(handles)})
            await warm_up(load, router, NUM_REPLICAS)
            before = [await handle.call(Replica.metrics) for handle in handles]
            found = await play_load(load, router)
            after = [await handle.call(Replica.metrics) for handle in handles]
        busy = {
            f"busy_{n}": (end["step_s"] - begin["step_s"]) / found["seconds"]
            for n, (begin, end) in enumerate(zip(before, after, strict=True))
        }
        kept = {name: router.counters()[name] for name in ("num_kept", "num_let_go")}
        return found | busy | kept

    return asyncio.run(run())


# -- tools that sleep ------------------------------------------------------------------------------


class SleepingEnv(Env):
    """An environment whose tool takes `seconds` and says the same whatever it is asked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def step(self, text: str) -> str:
        await asyncio.sleep(self._seconds)
        return "Output:\nNothing was found. Try once more, in other words."


def sleeping_tools(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Seconds of the same rollouts with the tool, without it, and of its calls alone. Turns end
    with a word of any kind, at the latest after 48 tokens."""
    tokenizer = ChatTokenizer.from_folder(folder)
    num_groups, size = (2, 2) if is_small(folder) else (workload.GROUPS, workload.MEMBERS)
    limits = Limits(max_turns=workload.TURNS, max_turn_tokens=48, max_context_tokens=512)

    async def play_all(generator: Generator, tool_s: float) -> tuple[float, list[Rollout]]:
        agent = Agent(generator=generator, tokenizer=tokenizer, limits=limits)

        async def play(task: Task, **options: Any) -> Rollout:
            services = Services(tokenizer=tokenizer, sandbox=None, timeout_s=2 * TOOL_S)
            episode = EnvEpisode(SleepingEnv(tool_s), (), None, services)
            return await agent.play(task, episode, **options)

        collector = RolloutCollector(play, run_seed=0)
        sampling = SamplingParams(stop_token_ids=ends_of_turns(tokenizer))
        start = time.perf_counter()
        groups = await asyncio.gather(
            *(
                collector.run_group(task, group_id=task.task_id, size=size, sampling=sampling)
                for task in some_tasks(num_groups)
            )
        )
        return time.perf_counter() - start, [rollout for group in groups for rollout in group]

    async def run() -> dict[str, float]:
        async with make_engine(folder, dtype, threads) as engine:
            await play_all(engine, 0.0)  # warms up
            before_s, rollouts = await play_all(engine, 0.0)
            wall_s, same = await play_all(engine, TOOL_S)
            after_s, _ = await play_all(engine, 0.0)
            assert [r.tokens for r in same] == [r.tokens for r in rollouts], "sampling is seeded"
            calls = [len(rollout.turn_spans) for rollout in rollouts]
            tools_s = await tools_alone(calls)
        return {
            "wall_s": wall_s,
            "model_s": (before_s + after_s) / 2,
            "tools_s": tools_s,
            "num_rollouts": len(rollouts),
            "num_calls": sum(calls),
            "num_sampled": sum(rollout.num_action_tokens for rollout in rollouts),
        }

    return asyncio.run(run())


async def tools_alone(calls: Sequence[int]) -> float:
    """Seconds of so many calls of each rollout, one after another, all rollouts at once."""

    async def call(num_calls: int) -> None:
        env = SleepingEnv(TOOL_S)
        for _ in range(num_calls):
            await env.step("")

    start = time.perf_counter()
    await asyncio.gather(*map(call, calls))
    return time.perf_counter() - start


def ends_of_turns(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Tokens that end a sentence or a line."""
    return tuple({tokenizer.encode(text)[-1] for text in (".", "?", "!", ":", "\n", ".\n", "\n\n")})


def some_tasks(count: int) -> list[Task]:
    prompts = workload.step_prompts()
    return [
        Task(task_id=f"t{n}", kind="talk", prompt=f"{n}: {prompts[n % len(prompts)]}", answer="42")
        for n in range(count)
    ]


# -- whole steps -----------------------------------------------------------------------------------


def inline_steps(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Synchronous steps in this process."""
    return run_steps(step_config(folder, dtype, threads))


def apart_steps(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Learner and replica with half the threads each."""
    config, half = step_config(folder, dtype, threads), max(1, threads // 2)
    return run_steps(
        replace(
            config,
            rl=replace(config.rl, max_staleness=1),
            cluster=ClusterConfig(backend="local", heartbeat_s=0.1),
            learner=LearnerConfig(threads=half),
            rollout=RolloutConfig(threads=half),
        )
    )


def step_config(folder: str, dtype: str, threads: int) -> RunConfig:
    """The options that both ways of running have in common. The entropy bonus makes every rollout
    count: a model that solves nothing would have nothing to train on."""
    rl = RLConfig(
        steps=WARM_STEPS + STEPS,
        tasks_per_step=2 if is_small(folder) else 8,
        group_size=4,
        algorithm=AlgorithmSpec(entropy_coef=0.01),
    )
    preset = get_preset("tiny" if is_small(folder) else "smollm2").config()
    given: dict[str, Any] = {"model": folder, "dtype": dtype, "device": "cpu", "threads": threads}
    return replace(preset, rl=rl, **given)


def run_steps(config: RunConfig) -> dict[str, Any]:
    """Some steps of the run's own trainer; seconds of a step and the idle share of each role."""
    torch.set_num_threads(1)  # of this thread, as train_agent.py does
    with tempfile.TemporaryDirectory() as out:
        parts = Parts(replace(config, out=Path(out)))
        roles = make_roles(parts)
        try:
            return asyncio.run(time_steps(parts, roles))
        finally:
            roles.close()


@dataclass(frozen=True)
class Reading:
    """Where the clocks stood when a step was done."""

    at: float
    learner_s: float  # busy since the step before
    engine_s: float  # busy since the beginning
    num_sampled: int


async def time_steps(parts: Parts, roles: Roles) -> dict[str, float]:
    """The warm-up steps, then those that count."""
    readings: list[Reading] = []

    async def on_step(result: StepResult) -> None:
        found = result.metrics
        readings.append(
            Reading(
                time.perf_counter(),
                found["train_s"] + found["sync_s"],
                engine_seconds(roles),
                found["action_tokens"],
            )
        )

    await roles.start()
    try:
        chosen = choose_learner(
            parts.config,
            engine=roles.engine,
            publisher=roles.publisher,
            thread=roles.optimizer_thread,
        )
        with Scheduler(backend="inline") as scheduler:
            learner = scheduler.actor(chosen.func).remote(*chosen.args, **chosen.keywords)
            trainer = Trainer(
                parts.config,
                learner=learner,
                collector=roles.collector,
                tasks=TaskChooser(parts.tasks.train, InOrder(), seed=parts.config.seed),
            )
            await trainer.fit(0, on_step)
    finally:
        await roles.close_loop()
    return summary(readings[WARM_STEPS - 1 :])


def engine_seconds(roles: Roles) -> float:
    """Seconds in which the inference engine worked, as of its last heartbeat."""
    if isinstance(roles, InlineRoles):
        metrics: Any = roles.generator.metrics()
    else:
        assert roles.control is not None, "there are several processes"
        (metrics,) = [one.metrics for one in roles.control.roles() if one.kind == "replica"]
    return metrics["step_s"] + metrics["update_s"]


def summary(readings: Sequence[Reading]) -> dict[str, float]:
    """From the first reading to the last."""
    first, last = readings[0], readings[-1]
    wall_s = last.at - first.at
    return {
        "step_s": wall_s / (len(readings) - 1),
        "idle_learner": 1 - sum(one.learner_s for one in readings[1:]) / wall_s,
        "idle_engine": 1 - (last.engine_s - first.engine_s) / wall_s,
        "tokens_per_step": sum(one.num_sampled for one in readings[1:]) / (len(readings) - 1),
    }
