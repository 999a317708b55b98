"""OpenAI's Responses API, where the server remembers the conversation.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/openai_responses.py:agent --agent.max-turns 2
"""


async def agent(task, client):
    draft = await client.responses.create(model="policy", input=task.messages)
    answer = await client.responses.create(
        model="policy",
        previous_response_id=draft.id,
        input="Are you sure? Say the result once more.",
    )
    return answer.output_text
