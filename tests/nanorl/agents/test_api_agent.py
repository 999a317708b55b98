"""Functions of (task, client): how they answer, how they are scored, what their failures say."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import ScriptedGenerator
from agent_programs import SECRET, TASK, TINY, play

from nanorl.agents.api_agent import ApiLoop, is_api_agent
from nanorl.agents.endpoint.report import SCORER_HEADER, ReportRules
from nanorl.agents.loops import load_loop
from nanorl.envs.rewards.base import Score
from nanorl.options.parts import Parts
from nanorl.options.presets import get_preset
from nanorl.run.parse import with_options
from nanorl.types import Rollout, Status

openai = pytest.importorskip("openai", reason="needs the extra `agents`")
httpx = pytest.importorskip("httpx")


def rollout_of(function: Any, *said: str) -> Rollout:
    return asyncio.run(play(ApiLoop(function), ScriptedGenerator(TINY, list(said)), TASK))


def spoken(rollout: Rollout) -> str:
    pairs = zip(rollout.tokens, rollout.loss_mask, strict=True)
    return TINY.decode([token for token, mask in pairs if mask], skip_special=True)


async def ask(client: Any, text: str = "x") -> str:
    messages = [{"role": "user", "content": text}]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return str(answer.choices[0].message.content)


async def repeat(task: Any, client: Any) -> str:
    return await ask(client)


@pytest.mark.parametrize(("said", "reward"), [(SECRET, 1.0), ("something else", 0.0)])
def test_a_text_is_scored_by_the_environment(said: str, reward: float) -> None:
    rollout = rollout_of(repeat, said)
    assert (rollout.status, rollout.reward) == (Status.FINISHED, reward)
    assert spoken(rollout) == said


@pytest.mark.parametrize(
    ("given", "reward"), [(0.25, 0.25), (1, 1.0), (Score(0.5, parts={"style": 2.0}), 0.5)]
)
def test_a_number_is_the_reward(given: Any, reward: float) -> None:
    async def agent(task: Any, client: Any) -> Any:
        await ask(client)
        return given

    rollout = rollout_of(agent, SECRET)
    assert (rollout.status, rollout.reward) == (Status.FINISHED, reward)
    assert rollout.metrics["reward_from_agent"] == 1.0
    assert any("style" in name for name in rollout.metrics) == isinstance(given, Score)


@pytest.mark.parametrize("given", [True, [1], math.nan, object()])
def test_what_is_neither_says_nothing_of_the_policy(given: Any) -> None:
    async def agent(task: Any, client: Any) -> Any:
        await ask(client)
        return given

    assert rollout_of(agent, SECRET).status is Status.FAILED


def test_a_plain_function_has_a_plain_client_and_a_thread() -> None:
    def agent(task: Any, client: Any) -> str:
        messages = [{"role": "user", "content": "x"}]
        answer = client.chat.completions.create(model="policy", messages=messages)
        return str(answer.choices[0].message.content)

    assert rollout_of(agent, SECRET).reward == 1.0


def test_the_task_says_what_the_policy_may_read() -> None:
    seen = []

    async def agent(task: Any, client: Any) -> str:
        seen.append(task)
        return await ask(client)

    rollout_of(agent, SECRET)
    (task,) = seen
    assert task.prompt == "Say it." and task.messages[-1]["content"] == "Say it."
    assert task.files == {"src/notes.txt": "a note"}
    assert SECRET not in repr(task) and "hidden" not in repr(task)


def test_a_client_without_a_key_finds_it_in_the_url() -> None:
    async def agent(task: Any, client: Any) -> str:
        async with httpx.AsyncClient(timeout=30) as plain:
            url = f"{task.keyed_url}/v1/chat/completions"
            answer = await plain.post(url, json={"messages": task.messages})
        return str(answer.json()["choices"][0]["message"]["content"])

    assert rollout_of(agent, SECRET).reward == 1.0


@pytest.mark.parametrize("report", [{"reward": 0.75, "metrics": {"tries": 3}}, {"answer": SECRET}])
def test_a_report_by_http_counts_for_more_than_what_is_returned(report: dict[str, Any]) -> None:
    async def agent(task: Any, client: Any) -> str:
        said = await ask(client)
        options = {"headers": {SCORER_HEADER: "of the scorer"}}
        await client.post("/../episode", cast_to=object, body=report, options=options)
        return said

    generator = ScriptedGenerator(TINY, ["something else"])
    scoring = ReportRules("of the scorer")
    rollout = asyncio.run(play(ApiLoop(agent), generator, TASK, scoring=scoring))
    assert rollout.metrics.get("reward_from_scorer") == (1.0 if "reward" in report else None)
    assert rollout.reward == report.get("reward", 1.0)
    assert rollout.metrics.get("tries") == (3.0 if "metrics" in report else None)


def test_an_agent_that_raises_after_an_answer_is_scored_as_it_stands() -> None:
    async def agent(task: Any, client: Any) -> str:
        await ask(client)
        raise KeyError("what the policy said made no sense")

    rollout = rollout_of(agent, SECRET)
    assert (rollout.status, rollout.reward) == (Status.FINISHED, 0.0)
    assert rollout.metrics["agent_failed"] == 1.0


def test_one_that_raises_before_any_is_played_again() -> None:
    async def agent(task: Any, client: Any) -> str:
        raise RuntimeError("no such file")

    rollout = rollout_of(agent, SECRET)
    assert rollout.status is Status.FAILED and "RuntimeError: no such file" in str(rollout.error)


def test_only_functions_of_a_task_and_a_client_are_agents() -> None:
    async def other(episode: Any) -> None:
        """A loop of the project."""

    assert is_api_agent(repeat) and not is_api_agent(other) and not is_api_agent("repeat")


@pytest.mark.parametrize(
    "agent", [{"agent.loop": "FILE:agent"}, {"agent.command": "python FILE"}], ids=str
)
def test_a_warm_start_before_an_agent_without_a_teacher_is_refused(
    agent: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    file.write_text("async def agent(task, client): ...\n")
    options = {name: text.replace("FILE", str(file)) for name, text in agent.items()}
    config = with_options(
        get_preset("tiny").config(), {**options, "out": tmp_path / "run"}, where="test"
    )
    assert config.warm_start.steps > 0
    with pytest.raises(ValueError, match=r"--warm-start.steps .* --warm-start.steps 0"):
        Parts(config)


def test_a_file_without_such_a_function_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("async def agent(job, client): ...\n")
    with pytest.raises(ValueError, match="agent"):
        load_loop(f"{file}:agent")
