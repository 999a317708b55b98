"""SGLang's own `POST /generate`: a prompt of token ids or text in, ids with log-probs out.

    {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}, "return_logprob": true}
    {"text": "..", "output_ids": [7], "meta_info": {"output_token_logprobs": [[-0.1, 7, null]]}}

Several prompts, or `n` above 1, are answered by a list. Log-probs are of the tempered distribution,
as SGLang's are. `lora_path` names an adapter that the server has loaded.
Left out: streams, which /generate with `ids` and /v1/completions have; pictures; sessions.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.http.api_error import user_errors
from nanoinfer.http.http_io import SHOWN_BYTES, in_proportion, while_connected
from nanoinfer.params import Grammar, Output, SamplingParams
from nanoinfer.server.completions import CompletionJob, Completions
from nanoinfer.server.control import Control
from nanoinfer.server.requests import StrictBody
from nanoinfer.server.served_model import ServedModel

_Ids = Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]
_Json = dict[str, Any]
MANY = 1 << 30
"""SGLang's word for a top_k that keeps every token."""
DEFAULT_MAX_TOKENS = 128  # SGLang's


class SglangSampling(StrictBody):
    """Its `sampling_params`."""

    ignored = frozenset({"spaces_between_special_tokens", "stream_interval"})
    skip_special_tokens: StrictBool = True
    no_stop_trim: StrictBool = False
    max_new_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=1, strict=True)
    min_new_tokens: Literal[0] = 0
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, strict=True)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Annotated[list[str], Field(max_length=16)] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: StrictBool = False
    sampling_seed: int | None = None
    logit_bias: dict[int, float] = Field(default_factory=dict)
    n: int = Field(1, ge=1, strict=True)
    json_schema: str | None = None
    regex: str | None = None
    custom_params: Annotated[_Json, Field(max_length=0)] = Field(default_factory=dict)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def params(self, room: int, seed: int, adapter: str, asked: SglangGenerate) -> SamplingParams:
        """The engine's parameters. `seed` is for requests that give none."""
        given = [
            Grammar("json_schema", self.json_schema) if self.json_schema else None,
            Grammar("regex", self.regex) if self.regex else None,
        ]
        grammars = [one for one in given if one is not None]
        if len(grammars) > 1:
            raise ValueError("json_schema and regex exclude each other: give one")
        return SamplingParams(
            max_tokens=min(self.max_new_tokens, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k in (-1, MANY) else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=seed if self.sampling_seed is None else self.sampling_seed,
            logit_bias=self.logit_bias,
            n=self.n,
            grammar=grammars[0] if grammars else None,
            detokenize=True,
            top_logps=asked.top_logprobs_num if asked.return_logprob else 0,
            prompt_logps=asked.is_prompt_scored,
            adapter=adapter,
        )


class SglangGenerate(StrictBody):
    """Its body. A prompt is `input_ids` or `text`, one or several."""

    ignored = frozenset(
        {"log_metrics", "no_logs", "session_id", "conversation_id", "routing_key", "modalities"}
        | {"bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "extra_key"}
        | {
            "routed_dp_rank",
            "custom_labels",
            "external_trace_header",
            "cache_salt",
            "session_params",
        }
    )
    input_ids: _Ids | Annotated[list[_Ids], Field(min_length=1)] | None = None
    text: str | Annotated[list[str], Field(min_length=1)] | None = None
    sampling_params: SglangSampling | list[SglangSampling] = Field(
        default_factory=lambda: SglangSampling.model_validate({})
    )
    return_logprob: StrictBool = False
    logprob_start_len: int = Field(-1, ge=-1, strict=True)
    top_logprobs_num: int = Field(0, ge=0, le=20, strict=True)
    return_text_in_logprobs: StrictBool = False
    stream: Literal[False] = False
    rid: str | list[str] | None = None
    lora_path: str | None = None
    priority: int = Field(0, strict=True)
    return_hidden_states: Literal[False] = False
    return_routed_experts: Literal[False] = False

    @model_validator(mode="after")
    def _is_one_prompt_or_several(self) -> SglangGenerate:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("give input_ids or text, and not both")
        params = self.sampling_params
        if isinstance(params, list) and (not self.is_batch or len(params) != len(self.prompts)):
            raise ValueError(f"sampling_params: {len(params)} for {len(self.prompts)} prompts")
        if isinstance(self.rid, list) and len(self.rid) != len(self.prompts):
            raise ValueError(f"rid: {len(self.rid)} for {len(self.prompts)} prompts")
        return self

    @property
    def is_batch(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, list)
        return isinstance((self.input_ids or [0])[0], list)

    @property
    def prompts(self) -> list[Any]:
        """Each as a text or a list of ids."""
        given: Any = self.text if self.text is not None else self.input_ids
        return list(given) if self.is_batch else [given]

    @property
    def is_prompt_scored(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    def sampling(self, place: int) -> SglangSampling:
        """The parameters of the prompt at that place."""
        params = self.sampling_params
        return params[place] if isinstance(params, list) else params

    def name(self, place: int) -> str:
        """By which /abort_request finds the prompt at that place."""
        if isinstance(self.rid, list):
            return self.rid[place]
        return self.rid or uuid.uuid4().hex


@dataclass(frozen=True)
class _Prompt:
    """One of a request, on its way."""

    name: str
    ids: list[int]
    jobs: list[CompletionJob]
    sampling: SglangSampling


class SglangGenerator:
    """Answers such requests."""

    def __init__(self, model: ServedModel, completions: Completions, control: Control) -> None:
        self._model, self._completions, self._control = model, completions, control

    async def answer(self, request: Request, asked: SglangGenerate, limit_s: float) -> Response:
        """Sample and answer; a client that hangs up ends its requests."""
        prompts = [await self._admitted(asked, place) for place in range(len(asked.prompts))]
        self._completions.check_count(sum(len(one.jobs) for one in prompts))
        outputs = await while_connected(request.receive, self._sampled(asked, prompts), limit_s)
        num_shown = sum(len(o.ids) for each in outputs for o in each)

        def written() -> Response:
            answers = [
                self._generated(asked, prompt, output)
                for prompt, each in zip(prompts, outputs, strict=True)
                for output in each
            ]
            is_one = len(answers) == 1 and not asked.is_batch
            return JSONResponse(answers[0] if is_one else answers)

        num_shown *= 1 + asked.top_logprobs_num
        return await in_proportion(num_shown * SHOWN_BYTES, written)

    async def _admitted(self, asked: SglangGenerate, place: int) -> _Prompt:
        given, sampling = asked.prompts[place], asked.sampling(place)
        model = self._model
        adapter = model.adapter(asked.lora_path)
        self._completions.check_count(len(asked.prompts) * sampling.n)
        with user_errors():
            ids = given
            if isinstance(given, str):
                ids = await model.bound.encoded(
                    [given], lambda: model.tokenizer.encode_prompt(given)
                )
            seed = uuid.uuid4().int % 2**63
            jobs = await self._completions.admit(
                [ids], sampling.n, lambda room: sampling.params(room, seed, adapter, asked)
            )
        return _Prompt(asked.name(place), ids, jobs, sampling)

    async def _sampled(
        self, asked: SglangGenerate, prompts: Sequence[_Prompt]
    ) -> list[list[Output]]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._completions.sampled(one.jobs, asked.priority, one.name))
                for one in prompts
            ]
        return [task.result() for task in tasks]

    def _generated(self, asked: SglangGenerate, prompt: _Prompt, output: Output) -> _Json:
        tokenizer = self._model.tokenizer
        meta: _Json = {
            "id": prompt.name,
            "finish_reason": _finish_reason(output),
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": len(output.ids),
            "cached_tokens": output.num_cached_tokens,
            "weight_version": self._control.weight_version,
            "versions": output.versions,
        }
        if asked.return_logprob:
            meta |= _logprobs(asked, tokenizer, prompt.ids, output)
        text = _text(tokenizer, prompt.sampling, output)
        return {"text": text, "output_ids": output.ids, "meta_info": meta}


def _text(tokenizer: ChatTokenizer, sampling: SglangSampling, output: Output) -> str:
    if sampling.skip_special_tokens and not sampling.no_stop_trim:
        return output.text or ""
    text = tokenizer.decode(output.ids, skip_special=sampling.skip_special_tokens)
    if sampling.no_stop_trim:
        return text
    places = [text.find(one) for one in sampling.stops if one in text]
    return text[: min(places, default=len(text))]


def _logprobs(
    asked: SglangGenerate, tokenizer: ChatTokenizer, prompt: Sequence[int], output: Output
) -> _Json:
    found: _Json = {}

    def entry(token: int, logp: float | None) -> list[Any]:
        return [logp, token, tokenizer.decode([token]) if asked.return_text_in_logprobs else None]

    found["output_token_logprobs"] = [
        entry(token, logp) for token, logp in zip(output.ids, output.logps, strict=True)
    ]
    if asked.top_logprobs_num:
        found["output_top_logprobs"] = [
            [entry(token, logp) for token, logp in row] for row in output.top_logps
        ]
    if asked.is_prompt_scored:
        scores = [None, *output.prompt_logps]
        pairs = list(zip(prompt, scores, strict=True))[asked.logprob_start_len :]
        found["input_token_logprobs"] = [entry(token, logp) for token, logp in pairs]
    return found


def _finish_reason(output: Output) -> _Json:
    match output.finish_reason:
        case "length":
            return {"type": "length", "length": len(output.ids)}
        case "abort":
            return {"type": "abort", "message": "ended by /abort_request or /pause_generation"}
        case _:
            return {"type": "stop", "matched": output.ids[-1] if output.ids else None}
