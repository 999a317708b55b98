"""Calls as Llama 3.2 and 4 may write them: a Python list of calls with literal arguments.

    [add(a=1, b=2), look_up(word="x")]

The list opens a line. It is parsed with `ast` and never run: arguments are strings, numbers,
True, False, None (true, false and null too), lists and dicts of these.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.json_calls import MAX_DEPTH, checked_call
from nanoinfer.chat.reading import Found, Marks, WalkingParser
from nanoinfer.chat.signatures import signature

MARKS = Marks.of(
    r"^[ \t]*(?=\[\s*[A-Za-z_][\w.]*\s*\()",
    begun=r"^[ \t]*(?:\[\s*(?:[A-Za-z_][\w.]*\s*)?)?",
)
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
PIECES = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|'
    r"'''(?:[^\\]|\\.)*?'''|"
    r'"(?:[^"\\\n]|\\.)*"|'
    r"'(?:[^'\\\n]|\\.)*'|"
    r"[][(){}\"']",
    re.DOTALL,
)
"""Strings as wholes, brackets, and a quote that opens a string without an end."""
WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, kw_only=True)
class PythonicParser(WalkingParser):
    """The parser; results come back as messages of `role`."""

    name: ClassVar[str] = "pythonic"
    role: str = "ipython"

    @property
    def marks(self) -> Marks:
        return MARKS

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        start = mark.end()
        try:
            end = _end_of_list(text, start)
            return [_call_of(node) for node in _nodes(text[start:end])], end
        except ToolCallError as error:
            return [error], start + 1

    def write(self, call: ToolCall) -> str:
        """`ValueError` for a name that Python could not call."""
        is_name = NAME.fullmatch(call.name) is not None
        if not is_name or any(keyword.iskeyword(part) for part in call.name.split(".")):
            raise ValueError(f"tool name {call.name!r}: not a name in Python; use another parser")
        return f"[{call.name}({', '.join(_written(*pair) for pair in call.arguments.items())})]"

    def describe(self, tools: Sequence[Described]) -> str:
        return (
            "You may call functions. To do so, reply with nothing but a list of calls, as in "
            "[first(name=value, other=value), second(name=value)]. Name every argument and write "
            "its value as a Python literal.\n\n"
            + "\n".join(signature(tool.schema) for tool in tools)
        )


def _written(name: str, value: Any) -> str:
    if name.isidentifier() and name.isascii() and not keyword.iskeyword(name):
        return f"{name}={value!r}"
    return f"**{{{name!r}: {value!r}}}"


def _end_of_list(text: str, start: int) -> int:
    """The end of the list that opens at `start`. `ToolCallError` where it has none."""
    depth = 0
    for piece in PIECES.finditer(text, start):
        if piece.group() in "[({":
            depth += 1
        elif piece.group() in "])}":
            depth -= 1
        elif len(piece.group()) == 1:
            raise ToolCallError(f"a string opens with {piece.group()} and does not end")
        if depth == 0:
            return piece.end()
        if depth > MAX_DEPTH:
            raise ToolCallError(f"the list of calls is nested more than {MAX_DEPTH} deep")
    raise ToolCallError("the list of calls is not closed with ]")


def _nodes(source: str) -> list[ast.expr]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in what the model wrote
            tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise ToolCallError(f"the list of calls is not valid Python: {error.msg}") from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise ToolCallError("the list of calls is too complex to be read") from error
    if not isinstance(tree, ast.List):
        raise ToolCallError("write the calls as one list: [f(a=1), g(b=2)]")
    return tree.elts


def _call_of(node: ast.expr) -> ToolCall | ToolCallError:
    try:
        if not isinstance(node, ast.Call):
            raise ToolCallError("the list must hold calls alone: [f(a=1), g(b=2)]")
        name = _name(node.func)
        if node.args:
            raise ToolCallError(f"name every argument of {name}: {name}(name=value)")
        arguments: dict[str, Any] = {}
        for one in node.keywords:
            value = _literal(one.value)
            given = {one.arg: value} if one.arg is not None else value
            if not isinstance(given, dict):
                raise ToolCallError("** needs a dict, as in f(**{'a': 1})")
            if arguments.keys() & given.keys():
                raise ToolCallError(f"an argument of {name} is given twice")
            arguments |= given
    except ToolCallError as error:
        return error
    return checked_call(name, arguments)


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ToolCallError("a call begins with the name of a function")
    return ".".join([node.id, *reversed(parts)])


def _literal(node: ast.expr) -> Any:
    """The value of a literal, no deeper than the brackets that `_end_of_list` let through."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(one) if one is not None else None for one in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ToolCallError("the keys of a dict must be strings")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise ToolCallError("an argument must be a literal: a string, a number, a list or a dict")
