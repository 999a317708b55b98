"""Agent frameworks, unchanged, work a tool on a served model: OpenAI's Agents SDK over Responses,
LiteLLM over Messages and over Responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, scripted_engine
from serving import KEY, Served, serve

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ASKED = "What is 2 + 3?"


@contextmanager
def speaking(*script: str) -> Iterator[tuple[Served, ScriptedEngine]]:
    engine = scripted_engine(*script)
    with serve(engine) as served:
        yield served, engine


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openais_agents_work_a_tool_over_responses(is_streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason="needs openai-agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    added: list[tuple[int, int]] = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        added.append((a, b))
        return a + b

    async def talk(port: int) -> str:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
        async with client:
            model = agents.OpenAIResponsesModel("tiny", client)
            agent = agents.Agent("adder", instructions="Be brief.", model=model, tools=[add])
            if not is_streamed:
                return str((await agents.Runner.run(agent, ASKED)).final_output)
            run = agents.Runner.run_streamed(agent, ASKED)
            async for _ in run.stream_events():
                pass
            return str(run.final_output)

    with speaking(f"<think>Add.</think>{CALL}", "It is 5.") as (served, engine):
        assert asyncio.run(talk(served.port)) == "It is 5."
        assert added == [(2, 3)] and len(engine.prompts) == 2


@pytest.mark.parametrize("is_streamed", [False, True])
def test_litellm_reads_messages(is_streamed: bool) -> None:
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    function = {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    with speaking(f"Let me add. {CALL}") as (served, _):
        answer: Any = litellm.completion(
            model="anthropic/tiny",
            api_base=f"http://127.0.0.1:{served.port}",
            api_key=KEY,
            messages=[{"role": "user", "content": ASKED}],
            tools=[{"type": "function", "function": function}],
            max_tokens=300,
            stream=is_streamed,
        )
        if is_streamed:
            answer = litellm.stream_chunk_builder(list(answer))
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert message.content.strip() == "Let me add."
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        assert answer.choices[0].finish_reason == "tool_calls"


def test_litellm_reads_responses() -> None:
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    with speaking("It is 5.") as (served, _):
        answer: Any = litellm.responses(
            model="openai/tiny",
            api_base=f"http://127.0.0.1:{served.port}/v1",
            api_key=KEY,
            input=ASKED,
        )
        assert answer.output[0].content[0].text == "It is 5."
