"""A teacher of an environment that shows pictures sees what the agent sees."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from seer import Seer, png

import nanorl
from nanoinfer.params import SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.distributed.warm_start import RecordingEnv, ScriptedGenerator
from nanorl.envs.base import Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.images import as_shown, observed
from nanorl.task import Task

SAID: list[Any] = []
"""What teachers were given, in the order of their turns."""


class Pages(nanorl.Env):
    """An opening with a picture, then a text, a picture alone, and the end."""

    def tasks(self, rng: random.Random) -> Task:
        return Task("look")

    def reset(self) -> Any:
        self.replies = iter(["a text", nanorl.Image(png(20)), ["a", nanorl.Image(png(30)), "b"]])
        return ["First:", nanorl.Image(png(10))]

    def step(self, text: str) -> Any:
        reply = next(self.replies, None)
        return self.done(reward=1.0) if reply is None else reply

    def teacher(self, observations: Sequence[Any], rng: random.Random) -> str:
        SAID.append([as_bytes(one) for one in observations])
        return "on"


def as_bytes(observation: Any) -> Any:
    if isinstance(observation, str):
        return observation
    return [one.data() if isinstance(one, nanorl.Image) else one for one in observation]


SEEN = [["First:", png(10)], "a text", [png(20)], ["a", png(30), "b"]]


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    SAID.clear()


def test_a_rehearsal_shows_pictures_without_a_model() -> None:
    played = nanorl.rehearse(Pages)
    assert played.reward == 1.0 and len(played.turns) == 4
    assert [SEEN[:number] for number in (1, 2, 3, 4)] == SAID
    assert played.observations[0] == "a text"


def test_the_supervised_start_shows_its_teacher_what_the_agent_sees(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    seer = Seer.make(tmp_path_factory.mktemp("seer"))
    kind = EnvClassKind(Pages)
    env = RecordingEnv(kind.open(Services(tokenizer=seer.tokenizer, sandbox=None, timeout_s=5.0)))
    script = kind.demonstrator(Task("look"), random.Random(1), seer.tokenizer, env)
    eos = min(seer.tokenizer.eos_ids)
    generator = ScriptedGenerator(script, lambda: env.observations, seer.tokenizer, eos)
    limits = Limits(max_turns=6, max_context_tokens=300)
    agent = Agent(generator=generator, tokenizer=seer.tokenizer, limits=limits)
    playing = agent.play(
        Task("look"), env, group_id="g", rollout_id="r", sampling=SamplingParams(seed=1)
    )
    rollout = asyncio.run(playing)
    assert [SEEN[:number] for number in (1, 2, 3, 4)] == SAID
    assert len(rollout.images) == 3 and rollout.reward == 1.0


def test_messages_without_pictures_stay_a_text() -> None:
    said = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}]
    assert observed(said) == "5\n6" == as_shown("5\n6", None)


def test_a_picture_is_read_when_the_teacher_looks_at_it_or_another_process_gets_it() -> None:
    asked: list[str] = []

    def data(sha256: str) -> bytes:
        asked.append(sha256)
        return png(10)

    tokenizer = SimpleNamespace(store=SimpleNamespace(data=data))
    one, two = as_shown([{"type": "image", "sha256": name} for name in "ab"], tokenizer)
    assert not asked
    assert isinstance(two, nanorl.Image) and two.data() == png(10) and asked == ["b"]
    sent = pickle.loads(pickle.dumps(one))
    assert asked == ["b", "a"] and sent.data() == sent.source == png(10) and len(asked) == 2
