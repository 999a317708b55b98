"""Bodies of HTTP requests: what they may hold, and the `SamplingParams` they mean.

Every field is done, without effect, or refused by name, and one error tells all that is wrong with
a body (strict_body.py); which fields of other servers and clients are what: harmless.py, and the
table in docs/request_fields.md. A null is a field left out.
/inference/v1/generate is vLLM's (its GenerateRequest): token ids in, token ids out.
Messages and tools of chats: chat_messages.py; what goes to their template: template_fields.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, Tag, model_validator

from nanoengine.spans import ImageSpan
from nanoinfer.http.strict_body import StrictBody
from nanoinfer.options.outputs import output_from_json
from nanoinfer.params import Grammar, Output, SamplingParams
from nanoinfer.server.chat_messages import ChatMessage, NamedTool, OfferedTool, Text
from nanoinfer.server.grammar_fields import GrammarFields
from nanoinfer.server.harmless import CHAT_REFUSED, HARMLESS, TEXT_REFUSED
from nanoinfer.server.media import refusals
from nanoinfer.server.template_fields import TemplateFields
from nanoinfer.server.tool_calls import call_schema

MAX_TOP_LOGPROBS = 20  # the OpenAI API's limit
_SEED = 2**63  # an int64, as in the OpenAI API
_TokenId = Annotated[int, Field(strict=True)]


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


StopTexts = Annotated[list[Text], Field(max_length=16), BeforeValidator(_as_list)]


class StreamOptions(StrictBody):
    ignored = frozenset({"include_obfuscation", "continuous_usage_stats"})
    include_usage: StrictBool = False


class UsageOptions(StrictBody):
    """OpenRouter's wish for numbers of tokens."""

    include: StrictBool = False


class Sampling(GrammarFields, ABC):
    """The fields that chat and plain completions share."""

    ignored = HARMLESS
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, strict=True)
    min_tokens: int = Field(0, ge=0, strict=True)
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, strict=True)
    """0 and -1 keep every token."""
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, strict=True)
    best_of: int | None = Field(None, ge=1, strict=True)
    seed: int | None = Field(None, ge=-_SEED, lt=_SEED, strict=True)
    stop: StopTexts = Field(default_factory=list)
    stop_token_ids: list[_TokenId] = Field(default_factory=list)
    ignore_eos: StrictBool = False
    include_stop_str_in_output: StrictBool = False
    no_stop_trim: StrictBool = False
    """SGLang's name of `include_stop_str_in_output`."""
    skip_special_tokens: StrictBool = True
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[_TokenId] | None = None
    priority: int = Field(0, strict=True)
    request_id: Text | None = None
    """The name by which /abort finds it; default: the answer's id."""
    rid: Text | None = None
    """SGLang's name of `request_id`."""
    logprobs_mode: Literal["tempered", "raw"] = "tempered"
    """Log-probs at the request's temperature, or "raw", at temperature 1."""
    return_token_ids: StrictBool = False
    return_tokens_as_token_ids: StrictBool = False
    """Tokens of log-probs are named `token_id:N`."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)
    """Score the prompt, and tell so many likeliest tokens beside each of its own."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, strict=True)
    """Keep so many tokens of a longer prompt; -1: what leaves room for the answer."""
    truncation_side: Literal["left", "right"] = "left"
    """Where tokens are taken away."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        faults = [(name, why) for name, why in self.conflicts().items() if why]
        if faults:
            raise refusals(((name,), why, None) for name, why in faults)
        return self

    def conflicts(self) -> dict[str, str]:
        """Why a field cannot be beside the others, by its name; empty where it can."""
        is_more = self.best_of is not None and self.best_of > self.n
        is_shown = self.prompt_logprobs is not None and self.stream
        return {
            "best_of": "is more than n, and no best of them is picked; give n" if is_more else "",
            "prompt_logprobs": "cannot be streamed; leave out one of them" if is_shown else "",
            "truncate_prompt_tokens": (
                "an empty prompt cannot go on; give at least 1"
                if self.truncate_prompt_tokens == 0
                else ""
            ),
        }

    @property
    def name(self) -> str | None:
        return self.request_id or self.rid

    @property
    def is_usage_wanted(self) -> bool:
        is_option = self.stream_options is not None and self.stream_options.include_usage
        return is_option or (self.usage is not None and self.usage.include)

    @property
    @abstractmethod
    def num_top(self) -> int | None:
        """Likeliest tokens to report at each position; None: no log-probs at all."""

    def params(self, max_tokens: int, seed: int) -> SamplingParams:
        """The engine's parameters, for a prompt that leaves room for `max_tokens`. `seed` is for
        requests that give none."""
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
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
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop_str_in_output or self.no_stop_trim,
            skip_special=self.skip_special_tokens,
            detokenize=True,
            top_logps=max(self.num_top or 0, self.prompt_logprobs or 0),
            prompt_logps=self.prompt_logprobs is not None,
            logps_mode=self.logprobs_mode,
        )

    def cut(self, ids: list[int], room: int, max_tokens: int | None) -> list[int]:
        """The tokens of a prompt that `truncate_prompt_tokens` leaves, where prompt and answer have
        `room`."""
        most = self.truncate_prompt_tokens
        if most == -1:
            most = max(1, room - (max_tokens or 1))
        if most is None:
            return ids
        return ids[-most:] if self.truncation_side == "left" else ids[:most]


def _as_prompts(given: Any) -> Any:
    """One prompt as a list of one."""
    is_one = isinstance(given, str) or (
        isinstance(given, list) and given and all(type(token) is int for token in given)
    )
    return [given] if is_one else given


def _prompt_kind(given: Any) -> str:
    return "text" if isinstance(given, str) else "ids"


OnePrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[_TokenId], Tag("ids")], Discriminator(_prompt_kind)
]


class Completion(Sampling):
    """/v1/completions. A prompt is text or token ids, one or several."""

    refused = TEXT_REFUSED
    prompt: Annotated[
        list[OnePrompt],
        BeforeValidator(_as_prompts),
        Field(min_length=1),
    ]
    max_tokens: int | None = Field(None, ge=0, strict=True)
    add_special_tokens: StrictBool = True
    """Begin a prompt of text with the BOS of a tokenizer that adds one."""
    echo: StrictBool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)

    def conflicts(self) -> dict[str, str]:
        is_streamed = self.echo and self.stream
        is_empty = self.max_tokens == 0 and not self.echo
        return super().conflicts() | {
            "echo": "cannot be streamed; leave out echo or stream" if is_streamed else "",
            "max_tokens": "0 scores a prompt, with echo; else give at least 1" if is_empty else "",
        }

    @property
    def num_top(self) -> int | None:
        return self.logprobs


class AllowedTools(StrictBody):
    """Some of the tools that are offered."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolChoice(StrictBody):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolMode(StrictBody):
    type: Literal["none", "auto", "required", "any"]


