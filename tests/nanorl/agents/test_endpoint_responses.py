"""OpenAI's Responses as OpenAI's own client speaks it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from agent_doubles import EOS, ScriptedGenerator, tiny_tokenizer
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
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from nanoinfer.dialects.exchange import ApiCall, ApiReply, ApiToolCall, message_of
from nanoinfer.dialects.responses import ResponsesDialect
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Grammar, SamplingParams
from nanorl.agents.endpoint.endpoint_server import ApiSession
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits

USER = {"role": "user", "content": "2+2?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
ADD_SPEC = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}
CALL = ApiToolCall(id="call_1", name="add", arguments='{"a": 1}')
DIALECT = ResponsesDialect(tiny_tokenizer())
WAYS = pytest.mark.parametrize("way", ["whole", "stream"])


class Sum(BaseModel):
    total: int


def client_of(session: ApiSession, **options: Any) -> openai.AsyncOpenAI:
    given = {"base_url": session.openai_url, "api_key": session.key, "max_retries": 0, **options}
    return openai.AsyncOpenAI(**given)


@asynccontextmanager
async def script(*said: ApiReply | Exception) -> AsyncIterator[tuple[openai.AsyncOpenAI, Script]]:
    written = Script(list(said))
    async with serving(written) as session, client_of(session) as client:
        yield client, written


def read(**fields: Any) -> ApiCall:
    return DIALECT.read({"model": "any", "input": "2+2?", **fields})


# -- what is written ---------------------------------------------------------------------------


async def ask(client: openai.AsyncOpenAI, way: str, given: Any, **more: Any) -> Response:
    """The same answer in each way that the client knows."""
    asked: Any = {"model": "any", "input": given, **more}
    if way == "whole":
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        return await stream.get_final_response()


@WAYS
def test_an_answer_arrives_in_the_client(way: str) -> None:
    async def talk() -> None:
        async with script(reply_of("Let me add.", CALL, reasoning="Two.")) as (client, written):
            said = await ask(client, way, "2+2?", tools=[ADD])
        thought, message, call = said.output
        assert thought.type == "reasoning" and thought.content is not None
        assert [part.text for part in thought.content] == ["Two."]
        assert message.type == "message" and message.status == "completed"
        assert said.output_text == "Let me add."
        assert call.type == "function_call"
        assert (call.call_id, call.name, call.arguments) == ("call_1", "add", '{"a": 1}')
        assert (said.status, said.model, said.error) == ("completed", "tiny", None)
        assert said.id == f"resp_{written.names[0]}"
        assert said.usage is not None
        assert (said.usage.input_tokens, said.usage.output_tokens) == (len(PROMPT), 5)
        assert written.calls[0].is_streamed == (way == "stream")

    asyncio.run(talk())


def test_an_answer_at_a_limit_is_incomplete() -> None:
    async def talk() -> None:
        async with script(*[reply_of("Let me", finish="length")] * 2) as (client, _):
            said = await ask(client, "whole", "2+2?")
            events = [
                event
                async for event in await client.responses.create(
                    model="any", input="2+2?", stream=True
                )
            ]
        assert said.status == "incomplete" and said.incomplete_details is not None
        assert said.incomplete_details.reason == "max_output_tokens"
        assert [item.status for item in said.output if item.type == "message"] == ["incomplete"]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == "Let me"

    asyncio.run(talk())


def test_an_answer_without_a_word_has_a_message_all_the_same() -> None:
    (item,) = DIALECT.write(read(), answer_of(reply_of("")))["output"]
    assert [part["text"] for part in item["content"]] == [""]


def test_events_are_those_of_the_api_in_their_order() -> None:
    call = read(tools=[ADD])
    answer = answer_of(reply_of("Let me add.", CALL, reasoning="Two numbers."))
    events = list(DIALECT.events(call, answer))
    added, done = "output_item.added", "output_item.done"
    part_added, part_done = "content_part.added", "content_part.done"
    names = [
        "created", "in_progress",
        added, part_added, "reasoning_text.delta", "reasoning_text.done", part_done, done,
        added, part_added, "output_text.delta", "output_text.done", part_done, done,
        added, "function_call_arguments.delta", "function_call_arguments.done", done,
        "completed",
    ]  # fmt: skip
    assert [event.name for event in events] == [f"response.{name}" for name in names]
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, event in enumerate(events):
        told = known.validate_python(event.data)  # with every required field
        assert (told.type, told.sequence_number) == (event.name, number)
    whole = DIALECT.write(call, answer)
    assert events[-1].data["response"] == whole
    finished = [event.data["item"] for event in events if event.name == f"response.{done}"]
    assert finished == whole["output"]
    Response.model_validate(whole)


@WAYS
def test_a_schema_of_pydantic_comes_back_as_its_object(way: str) -> None:
    async def talk() -> None:
        async with script(reply_of('{"total": 4}')) as (client, written):
            if way == "whole":
                parsed = await client.responses.parse(model="any", input="2+2?", text_format=Sum)
            else:
                asked = client.responses.stream(model="any", input="2+2?", text_format=Sum)
                async with asked as stream:
                    parsed = await stream.get_final_response()
        assert parsed.output_parsed == Sum(total=4)
        grammar = written.calls[0].grammar
        assert grammar is not None and grammar.kind == "json_schema"
        assert json.loads(grammar.value)["properties"]["total"]["type"] == "integer"

    asyncio.run(talk())


@WAYS
def test_a_tool_of_pydantic_is_called_with_its_object(way: str) -> None:
    async def talk() -> None:
        use = ApiToolCall(id="call_1", name="Sum", arguments='{"total": 4}')
        tools = [openai.pydantic_function_tool(Sum)["function"] | {"type": "function"}]
        async with script(reply_of("", use)) as (client, written):
            if way == "whole":
                said: Any = await client.responses.parse(model="any", input="2+2?", tools=tools)
            else:
                said = await ask(client, way, "2+2?", tools=tools)
        assert [item.parsed_arguments for item in said.output] == [{"total": 4}]
        assert written.calls[0].tools[0]["function"]["name"] == "Sum"

    asyncio.run(talk())


@WAYS
def test_log_probs_are_those_of_the_tokens(way: str) -> None:
    reply = reply_of("ab")
    half = tiny_tokenizer().encode("é")[0]
    reply.output.ids = [64, 65, half, EOS]
    reply.output.logps = [-0.5, -0.25, -1.0, -0.125]
    reply.output.top_logps = [[(64, -0.5), (65, -2.0)]] * 4

    async def talk() -> None:
        more: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        async with script(reply, reply) as (client, written):
            said = await ask(client, way, "2+2?", **more)
            without = await ask(client, way, "2+2?", top_logprobs=2)
        assert [call.num_top for call in written.calls] == [2, None]
        logprobs = said.output[0].content[0].logprobs  # type: ignore[union-attr]
        tokenizer = tiny_tokenizer()
        told = [(one.token, one.bytes, one.logprob) for one in logprobs]
        a, b = tokenizer.decode([64]), tokenizer.decode([65])
        assert told[:2] == [(a, list(a.encode()), -0.5), (b, list(b.encode()), -0.25)]
        assert told[2] == ("\ufffd", [195], -1.0), "half of a character is its first byte"
        assert [(one.token, one.logprob) for one in logprobs[0].top_logprobs] == [
            (a, -0.5),
            (b, -2.0),
        ]
        assert not without.output[0].content[0].logprobs  # type: ignore[union-attr]

    asyncio.run(talk())


# -- what comes back ---------------------------------------------------------------------------


@CONVERSATIONS
@given(st.lists(st.tuples(REPLIES, st.sampled_from(["whole", "stream"]), TEXTS), min_size=1,
                max_size=4))  # fmt: skip
def test_whatever_was_said_comes_back_as_it_was_said(
    turns: list[tuple[ApiReply, str, str]],
) -> None:
    async def talk() -> None:
        items: list[Any] = [USER]
        expected: list[Any] = [USER]
        replies = [reply for reply, _, _ in turns]
        async with script(*replies, reply_of("end")) as (client, written):
            for reply, way, text in turns:
                said = await ask(client, way, items, tools=[ADD])
                items += said.output
                items += [
                    {"type": "function_call_output", "call_id": item.call_id, "output": text}
                    for item in said.output
                    if item.type == "function_call"
                ]
                items.append({"role": "user", "content": "go on"})
                expected.append(message_of(reply))
                expected += [
                    {"role": "tool", "tool_call_id": use.id, "content": text} for use in reply.calls
                ]
                expected.append({"role": "user", "content": "go on"})
            await ask(client, "whole", items)
        assert written.messages == expected

    asyncio.run(talk())


def test_what_the_parsing_helpers_made_may_come_back() -> None:
    async def talk() -> None:
        async with script(*[reply_of('{"total": 4}', CALL)] * 2) as (client, written):
            items: list[Any] = [USER]
            said = await client.responses.parse(
                model="any", input=items, text_format=Sum, tools=[{**ADD, "strict": True}]
            )
            items += said.output
            await client.responses.create(model="any", input=[*items, USER])
        assert written.messages == [USER, message_of(written.said[0]), USER]  # type: ignore[arg-type]

    asyncio.run(talk())


# -- what is read ------------------------------------------------------------------------------


def test_content_is_read_in_both_forms() -> None:
    call = read(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "In French."},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": "c", "phase": "final_answer"},
            {"role": "assistant", "content": "d"},
            {"role": "system", "content": "e"},
        ],
    )  # fmt: skip
    assert call.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "In French."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "e"},
    ]
    assert call.has_instructions
    assert read() == ApiCall(messages=[USER], is_kept=True)


def test_calls_belong_to_the_message_before_them() -> None:
    def called(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"}

    def result(name: str, output: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": output}

    call = read(
        input=[
            USER, {"role": "assistant", "content": "I add."}, called("x"), called("y"),
            result("x", "1"), result("y", [{"type": "input_text", "text": "2"}]),
            {"type": "reasoning", "id": "rs_1", "summary": []}, called("z"), result("z", ""),
        ]
    )  # fmt: skip
    assert [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in call.messages] == [
        ("user", "2+2?", 0),
        ("assistant", "I add.", 2),
        ("tool", "1", 0),
        ("tool", "2", 0),
        ("assistant", "", 1),
        ("tool", "", 0),
    ]
    assert call.messages[1]["tool_calls"][1] == {
        "id": "y",
        "type": "function",
        "function": {"name": "add", "arguments": {}},
    }


def test_what_a_client_may_ask_for() -> None:
    call = read(
        tools=[ADD | {"strict": True}], tool_choice="auto", max_output_tokens=16, temperature=0.3,
        top_p=0.5, store=False, metadata={"a": "b"}, parallel_tool_calls=False, truncation="auto",
        reasoning={"effort": "low"}, context_management=[], include=["reasoning.encrypted_content"],
        previous_response_id="resp_0a1b", text={"verbosity": "low", "format": {"type": "text"}},
    )  # fmt: skip
    assert call == ApiCall(
        messages=[USER], tools=[ADD_SPEC], max_tokens=16, ignored=("temperature", "top_p"),
        continues="0a1b", sampling={"temperature": 0.3, "top_p": 0.5},
        variables={"reasoning_effort": "low"},
    )  # fmt: skip
    assert read(input=[], previous_response_id="resp_0a1b").messages == []
    schema = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    assert read(text=schema).grammar == Grammar("json_schema", json.dumps(SCHEMA))
    free = read(text={"format": {"type": "json_object"}}).grammar
    assert free is not None and json.loads(free.value) == {"type": "object"}


@pytest.mark.parametrize(
    ("choice", "forced", "num_tools"),
    [
        ("auto", None, 1),
        ("none", None, 0),
        ("required", "", 1),
        ({"type": "function", "name": "add"}, "add", 1),
    ],
)
def test_choices_of_tools(choice: Any, forced: str | None, num_tools: int) -> None:
    call = read(tools=[ADD], tool_choice=choice, text={"format": {"type": "json_object"}})
    assert (call.forced_tool, len(call.tools)) == (forced, num_tools)
    assert (call.grammar is None) == (forced is not None), "a call is no text"
    told = DIALECT.write(call, answer_of(reply_of("4")))["tool_choice"]
    assert told == ("auto" if choice == "none" else choice)


IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": []}, "input: give a text or at least one item"),
        ({"input": [{"role": "tool", "content": "4"}]}, "role: .*'user', 'assistant'.*'tool'"),
        ({"input": [{"role": "user", "content": [IMAGE]}]},
         "input.0.content.0: input_image: this model reads text; leave it out, or say in words"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]},
         "input.0.type: item_reference: it is kept by another server; send the messages"),
        ({"input": [{"type": "local_shell_call"}]}, "input.0: .*'local_shell_call'"),
        ({"tools": [{"type": "local_shell"}]}, "tools.0.type: local_shell: the API defines it"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]},
         "tools.0.type: file_search: this server runs no tools; offer it as a function"),
        ({"tool_choice": "required"}, "tool_choice: asks for a call, but tools is empty"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}},
         "tool_choice: no tool is called 'sub'; there is add"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.name: give the name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type: .*'auto', 'required'"),
        ({"max_output_tokens": 0}, "max_output_tokens: .*greater than or equal to 1, not '0'"),
        ({"background": True}, "background: Input should be False"),
        ({"conversation": "conv_1"}, "conversation: nothing is kept by that name; send the items"),
        ({"extra_body": {"temprature": 1}}, "temprature: unknown field; remove it"),
        ({"include": ["logprobs"]}, r"include.0: .*'message.output_text.logprobs'"),
        ({"top_logprobs": 21}, "top_logprobs: .*less than or equal to 20"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named_with_what_can(fields: dict[str, Any], told: str) -> None:
    async def talk() -> None:
        async with script() as (client, _):
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.create(**{"model": "any", "input": "2+2?", **fields})
        body: Any = error.value.body
        assert re.search(told, body["message"]), body["message"]
        assert body["type"] == "invalid_request_error"

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (400, openai.BadRequestError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (413, openai.APIStatusError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
def test_errors_are_raised_by_their_class(status: int, raised: type[openai.APIStatusError]) -> None:
    async def talk() -> None:
        async with script(*[ApiError(status, "it cannot be", "input")] * 2) as (client, _):
            for way in ("whole", "stream"):
                with pytest.raises(raised, match="it cannot be") as error:
                    await ask(client, way, "2+2?")
                assert (error.value.status_code, error.value.param) == (status, "input")

    asyncio.run(talk())


def test_a_key_of_no_episode_is_refused() -> None:
    async def talk() -> None:
        async with serving(Script([])) as session:
            for key in ("another", session.key[:-1]):
                async with client_of(session, api_key=key) as stranger:
                    with pytest.raises(openai.AuthenticationError, match="of no episode"):
                        await ask(stranger, "whole", "2+2?")

    asyncio.run(talk())


# -- with a recording --------------------------------------------------------------------------


def recording_of(texts: list[str]) -> tuple[Recording, ScriptedGenerator]:
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(tokenizer, [*texts])
    limits = Limits(max_turns=9, max_turn_tokens=200, max_context_tokens=4000)
    recording = Recording(generator, tokenizer, limits=limits, sampling=SamplingParams(seed=1))
    return recording, generator


def said_in(recording: Recording) -> list[list[str]]:
    """The texts of each sequence's answers."""
    return [
        [
            recording.tokenizer.decode(sequence.tokens[span.action_start : span.action_end - 1])
            for span in sequence.turn_spans
        ]
        for sequence in recording.tree.sequences()
    ]


