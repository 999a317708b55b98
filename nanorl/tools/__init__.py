"""Tools: what an agent may call in its turns, each with a name, a schema and `run`.

base.py      the contract: `Tool`, the episode's `ToolContext`, and the ways in which a call ends
"""
