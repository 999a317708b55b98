"""Chat templates: the jinja2 program of a model folder, run as `transformers` runs it.

The environment is the immutable sandbox with `trim_blocks`, `lstrip_blocks`, loop controls, a plain
`tojson`, `raise_exception`, `strftime_now` and a `{% generation %}` block that renders its body.

Left out: tracking which text lies in generation blocks (masks come from sampled ids, never from
templates) and image or audio parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, plus whatever else the model's template reads."""


class GenerationTag(Extension):
    """`{% generation %}` marks assistant text in some templates: keep the body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads a plain class attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template. `variables` are bound for every rendering (`bos_token` and the like)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `ValueError` when the template itself rejects the messages."""
        bound = {"documents": None, **self._variables, **(variables or {})}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools is not None else None,
                add_generation_prompt=add_generation_prompt,
                **bound,
            )
        except jinja2.exceptions.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(
                f"the chat template rejects messages with roles {roles}: {error}"
            ) from error
