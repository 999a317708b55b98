"""Anthropic's Messages as Anthropic's own client speaks it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from agent_doubles import ScriptedGenerator, tiny_tokenizer
from anthropic.types import Message as Said
from anthropic.types import RawMessageStreamEvent
from endpoint_doubles import (
    CONVERSATIONS,
    PROMPT,
    REPLIES,
    TEXTS,
    Script,
    answer_of,
    reply_of,
    serving,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from nanoinfer.dialects.exchange import ApiCall, ApiReply, ApiToolCall, message_of
from nanoinfer.dialects.messages import MessagesDialect
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Grammar, SamplingParams
from nanorl.agents.endpoint.endpoint_server import ApiSession
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits

BASE: dict[str, Any] = {"model": "any", "max_tokens": 16}
USER = [{"role": "user", "content": "2+2?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
ADD_SPEC = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}
CALL = ApiToolCall(id="call_1", name="add", arguments='{"a": 1}')
DIALECT = MessagesDialect()


class Sum(BaseModel):
    total: int


def client_of(session: ApiSession, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=session.url, api_key=session.key, max_retries=0, **options
    )


@asynccontextmanager
async def script(
    *said: ApiReply | Exception,
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Script]]:
    written = Script(list(said))
    async with serving(written) as session, client_of(session) as client:
        yield client, written


def read(**fields: Any) -> ApiCall:
    return DIALECT.read({**BASE, "messages": USER, **fields})


# -- what is written ---------------------------------------------------------------------------


async def ask(client: anthropic.AsyncAnthropic, way: str, messages: list[Any], **more: Any) -> Said:
    """The same answer in each way that the client knows."""
    asked: Any = {**BASE, "messages": messages, **more}
    if way == "whole":
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("way", ["whole", "stream"])
def test_an_answer_arrives_in_the_client(way: str) -> None:
    async def talk() -> None:
        reply = reply_of("Let me add.", CALL, reasoning="Two numbers.")
        async with script(reply) as (client, written):
            said = await ask(client, way, USER, thinking={"type": "adaptive"})
        thinking, text, use = said.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Two numbers.")
        assert thinking.signature
        assert (text.type, text.text) == ("text", "Let me add.")
        assert (use.type, use.id, use.name, use.input) == ("tool_use", "call_1", "add", {"a": 1})
        assert said.stop_reason == "tool_use" and said.stop_sequence is None
        assert said.id == f"msg_{written.names[0]}" and said.model == "tiny"
        assert (said.usage.input_tokens, said.usage.output_tokens) == (len(PROMPT), 5)
        assert written.calls[0].is_streamed == (way == "stream")

    asyncio.run(talk())


@pytest.mark.parametrize("way", ["whole", "stream"])
def test_thinking_is_shown_to_those_who_ask(way: str) -> None:
    async def talk() -> None:
        async with script(*[reply_of("4", reasoning="Easy.")] * 2) as (client, _):
            plain = await ask(client, way, USER)
            disabled = await ask(client, way, USER, thinking={"type": "disabled"})
        assert [block.type for block in plain.content + disabled.content] == ["text", "text"]

    asyncio.run(talk())


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (reply_of("4"), "end_turn", None),
        (reply_of("4", finish="length"), "max_tokens", None),
        (reply_of("4", stop_text="END"), "stop_sequence", "END"),
        (reply_of("", CALL), "tool_use", None),
    ],
)
def test_why_an_answer_ended(way: str, reply: ApiReply, reason: str, sequence: str | None) -> None:
    async def talk() -> None:
        async with script(reply) as (client, _):
            said = await ask(client, way, USER)
        assert (said.stop_reason, said.stop_sequence) == (reason, sequence)

    asyncio.run(talk())


def test_an_answer_without_a_word_has_a_text_all_the_same() -> None:
    assert DIALECT.write(read(), answer_of(reply_of("")))["content"] == [
        {"type": "text", "text": ""}
    ]


def test_tokens_of_the_prefix_cache_are_counted_by_themselves() -> None:
    reply = reply_of("4")
    reply.output.num_cached_tokens = 3
    usage = DIALECT.write(read(), answer_of(reply))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(PROMPT) - 3, 3)


def test_events_are_those_of_the_api_in_their_order() -> None:
    reply = reply_of("Let me add.", CALL, reasoning="Two numbers.")
    call = read(thinking={"type": "adaptive"})
    events = list(DIALECT.events(call, answer_of(reply)))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    signed = [*block[:1], *block[1:2] * 2, *block[2:]]
    names = ["message_start", *signed, *block, *block, "message_delta", "message_stop"]
    assert [event.name for event in events] == names
    kinds = [event.data["delta"]["type"] for event in events if event.name == block[1]]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    known: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in events:
        assert known.validate_python(event.data).type == event.name  # with every required field
    Said.model_validate(DIALECT.write(call, answer_of(reply)))


@pytest.mark.parametrize("way", ["whole", "stream"])
def test_a_schema_of_pydantic_comes_back_as_its_object(way: str) -> None:
    async def talk() -> None:
        async with script(reply_of('{"total": 4}')) as (client, written):
            if way == "whole":
                parsed = await client.messages.parse(**BASE, messages=USER, output_format=Sum)
            else:
                asked = client.messages.stream(**BASE, messages=USER, output_format=Sum)
                async with asked as stream:
                    parsed = await stream.get_final_message()
        assert parsed.parsed_output == Sum(total=4)
        grammar = written.calls[0].grammar
        assert grammar is not None and grammar.kind == "json_schema"
        assert json.loads(grammar.value)["properties"]["total"]["type"] == "integer"

    asyncio.run(talk())


# -- what comes back ---------------------------------------------------------------------------


@CONVERSATIONS
@given(st.lists(st.tuples(REPLIES, st.sampled_from(["whole", "stream"]), TEXTS), min_size=1,
                max_size=4))  # fmt: skip
def test_whatever_was_said_comes_back_as_it_was_said(
    turns: list[tuple[ApiReply, str, str]],
) -> None:
    async def talk() -> None:
        replies = [reply for reply, _, _ in turns]
        messages: list[Any] = [*USER]
        expected: list[Any] = [*USER]
        async with script(*replies, reply_of("end")) as (client, written):
            for reply, way, text in turns:
                said = await ask(client, way, messages, thinking={"type": "adaptive"})
                results = [
                    {"type": "tool_result", "tool_use_id": use.id, "content": text}
                    for use in said.content
                    if use.type == "tool_use"
                ]
                asked = {"type": "text", "text": "go on"}
                messages.append({"role": "assistant", "content": said.content})
                messages.append({"role": "user", "content": [*results, asked]})
                expected.append(message_of(reply))
                expected += [
                    {"role": "tool", "tool_call_id": use.id, "content": text} for use in reply.calls
                ]
                expected.append({"role": "user", "content": "go on"})
            await ask(client, "whole", messages)
        assert written.messages == expected

    asyncio.run(talk())


# -- what is read ------------------------------------------------------------------------------


def test_content_is_read_in_both_forms() -> None:
    call = read(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.",
                                                 "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
            {"role": "assistant", "content": "c"},
            {"role": "system", "content": "From now on in French."},
            {"role": "user", "content": "d"},
        ],
    )  # fmt: skip
    assert call.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "From now on in French."},
        {"role": "user", "content": "d"},
    ]
    assert read(system="Be brief.").messages[0] == call.messages[0]
    assert read(system="").messages == USER


def test_results_of_tools_stand_in_their_places() -> None:
    uses = [
        {"type": "tool_use", "id": name, "name": "add", "input": {"a": place}}
        for place, name in enumerate("xy")
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "x", "content": "1"},
        {"type": "tool_result", "tool_use_id": "y", "is_error": True,
         "content": [{"type": "text", "text": "no "}, {"type": "text", "text": "number"}]},
        {"type": "text", "text": "So?"},
        {"type": "tool_result", "tool_use_id": "z"},
    ]  # fmt: skip
    thought = {"type": "redacted_thinking", "data": "secret"}
    said = {"role": "assistant", "content": [thought, *uses]}
    call = read(messages=[*USER, said, {"role": "user", "content": results}])
    assert [c["function"]["arguments"] for c in call.messages[1]["tool_calls"]] == [
        {"a": 0},
        {"a": 1},
    ]
    assert call.messages[1]["content"] == ""
    assert call.messages[2:] == [
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "tool", "tool_call_id": "y", "content": "Error: no number"},
        {"role": "user", "content": "So?"},
        {"role": "tool", "tool_call_id": "z", "content": ""},
    ]


def test_what_a_client_may_ask_for() -> None:
    call = read(
        tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["END", "\n\n"], temperature=0.3, top_k=5, metadata={"user_id": "me"},
        service_tier="auto", output_config={"effort": "low"}, context_management={"edits": []},
    )  # fmt: skip
    assert call == ApiCall(
        messages=[*USER], tools=[ADD_SPEC], max_tokens=16, stop=("END", "\n\n"),
        ignored=("temperature", "top_k"), has_reasoning=False,
        variables={"reasoning_effort": "low"},
        sampling={"temperature": 0.3, "top_k": 5},
    )  # fmt: skip
    schema = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert read(output_config=schema).grammar == Grammar("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("choice", "forced", "num_tools"),
    [
        ({"type": "auto"}, None, 1),
        ({"type": "none"}, None, 0),
        ({"type": "any"}, "", 1),
        ({"type": "tool", "name": "add"}, "add", 1),
    ],
)
def test_choices_of_tools(choice: dict[str, str], forced: str | None, num_tools: int) -> None:
    schema = {"format": {"type": "json_schema", "schema": SCHEMA}}
    call = read(tools=[ADD], tool_choice=choice, output_config=schema)
    assert (call.forced_tool, len(call.tools)) == (forced, num_tools)
    assert (call.grammar is None) == (forced is not None), "a call is no text"


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "4"}]}, r"messages.0: .*'tool'.*'user', 'assi"),
        ({"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "?"}, IMAGE]}]},
         r"2 .*messages.0.content.0: image: this model reads text; l.*messages.0.content.2: i"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, *USER]},
         r"messages.0.*'server_tool_use'.*'text', 'tool_use', 'thinking'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]},
         "tools.0.type: bash_20250124: the API defines it; offer it as a function, with a schema"),
        ({"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]},
         "tools.0.type: code_execution_20250825: this server runs no tools; offer it"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: asks for a call, but tools is empty"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}},
         "tool_choice: no tool is called 'sub'; there is add"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name: give the name"),
        ({"tools": [ADD], "tool_choice": {"type": "all"}}, "tool_choice.type: .*'auto', 'any'"),
        ({"max_tokens": 0}, "max_tokens: .*greater than or equal to 1, not '0'"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers: this server runs no tools"),
        ({"extra_body": {"temprature": 1}}, "temprature: unknown field; remove it"),
        ({"output_config": {"format": {"type": "xml"}}}, "config.format.type: .*json_schema"),
        ({"stop_sequences": [""]}, "stop_sequences.0: String should have at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named_with_what_can(fields: dict[str, Any], told: str) -> None:
    async def talk() -> None:
        async with script() as (client, _):
            with pytest.raises(anthropic.BadRequestError) as error:
                await client.messages.create(**{**BASE, "messages": USER, **fields})
        assert error.value.type == "invalid_request_error"
        assert re.search(told, str(error.value.api_message)), error.value.api_message

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("status", "raised", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (403, anthropic.PermissionDeniedError, "permission_error"),
        (404, anthropic.NotFoundError, "not_found_error"),
        (413, anthropic.APIStatusError, "invalid_request_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (503, anthropic.InternalServerError, "overloaded_error"),
        (529, anthropic.InternalServerError, "overloaded_error"),
    ],
)
def test_errors_are_raised_by_their_class(
    status: int, raised: type[anthropic.APIStatusError], kind: str
) -> None:
    async def talk() -> None:
        async with script(*[ApiError(status, "it cannot be")] * 2) as (client, _):
            for way in ("whole", "stream"):
                with pytest.raises(raised, match="it cannot be") as error:
                    await ask(client, way, USER)
                assert (error.value.status_code, error.value.type) == (status, kind)

    asyncio.run(talk())


def test_a_key_is_taken_from_either_header() -> None:
    async def talk() -> None:
        async with serving(Script([reply_of("4")] * 2)) as session:
            bearer = anthropic.AsyncAnthropic(
                base_url=session.url, api_key=None, auth_token=session.key, max_retries=0
            )
            async with bearer, client_of(session) as keyed:
                for client in (bearer, keyed):
                    assert (await ask(client, "whole", USER)).stop_reason == "end_turn"
            async with anthropic.AsyncAnthropic(
                base_url=session.url, api_key="another", max_retries=0
            ) as stranger:
                with pytest.raises(anthropic.AuthenticationError, match="of no episode") as error:
                    await ask(stranger, "whole", USER)
            assert error.value.type == "authentication_error"

    asyncio.run(talk())


def test_tokens_are_counted() -> None:
    async def talk() -> None:
        async with script() as (client, written):
            counted = await client.messages.count_tokens(
                model="any", messages=USER, system="Be brief.", tools=[ADD],
                thinking={"type": "adaptive"},
            )  # fmt: skip
            with pytest.raises(anthropic.BadRequestError, match="messages: Field required"):
                await client.messages.count_tokens(
                    model="any", messages=USER, extra_body={"messages": None}
                )
        assert counted.input_tokens == len(PROMPT)
        assert written.messages == [{"role": "system", "content": "Be brief."}, *USER]
        assert written.calls[0].tools == [ADD_SPEC]

    asyncio.run(talk())


# -- with a recording --------------------------------------------------------------------------


def test_the_tool_runner_of_the_client_is_one_sequence() -> None:
    """Anthropic's own agent loop: two calls of tools, with a result that is an error."""
    tokenizer = tiny_tokenizer()
    texts = [
        'I add.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 0}}</tool_call>',
        "It is 3.",
    ]
    generator = ScriptedGenerator(tokenizer, [*texts])
    limits = Limits(max_turns=9, max_turn_tokens=200, max_context_tokens=4000)
    recording = Recording(generator, tokenizer, limits=limits, sampling=SamplingParams(seed=1))

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        if b == 0:
            raise ValueError("b is zero")
        return str(a + b)

    async def talk() -> None:
        async with serving(recording) as session, client_of(session) as client:
            runner = client.beta.messages.tool_runner(
                **BASE | {"max_tokens": 200}, tools=[add], messages=USER, system="Add."
            )
            said = await runner.until_done()
            counted = await client.messages.count_tokens(model="any", messages=USER, system="Add.")
        assert said.content[0].text == "It is 3." and said.stop_reason == "end_turn"
        assert counted.input_tokens == len(
            tokenizer.encode_chat(
                [{"role": "system", "content": "Add."}, *USER], add_generation_prompt=True
            )
        )

    asyncio.run(talk())
    (only,) = recording.tree.sequences()
    spans = only.turn_spans
    assert [
        tokenizer.decode(only.tokens[span.action_start : span.action_end - 1]) for span in spans
    ] == texts
    assert "b is zero" in tokenizer.decode(only.tokens)
