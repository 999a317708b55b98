"""Bodies of HTTP requests: what they may hold, and the `SamplingParams` they mean.

Unknown fields, wrong types and values out of range are refused by name, never ignored, but for
those that cannot change an answer (`ignored`): they have no effect. A null is a field left out.
/inference/v1/generate is vLLM's (its GenerateRequest): token ids in, token ids out.
Beyond the OpenAI API: top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos,
allowed_token_ids, logprobs_mode, priority, request_id, return_token_ids and the three `guided_*`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from nanoinfer.params import Grammar, LogpsMode, Output, SamplingParams
from nanoinfer.server.tool_calls import call_schema

MAX_TOP_LOGPROBS = 20  # the OpenAI API's limit
_SEED = 2**63  # an int64, as in the OpenAI API
_Text = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(strict=True)]


class StrictBody(BaseModel):
    """An object that may hold its own fields, those `ignored`, and no others."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in given.items() if v is not None and k not in cls.ignored}


class StreamOptions(StrictBody):
    ignored = frozenset({"include_obfuscation", "continuous_usage_stats"})
    include_usage: StrictBool = False


class Sampling(StrictBody, ABC):
    """The fields that chat and plain completions share."""

    ignored = frozenset(
        {"metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"}
        | {"safety_identifier", "service_tier", "store", "user"}
    )
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, strict=True)
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, strict=True)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, strict=True)
    seed: int | None = Field(None, ge=-_SEED, lt=_SEED, strict=True)
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    stop_token_ids: list[_TokenId] = []
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[_TokenId] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: _Text | None = None
    guided_choice: list[_Text] | None = None
    priority: int = Field(0, strict=True)
    request_id: _Text | None = None
    """The name by which /abort finds it; default: the answer's id."""
    logprobs_mode: LogpsMode = "tempered"
    """Log-probs at the request's temperature, or "raw", at temperature 1."""
    return_token_ids: StrictBool = False

    @property
    def is_usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_top(self) -> int | None:
        """Likeliest tokens to report at each position; None: no log-probs at all."""

    def grammar(self) -> Grammar | None:
        given = [
            Grammar("json_schema", _text(self.guided_json)) if self.guided_json else None,
            Grammar("regex", self.guided_regex) if self.guided_regex else None,
            Grammar("choice", choices=tuple(self.guided_choice)) if self.guided_choice else None,
        ]
        return _only(given)

    def params(self, max_tokens: int, seed: int) -> SamplingParams:
        """The engine's parameters, for a prompt that leaves room for `max_tokens`. `seed` is for
        requests that give none."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=_tuple(self.allowed_token_ids),
            grammar=self.grammar(),
            seed=seed if self.seed is None else self.seed,
            n=self.n,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            detokenize=True,
            top_logps=self.num_top or 0,
            logps_mode=self.logprobs_mode,
        )


class Completion(Sampling):
    """/v1/completions. A prompt is text or token ids, one or several."""

    prompt: (
        str
        | Annotated[list[_TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[list[_TokenId]], Field(min_length=1)]
    )
    add_special_tokens: StrictBool = True
    """Begin a prompt of text with the BOS of a tokenizer that adds one."""
    echo: StrictBool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)

    @model_validator(mode="after")
    def _echo_is_not_streamed(self) -> Completion:
        if self.echo and self.stream:
            raise ValueError("echo cannot be streamed; leave out echo or stream")
        return self

    @property
    def num_top(self) -> int | None:
        return self.logprobs


class Function(StrictBody):
    name: _Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(StrictBody):
    type: Literal["function"]
    function: Function


class NamedFunction(StrictBody):
    name: _Text


class NamedTool(StrictBody):
    type: Literal["function"]
    function: NamedFunction


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class CalledFunction(StrictBody):
    name: str
    arguments: str


class Call(StrictBody):
    ignored = frozenset({"index"})
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictBody):
    """One message of a conversation; an earlier answer may be sent back as it was."""

    ignored = frozenset({"annotations", "audio", "function_call", "refusal"})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's new name of the same."""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text in one piece, arguments as objects."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        if self.role == "assistant" and (thought := self.reasoning_content or self.reasoning):
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [_called(call) for call in self.tool_calls]
        return message


