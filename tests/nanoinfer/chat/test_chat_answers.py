"""Bodies of chat answers: one reading whole and streamed, on tokens; turns that a limit cut."""

from __future__ import annotations

from typing import Any

import pytest
from model_forms import TOOLS, tokenizer_of
from reply_cases import CASES, Case

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import ToolCall
from nanoinfer.chat.call_ids import ids_of, next_ids, short_id
from nanoinfer.chat.choose import BY_NAME
from nanoinfer.chat.form import ChatForm
from nanoinfer.chat.reasoning import opened_reasoning
from nanoinfer.chat.reply import mark_tokens
from nanoinfer.dialects import ChatDialect, MessagesDialect, ResponsesDialect
from nanoinfer.dialects.exchange import ApiAnswer, ApiCall, ApiReply, ApiToolCall
from nanoinfer.options.streams import StreamChunk
from nanoinfer.params import Output
from nanoinfer.server.requests import ChatCompletion
from nanoinfer.server.responses import ChatFormat

CHAT = [{"role": "user", "content": "a"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FORCED = {"type": "function", "function": {"name": "add"}}


def format_of(
    tokenizer: ChatTokenizer, form: ChatForm, prompt: list[int] | None = None, **body: Any
) -> ChatFormat:
    asked = ChatCompletion.model_validate({"messages": CHAT, "tools": TOOLS, **body})
    return ChatFormat(tokenizer, asked, form, CHAT, prompt or [])


def output_of(tokenizer: ChatTokenizer, text: str, finish: str = "stop") -> Output:
    ids = tokenizer.encode(text, allow_special=True)
    if finish == "stop":
        ids.append(min(tokenizer.eos_ids))
    told = tokenizer.decode(ids, skip_special=True)
    zeros = [0.0] * len(ids)
    return Output(ids=ids, logps=zeros, versions=[0] * len(ids), finish_reason=finish, text=told)


def streamed(written: ChatFormat, output: Output, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """A message and its end from an answer that came token by token."""
    deltas = written.start(0)
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    shown, reason = 0, None
    for place in range(1, len(output.ids) + 1):
        is_last = place == len(output.ids)
        text = tokenizer.decode(output.ids[:place], skip_special=True)
        text = text if is_last else text.rstrip("\ufffd")
        chunk = StreamChunk(
            ids=output.ids[place - 1 : place], logps=[0.0], versions=[0], text=text[shown:],
            output=output if is_last else None,
        )  # fmt: skip
        shown = max(shown, len(text))
        sent = deltas.push(chunk)
        if sent is None:
            continue
        for key in said:
            said[key] += sent["delta"].get(key) or type(said[key])()
        assert sent["delta"].get("reasoning") == sent["delta"].get("reasoning_content")
        reason = sent["finish_reason"]
    return {**said, "finish_reason": reason}


def whole(written: ChatFormat, output: Output) -> dict[str, Any]:
    choice = written.choice(0, [], output)
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [
            {"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))
        ],
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_servers_answer_is_the_tables_whole_and_token_by_token(case: Case) -> None:
    tokenizer = tokenizer_of("harmony" if case.parser.name == "harmony" else "mistral")
    marks = mark_tokens(tokenizer, has_tools=True)
    form = ChatForm(case.parser, "", TOOLS, marks=marks)
    prompt = tokenizer.encode(f"a\n{case.opened}\n", allow_special=True)
    assert opened_reasoning(tokenizer, prompt) == case.opened
    written = format_of(tokenizer, form, prompt)
    output = output_of(tokenizer, case.text, "length" if case.is_cut else "stop")
    answer = whole(written, output)
    calls = [ToolCall(one["function"]["name"]) for one in answer["tool_calls"]]
    assert [one.name for one in calls] == [one.name for one in case.calls]
    content = case.text if case.content is None else case.content
    for token in marks.values():
        content = content.replace(token, "")
        assert token not in answer["content"]
    assert answer["content"] == content
    for token in marks.values():
        assert token not in answer["reasoning_content"]
    finish = "length" if case.is_cut else "tool_calls" if case.calls else "stop"
    assert answer["finish_reason"] == finish
    assert streamed(written, output, tokenizer) == answer


def reply_of(text: str, finish: str, **fields: Any) -> ApiReply:
    tokenizer = tokenizer_of("hermes")
    call = ApiCall(messages=[*CHAT], tools=TOOLS, **fields)
    output = output_of(tokenizer, text, finish)
    form = ChatForm.of(tokenizer, TOOLS)
    said, stop = form.spoken(tokenizer, output.ids, call.stop)
    return form.reply(said, output, call, stop)


def answer_of(reply: ApiReply) -> ApiAnswer:
    return ApiAnswer(id="0a", model="m", created=1, num_prompt_tokens=3, replies=[reply])


@pytest.mark.parametrize("finish", ["length", "abort"])
@pytest.mark.parametrize(
    "text, forced",
    [(CALL, False), (f"a {CALL[:40]}", False), (CALL[len("<tool_call>\n") : -13], True)],
    ids=["whole", "cut", "forced"],
)
def test_a_cut_turn_calls_nothing_on_the_server(text: str, forced: bool, finish: str) -> None:
    tokenizer = tokenizer_of("hermes")
    choice = {"tool_choice": FORCED} if forced else {}
    written = format_of(tokenizer, ChatForm.of(tokenizer, TOOLS), **choice)
    cut = output_of(tokenizer, text, finish)
    assert whole(written, cut) == streamed(written, cut, tokenizer) == {
        "content": text, "reasoning_content": "", "tool_calls": [], "finish_reason": finish,
    }  # fmt: skip
    ended = whole(written, output_of(tokenizer, text))
    assert (ended["finish_reason"] == "tool_calls") == (text != f"a {CALL[:40]}")


@pytest.mark.parametrize("forced", [None, "add"])
def test_a_cut_turn_calls_nothing_in_any_dialect(forced: str | None) -> None:
    text = CALL if forced is None else '{"name": "add", "arguments": {"a": 1}}'
    cut = reply_of(text, "length", forced_tool=forced)
    assert (cut.text, cut.calls) == (text, ())
    assert reply_of(text, "stop", forced_tool=forced).calls[0].name == "add"
    assert reply_of(CALL, "abort").calls == ()


USE = ApiToolCall(id="call00000", name="add", arguments="{}")


def test_every_dialect_says_that_a_limit_ended_the_turn() -> None:
    """Even of a reply that has calls, which ours has not when it was cut."""
    tokenizer = tokenizer_of("hermes")
    output = output_of(tokenizer, "a", "length")
    call, answer = ApiCall(messages=[*CHAT]), answer_of(
        ApiReply(text="a", calls=(USE,), output=output)
    )  # fmt: skip
    chat, messages = ChatDialect(tokenizer), MessagesDialect()
    responses = ResponsesDialect(tokenizer)
    assert chat.write(call, answer)["choices"][0]["finish_reason"] == "length"
    assert messages.write(call, answer)["stop_reason"] == "max_tokens"
    told = responses.write(call, answer)
    assert (told["status"], told["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    ends = [event.data for event in chat.events(call, answer)][:-1]
    assert ends[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    (ended,) = [one.data for one in messages.events(call, answer) if one.name == "message_delta"]
    assert ended["delta"]["stop_reason"] == "max_tokens"  # type: ignore[index]
    assert [*responses.events(call, answer)][-1].name == "response.incomplete"


def test_ids_are_nine_signs_and_new_in_the_conversation() -> None:
    used = [{"role": "assistant", "content": "", "tool_calls": [{"id": "call00000"}]}]
    assert next_ids(used, 2) == ["call00001", "call00002"]
    own = ToolCall("f", {}, "abcdefghi")
    assert ids_of([own, own, ToolCall("f")], used) == ["abcdefghi", "call00002", "call00003"]
    assert short_id("abcdefghi") == "abcdefghi"
    other = short_id("call_0123456789")
    assert len(other) == 9 and other.isalnum() and other == short_id("call_0123456789")


def test_a_clients_own_ids_fit_a_template_that_wants_nine_signs() -> None:
    tokenizer = tokenizer_of("mistral")
    form = ChatForm.of(tokenizer, TOOLS)
    function = {"name": "add", "arguments": {}}
    said = {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "call_long_one", "type": "function", "function": function}],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_long_one", "content": "1"}
    written = form.opening([*CHAT, said, result])
    text = tokenizer.render(written, add_generation_prompt=True, tools=form.schemas)
    assert text.count(short_id("call_long_one")) == 2


def test_several_calls_of_one_turn_render_where_the_template_takes_one() -> None:
    functions = [{"name": "add", "arguments": {"a": place}} for place in range(2)]
    calls = [
        {"id": f"c{i}", "type": "function", "function": one} for i, one in enumerate(functions)
    ]
    said = {"role": "assistant", "content": "Hm.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in range(2)]
    for name, middle in (("llama", "Hm.\n{}\n{}<|im_end|>"), ("harmony", "r0")):
        tokenizer = tokenizer_of(name)
        form = ChatForm.of(tokenizer, TOOLS)
        written = form.opening([*CHAT, said, *results])
        text = tokenizer.render(written, add_generation_prompt=True, tools=form.schemas)
        read = [one for one in form.parser.read(text) if isinstance(one, ToolCall)]
        assert [one.arguments for one in read] == [{"a": 0}, {"a": 1}]
        if name == "llama":
            middle = middle.format(*(form.parser.write(one) for one in read))
        assert middle in text and text.index("r0") < text.index("r1")
    assert text.index('{"a": 0}') < text.index("r0") < text.index('{"a": 1}')


def test_empty_arguments_reach_a_template_as_an_object() -> None:
    form = ChatForm.of(tokenizer_of("hermes"), TOOLS)
    for given in ("", " ", None, {}):
        function = {"name": "add", "arguments": given}
        said = {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }  # fmt: skip
        (written,) = form.written([said])
        assert written["tool_calls"][0]["function"]["arguments"] == {}


def test_reasoning_goes_where_the_template_reads_it() -> None:
    said = {"role": "assistant", "content": "b", "reasoning_content": "Hm."}
    for name, shown in (
        ("hermes", "<think>\nHm.\n</think>\n\nb"),
        ("hermes_plain", "<think>\nHm.\n</think>\n\nb"),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|>"),
        ("mistral", "[THINK]Hm.[/THINK]b"),
    ):
        tokenizer = tokenizer_of(name)
        written = ChatForm.of(tokenizer, TOOLS).opening([*CHAT, said])
        assert shown in tokenizer.render(written, add_generation_prompt=False)
    for key in ("reasoning_content", "reasoning"):
        body = {"messages": [{"role": "assistant", "content": "b", key: "Hm."}]}
        (message,) = ChatCompletion.model_validate(body).messages
        assert message.for_template() == said


def test_every_form_has_a_name() -> None:
    assert {case.parser.name for case in CASES.values()} <= BY_NAME.keys()
