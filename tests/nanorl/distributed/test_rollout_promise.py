"""Which replica served a request, how often it died and who was in the batch cannot change a
rollout."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
from tiny_text import make_model, make_tokenizer
from waiting import turns

from nanoengine.model.transformer import Transformer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.agents.context import Generator
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.distributed.roles.replica_clients import ActorClient, ReplicaClient
from nanorl.distributed.roles.replica_role import Replica
from nanorl.distributed.roles.router import Router
from nanorl.envs.base import Services
from nanorl.envs.env import Env
from nanorl.envs.env_episode import EnvEpisode
from nanorl.task import Task
from nanorl.types import Rollout
from nanosched import ActorHandle, Scheduler

TOKENIZER = make_tokenizer()
STOPS = tuple(range(0, 300, 17))  # so many that a random model ends its turns
NUM_GROUPS, GROUP_SIZE = 4, 4


class Echo(Env):
    """Answers each action with a few bytes that depend on it, after a wait that does not."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    async def step(self, text: str) -> str:
        await turns(self._draw.randrange(12))
        return "Output:\n" + blake2b(text.encode(), digest_size=4).hexdigest()


async def play_all(generator: Generator, draw: random.Random) -> list[Rollout]:
    """All rollouts of a step, begun in a random order at random moments."""
    limits = Limits(max_turns=4, max_turn_tokens=30, max_context_tokens=200)
    agent = Agent(generator=generator, tokenizer=TOKENIZER, limits=limits)

    async def play(group: int, member: int) -> Rollout:
        await turns(draw.randrange(60))
        task = Task(task_id=f"t{group}", kind="k", prompt=f"hello, the {group}" * 3, answer="42")
        options = {"repetition_penalty": 1.2} if group == 1 else {}
        sampling = SamplingParams(seed=100 * group + member, temperature=0.8, **options)  # type: ignore[arg-type]
        services = Services(tokenizer=TOKENIZER, sandbox=None, timeout_s=1.0)
        episode = EnvEpisode(Echo(draw), (), None, services)
        names = {"group_id": f"g{group}", "rollout_id": f"g{group}-m{member}"}
        return await agent.play(task, episode, **names, sampling=sampling)

    order = [(group, member) for group in range(NUM_GROUPS) for member in range(GROUP_SIZE)]
    draw.shuffle(order)
    rollouts = await asyncio.gather(*(play(*who) for who in order))
    return sorted(rollouts, key=lambda rollout: rollout.rollout_id)


class Cluster:
    """Replicas of one model, every engine of other sizes, that die, drain and come."""

    def __init__(self, model: Transformer, draw: random.Random) -> None:
        self.sched, self.router = Scheduler(), Router(gate=2, wait_s=60)
        self._model, self._draw = model, draw
        self._handles: dict[str, ActorHandle[Replica]] = {}
        self.num_made = 0

    def add(self, **options: object) -> None:
        draw = self._draw
        sizes = {
            "num_blocks": draw.choice((60, 200)),
            "max_num_seqs": draw.choice((2, 16)),
            "max_batch_tokens": draw.choice((16, 100)),
            "speculate": draw.choice((0, 3)),
            "prefix_caching": draw.random() < 0.7,
            "eos_ids": STOPS,
        }
        config = InferConfig(**{**sizes, **options})  # type: ignore[arg-type]
        engine = LLMEngine(self._model, config, tokenizer=TOKENIZER)
        generator = AsyncEngine(engine, use_thread=False)
        name = f"r{self.num_made}"
        self._handles[name] = self.sched.actor(Replica).remote(generator=generator)
        self.num_made += 1
        self._tell()

    def _tell(self) -> None:
        clients: dict[str, ReplicaClient] = {n: ActorClient(h) for n, h in self._handles.items()}
        self.router.set_replicas(clients)

    async def trouble(self) -> None:
        """One replica is killed or drained, and then another comes."""
        name = self._draw.choice(sorted(self._handles))
        if self.num_made % 2:  # in turn
            self.sched.kill(self._handles[name])
        else:
            await self._handles[name].call(Replica.drain)
        await turns(self._draw.randrange(20))
        del self._handles[name]
        self.add()


def run(scenario: Callable[[], Awaitable[list[Rollout]]]) -> list[Rollout]:
    async def main() -> list[Rollout]:
        return await asyncio.wait_for(scenario(), 200)

    return asyncio.run(main())


def content(rollouts: list[Rollout]) -> list[tuple]:
    return [(r.rollout_id, r.tokens, r.logps, r.versions, r.turn_spans) for r in rollouts]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_no_replica_no_batch_and_no_death_changes_a_rollout(dtype: torch.dtype) -> None:
    # Heads as wide as in test_speculative_exactness.py, for the reason said there.
    model = Transformer(replace(make_model().config, head_dim=64), dtype)
    model.init_weights(0, std=0.3)

    async def one_engine() -> list[Rollout]:
        engine = LLMEngine(model, InferConfig(num_blocks=400, eos_ids=STOPS), tokenizer=TOKENIZER)
        async with AsyncEngine(engine, use_thread=False) as generator:
            return await play_all(generator, random.Random(0))

    expected = content(run(one_engine))
    assert sum(len(spans) > 1 for *_, spans in expected) > 5, "too few turns to say anything"

    async def three_engines(seed: int) -> list[Rollout]:
        draw = random.Random(seed)
        cluster = Cluster(model, draw)
        for _ in range(3):
            cluster.add()
        playing = asyncio.create_task(play_all(cluster.router, draw))
        while not playing.done():
            await turns(draw.randrange(1, 25))
            if seed and not playing.done():
                await cluster.trouble()
        counters = cluster.router.counters()
        assert counters["num_requests"] == counters["num_finished"]
        assert not any(v for name, v in counters.items() if name.startswith("load/"))
        if seed:
            assert counters["num_lost"] and counters["num_drained"], counters
        cluster.sched.close()
        return await playing

    for seed in range(3):  # the first without trouble
        assert content(run(lambda seed=seed: three_engines(seed))) == expected
