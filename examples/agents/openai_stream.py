"""Streams from OpenAI's client: the policy proposes, then checks itself.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/openai_stream.py:agent --agent.max-turns 2
"""


async def agent(task, client):
    messages = list(task.messages)
    for request in ("Are you sure? Say the result once more.", None):
        stream = await client.chat.completions.create(
            model="policy", messages=messages, stream=True
        )
        text = ""
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
        if request is None:
            return text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": request}]
