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

from nanoengine.formats.template_files import DEFAULT

WITH_TOOLS = "tool_use"

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


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message carries what was thought; templates read the first or the second."""


def new_environment() -> ImmutableSandboxedEnvironment:
    """The jinja2 environment in which templates are compiled."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def line_of(error: BaseException) -> int | None:
    """The line of the template that raised; None where it did not get so far."""
    lines, place = [], error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == "<template>":
            lines.append(place.tb_lineno)
        place = place.tb_next
    return lines[-1] if lines else None


class ChatTemplate:
    """A compiled template. `variables` are bound for every rendering (`bos_token` and the like)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.variables = dict(variables)
        try:
            self._template = new_environment().from_string(source)
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
        bound = {
            "documents": None,
            **self.variables,
            **(variables or {}),
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
        told = [_with_reasoning(message) for message in messages]
        try:
            try:
                return self._template.render(**{**bound, "messages": told})
            except TypeError:  # DeepSeek's adds the arguments of calls to a text
                texts = [with_json_arguments(message) for message in told]
                return self._template.render(**{**bound, "messages": texts})
        # A template that was not made for such messages adds a text to None, or loops over it.
        except (jinja2.exceptions.TemplateError, TypeError, AttributeError, LookupError) as error:
            roles = [message.get("role") for message in messages]
            line = line_of(error)
            raise ValueError(
                f"the chat template rejects messages with roles {roles}: {error}"
                + (f" (line {line} of the template)" if line else "")
            ) from error


def _with_reasoning(message: Message) -> dict[str, Any]:
    """The message with its reasoning under both names that templates read, as `transformers`
    binds it."""
    given = (message.get(name) for name in REASONING_FIELDS)
    thought = next((one for one in given if one is not None), None)
    if thought is None:
        return dict(message)
    return {"thinking": thought, **message, "reasoning_content": thought}


def with_json_arguments(message: Message) -> dict[str, Any]:
    """The message with each call's arguments as the JSON text that an API has for them."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_with_json, calls)]} if calls else dict(message)


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


class ChatTemplates:
    """The templates of a model by name, of which a chat takes one, as `transformers` chooses it:
    "tool_use" where tools are given and there is one, else "default"."""

    def __init__(self, sources: str | Mapping[str, str], variables: Mapping[str, Any]) -> None:
        self.sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self.variables = dict(variables)
        self._by_name = {
            name: ChatTemplate(source, variables) for name, source in self.sources.items()
        }

    @property
    def source(self) -> str:
        """That of "default", or the one for tools, or the first."""
        name = next((name for name in (DEFAULT, WITH_TOOLS) if name in self.sources), None)
        return self.sources[name] if name else next(iter(self.sources.values()))

    def chosen(self, has_tools: bool) -> ChatTemplate:
        """The template of a chat. `ValueError` where nobody said which one it is."""
        names = (WITH_TOOLS, DEFAULT) if has_tools else (DEFAULT,)
        name = next((name for name in names if name in self._by_name), None)
        if name is None:
            known = ", ".join(map(repr, self._by_name))
            raise ValueError(
                f"the model has chat templates of the names {known} and none of the name "
                f"{DEFAULT!r}, which a chat {'with' if has_tools else 'without'} tools is written "
                "with: name one of them so in tokenizer_config.json"
            )
        return self._by_name[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `ValueError` when there is no template for it, or it rejects the
        messages."""
        return self.chosen(tools is not None).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )
