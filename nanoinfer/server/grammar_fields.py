"""`GrammarFields`: what an answer must match, under the names of several APIs.

    {"response_format": {"type": "json_schema", "json_schema": {"schema": {..}}}}   OpenAI's
    {"structured_outputs": {"choice": ["yes", "no"]}}   {"guided_regex": ".."}      vLLM's
    {"regex": ".."}   {"ebnf": ".."}   {"json_schema": ".."}                        SGLang's

A grammar is Lark's, or llama.cpp's. One of all these may be given. Left out: grammars for parts of
an answer (structural tags).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from nanoinfer.http.strict_body import Refused, StrictBody
from nanoinfer.params import Grammar
from nanoinfer.server.chat_messages import Text
from nanoinfer.server.media import refusals

ANY_OBJECT = '{"type": "object"}'


def _schema(value: dict[str, Any] | str) -> Grammar:
    return Grammar("json_schema", _text(value))


def _text(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _unless_flag(given: Any) -> Any:
    return None if isinstance(given, bool) else given  # OpenRouter's flag of that name


class StructuredOutputs(StrictBody):
    """The constraint that an answer must match, in a single form: vLLM's name for `guided_*`."""

    ignored = frozenset({"disable_fallback"})
    refused = {  # noqa: RUF012
        "disable_additional_properties": Refused("say so in the schema"),
        "disable_any_whitespace": Refused("blanks in JSON follow the grammar; leave it out"),
        "structural_tag": Refused("give a schema, a regex or a grammar for the whole answer"),
        "whitespace_pattern": Refused("blanks in JSON follow the grammar; leave it out"),
    }
    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: StrictBool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.grammars()) != 1:
            raise ValueError("give one of json, regex, choice, grammar, json_object")
        return self

    def grammars(self) -> list[Grammar]:
        return [
            *([] if self.schema_ is None else [Grammar("json_schema", _text(self.schema_))]),
            *([Grammar("regex", self.regex)] if self.regex else []),
            *([Grammar("choice", choices=tuple(self.choice))] if self.choice else []),
            *([Grammar("lark", self.grammar)] if self.grammar else []),
            *([Grammar("json_schema", ANY_OBJECT)] if self.json_object else []),
        ]


class JsonSchema(StrictBody):
    ignored = frozenset({"description", "name", "strict"})
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """Of a json_object, as llama.cpp and Together have it."""

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise refusals([(("json_schema",), "type json_schema needs it", None)])
        return self

    def grammars(self) -> list[Grammar]:
        if self.json_schema is not None and self.type == "json_schema":
            return [_schema(self.json_schema.schema_)]
        if self.type == "json_object":
            return [_schema(ANY_OBJECT if self.schema_ is None else self.schema_)]
        return []


class GrammarFields(StrictBody):
    """The fields; `grammar` is what they say."""

    guided_json: dict[str, Any] | str | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    guided_grammar: Text | None = None
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(_unless_flag)] = None
    regex: Text | None = None
    ebnf: Text | None = None
    json_schema: dict[str, Any] | str | None = None
    """SGLang's names of `guided_regex`, `guided_grammar` and `guided_json`."""
    response_format: ResponseFormat | None = None

    def grammars(self) -> list[Grammar]:
        """Everything that the answer must match."""
        patterns = [one for one in (self.guided_regex, self.regex) if one]
        grammars = [one for one in (self.guided_grammar, self.ebnf) if one]
        return [
            *(_schema(one) for one in (self.guided_json, self.json_schema) if one is not None),
            *(Grammar("regex", one) for one in patterns),
            *([Grammar("choice", choices=tuple(self.guided_choice))] if self.guided_choice else []),
            *(Grammar("lark", one) for one in grammars),
            *(self.structured_outputs.grammars() if self.structured_outputs else []),
            *(self.response_format.grammars() if self.response_format else []),
        ]

    def grammar(self) -> Grammar | None:
        """`ValueError` where there are several."""
        found = self.grammars()
        if len(found) > 1:
            raise ValueError(
                "structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar, "
                "response_format and a forced tool_choice exclude each other: give one"
            )
        return found[0] if found else None
