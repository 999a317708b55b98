"""The model's own form of calls: found by rendering, and served as it was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from model_forms import FORMS, TOOLS, engine_of, tokenizer_of
from serving import Served, serve

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import ToolCall
from nanoinfer.chat.call_ids import as_results
from nanoinfer.chat.choose import ClientTool, tool_chat
from nanoinfer.chat.form import ChatForm
from nanoinfer.dialects import MessagesDialect, ResponsesDialect
from nanoinfer.params import Output
from nanoinfer.server.requests import ChatCompletion
from nanoinfer.server.responses import ChatFormat
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder

TOOLED = [ClientTool(tool) for tool in TOOLS]
LISTED = [name for name in FORMS if name != "none"]


def name_of(form: str) -> str:
    return {"hermes_plain": "hermes", "none": "hermes"}.get(form, form)


@pytest.mark.parametrize("form", FORMS)
def test_a_template_tells_its_form_and_the_generation_that_it_writes(form: str) -> None:
    chat = tool_chat(tokenizer_of(form), TOOLED)
    assert chat.parser.name == name_of(form)
    assert (chat.schemas is not None, bool(chat.description)) == (form in LISTED, form == "none")
    assert chat.is_single == (form in ("llama", "harmony"))
    role = chat.parser.observation(["1"])[0]["role"]
    assert role == ("user" if form == "none" else "tool")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_can_be_described_and_asked_for_by_name(form: str) -> None:
    chat = tool_chat(tokenizer_of("none"), TOOLED, name_of(form))
    assert chat.parser.name == name_of(form) and "add" in chat.description
    call = ToolCall("add", {"a": 1, "note": "two\nlines"})
    assert chat.parser.read(chat.parser.write(call)) == [call]


class Grown:
    """One conversation twice: as a rollout's tokens, and as the messages of a server's client."""

    def __init__(self, form: str, served: Served, tokenizer: ChatTokenizer) -> None:
        self.served, self.tokenizer = served, tokenizer
        self.chat = tool_chat(tokenizer, TOOLED)
        limits = Limits(max_turn_tokens=4000, max_context_tokens=4000, max_turns=9)
        self.builder = TurnBuilder(tokenizer, limits, task_id="t", group_id="g", rollout_id="r")
        has_system = not form.startswith("mistral")
        system = [{"role": "system", "content": "Be brief."}] if has_system else []
        self.client: list[Any] = [*system, {"role": "user", "content": "1 + 2?"}]
        opening = [dict(one) for one in self.client]
        if self.chat.description:
            opening[0]["content"] += "\n\n" + self.chat.description
        self.builder.start(opening, self.chat.schemas)
        self.check()

    def check(self) -> None:
        """The server's prompt is the rollout so far."""
        body = {"messages": self.client, "tools": TOOLS, "max_tokens": 1, "return_token_ids": True}
        status, answer = self.served.send("/v1/chat/completions", body)
        assert status == 200, answer
        ours, theirs = self.builder.prompt_ids, answer["prompt_token_ids"]
        assert self.tokenizer.decode(theirs) == self.tokenizer.decode(ours)
        assert theirs == ours

    def check_dialects(self) -> None:
        """So is the prompt of a client of another API, who sends the same conversation."""
        form = ChatForm.of(self.tokenizer, TOOLS)
        for dialect, body in (
            (MessagesDialect(), as_messages(self.client)),
            (ResponsesDialect(self.tokenizer), as_responses(self.client)),
        ):
            messages = form.opening(dialect.read(body).messages)
            ids = self.tokenizer.encode_chat(
                messages, add_generation_prompt=True, tools=form.schemas
            )
            assert ids == self.builder.prompt_ids

    def turn(self, *calls: ToolCall, text: str = "", thought: str = "") -> None:
        """The model says what its template writes of these, and the tools answer."""
        ids = self.sampled(calls, text, thought)
        output = Output(
            ids=ids, logps=[0.0] * len(ids), versions=[0] * len(ids), finish_reason="stop",
            text=self.tokenizer.decode(ids, skip_special=True),
        )  # fmt: skip
        prompt = self.builder.prompt_ids
        self.builder.append_action(output)
        self.client.append(self.reply(prompt, output))
        read = self.chat.parser.read(self.builder.action_text())
        assert read == list(calls)
        found = self.client[-1].get("tool_calls", [])
        assert [json.loads(one["function"]["arguments"]) for one in found] == [
            dict(one.arguments) for one in calls
        ]
        results = [str(place) for place, _ in enumerate(calls)]
        if calls:
            self.builder.append_observation(as_results(self.chat.parser.observation(results), read))
            self.client += [
                {"role": "tool", "tool_call_id": one["id"], "content": result}
                for one, result in zip(found, results, strict=True)
            ]
        else:
            self.builder.append_observation([{"role": "user", "content": "Sure?"}])
            self.client.append({"role": "user", "content": "Sure?"})
        self.check()

    def reply(self, prompt: list[int], output: Output) -> dict[str, Any]:
        body = ChatCompletion.model_validate({"messages": self.client, "tools": TOOLS})
        form = ChatForm.of(self.tokenizer, TOOLS)
        history = [one.for_template() for one in body.messages]
        choice = ChatFormat(self.tokenizer, body, form, history, prompt).choice(0, prompt, output)
        assert choice["finish_reason"] == (
            "tool_calls" if "tool_calls" in choice["message"] else "stop"
        )
        for token in self.tokenizer.special_ids:
            shown = json.dumps(choice["message"], ensure_ascii=False)
            assert self.tokenizer.decode([token]) not in shown
        message: dict[str, Any] = choice["message"]
        return message

    def sampled(self, calls: tuple[ToolCall, ...], text: str, thought: str) -> list[int]:
        """What the template writes of a turn, with the token that ends it."""
        form = ChatForm.of(self.tokenizer, TOOLS)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {"id": one.id, "type": "function",
                 "function": {"name": one.name, "arguments": dict(one.arguments)}}
                for one in calls
            ]  # fmt: skip
        before = form.opening(self.history())
        whole = [*before, *form.written([message])]
        tools = form.schemas
        start = self.tokenizer.encode_chat(before, add_generation_prompt=True, tools=tools)
        ids = self.tokenizer.encode_chat(whole, add_generation_prompt=False, tools=tools)
        assert ids[: len(start)] == start
        end = next(i for i in range(len(start), len(ids)) if ids[i] in self.tokenizer.eos_ids)
        return ids[len(start) : end + 1]

    def history(self) -> list[Message]:
        body = ChatCompletion.model_validate({"messages": self.client})
        return [one.for_template() for one in body.messages]


def as_messages(client: list[Any]) -> dict[str, Any]:
    """A conversation as Anthropic's clients send it."""
    system = "".join(one["content"] for one in client if one["role"] == "system")
    turns: list[dict[str, Any]] = []
    for one in client:
        content: Any = one["content"]
        if one["role"] == "assistant":
            thought, text = one.get("reasoning_content"), one["content"]
            blocks = (
                [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
            )
            blocks += [{"type": "text", "text": text}] if text else []
            content = blocks + [
                {
                    "type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in one.get("tool_calls", [])
            ]  # fmt: skip
        elif one["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": content}
            if turns[-1]["role"] == "user":
                turns[-1]["content"].append(result)
                continue
            content = [result]
        if one["role"] != "system":
            role = "assistant" if one["role"] == "assistant" else "user"
            turns.append({"role": role, "content": content})
    told = {"system": system} if system else {}
    return {"model": "m", "max_tokens": 9, "messages": turns, **told}


def as_responses(client: list[Any]) -> dict[str, Any]:
    """A conversation as clients of OpenAI's Responses send it."""
    items: list[dict[str, Any]] = []
    for one in client:
        if one["role"] == "tool":
            output = {"call_id": one["tool_call_id"], "output": one["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if thought := one.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "id": "r", "summary": [], "content": content})
        if one["content"]:
            items.append({"role": one["role"], "content": one["content"]})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in one.get("tool_calls", [])
        ]
    return {"input": items}


@pytest.fixture(params=FORMS)
def grown(request: pytest.FixtureRequest) -> Iterator[Grown]:
    tokenizer = tokenizer_of(request.param)
    with serve(engine_of(tokenizer), tokenizer) as served:
        yield Grown(request.param, served, tokenizer)


def add(number: int, note: str = "a", name: str = "") -> ToolCall:
    return ToolCall("add", {"a": number, "note": note}, name)


def test_the_deployed_prompt_is_the_trained_one(grown: Grown) -> None:
    name = grown.chat.parser.name
    grown.turn(add(1, "two\nlines </tool_call> <think>", "call00000"))
    if name != "harmony":  # its turn ends with a call
        grown.turn(add(2, name="call00001"), add(3, "7", name="call00002"))
    grown.turn(add(5, name="call00009"))
    if not name.startswith("mistral"):  # its calls stand alone
        grown.turn(add(4, name="call00010"), text="" if name == "harmony" else "Let me see.")
    grown.check_dialects()
    grown.turn(text="It is 3.")


def test_reasoning_comes_back_where_the_model_reads_it(grown: Grown) -> None:
    if grown.chat.parser.name.startswith(("mistral", "deepseek")):
        pytest.skip("its template prints no reasoning")
    grown.turn(add(1, name="call00000"), thought="Two numbers.")
    assert grown.client[-2]["reasoning_content"] == "Two numbers."
    grown.turn(add(2, name="call00001"), thought="Again.")
    grown.check_dialects()