@WAYS
def test_a_loop_with_tools_is_one_sequence(way: str) -> None:
    texts = [
        'I add.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>',
        "It is 3.",
    ]
    recording, _ = recording_of(texts)

    async def talk() -> None:
        async with serving(recording) as session, client_of(session) as client:
            items: list[Any] = [USER]
            while True:
                said = await ask(client, way, items, instructions="Add.", tools=[ADD])
                items += said.output
                calls = [item for item in said.output if item.type == "function_call"]
                if not calls:
                    break
                items += [
                    {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
                    for call in calls
                ]
        assert said.output_text == "It is 3."

    asyncio.run(talk())
    assert said_in(recording) == [texts]


def test_instructions_hold_for_one_call() -> None:
    recording, generator = recording_of(["one", "two", "three"])

    async def talk() -> None:
        async with serving(recording) as session, client_of(session) as client:
            first = await ask(client, "whole", "x", instructions="Be brief.")
            second = await ask(
                client, "whole", "y", instructions="Be brief.", previous_response_id=first.id
            )
            await ask(client, "whole", "z", previous_response_id=second.id)
            with pytest.raises(openai.NotFoundError, match="no answer 'unknown' in this episode"):
                await ask(client, "whole", "z", previous_response_id="resp_unknown")
            with pytest.raises(openai.NotFoundError, match="one begins with resp_"):
                await ask(client, "whole", "z", previous_response_id="chatcmpl-1")

    asyncio.run(talk())
    prompts = [recording.tokenizer.decode(ids) for ids, _ in generator.calls]
    assert [prompt.count("Be brief.") for prompt in prompts] == [1, 1, 0]
    assert [re.findall(r"<\|im_start\|>(\w+)\n(\w+)<", prompt) for prompt in prompts[1:]] == [
        [("user", "x"), ("assistant", "one"), ("user", "y")],
        [("user", "x"), ("assistant", "one"), ("user", "y"), ("assistant", "two"), ("user", "z")],
    ]
    assert sorted(said_in(recording)) == [["one", "two"], ["three"]]
