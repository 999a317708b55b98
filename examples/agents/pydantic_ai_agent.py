"""Pydantic AI with an answer of a given type: what is no such number, the policy is told of.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/pydantic_ai_agent.py:agent --agent.max-turns 4
"""

from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

Number = Annotated[int, Field(ge=0, le=999)]


class Sum(BaseModel):
    """The result."""

    total: Number


async def agent(task, client):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    adder = Agent(model, output_type=Sum)

    @adder.tool_plain
    def add(a: Number, b: Number) -> int:
        """Add two numbers."""
        return a + b

    result = await adder.run(task.prompt)
    return str(result.output.total)
