"""Messages and tools of /v1/chat/completions, and what a chat template reads of them.

An earlier answer may be sent back as it was, with whatever clients and proxies keep beside it. Its
reasoning goes to the template, which decides if the model reads it again. Pictures: media.py.
Left out: tools without a schema (`custom`), which /v1/responses knows.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, model_validator

from nanoinfer.http.strict_body import Refused, StrictBody
from nanoinfer.server.media import MediaPart, content_of, refuse_media

Text = Annotated[str, Field(min_length=1)]
NOTES = frozenset({"cache_control", "extra_content", "id", "index", "provider_specific_fields"})
"""What clients and proxies hang onto any part of a conversation."""


class Function(StrictBody):
    ignored = NOTES | {"defer_loading", "strict"}
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OfferedTool(StrictBody):
    ignored = NOTES | {"allowed_callers", "defer_loading", "input_examples"}
    refused = {  # noqa: RUF012
        "custom": Refused(
            "tools without a schema are /v1/responses'; offer a function with one text argument"
        )
    }
    type: Literal["function"]
    function: Function


class NamedFunction(StrictBody):
    name: Text


class NamedTool(StrictBody):
    type: Literal["function"]
    function: NamedFunction


class TextPart(StrictBody):
    ignored = NOTES | {"annotations", "prompt_cache_breakpoint"}
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(StrictBody):
    ignored = NOTES
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(BaseModel):
    """The model's reasoning, as some clients keep it in the content; `reasoning` has it too."""

    type: Literal["thinking", "redacted_thinking", "reasoning"]

    @property
    def text(self) -> str:
        return ""


class ToolReference(StrictBody):
    """A tool that a search for tools found. Tools are all offered from the beginning."""

    ignored = NOTES
    type: Literal["tool_reference"]
    name: Text

    @property
    def text(self) -> str:
        return f"[tool: {self.name}]"


Part = Annotated[
    TextPart | RefusalPart | ThinkingPart | ToolReference | MediaPart, Field(discriminator="type")
]


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_json(arguments: Any) -> Any:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class CalledFunction(StrictBody):
    ignored = NOTES | {"parsed_arguments", "strict"}
    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = ""


class Call(StrictBody):
    ignored = NOTES - {"id"}
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """A call without arguments has an empty object of them; a broken one is shown to the
        template as it was written."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = json.loads(arguments) if arguments.strip() else {}
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(StrictBody):
    """One message of a conversation."""

    ignored = NOTES | {
        *("annotations", "audio", "function_call", "parsed", "phase", "reasoning_details"),
        *("reasoning_items", "refusal", "status", "thinking_blocks"),
    }
    refused = {  # noqa: RUF012
        "images": Refused("pictures are parts of the content, for models that see; leave it out")
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], BeforeValidator(_as_parts)] = Field(default_factory=list)
    name: str | None = None
    tool_calls: list[Call] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's and OpenRouter's name of `reasoning_content`."""
    prefix: StrictBool = False
    """DeepSeek's and Mistral's: the answer goes on where this last message ends."""

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.role != "tool":
            refuse_media(self.content, "content", role=self.role)
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text in one piece, or a list of texts and pictures
        (`content_of`); arguments as objects."""
        message: dict[str, Any] = {"role": self.role, "content": content_of(self.content)}
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        thought = self.reasoning_content or self.reasoning
        if self.role == "assistant" and thought:
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
