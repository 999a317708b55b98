"""Environments of other libraries, played as ours are: Gymnasium's form, OpenEnv's servers."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapted_games
import pytest
from agent_doubles import ScriptedGenerator, tiny_tokenizer

from nanoinfer.params import SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.envs.base import Services
from nanorl.envs.catalog import load_kind
from nanorl.envs.env_kind import EnvKind
from nanorl.options.presets import get_preset
from nanorl.options.run_kind import num_env_workers
from nanorl.rollout_json import to_json
from nanorl.task import Task
from nanorl.types import Rollout, Status

FILE = f"gymnasium:{adapted_games.__file__}:Countdown"
LAKE = {"render_mode": "ansi", "is_slippery": False, "actions": ["left", "down", "right", "up"]}
TOKENIZER = tiny_tokenizer()


async def play(kind: EnvKind, task: Task, *says: str) -> tuple[Rollout, list[str]]:
    """The rollout of a policy that says these things, and what it read."""
    services = Services(tokenizer=TOKENIZER, sandbox=None, timeout_s=5.0)
    env = kind.open(services)
    read: list[str] = []

    async def loop(episode: Any) -> None:
        await episode.start()
        while (text := await episode.turn()) is not None:
            step = await episode.step(text)
            if step.is_done or not episode.observe(step):
                break
        read.extend(m["content"] for m in episode.context.messages if m["role"] != "assistant")

    agent = Agent(
        generator=ScriptedGenerator(TOKENIZER, list(says)),
        tokenizer=TOKENIZER,
        limits=Limits(max_turns=len(says), max_turn_tokens=200, max_context_tokens=8192),
        loop=loop,
    )
    rollout = await agent.play(
        task, env, group_id="g", rollout_id="r", sampling=SamplingParams(seed=1)
    )
    return rollout, read


def played(kind: EnvKind, task: Task, *says: str) -> tuple[Rollout, list[str]]:
    async def limited() -> Any:
        return await asyncio.wait_for(play(kind, task, *says), 60)

    return asyncio.run(limited())


def numbers_of(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [str(rng.randrange(100)) for _ in range(4)]


def test_a_class_of_gymnasiums_form_needs_no_package_and_its_return_is_the_rollouts() -> None:
    kind = load_kind(FILE, {"prompt": "Repeat."})
    tasks = kind.tasks(0).batch(0, 4)
    assert len({task.data["seed"] for task in tasks}) == 4
    one, two, three, _ = numbers_of(tasks[0].data["seed"])
    rollout, read = played(kind, tasks[0], one, "nothing", three)
    assert read == [f"Repeat.\nsay {one}", f"say {two}", f"say {three}"]
    assert (rollout.reward, rollout.turn_rewards) == (1.0, [1.0, -0.5, 0.0])
    assert rollout.total_reward == 1.5 and rollout.is_success
    again, _ = played(kind, tasks[0], one, "nothing", three)
    assert to_json(again) == to_json(rollout), "the seed is the task"
    cut, _ = played(kind, tasks[0], one, two)
    assert (cut.reward, cut.turn_rewards) == (0.0, [1.0, 1.0])


def test_frozen_lake_is_played_by_the_names_of_its_actions() -> None:
    pytest.importorskip("gymnasium")
    kind = load_kind("gymnasium:FrozenLake-v1", LAKE)
    task = kind.tasks(0).batch(0, 1)[0]
    way = ["Down", "I go down, not up: down.", "right", "right", "down", "right"]
    rollout, read = played(kind, task, *way)
    assert rollout.is_success and rollout.total_reward == 1.0 and rollout.status == Status.FINISHED
    assert read[0].startswith("Say one action: left, down, right, up.") and "[S]FFF" in read[0]
    rollout, read = played(kind, task, "jump", "upwards", "right", "down")
    assert read[1] == "There is no action in that. Say one action: left, down, right, up."
    assert read[2] == read[1], "a name inside a word is none"
    assert (rollout.reward, rollout.metrics["num_malformed_actions"]) == (0.0, 2.0)


def test_actions_are_numbers_without_names_and_texts_in_a_text_space() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    kind = load_kind("gymnasium:FrozenLake-v1", {"is_slippery": False})
    task = kind.tasks(0).batch(0, 1)[0]
    _, read = played(kind, task, "1", "4", "-1", "2.0", "so: 1")
    assert read[0] == "Say one action: a number from 0 to 3.\n0"
    assert [text[:15] for text in read[1:]] == ["4", *["There is no act"] * 3]

    class Echo(gymnasium.Env):
        action_space = gymnasium.spaces.Text(20)
        observation_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return f"seed {seed}", {}

        def step(self, action: str) -> Any:
            return action.upper(), 0.25, False, action == "stop", {}

    gymnasium.register("nanorl/Echo-v0", Echo, max_episode_steps=3)
    try:
        kind = load_kind("gymnasium:nanorl/Echo-v0", {})
        task = kind.tasks(0).batch(0, 1)[0]
        rollout, read = played(kind, task, "abc", "stop")
        assert read == [f"Say what to do.\nseed {task.data['seed']}", "ABC"]
        assert (rollout.reward, rollout.total_reward) == (0.25, 0.5)
        rollout, _ = played(kind, task, "a", "b", "c", "d")
        assert rollout.num_turns == 3, "its own limit on steps"
    finally:
        gymnasium.registry.pop("nanorl/Echo-v0")


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("gymnasium:NoSuchLake-v1", {}, "NoSuchLake"),
        ("gymnasium:FrozenLake-v1", {"actions": ["left"]}, "FrozenLake-v1 has 4"),
        ("gymnasium:Pendulum-v1", {}, "Box cannot be written"),
        ("gymnasium:nowhere.py:Game", {}, "no such file"),
        ("openenv:127.0.0.1:80", {}, "must look like openenv:http"),
        ("openenv:http://h", {"timeout_s": 0}, "must be positive"),
        ("openenv:http://h", {"colour": 1}, "colour"),
    ],
)
def test_what_cannot_be_played_is_refused_up_front(
    spec: str, arguments: dict[str, Any], message: str
) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("websockets")
    with pytest.raises(ValueError, match=message):
        load_kind(spec, arguments)


def test_code_of_the_users_is_hosted_and_servers_play_by_themselves() -> None:
    config = get_preset("tiny").config()
    num_workers = {
        env: num_env_workers(type(config)(**{**vars(config), "env": env}))
        for env in ("gymnasium:FrozenLake-v1", "openenv:http://h", "http://h:1", "guess", "mine.py")
    }
    assert list(num_workers.values()) == [2, 0, 0, 0, 2]


@pytest.fixture(scope="module")
def open_env() -> Iterator[str]:
    pytest.importorskip("openenv.core.env_server.http_server", reason="openenv-core is missing")
    pytest.importorskip("websockets")
    with subprocess.Popen(
        [sys.executable, adapted_games.__file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None and server.stdin is not None
        port = server.stdout.readline().strip()
        assert port, "the server did not start"
        yield f"openenv:http://127.0.0.1:{port}"
        server.stdin.close()
        server.wait(30)


def test_a_real_openenv_server_is_played_in_its_wire_form(open_env: str) -> None:
    kind = load_kind(open_env, {"prompt": "Guess."})
    task = kind.tasks(0).batch(0, 1)[0]
    answer = random.Random(task.data["seed"]).randint(1, 20)
    rollout, read = played(kind, task, "0", "21", str(answer))
    assert read == ["Guess.\na number from 1 to 20", "higher", "lower"]
    assert (rollout.reward, rollout.turn_rewards) == (1.0, [-0.125, -0.125, 0.0])
    broken, _ = played(kind, task, "stop")
    assert broken.status == Status.FAILED and "the game broke" in broken.error


def test_an_openenv_server_that_is_full_is_waited_for(open_env: str) -> None:
    """It has room for two sessions."""
    kind = load_kind(open_env, {})
    task = kind.tasks(0).batch(0, 1)[0]

    async def many() -> list[Any]:
        return await asyncio.gather(*(play(kind, task, "0", "0") for _ in range(5)))

    rollouts = asyncio.run(asyncio.wait_for(many(), 100))
    assert [rollout.status for rollout, _ in rollouts] == [Status.TRUNCATED_CONTEXT] * 5


def test_an_action_of_several_fields_is_written_as_json(open_env: str) -> None:
    kind = load_kind(open_env, {"action": "json"})
    task = kind.tasks(0).batch(0, 1)[0]
    rollout, read = played(kind, task, "12", '{"hint": 3}', '{"guess": "0"}')
    assert read[1] == "That is no action: write a JSON object"
    assert re.match(r"That is no action: guess: Field required; hint: Extra", read[2])
    assert rollout.metrics["num_malformed_actions"] == 2.0
    with pytest.raises(ValueError, match="action=word: the server's actions have guess"):
        load_kind(open_env, {"action": "word"}).tasks(0)


def test_an_address_without_an_openenv_server_is_refused_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("websockets")
    with pytest.raises(ValueError, match="no OpenEnv server answers at /schema"):
        load_kind("openenv:http://127.0.0.1:9", {}).tasks(0)