class JsonSchema(StrictBody):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCompletion(Sampling):
    """/v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, strict=True)
    logprobs: StrictBool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    response_format: ResponseFormat | None = None

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def is_tool_forced(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def tool_specs(self) -> list[dict[str, Any]]:
        """The tools as the chat template reads them; none where they must not be used."""
        if not self.tools or self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def grammar(self) -> Grammar | None:
        given = [super().grammar()]
        if self.is_tool_forced:
            named = self.tool_choice
            name = named.function.name if isinstance(named, NamedTool) else None
            if not self.tools:
                raise ValueError("tool_choice: asks for a call, but tools is empty")
            given.append(Grammar("json_schema", call_schema(self.tool_specs(), name)))
        form = self.response_format
        if form is not None and form.type == "json_object":
            given.append(Grammar("json_schema", '{"type": "object"}'))
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise ValueError("response_format: type json_schema needs json_schema")
            given.append(Grammar("json_schema", json.dumps(form.json_schema.schema_)))
        return _only(given)


class Generate(StrictBody):
    """/generate: token ids in, token ids out. `params` are those of `SamplingParams`, where
    grammar is {"kind": ..., "value": ..., "choices": [...]}."""

    ids: list[_TokenId]
    request_id: _Text | None = None
    params: dict[str, Any] = {}
    stream: StrictBool = False
    priority: int = Field(0, strict=True)

    def sampling(self) -> SamplingParams:
        return _sampling("params", self.params)


class TokenGenerate(StrictBody):
    """/inference/v1/generate: a prompt of token ids in, choices of token ids out, as vLLM's. Names
    in `sampling_params` are vLLM's or those of `SamplingParams`."""

    ignored = frozenset({"cache_salt", "stream_options"})
    model: str | None = None
    request_id: _Text | None = None
    token_ids: list[_TokenId]
    sampling_params: dict[str, Any] = {}
    stream: Literal[False] = False
    priority: int = Field(0, strict=True)
    sampled: dict[str, Any] | None = None
    """What an abort left of this very request, as an `output`: it goes on from there."""
    return_output: StrictBool = False
    """Put the engine's whole `Output` into each choice, as `output`."""

    def sampling(self, room: int, seed: int) -> SamplingParams:
        """The parameters, for a prompt that leaves `room`. `seed` is for requests without one."""
        given = {
            _OUR_NAMES.get(name, name): value
            for name, value in self.sampling_params.items()
            if value is not None and name not in _WITHOUT_EFFECT
        }
        if given.get("top_k") == -1:  # vLLM's "off"
            given["top_k"] = 0
        if "prompt_logps" in given:
            given["prompt_logps"] = given["prompt_logps"] is not False
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        return _sampling("sampling_params", {"max_tokens": room, "seed": seed} | given)

    def part(self) -> Output | None:
        """`sampled` as the engine reads it."""
        return None if self.sampled is None else Output.from_json(self.sampled)


_OUR_NAMES = {"logprobs": "top_logps", "prompt_logprobs": "prompt_logps"}
_WITHOUT_EFFECT = frozenset(
    {"extra_args", "flat_logprobs", "output_kind", "routed_experts_prompt_start"}
    | {"skip_special_tokens", "spaces_between_special_tokens"}
)


def _sampling(where: str, given: dict[str, Any]) -> SamplingParams:
    """Parameters by the names of `SamplingParams`; `ValueError` names what is wrong in `where`."""
    known = SamplingParams.__dataclass_fields__
    fields = dict(given)
    for name in fields:
        if name not in known:
            raise ValueError(f"{where}.{name}: unknown; choose from {', '.join(sorted(known))}")
    for name in ("stop", "stop_token_ids", "allowed_token_ids"):
        if isinstance(fields.get(name), list):
            fields[name] = tuple(fields[name])
    try:
        if fields.get("grammar") is not None:
            grammar = dict(fields["grammar"])
            grammar["choices"] = tuple(grammar.get("choices", ()))
            fields["grammar"] = Grammar(**grammar)
        bias = fields.get("logit_bias") or {}
        fields["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
        _check_types(where, fields)
        return SamplingParams(**fields)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from error


class Abort(StrictBody):
    """/abort: the request of that id, or all."""

    request_id: _Text | None = None
    all: StrictBool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Abort:
        if (self.request_id is not None) == self.all:
            raise ValueError("give request_id, or all: true")
        return self


class UpdateWeights(StrictBody):
    """/update_weights: safetensors of a folder on the server's machine."""

    path: _Text
    version: int = Field(ge=0, strict=True)
    checksums: dict[str, Annotated[int, Field(strict=True)]] | None = None
    """Of every tensor by its name, as `kernels.checksum`. A tensor with another one, and one that
    is not named, is refused, and then nothing is loaded."""


def _check_types(where: str, fields: dict[str, Any]) -> None:
    """Each value must be of the type of the field's default."""
    defaults = SamplingParams()
    for name, value in fields.items():
        default = getattr(defaults, name)
        if default is None:
            continue
        kinds = (int, float) if type(default) is float else (type(default),)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{where}.{name}={value!r}: must be of type {kinds[-1].__name__}")
    for name, kind in (("stop", str), ("stop_token_ids", int), ("allowed_token_ids", int)):
        if any(type(item) is not kind for item in fields.get(name) or ()):
            raise ValueError(f"{where}.{name}: every entry must be of type {kind.__name__}")


def _called(call: Call) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    with suppress(ValueError):  # a broken call is shown to the template as it was written
        arguments = json.loads(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _only(given: list[Grammar | None]) -> Grammar | None:
    found = [grammar for grammar in given if grammar is not None]
    if len(found) > 1:
        raise ValueError(
            "guided_json, guided_regex, guided_choice, response_format and a forced tool_choice "
            "exclude each other: give one"
        )
    return found[0] if found else None


def _text(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
