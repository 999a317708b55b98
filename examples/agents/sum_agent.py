"""An agent that knows OpenAI's client and one tool: it must call `add`, then answer.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/sum_agent.py:agent --agent.max-turns 2 --agent.max-turn-tokens 48 \
    --agent.max-context-tokens 512 --rl.tasks-per-step 4 --rl.group-size 8 --rl.steps 6 \
    --evaluation.num-tasks 100
"""

import json

NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
        },
    },
}


async def agent(task, client):
    messages = list(task.messages)
    for choice in ("required", "none"):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[ADD], tool_choice=choice
        )
        said = answer.choices[0].message
        messages.append(said)
        for call in said.tool_calls or []:
            given = json.loads(call.function.arguments)
            total = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
    return said.content
