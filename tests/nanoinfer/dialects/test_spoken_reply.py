"""What is told of a reply while its tokens come is the beginning of the whole, cut where it may."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_text import make_tokenizer

from nanoinfer.chat.form import ChatForm
from nanoinfer.dialects.call_params import call_params
from nanoinfer.dialects.exchange import ApiCall
from nanoinfer.dialects.spoken_reply import SpokenReply
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Output

TOKENIZER = make_tokenizer()
(EOS,) = TOKENIZER.eos_ids
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
MESSAGES = [{"role": "user", "content": "x"}]
OPENED = TOKENIZER.encode("<think>\n")
Told = tuple[str, str, list[tuple[str, str]]]


def told(text: str, prompt: list[int], cuts: list[int], **fields: Any) -> Told:
    """Reasoning, text and calls of a reply that comes in pieces; what was told is its beginning."""
    call = ApiCall(messages=[*MESSAGES], **fields)
    ids = [*TOKENIZER.encode(text), EOS]
    spoken = SpokenReply(ChatForm.of(TOKENIZER, call.tools), TOKENIZER, call, prompt)
    thought = said = ""
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        more = spoken.push(ids[start:end])
        thought, said = thought + more[0], said + more[1]
    reply = spoken.reply(Output(ids=ids, finish_reason="stop"))
    assert reply.reasoning.startswith(thought) and reply.text.startswith(said)
    return reply.reasoning, reply.text, [(use.name, use.arguments) for use in reply.calls]


ADD = [("add", '{"a": 2}')]
TABLE: list[tuple[str, list[int], bool, tuple[str, str, list[Any]]]] = [
    ("4", [], False, ("", "4", [])),
    ("<think>Hm. </think>\n\n4", [], False, ("Hm.", "4", [])),
    ("<think>never closed", [], False, ("never closed", "", [])),
    ("Hm.</think> 4", OPENED, False, ("Hm.", "4", [])),
    (f"I could say {CALL} here", OPENED, True, (f"I could say {CALL} here", "", [])),
    (f"<think>{CALL}</think>no", [], True, (CALL, "no", [])),
    (f"Let me.  {CALL}", [], True, ("", "Let me.", ADD)),
    (f"<think>Hm.</think>Let me.\n{CALL}", [], True, ("Hm.", "Let me.", ADD)),
    (CALL, [], True, ("", "", ADD)),
    (CALL, [], False, ("", CALL, [])),
    ("<tool_call>broken</tool_call>", [], True, ("", "<tool_call>broken</tool_call>", [])),
    ("a < b <tool", [], True, ("", "a < b <tool", [])),
]


@pytest.mark.parametrize(("text", "prompt", "has_tools", "expected"), TABLE)
def test_a_reply_is_the_same_however_it_is_cut(
    text: str, prompt: list[int], has_tools: bool, expected: Any
) -> None:
    fields = {"tools": [TOOL]} if has_tools else {}
    count = len(TOKENIZER.encode(text)) + 1
    assert told(text, prompt, [], **fields) == expected
    assert told(text, prompt, list(range(1, count)), **fields) == expected
    for cut in range(1, count):
        assert told(text, prompt, [cut], **fields) == expected


def test_text_comes_at_once_but_for_what_may_be_a_mark() -> None:
    call = ApiCall(messages=[*MESSAGES], tools=[TOOL])
    spoken = SpokenReply(ChatForm.of(TOKENIZER, [TOOL]), TOKENIZER, call, [])
    steps = [
        ("<thi", ("", "")), ("nk>Hm", ("Hm", "")), (". </th", (".", "")),
        ("ink>\nLet", ("", "Let")), (" me <to", ("", " me")), ("ps> ", ("", " <tops>")),
    ]  # fmt: skip
    for piece, news in steps:
        assert spoken.push(TOKENIZER.encode(piece)) == news


def test_a_stop_text_ends_it_and_is_named() -> None:
    call = ApiCall(messages=[*MESSAGES], stop=("END", "xyz"))
    spoken = SpokenReply(ChatForm.of(TOKENIZER, []), TOKENIZER, call, [])
    ids = TOKENIZER.encode("all EN END")
    assert spoken.push(ids[:-1])[1] == "all EN "
    spoken.push(ids[-1:])
    reply = spoken.reply(Output(ids=ids, finish_reason="stop"))
    assert (reply.text, reply.stop_text) == ("all EN ", "END")


def test_a_call_leaves_no_more_than_the_room() -> None:
    call = ApiCall(messages=[*MESSAGES], max_tokens=500, sampling={"top_k": -1, "temperature": 0.5})
    params = call_params(call, 40, 7, "poet")
    assert (params.max_tokens, params.top_k, params.temperature) == (40, 0, 0.5)
    assert (params.seed, params.adapter) == (7, "poet")
    assert call_params(ApiCall(messages=[*MESSAGES]), 40, 7).max_tokens == 40
    for wrong in ("hot", True, [1]):
        with pytest.raises(ApiError, match="temperature: must be a number"):
            call_params(ApiCall(messages=[*MESSAGES], sampling={"temperature": wrong}), 40, 7)
    with pytest.raises(ApiError, match="stop: 17 texts; at most 16"):
        call_params(ApiCall(messages=[*MESSAGES], stop=tuple(map(str, range(17)))), 40, 7)
