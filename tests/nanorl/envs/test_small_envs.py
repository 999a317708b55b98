"""The five small examples: right play pays, and what a policy has to find out can be learnt.

The policy here is a softmax over a few turns that looks at the words of the last message, taught by
REINFORCE: if it finds the right turns by the rewards alone, they say what is right.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import tiny_tokenizer

import nanorl
from nanorl.envs.base import Services
from nanorl.envs.catalog import load_kind
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.rewards.base import Transcript
from nanorl.task import Task
from nanorl.types import Rollout

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TURNS = {
    "corridor": ("[look()]", *(f"[go(door='{door}')]" for door in ("left", "middle", "right"))),
    "farm": ("feed", "flee", "Hm."),
    "drinks": ("hot", "cold", "Hm."),
    "duel": ("rock", "paper", "scissors", "Hm."),
}
NUM_EPISODES, NUM_COUNTED, RATE = 600, 100, 0.5
TOKENIZER = tiny_tokenizer()


class Policy:
    """Draws one of `turns` by the words that it reads, and is taught by what episodes earn."""

    def __init__(self, turns: tuple[str, ...], rng: random.Random) -> None:
        self.turns, self.rng = turns, rng
        self.weights: dict[tuple[str, int], float] = defaultdict(float)
        self.baseline = 0.0
        self.said: list[tuple[list[str], int, list[float]]] = []

    def say(self, read: str) -> str:
        words = read.lower().replace(".", " ").split()
        scores = [sum(self.weights[word, i] for word in words) for i in range(len(self.turns))]
        top = max(scores)
        odds = [math.exp(score - top) for score in scores]
        chances = [one / sum(odds) for one in odds]
        chosen = self.rng.choices(range(len(self.turns)), chances)[0]
        self.said.append((words, chosen, chances))
        return self.turns[chosen]

    def learn(self, reward: float) -> None:
        advantage, self.baseline = reward - self.baseline, 0.95 * self.baseline + 0.05 * reward
        for words, chosen, chances in self.said:
            for i, chance in enumerate(chances):
                for word in words:
                    self.weights[word, i] += RATE * advantage * ((i == chosen) - chance)
        self.said.clear()


async def play(kind: EnvKind, task: Task, policy: Policy, most_turns: int) -> float:
    """What an episode earned, its turns and all."""
    episode = kind.open(Services(tokenizer=TOKENIZER, sandbox=None, timeout_s=5.0))
    opening = await episode.reset(task)
    read, earned, answer, text = str(opening.messages[-1]["content"]), 0.0, None, ""
    try:
        for _ in range(most_turns):
            text = policy.say(read)
            step = await episode.step(text)
            earned += step.reward
            if step.is_done:
                answer = step.answer
                break
            read = str(episode.format_observation(step.observation)[-1]["content"])
        said = Transcript(messages=opening.messages, text=text, answer=answer)
        return earned + (await episode.score(no_tokens(task), said)).total
    finally:
        await episode.close()


def no_tokens(task: Task) -> Rollout:
    return Rollout(
        task_id=task.task_id, group_id="g", rollout_id="r",
        tokens=[], loss_mask=[], logps=[], versions=[],
    )  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_a_policy_learns_it_by_its_rewards_alone(name: str) -> None:
    kind: Any = load_kind(str(EXAMPLES / f"{name}.py"), {})
    most_turns = kind.defaults.get("agent.max_turns", 1)
    policy = Policy(TURNS[name], random.Random(name))
    tasks = kind.tasks(0).batch(0, NUM_EPISODES)

    async def learn() -> list[float]:
        rewards = []
        for task in tasks:
            rewards.append(await play(kind, task, policy, most_turns))
            policy.learn(rewards[-1])
        return rewards

    rewards = asyncio.run(learn())
    before = sum(rewards[:NUM_COUNTED]) / NUM_COUNTED
    after = sum(rewards[-NUM_COUNTED:]) / NUM_COUNTED
    assert after > 0.9 * max(rewards) and after > before + 0.2, (before, after)


@pytest.mark.parametrize("name", TURNS)
def test_a_teacher_shows_the_form_and_leaves_the_choice_to_rl(name: str) -> None:
    file = str(EXAMPLES / f"{name}.py")
    played = [nanorl.rehearse(file, seed=seed) for seed in range(30)]
    rate = sum(one.reward >= 1.0 for one in played) / len(played)
    assert 0.0 < rate < 0.9
    assert {turn for one in played for turn in one.turns} <= set(TURNS[name])


@pytest.mark.sandbox
def test_a_drawer_that_is_read_is_told() -> None:
    file = str(EXAMPLES / "drawers.py")
    task = nanorl.Task("b.txt", answer="42", files={"a.txt": "17", "b.txt": "42"})
    played = nanorl.rehearse(file, task, turns=["[read(path='b.txt')]", "42"])
    assert "42" in played.observations[0] and "17" not in played.observations[0]
    assert played.reward == 1.0
    assert nanorl.rehearse(file, task, turns=["17"]).reward == 0.0
