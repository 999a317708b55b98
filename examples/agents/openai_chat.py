"""A program with OpenAI's client and one tool. It knows an API and its task, and nothing of RL.

nanorl train --env answer --tasks examples/sums.jsonl --agent command \
    --agent.command "python examples/agents/openai_chat.py" --agent.max-turns 4
"""

import json
import os

import openai

NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": ADD}]

client = openai.OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = json.loads(os.environ["NANORL_TASK"])["messages"]
for choice in ("required", "auto"):  # first it must call the tool, then it may answer
    answer = client.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, tool_choice=choice
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        total = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
print(message.content)
