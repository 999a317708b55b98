"""Which line of a chat template printed each character of a chat: for diagnoses only.

A copy of the template prints a mark with its line in front of all that it prints. What a macro or
a block that fills a variable prints has the line where it is used: marks inside would be part of
the text that the template goes on to work with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from nanoengine.text.chat_template import ChatTemplate, Message, new_environment
from nanoengine.text.tokenizer import ChatTokenizer

_OPEN, _CLOSE = "\U0010f8f0", "\U0010f8f1"  # private use: no template has them
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_KEPT = (nodes.Macro, nodes.AssignBlock, nodes.CallBlock, nodes.FilterBlock)


@dataclass(frozen=True)
class TracedChat:
    """A rendered chat with the line of each of its characters."""

    text: str
    lines: list[int]
    source: list[str]

    def at(self, place: int) -> str:
        """The line that printed the character at `place`, or behind the text the last one."""
        if not self.lines:
            return "the template prints nothing"
        number = self.lines[min(place, len(self.lines) - 1)]
        return f"line {number}: {shown_line(self.source, number)}"


def shown_line(source: Sequence[str], number: int) -> str:
    """A line of a template, its middle left out where it is long."""
    line = source[number - 1].strip() if 0 < number <= len(source) else ""
    return line if len(line) <= 100 else f"{line[:60]} ... {line[-35:]}"


def trace(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> TracedChat:
    """Render a chat. `ValueError` where the template rejects it."""
    assert tokenizer.templates is not None, "there is a template"
    template = tokenizer.templates.chosen(tools is not None)
    text = _Marked(template).render(
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        variables=tokenizer.variables,
    )
    pieces, lines = [], []
    for number, piece in _pieces(text):
        pieces.append(piece)
        lines += [number] * len(piece)
    return TracedChat("".join(pieces), lines, template.source.splitlines())


class _Marked(ChatTemplate):
    """A template that prints the marks."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template.source, template.variables)
        environment = new_environment()
        tree = environment.parse(template.source)
        for node in _outputs(tree):
            node.nodes = [part for one in node.nodes for part in (_mark(one), one)]
        code = environment.compile(tree, filename="<template>")
        self._template = environment.template_class.from_code(
            environment, code, environment.make_globals(None)
        )


def _mark(node: nodes.Node) -> nodes.TemplateData:
    return nodes.TemplateData(f"{_OPEN}{node.lineno}{_CLOSE}", lineno=node.lineno)


def _outputs(node: nodes.Node) -> Iterator[nodes.Output]:
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Output):
            yield child
        elif not isinstance(child, _KEPT):
            yield from _outputs(child)


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Each line's number with what it printed. Text of the template itself goes on over lines."""
    first, *rest = _MARK.split(text)
    if first:
        yield 1, first
    for number, piece in zip(rest[::2], rest[1::2], strict=True):
        yield int(number), piece
