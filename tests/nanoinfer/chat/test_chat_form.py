"""A client's messages as the template reads them: calls stay calls where it lists tools."""

from __future__ import annotations

import pytest

from nanoengine.text.chat_template import Message
from nanoinfer.chat.form import ChatForm
from nanoinfer.chat.hermes import HermesParser

PARSER = HermesParser(role="user")
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED: Message = {"role": "developer", "content": "Be brief."}
SAID: Message = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}


def test_a_template_that_lists_tools_is_given_the_calls_themselves() -> None:
    form = ChatForm(PARSER, "", [{"type": "function"}])
    assert form.written([ASKED, SAID]) == [{**ASKED, "role": "system"}, SAID]


@pytest.mark.parametrize("text, head", [("Let me see.", "Let me see.\n"), ("", "")])
def test_another_is_given_them_as_the_model_writes_them_below_what_it_said(
    text: str, head: str
) -> None:
    form = ChatForm(PARSER, "Tools: add", None)
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert form.written([{**SAID, "content": text}]) == [
        {"role": "assistant", "content": head + written}
    ]


def test_results_of_one_turn_come_together_before_what_follows() -> None:
    results: list[Message] = [{"role": "tool", "content": one} for one in ("4", "5")]
    after: Message = {"role": "user", "content": "Go on."}
    form = ChatForm(PARSER, "Tools: add", None)
    assert form.written([*results, after]) == [*PARSER.observation(["4", "5"]), after]
    assert form.written([after, *results]) == [after, *PARSER.observation(["4", "5"])]
