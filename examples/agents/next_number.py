"""An agent that only knows OpenAI's client learns to say what it was asked for, and no more.

nanorl train --env examples/agents/next_number.py --agent examples/agents/next_number.py:agent
"""

from types import MappingProxyType

import nanorl


class NextNumber(nanorl.Env):
    """Which number comes next? 1 for the number alone, less for one among other words."""

    defaults = MappingProxyType(
        {
            "agent.max_turns": 1,
            "agent.max_turn_tokens": 32,
            "agent.max_context_tokens": 128,
            "rl.temperature": 0.8,
        }
    )

    def tasks(self, rng):
        number = rng.randrange(1, 1000)
        return nanorl.Task(f"Which number comes after {number}?", str(number + 1))

    def score(self, transcript):
        words = (transcript.answer or "").strip(" .").split()
        return 1 / len(words) if self.task.answer in words else 0.0


async def agent(task, client):
    answer = await client.chat.completions.create(model="policy", messages=task.messages)
    return answer.choices[0].message.content
