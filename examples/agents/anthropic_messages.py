"""Anthropic's client and one tool, in a plain function, which runs in a thread of its own.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/anthropic_messages.py:agent --agent.max-turns 2
"""

import anthropic

NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


def agent(task, client):
    own = anthropic.Anthropic(base_url=task.base_url.removesuffix("/v1"), api_key=task.api_key)
    messages = list(task.messages)
    for choice in ("any", "auto"):  # first it must call the tool, then it may answer
        answer = own.messages.create(
            model="policy",
            max_tokens=96,
            messages=messages,
            tools=[ADD],
            tool_choice={"type": choice},
        )
        calls = [one for one in answer.content if one.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": str(sum(one.input.values()))}
            for one in calls
        ]
        messages += [{"role": "assistant", "content": answer.content}]
        messages += [{"role": "user", "content": results}]
    return "".join(one.text for one in answer.content if one.type == "text")
