"""An agent that only knows OpenAI's client learns to answer in a few words.

nanorl train --env answer --tasks examples/own_tasks.jsonl --reward examples/own_reward.py \
    --agent examples/agents/few_words.py:agent \
    --rl.steps 8 --rl.tasks-per-step 8 --rl.group-size 8
"""


async def agent(task, client):
    answer = await client.chat.completions.create(model="policy", messages=task.messages)
    return answer.choices[0].message.content
