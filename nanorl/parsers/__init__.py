"""Parsers: how a model writes its calls of tools, and how it reads the results.

base.py      the contract: `Parser`, `ToolCall`, and the `ToolCallError` of a malformed one
"""
