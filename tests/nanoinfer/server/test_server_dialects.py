"""Responses and Messages on the server, as the official clients speak them: whole, streamed while
the model speaks, with tools; what goes wrong is told in the API's own form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scripted_engine import POSITIONS, ScriptedEngine, scripted_engine
from serving import KEY, Served, serve, slow_steps
from tiny_text import make_tokenizer

from nanoinfer.dialects.exchange import ApiCall, ApiReply
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Output
from nanoinfer.server.config import CompletionLimits
from nanoinfer.server.kept_answers import KeptAnswers

openai = pytest.importorskip("openai", reason="needs the openai client")
anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SPOKEN = f"<think>Two numbers.</think>Let me add them. {CALL}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
MESSAGES_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
ASKED = "What is 2 + 3?"


@contextmanager
def speaking(*script: str, **options: Any) -> Iterator[tuple[Served, ScriptedEngine]]:
    engine = scripted_engine(*script)
    with serve(engine, **options) as served:
        yield served, engine


def responses_client(served: Served, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=key, max_retries=0)


def messages_client(served: Served, key: str = KEY) -> Any:
    return anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{served.port}", api_key=key, max_retries=0
    )


def ask_messages(client: Any, way: str, messages: list[Any], **more: Any) -> Any:
    asked = {"model": "tiny", "max_tokens": 400, "messages": messages, **more}
    if way == "whole":
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def ask_responses(client: Any, way: str, **asked: Any) -> Any:
    if way == "whole":
        return client.responses.create(model="tiny", **asked)
    with client.responses.stream(model="tiny", **asked) as stream:
        return stream.get_final_response()


WAYS = pytest.mark.parametrize("way", ["whole", "stream"])


@WAYS
def test_a_tool_loop_over_messages(way: str) -> None:
    with speaking(SPOKEN, "It is 5.") as (served, engine), messages_client(served) as client:
        turn = [{"role": "user", "content": ASKED}]
        tools = {"tools": [MESSAGES_TOOL], "thinking": {"type": "adaptive"}}
        said = ask_messages(client, way, turn, **tools)
        thinking, text, use = said.content
        assert (thinking.thinking, text.text) == ("Two numbers.", "Let me add them.")
        assert (use.name, use.input) == ("add", {"a": 2, "b": 3})
        assert said.stop_reason == "tool_use" and said.model == "tiny"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "5"}
        blocks = [block.model_dump() for block in said.content]
        turn += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
        last = ask_messages(client, way, turn, **tools)
        assert [block.text for block in last.content] == ["It is 5."]
        assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", len("It is 5."))
        usage = last.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == len(engine.prompts[1])
        read = make_tokenizer().decode(engine.prompts[1])
        assert CALL.replace(">{", ">\n{").replace("}<", "}\n<") in read  # as Hermes writes it
        assert "<|tool|>5<|end|>" in read or "<tool_response>\n5\n</tool_response>" in read


@WAYS
def test_a_tool_loop_over_responses(way: str) -> None:
    with speaking(SPOKEN, "It is 5.") as (served, engine), responses_client(served) as client:
        said = ask_responses(client, way, input=ASKED, tools=[RESPONSES_TOOL], store=False)
        reasoning, message, call = said.output
        assert reasoning.content[0].text == "Two numbers."
        assert message.content[0].text == "Let me add them."
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
        assert said.status == "completed" and said.usage.input_tokens == len(engine.prompts[0])
        items = [{"role": "user", "content": ASKED}, *(one.model_dump() for one in said.output)]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        last = ask_responses(client, way, input=[*items, result], tools=[RESPONSES_TOOL])
        assert last.output_text == "It is 5." and last.usage.output_tokens == len("It is 5.")


def test_both_apis_and_tokenize_make_the_same_prompt() -> None:
    with speaking("4") as (served, engine):
        with messages_client(served) as client:
            ask_messages(
                client, "whole", [{"role": "user", "content": ASKED}], system="Be brief.",
                tools=[MESSAGES_TOOL],
            )  # fmt: skip
            counted = client.messages.count_tokens(
                model="tiny", messages=[{"role": "user", "content": ASKED}], system="Be brief.",
                tools=[MESSAGES_TOOL],
            )  # fmt: skip
        with responses_client(served) as client:
            client.responses.create(
                model="tiny", input=ASKED, instructions="Be brief.", tools=[RESPONSES_TOOL]
            )
        function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
        body = {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": ASKED},
            ],
            "tools": [{"type": "function", "function": function}],
        }
        status, told = served.send("/tokenize", body)
        assert status == 200
        assert engine.prompts[0] == engine.prompts[1] == told["tokens"]
        assert counted.input_tokens == told["count"] == len(told["tokens"])
        assert told["max_model_len"] == POSITIONS


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_events_come_while_the_model_speaks(path: str) -> None:
    """The engine stops when it has sampled a part: what arrived by then is that part's text."""
    text = "one two three four five six seven eight nine ten"
    with speaking(text) as (served, engine):
        body: dict[str, Any] = {"model": "tiny", "stream": True}
        if path == "/v1/messages":
            body |= {"max_tokens": 200, "messages": [{"role": "user", "content": "count"}]}
        else:
            body |= {"input": "count"}
        connection = served.connect()
        headers = {"Authorization": f"Bearer {KEY}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        seen = b""
        while b"delta" not in seen:
            seen += response.readline()
        is_over_early = engine.num_unfinished == 0
        rest = response.read()
        connection.close()
        events = [
            json.loads(line.removeprefix(b"data: "))
            for line in (seen + rest).splitlines()
            if line.startswith(b"data: ")
        ]
        deltas = [
            event["delta"] if isinstance(event["delta"], str) else event["delta"]["text"]
            for event in events
            if event["type"] in ("response.output_text.delta", "content_block_delta")
        ]
        assert "".join(deltas) == text and len(deltas) > 10
        assert not is_over_early, "the first delta came after the last token"


SPLITS = [
    *(SPOKEN, "<think>a</think>  b", "<think>never closed", "plain <b>text</b>", " <thin", CALL),
    *(f"{CALL}\n{CALL}", "<tool_call>broken</tool_call> behind", "a <tool_call", "", "x  "),
]


@pytest.mark.parametrize("text", SPLITS)
@pytest.mark.parametrize("tools", [True, False])
def test_a_streamed_answer_is_the_whole_one(text: str, tools: bool) -> None:
    with speaking(text or "x") as (served, _), messages_client(served) as client:
        more: dict[str, Any] = {"tools": [MESSAGES_TOOL]} if tools else {}
        more |= {"thinking": {"type": "adaptive"}, "stop_sequences": ["x"]}
        turn = [{"role": "user", "content": ASKED}]
        said = [ask_messages(client, way, turn, **more) for way in ("whole", "stream")]
        told = [
            [block.model_dump(exclude={"id", "signature"}) for block in one.content] for one in said
        ]
        assert told[0] == told[1]
        assert said[0].stop_reason == said[1].stop_reason
        assert said[0].stop_sequence == said[1].stop_sequence


def test_a_forced_tool_and_a_schema_rule_the_answer() -> None:
    small = {"type": "object", "properties": {"a": {"enum": [2]}}, "required": ["a"]}
    tool = MESSAGES_TOOL | {"input_schema": small | {"additionalProperties": False}}
    with speaking("unused") as (served, _):
        with messages_client(served) as client:
            said = ask_messages(
                client, "stream", [{"role": "user", "content": ASKED}], tools=[tool],
                tool_choice={"type": "tool", "name": "add"},
            )  # fmt: skip
            (use,) = said.content
            assert use.name == "add" and use.input == {"a": 2}
        with responses_client(served) as client:
            form = {"type": "json_schema", "name": "sum", "schema": {"enum": ["five"]}}
            said = client.responses.create(model="tiny", input=ASKED, text={"format": form})
            assert json.loads(said.output_text) == "five"


def test_what_the_client_says_of_sampling_is_done() -> None:
    with speaking("4") as (served, engine):
        with messages_client(served) as client:
            ask_messages(
                client, "whole", [{"role": "user", "content": ASKED}],
                extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7},
            )  # fmt: skip
        with responses_client(served) as client:
            client.responses.create(
                model="tiny", input=ASKED, temperature=0.75, max_output_tokens=10**6
            )
        first, second = engine.asked
        assert (first.temperature, first.top_p, first.top_k) == (0.25, 0.5, 7)
        assert (second.temperature, second.top_k) == (0.75, 0)
        assert first.max_tokens == 400
        assert second.max_tokens == POSITIONS - len(engine.prompts[1])
        status, told = served.send(
            "/v1/messages",
            {"model": "tiny", "max_tokens": 4, "temperature": "hot",
             "messages": [{"role": "user", "content": "x"}]},
        )  # fmt: skip
        assert status == 400 and "temperature" in told["error"]["message"]


