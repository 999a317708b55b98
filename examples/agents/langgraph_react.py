"""LangGraph's ReAct agent with one tool.

nanorl train --env answer --tasks examples/sums.jsonl \
    --agent examples/agents/langgraph_react.py:agent --agent.max-turns 4
"""

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def agent(task, client):
    model = ChatOpenAI(model="policy", base_url=task.base_url, api_key=task.api_key)
    graph = create_react_agent(model, [add])
    end = await graph.ainvoke({"messages": task.messages}, {"recursion_limit": 6})
    return end["messages"][-1].content