def _as_choice(given: Any) -> Any:
    return {"type": given} if isinstance(given, str) else given


ToolChoice = Annotated[
    ToolMode | NamedTool | AllowedToolChoice,
    Field(discriminator="type"),
    BeforeValidator(_as_choice),
]


class ChatCompletion(Sampling, TemplateFields):
    """/v1/chat/completions."""

    refused = CHAT_REFUSED
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, strict=True)
    logprobs: StrictBool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)
    tools: list[OfferedTool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolMode(type="auto")
    add_generation_prompt: StrictBool | None = None
    """False: the prompt ends with the last message, without the opening of an answer."""
    continue_final_message: StrictBool = False
    """The answer goes on where the last message, an assistant's, ends."""

    def conflicts(self) -> dict[str, str]:
        last = self.messages[-1]
        is_open = last.role == "assistant" and not last.tool_calls
        return super().conflicts() | {
            "continue_final_message": (
                "the last message is no text of an assistant; leave it out"
                if self.is_continued and not is_open
                else ""
            ),
            "add_generation_prompt": (
                "true opens a new answer, and continue_final_message goes on with the last; "
                "give false"
                if self.is_continued and self.add_generation_prompt
                else ""
            ),
        }

    @property
    def is_continued(self) -> bool:
        return self.continue_final_message or self.messages[-1].prefix

    @property
    def has_opening(self) -> bool:
        """The prompt ends with the opening of an answer."""
        return not self.is_continued and self.add_generation_prompt is not False

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def is_tool_forced(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedToolChoice):
            return choice.allowed_tools.mode == "required"
        return choice.type in ("required", "any", "function")

    @property
    def forced_name(self) -> str | None:
        """The tool that must be called; None where any may be, or none must."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def tool_specs(self) -> list[dict[str, Any]]:
        """The tools as the chat template reads them; none where they must not be used."""
        choice = self.tool_choice
        if isinstance(choice, ToolMode) and choice.type == "none":
            return []
        tools = self.tools
        if isinstance(choice, AllowedToolChoice):
            allowed = {tool.function.name for tool in choice.allowed_tools.tools}
            tools = [tool for tool in tools if tool.function.name in allowed]
        return [tool.model_dump(exclude_none=True) for tool in tools]

    def grammars(self) -> list[Grammar]:
        found = super().grammars()
        if self.is_tool_forced:
            specs = self.tool_specs()
            if not specs:
                raise ValueError("tool_choice: asks for a call, but tools is empty")
            found.append(Grammar("json_schema", call_schema(specs, self.forced_name)))
        return found


class Generate(StrictBody):
    """/generate: token ids in, token ids out. `params` are those of `SamplingParams`, where
    grammar is {"kind": ..., "value": ..., "choices": [...]}."""

    ids: list[_TokenId]
    request_id: Text | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    stream: StrictBool = False
    priority: int = Field(0, strict=True)

    def sampling(self) -> SamplingParams:
        return _sampling("params", self.params)


class TokenGenerate(StrictBody):
    """/inference/v1/generate: a prompt of token ids in, choices of token ids out, as vLLM's. Names
    in `sampling_params` are vLLM's or those of `SamplingParams`."""

    ignored = frozenset({"cache_salt", "stream_options"})
    model: str | None = None
    request_id: Text | None = None
    token_ids: list[_TokenId]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
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
        return None if self.sampled is None else output_from_json(self.sampled)


_OUR_NAMES = {
    "logprobs": "top_logps",
    "prompt_logprobs": "prompt_logps",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "skip_special",
}
_WITHOUT_EFFECT = frozenset(
    {"extra_args", "flat_logprobs", "output_kind", "routed_experts_prompt_start"}
    | {"spaces_between_special_tokens"}
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
        fields["images"] = tuple(map(ImageSpan.from_json, fields.get("images") or ()))
        _check_types(where, fields)
        return SamplingParams(**fields)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from error


class Abort(StrictBody):
    """/abort: the request of that id, or all."""

    request_id: Text | None = None
    all: StrictBool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Abort:
        if (self.request_id is not None) == self.all:
            raise ValueError("give request_id, or all: true")
        return self


class UpdateWeights(StrictBody):
    """/update_weights: safetensors of a folder on the server's machine."""

    path: Text
    version: int = Field(ge=0, strict=True)
    checksums: dict[str, Annotated[int, Field(strict=True)]] | None = None
    """Of every tensor by its name (transport/checksum.py). A tensor with another one, and one that
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


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
