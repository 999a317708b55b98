"""Tools of a request that are no plain functions, and what becomes of each kind.

A search of the API's own server is left out: clients always offer it, and a model that was not told
of it answers without it. Tools that an API defines or runs otherwise are refused, since an agent
counts on them. A tool without a schema (freeform) is a function with one text argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, model_validator

from nanoinfer.dialects.exchange import Json
from nanoinfer.server.media import refusals

SEARCHES = ("tool_search", "web_fetch", "web_search")
"""What the names of tools begin with that are left out."""
CLIENTS_OWN = (
    *("apply_patch", "bash", "browser", "computer", "local_shell", "memory", "shell"),
    *("str_replace", "text_editor"),
)
INPUT = "input"


class ForeignTool(BaseModel):
    """One that the API's own server runs, or that the API defines. It is left out, or refused with
    what to offer instead; its other fields are not read."""

    type: str

    @model_validator(mode="after")
    def _is_left_out(self) -> Self:
        if self.type.startswith(SEARCHES):
            return self
        if self.type.startswith(CLIENTS_OWN):
            why = "the API defines it; offer it as a function, with a schema"
        else:
            why = "this server runs no tools; offer it as a function that the client runs"
        raise refusals([(("type",), f"{self.type}: {why}", self.type)])


def freeform_spec(name: str, description: str | None, form: Mapping[str, Any] | None) -> Json:
    """A tool that takes a text, as a function. What the text must look like is told to the model;
    only a regular expression is also held, where a call is forced."""
    told = [description] if description else []
    text: Json = {"type": "string"}
    if form is not None and form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        told.append(f"`{INPUT}` must match this {syntax} grammar:\n{definition}")
        if syntax == "regex":
            text["pattern"] = definition
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": name, "description": "\n\n".join(told), "parameters": parameters}
    return {"type": "function", "function": function}


def freeform_arguments(text: str) -> str:
    """The arguments of a call of such a tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def freeform_text(arguments: str) -> str:
    """The text of a call; arguments that are no such object are the text as they stand."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(INPUT) if isinstance(given, dict) and len(given) == 1 else None
    return text if isinstance(text, str) else arguments
