"""`TemplateFields`: what a client tells the chat template, under the names of several APIs.

    {"chat_template_kwargs": {"enable_thinking": false}}          vLLM's, SGLang's
    {"reasoning_effort": "none"}   {"reasoning": {"effort": ..}}  OpenAI's, OpenRouter's
    {"thinking": {"type": "disabled"}}                            DeepSeek's, Anthropic's

All become variables of the template: `reasoning_effort` as it was given, `enable_thinking` (and
`thinking`, which some templates call it) where thinking is turned on or off, which an effort does
as in vLLM. Which of them a model knows, its template says. Left out: limits of how long a model
thinks.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StrictBool

from nanoinfer.http.strict_body import StrictBody

MAX_VARIABLES, MAX_VARIABLES_CHARS = 32, 1 << 16
OWN_NAMES = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation"}
    | {"documents", "messages", "raise_exception", "strftime_now", "tokenize", "tools"}
    | {"bos_token", "eos_token", "pad_token", "unk_token"}
)
"""Variables of a template that are not a client's to set."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def checked_variables(given: dict[str, Any]) -> dict[str, Any]:
    """`given`. `ValueError` for names that the server sets itself, and for too much."""
    own = sorted(OWN_NAMES & given.keys())
    if own:
        raise ValueError(f"{', '.join(own)}: the server sets it; use the request's own fields")
    if len(given) > MAX_VARIABLES or len(json.dumps(given)) > MAX_VARIABLES_CHARS:
        raise ValueError(
            f"at most {MAX_VARIABLES} variables of {MAX_VARIABLES_CHARS} characters; give fewer"
        )
    return given


def default_variables(text: str) -> dict[str, Any]:
    """What `--default-chat-template-kwargs` says; empty says nothing. `ValueError` where it is no
    JSON object, or names what is not to be set."""
    try:
        given = json.loads(text or "{}")
        if not isinstance(given, dict):
            raise ValueError(f"a JSON object is expected, not a {type(given).__name__}")
        return checked_variables(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--default-chat-template-kwargs {text}: {error}; give variables as JSON, such as "
            '{"enable_thinking": false}'
        ) from None


Variables = Annotated[dict[str, Any], AfterValidator(checked_variables)]


class Thinking(BaseModel):
    """A switch; what else it holds, such as a budget, is not read."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]

    @property
    def is_on(self) -> bool | None:
        """None leaves it to the template."""
        return {"enabled": True, "disabled": False}.get(self.type)


class Reasoning(StrictBody):
    ignored = frozenset({"context", "generate_summary", "max_tokens", "mode", "summary"})
    effort: Effort | None = None
    enabled: StrictBool | None = None
    exclude: StrictBool = False


class TemplateFields(StrictBody):
    """The fields; `variables` is what they say."""

    chat_template_kwargs: Variables = Field(default_factory=dict)
    documents: list[dict[str, str]] | None = None
    enable_thinking: StrictBool | None = None
    include_reasoning: StrictBool = True
    reasoning_effort: Effort | None = None
    reasoning: Reasoning = Field(default_factory=Reasoning)
    thinking: Thinking | None = None

    @property
    def shows_reasoning(self) -> bool:
        """The answer tells what the model thought."""
        return self.include_reasoning and not self.reasoning.exclude

    def variables(self) -> dict[str, Any]:
        """For the chat template; those named outright come last."""
        is_on = self.enable_thinking
        if is_on is None and self.thinking is not None:
            is_on = self.thinking.is_on
        if is_on is None:
            is_on = self.reasoning.enabled
        effort = self.reasoning_effort or self.reasoning.effort
        if is_on is None and effort is not None:
            is_on = effort != "none"
        made = thinking_variables(effort, is_on)
        if self.documents is not None:
            made["documents"] = self.documents
        return made | self.chat_template_kwargs


def thinking_variables(effort: str | None, is_on: bool | None) -> dict[str, Any]:
    """Variables that say how much to think, or whether; None says nothing. An effort alone turns
    nothing on: some clients send one always."""
    if is_on is None and effort == "none":
        is_on = False
    made: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return made if is_on is None else made | {"enable_thinking": is_on, "thinking": is_on}
