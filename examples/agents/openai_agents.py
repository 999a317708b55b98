"""The OpenAI Agents SDK: its runner calls the tool, then asks for the answer.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/openai_agents.py:agent --agent.max-turns 4
"""

from typing import Annotated

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from pydantic import Field

Number = Annotated[int, Field(ge=0, le=999)]


@function_tool
def add(a: Number, b: Number) -> int:
    """Add two numbers."""
    return a + b


async def agent(task, client):
    adder = Agent(
        name="adder",
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
        model_settings=ModelSettings(tool_choice="required"),  # in the first turn
        tools=[add],
    )
    quiet = RunConfig(tracing_disabled=True)
    result = await Runner.run(adder, task.messages, max_turns=4, run_config=quiet)
    return str(result.final_output)
