"""smolagents' ToolCallingAgent, whose every turn is a call of a tool.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/smolagents_tools.py:agent \
    --agent.max-turns 4 --agent.max-context-tokens 4096
"""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def agent(task, client):
    model = OpenAIModel("policy", api_base=task.base_url, api_key=task.api_key)
    adder = ToolCallingAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF)
    return str(adder.run(task.prompt))