@WAYS
def test_an_answer_that_is_cut_says_so(way: str) -> None:
    with speaking("one two three") as (served, _):
        with messages_client(served) as client:
            turn = [{"role": "user", "content": ASKED}]
            said = ask_messages(client, way, turn, max_tokens=5)
            assert said.stop_reason == "max_tokens" and said.content[0].text == "one t"
        with responses_client(served) as client:
            answer = client.responses.create(model="tiny", input=ASKED, max_output_tokens=5)
            assert answer.status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"


@WAYS
def test_a_conversation_goes_on_from_an_answer_that_is_kept(way: str) -> None:
    with speaking("4", "8") as (served, engine), responses_client(served) as client:
        first = ask_responses(client, way, input="2+2?", instructions="Be brief.")
        last = ask_responses(client, way, input="twice?", previous_response_id=first.id)
        read = make_tokenizer().decode(engine.prompts[1])
        assert last.previous_response_id == first.id
        assert read == (
            "<|user|>2+2?<|end|><|assistant|>4<|end|><|user|>twice?<|end|><|assistant|>"
        )
        unkept = ask_responses(client, way, input="2+2?", store=False)
        for gone in (unkept.id, "resp_0"):
            with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
                client.responses.create(model="tiny", input="x", previous_response_id=gone)


