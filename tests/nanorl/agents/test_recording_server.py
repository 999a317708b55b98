"""The recording server, asked by the real client of OpenAI and by plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from agent_doubles import ScriptedGenerator, tiny_tokenizer

from nanoinfer.dialects import all_dialects
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.endpoint_server import RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.endpoint.report import SCORER_HEADER, ReportRules
from nanorl.agents.limits import Limits

TOKENIZER = tiny_tokenizer()
LIMITS = Limits(max_turns=8, max_turn_tokens=200, max_context_tokens=4000)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def recording(*script: str, limits: Limits = LIMITS) -> Recording:
    generator = ScriptedGenerator(TOKENIZER, list(script))
    return Recording(generator, TOKENIZER, limits=limits, sampling=SamplingParams())


def serve(work: Callable[[RecordingServer], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        server = RecordingServer(
            all_dialects(TOKENIZER), model="tiny", max_model_len=512, **options
        )
        try:
            await work(server)
        finally:
            await server.close()

    asyncio.run(run())


def client_of(session: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=session.openai_url, api_key=session.key, max_retries=0, **options
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_with_tools_through_the_real_client_is_one_sequence() -> None:
    said = f"Let me see.\n{CALL}"
    record = recording(said, "It is 2.")

    async def work(server: RecordingServer) -> None:
        async with server.episode(record) as session, client_of(session) as client:
            messages: list[Any] = [user("1+1?")]
            first = await client.chat.completions.create(
                model="any", messages=messages, tools=[ADD], logprobs=True
            )
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert message.content == "Let me see."
            (call,) = message.tool_calls or []
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            assert first.choices[0].logprobs is not None
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
            second = await client.chat.completions.create(
                model="any", messages=messages, tools=[ADD], temperature=0.1
            )
            assert second.choices[0].message.content == "It is 2."

    serve(work)
    (only,) = record.tree.sequences()
    text = TOKENIZER.decode(only.tokens)
    assert text.index(said) < text.index("2\n", text.index(said)) < text.index("It is 2.")
    assert '"name": "add"' in text[: text.index("1+1?")], "the system message tells of the tool"
    assert sum(only.loss_mask) == len(said) + len("It is 2.") + 2
    assert record.metrics["ignored_temperature"] == 1


def test_a_stream_says_what_the_answer_says() -> None:
    async def work(server: RecordingServer) -> None:
        record = recording(f"Yes.{CALL}", "No.")
        async with server.episode(record) as session, client_of(session) as client:
            stream = await client.chat.completions.create(
                model="x", messages=[user("?")], tools=[ADD], stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            calls = [c.choices[0].delta.tool_calls for c in chunks if c.choices]
            assert text == "Yes." and sum(bool(c) for c in calls) == 1
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 4

    serve(work)


def test_a_key_is_good_for_its_episode_alone() -> None:
    one, two = recording("one"), recording("two")

    async def work(server: RecordingServer) -> None:
        async with server.episode(one) as first:
            async with server.episode(two) as second:
                for session, said in ((second, "two"), (first, "one")):
                    async with client_of(session) as client:
                        answer = await client.chat.completions.create(
                            model="x", messages=[user("?")]
                        )
                        assert answer.choices[0].message.content == said
            async with client_of(second) as client:
                with pytest.raises(openai.AuthenticationError, match="not after its end"):
                    await client.chat.completions.create(model="x", messages=[user("?")])
            async with httpx.AsyncClient(timeout=30) as plain:
                body = {"messages": [user("?")]}
                without = await plain.post(f"{first.openai_url}/chat/completions", json=body)
                assert without.status_code == 401
                behind = await plain.get(f"{first.keyed_url}/v1/models")
                assert behind.json()["data"][0]["max_model_len"] == 512
                for way in ({"x-api-key": first.key}, {"authorization": f"Bearer {first.key}"}):
                    asked = await plain.get(f"{first.openai_url}/models", headers=way)
                    assert asked.json() == behind.json(), "whichever API the client knows"
        assert not server.sessions

    serve(work)
    assert len(one.tree.nodes) == len(two.tree.nodes) == 1


def test_limits_are_typed_errors_of_the_client() -> None:
    record = recording("one", limits=Limits(max_turns=1, max_turn_tokens=8, max_context_tokens=80))

    async def work(server: RecordingServer) -> None:
        async with server.episode(record) as session, client_of(session) as client:

            async def ask(text: str, **options: Any) -> Any:
                return await client.chat.completions.create(
                    model="x", messages=[user(text)], **options
                )

            with pytest.raises(openai.BadRequestError) as long:
                await ask("long" * 30)
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="tools is empty"):
                await ask("?", tool_choice="required")
            with pytest.raises(openai.BadRequestError, match="no tool is called 'sub'"):
                named = {"type": "function", "function": {"name": "sub"}}
                await ask("?", tools=[ADD], tool_choice=named)
            await ask("?")
            with pytest.raises(openai.BadRequestError, match="has had its 1 calls"):
                await ask("?")

    serve(work)
    assert len(record.tree.nodes) == 1


def test_tokens_in_tokens_out() -> None:
    record = recording("one", "two")

    async def work(server: RecordingServer) -> None:
        async with server.episode(record) as session, httpx.AsyncClient(timeout=30) as plain:
            headers = {"authorization": f"Bearer {session.key}"}

            async def ask(ids: list[int], **params: Any) -> httpx.Response:
                body = {"token_ids": ids, "sampling_params": params}
                url = f"{session.url}/inference/v1/generate"
                return await plain.post(url, json=body, headers=headers)

            first = (await ask([1, 2], max_tokens=9)).json()["choices"][0]
            ids = first["token_ids"]
            assert TOKENIZER.decode(ids[:-1]) == "one" and len(first["versions"]) == len(ids)
            await ask([1, 2, *ids, 7])
            assert (await ask([99999])).json()["error"]["param"] == "token_ids"
            assert (await ask([])).status_code == 400

    serve(work)
    (only,) = record.tree.sequences()
    assert only.tokens[:2] == [1, 2] and len(only.turn_spans) == 2


def test_an_episode_is_told_its_reward_by_http() -> None:
    async def work(server: RecordingServer) -> None:
        async with server.episode(recording()) as session, httpx.AsyncClient(timeout=30) as plain:
            key = {"authorization": f"Bearer {session.key}"}
            headers = key | {SCORER_HEADER: "of the scorer"}
            url = f"{session.url}/episode"
            body = {"reward": 0.5, "metrics": {"tries": 3}, "is_done": True}
            assert (await plain.post(url, json=body, headers=headers)).status_code == 200
            bad = await plain.post(url, json={"reward": "much"}, headers=headers)
            assert bad.status_code == 400 and bad.json()["error"]["param"] == "reward"
            assert (session.report.reward, session.report.metrics) == (0.5, {"tries": 3.0})
            assert session.report.done.is_set()

    serve(work, scoring=ReportRules("of the scorer"))


class Slow:
    """Never answers, and notes that it was given up."""

    def __init__(self) -> None:
        self.begun, self.given_up = asyncio.Event(), asyncio.Event()

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.begun.set()
        try:
            return await asyncio.Future()
        finally:
            self.given_up.set()


def test_a_client_that_hangs_up_is_aborted_and_not_recorded() -> None:
    async def work(server: RecordingServer) -> None:
        slow = Slow()
        record = Recording(slow, TOKENIZER, limits=LIMITS, sampling=SamplingParams())
        async with server.episode(record) as session:
            async with client_of(session) as client:
                asking = asyncio.ensure_future(
                    client.chat.completions.create(model="x", messages=[user("?")])
                )
                await slow.begun.wait()
                asking.cancel()
            async with asyncio.timeout(30):
                await slow.given_up.wait()
        assert not record.tree.nodes

    serve(work)
