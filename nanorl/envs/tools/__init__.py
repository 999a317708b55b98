"""Tools: what an agent may call in its turns, each with a name, a schema and `run`.

base.py      the contract: `Tool`, the episode's `ToolContext`, and the ways in which a call ends
function.py  `function_tool` and `method_tools`: Python functions as tools
python.py    `python`: a program in the sandbox
workspace.py `bash`, `python_session`, `read`, `write`, `edit`, `submit`, over one workspace
mcp.py       `mcp_tools`: the tools of an MCP server, shared or one for each episode
mcp_connection.py  one connection to such a server, from its start to its end
tool_calls.py     `answer_calls`: the calls of one turn, side by side, answered in order
"""
