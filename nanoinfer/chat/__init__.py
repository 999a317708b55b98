"""Chats: how a model is told of tools, how it calls them, and what stands between two turns.

turns.py     the tokens that a template puts behind a turn of the assistant
call_ids.py  names of calls, and of the results that answer them
base.py      the contract of a parser: `Parser`, `ToolCall`, the `ToolCallError` of a malformed one
reading.py   what they share: the walk through a turn, reasoning left out
reasoning.py the marks of reasoning, and what a turn says behind it
json_calls.py calls in JSON
fenced.py    code between markers, such as ```python blocks
hermes.py    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen
llama.py     `{"name": ..., "parameters": {...}}`: Llama 3
pythonic.py  `[f(a=1), g(b="x")]`: Llama 3.2 and 4
tagged.py    an argument a pair of tags: Qwen3-Coder, GLM-4.5; typed.py reads the values
named.py     a name, then JSON: Mistral, DeepSeek, GLM-4
harmony.py   messages on channels: gpt-oss
signatures.py a tool as the head of a Python function, for pythonic.py
reply.py     a turn as reasoning, text and calls, whole or while it comes
chat.py      `ToolChat`: how the model is told of tools, and its parser
choose.py    `tool_chat`: both as a model's chat template has them
form.py      `ChatForm`: a client's messages for the template, and the model's text for the client
"""
