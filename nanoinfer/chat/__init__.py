"""Parsers: how a model writes its calls of tools, and how it reads the results.

base.py      the contract: `Parser`, `ToolCall`, and the `ToolCallError` of a malformed one
reading.py   what they share: the walk through a turn, reasoning left out, and calls in JSON
fenced.py    code between markers, such as ```python blocks
hermes.py    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen
llama.py     `{"name": ..., "parameters": {...}}`: Llama 3
pythonic.py  `[f(a=1), g(b="x")]`: Llama 3.2 and 4
signatures.py a tool as the head of a Python function, for pythonic.py
chat.py      `ToolChat`: how the model is told of tools, and its parser
choose.py    `tool_chat`: both as a model's chat template has them
"""
