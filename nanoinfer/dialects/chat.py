"""OpenAI's chat completions: `POST /v1/chat/completions`.

Bodies are read as the project's own server reads them (nanoinfer/server/requests.py), with its
extensions but for those that would make a prompt or an answer no turn of an episode. Left out:
audio.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.dialects.exchange import (
    ApiAnswer,
    ApiCall,
    ApiReply,
    ApiToolCall,
    Json,
    ServerEvent,
    forced_tool,
    given_fields,
)
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import read_json_body
from nanoinfer.http.strict_body import Refused
from nanoinfer.server.harmless import CHAT_REFUSED
from nanoinfer.server.media import PictureTaker
from nanoinfer.server.requests import ChatCompletion
from nanoinfer.server.responses import chat_logprobs, reasoning_json

DECIDED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that the run decides."""
_PROMPT = "an episode keeps its prompts as they were read; leave it out"
_ANSWER = "an episode keeps its answers as they were sampled; leave it out"
_IDS = "ask /inference/v1/generate, which speaks token ids"


class RecordedChat(ChatCompletion):
    """A chat whose tokens are kept."""

    refused = CHAT_REFUSED | {
        "add_generation_prompt": Refused(_PROMPT, (True,)),
        "continue_final_message": Refused(_PROMPT),
        "include_stop_str_in_output": Refused(_ANSWER),
        "logprobs_mode": Refused("those of training are tempered; leave it out", ("tempered",)),
        "no_stop_trim": Refused(_ANSWER),
        "prompt_logprobs": Refused(_IDS, ()),
        "return_token_ids": Refused(_IDS),
        "return_tokens_as_token_ids": Refused(_IDS),
        "skip_special_tokens": Refused(_ANSWER, (True,)),
        "truncate_prompt_tokens": Refused(_PROMPT, ()),
    }

    def conflicts(self) -> dict[str, str]:
        is_prefix = self.messages[-1].prefix
        return super().conflicts() | {"messages": f"prefix: {_PROMPT}" if is_prefix else ""}


class ChatDialect:
    """Stateless; `tokenizer` writes the texts of log-probs."""

    path = "/v1/chat/completions"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, body: Json, pictures: PictureTaker | None = None) -> ApiCall:
        asked = read_json_body(body, RecordedChat, pictures)
        forced = None
        if asked.is_tool_forced:
            forced = forced_tool(asked.tool_specs(), asked.forced_name)
        try:
            grammar = None if asked.is_tool_forced else asked.grammar()
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return ApiCall(
            messages=[message.for_template() for message in asked.messages],
            tools=asked.tool_specs(),
            forced_tool=forced,
            variables=asked.variables(),
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            min_tokens=asked.min_tokens,
            n=asked.n,
            stop=tuple(asked.stop),
            stop_token_ids=tuple(asked.stop_token_ids),
            ignore_eos=asked.ignore_eos,
            grammar=grammar,
            num_top=asked.num_top,
            is_streamed=asked.stream,
            has_usage=asked.is_usage_wanted,
            has_reasoning=asked.shows_reasoning,
            ignored=tuple(name for name in DECIDED if body.get(name) is not None),
            sampling=given_fields(body, DECIDED),
        )

    def write(self, call: ApiCall, answer: ApiAnswer) -> Json:
        return _head(answer, "chat.completion") | {
            "choices": [self._choice(call, i, one) for i, one in enumerate(answer.replies)],
            "usage": _usage(answer),
        }

    def events(self, call: ApiCall, answer: ApiAnswer) -> Iterator[ServerEvent]:
        head = _head(answer, "chat.completion.chunk")

        def chunk(index: int, delta: Json, **more: object) -> ServerEvent:
            choice = {"index": index, "delta": delta, "finish_reason": None} | more
            return ServerEvent(head | {"choices": [choice]})

        for index, reply in enumerate(answer.replies):
            yield chunk(index, {"role": "assistant", "content": ""})
            if reply.reasoning and call.has_reasoning:
                yield chunk(index, reasoning_json(reply.reasoning))
            if reply.text:
                yield chunk(index, {"content": reply.text})
            calls = [{"index": i} | _call(use) for i, use in enumerate(reply.calls)]
            if calls:
                yield chunk(index, {"tool_calls": calls})
            yield chunk(
                index, {}, finish_reason=_reason(reply), logprobs=self._logprobs(call, reply)
            )
        if call.has_usage:
            yield ServerEvent(head | {"choices": [], "usage": _usage(answer)})
        yield ServerEvent("[DONE]")

    def error(self, error: ApiError) -> Json:
        return error.to_json()

    def _choice(self, call: ApiCall, index: int, reply: ApiReply) -> Json:
        message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning and call.has_reasoning:
            message |= reasoning_json(reply.reasoning)
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [_call(use) for use in reply.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(call, reply),
            "finish_reason": _reason(reply),
        }

    def _logprobs(self, call: ApiCall, reply: ApiReply) -> Json | None:
        if call.num_top is None:
            return None
        output = reply.output
        return chat_logprobs(self._tokenizer, output.ids, output.logps, output.top_logps)


def _head(answer: ApiAnswer, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }


def _call(use: ApiToolCall) -> Json:
    function = {"name": use.name, "arguments": use.arguments}
    return {"id": use.id, "type": "function", "function": function}


def _reason(reply: ApiReply) -> str:
    if reply.is_cut:
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _usage(answer: ApiAnswer) -> Json:
    sampled = answer.num_sampled_tokens
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.num_prompt_tokens + sampled,
    }