def test_what_is_kept_is_bounded_in_bytes_and_in_time() -> None:
    now = [0.0]
    kept = KeptAnswers(max_bytes=600, max_age_s=10, clock=lambda: now[0])
    call = ApiCall(messages=[{"role": "user", "content": "x" * 200}], is_kept=True)
    reply = ApiReply(text="y", output=Output())

    def has(name: str) -> bool:
        try:
            return bool(kept.continued(ApiCall(messages=[], continues=name)).messages)
        except ApiError as error:
            assert error.status == 404
            return False

    for name in "abc":
        kept.keep(name, call, reply)
        now[0] += 4
    assert [has(name) for name in "abc"] == [False, True, True]
    now[0] += 4  # b is 12 s old, c 8 s
    assert [has(name) for name in "bc"] == [False, True]
    kept.keep("d", ApiCall(messages=[{"role": "user", "content": "x" * 900}], is_kept=True), reply)
    assert [has(name) for name in "cd"] == [False, False]


def test_errors_have_the_form_of_the_api() -> None:
    with speaking("4") as (served, _):
        ask = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        for more, key, status, kind in (
            ({"model": "gpt"}, KEY, 404, "not_found_error"),
            ({"messages": []}, KEY, 400, "invalid_request_error"),
            ({}, "wrong", 401, "authentication_error"),
        ):
            got, told = served.send("/v1/messages", ask | more, key)
            assert (got, told["type"], told["error"]["type"]) == (status, "error", kind)
        with (
            messages_client(served, "wrong") as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            ask_messages(client, "whole", ask["messages"])
        other = pytest.raises(openai.NotFoundError, match="'gpt' is not served; this is 'tiny'")
        with responses_client(served) as client, other:
            client.responses.create(model="gpt", input="x")
        long = {"role": "user", "content": "word " * POSITIONS}
        got, told = served.send("/v1/messages", ask | {"messages": [long]})
        assert got == 400 and "the prompt is too long" in told["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_that_breaks_ends_with_the_apis_error(path: str) -> None:
    limits = CompletionLimits(request_timeout_s=0.3)
    with speaking("4", limits=limits) as (served, _):
        served.send("/pause", {})
        body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 9}
        body |= {"messages": [{"role": "user", "content": "x"}]}
        if path == "/v1/responses":
            body = {"model": "tiny", "stream": True, "input": "x"}
        status, text = served.send(path, body)
        assert status == 200
        kind, data = [part for part in text.split("\n\n") if part][-1].split("\n")
        told = json.loads(data.removeprefix("data: "))
        if path == "/v1/messages":
            assert kind == "event: error" and told["error"]["type"] == "timeout_error"
            assert "0.3 s" in told["error"]["message"]
        else:
            assert kind == "event: response.failed"
            assert "0.3 s" in told["response"]["error"]["message"]
        served.wait_idle()
        served.send("/resume", {})


def test_a_client_that_hangs_up_ends_its_request() -> None:
    with speaking("word " * 500) as (served, engine):
        connection = served.connect()
        body = {"model": "tiny", "stream": True, "input": "x"}
        with slow_steps(engine):
            connection.request(
                "POST", "/v1/responses", json.dumps(body), {"Authorization": f"Bearer {KEY}"}
            )
            response = connection.getresponse()
            while b"delta" not in response.readline():
                pass
            response.close()
            connection.close()
            served.wait_idle()
        assert engine.metrics()["num_aborted"] == 1


def test_many_clients_stream_at_once_and_none_reads_anothers_words() -> None:
    texts = [f"I am number {i}." for i in range(12)]
    with speaking("unused") as (served, engine):
        client = anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{served.port}", api_key=KEY, max_retries=0
        )
        spoken = {text: engine_prompt(text) for text in texts}
        engine.script = ["unused"]
        by_prompt = {tuple(ids): text for text, ids in spoken.items()}
        add = type(engine).add

        def said(ids: Any, *rest: Any) -> int:
            engine.script = [by_prompt[tuple(ids)]]
            return add(engine, ids, *rest)

        engine.add = said  # type: ignore[method-assign]

        async def one(text: str) -> str:
            async with client.messages.stream(
                model="tiny", max_tokens=99, messages=[{"role": "user", "content": text}]
            ) as stream:
                return "".join([delta async for delta in stream.text_stream])

        async def everyone() -> list[str]:
            async with client:
                return await asyncio.gather(*(one(text) for text in texts))

        assert asyncio.run(everyone()) == texts


def engine_prompt(text: str) -> list[int]:
    turn = [{"role": "user", "content": text}]
    return make_tokenizer().encode_chat(turn, add_generation_prompt=True)
