"""Arguments of a tool call that are no JSON object, as Anthropic's Messages carry them."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint_doubles import answer_of, reply_of

from nanoinfer.dialects.exchange import ApiToolCall
from nanoinfer.dialects.messages import MessagesDialect

DIALECT = MessagesDialect()
ASKED: dict[str, Any] = {
    "model": "any",
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "2+2?"}],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
}


def sent_back(given: dict[str, Any]) -> Any:
    """The arguments of a call that a client says was answered with `given`."""
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": given}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "4"}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    call = DIALECT.read({**ASKED, "messages": messages})
    [said] = [message for message in call.messages if message["role"] == "assistant"]
    return said["tool_calls"][0]["function"]["arguments"]


def test_the_client_finds_them_under_one_name_and_may_send_them_back() -> None:
    call = DIALECT.read(ASKED)
    answer = answer_of(reply_of("", ApiToolCall(id="call_1", name="add", arguments="no JSON")))
    [block] = DIALECT.write(call, answer)["content"]
    assert block["input"] == {"__arguments__": "no JSON"}
    assert sent_back(block["input"]) == "no JSON"


@pytest.mark.parametrize("given", [{"": "x"}, {"a": 1}, {"__arguments__": 7}])
def test_no_other_name_is_taken_for_it(given: dict[str, Any]) -> None:
    assert sent_back(given) == given
