"""OpenAI's chat completions: `POST /v1/chat/completions`.

Bodies are read as the project's own server reads them (nanoinfer/server/requests.py), with its
extensions. Left out: images and audio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.dialects.exchange import (
    ApiAnswer,
    ApiCall,
    ApiReply,
    ApiToolCall,
    Json,
    ServerEvent,
    bearer_key,
    forced_tool,
    given_fields,
)
from nanoinfer.server.http_io import ApiError, read_json_body
from nanoinfer.server.requests import ChatCompletion
from nanoinfer.server.responses import chat_logprobs

DECIDED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that the run decides."""


class ChatDialect:
    """Stateless; `tokenizer` writes the texts of log-probs."""

    path = "/v1/chat/completions"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def key(self, headers: Mapping[str, str]) -> str:
        return bearer_key(headers)

    def read(self, body: Json) -> ApiCall:
        asked = read_json_body(body, ChatCompletion)
        stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        forced = None
        if asked.is_tool_forced:
            named = asked.tool_choice
            name = None if isinstance(named, str) else named.function.name
            forced = forced_tool(asked.tool_specs(), name)
        try:
            grammar = None if asked.is_tool_forced else asked.grammar()
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return ApiCall(
            messages=[message.for_template() for message in asked.messages],
            tools=asked.tool_specs(),
            forced_tool=forced,
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            n=asked.n,
            stop=stop,
            grammar=grammar,
            num_top=asked.num_top,
            is_streamed=asked.stream,
            has_usage=asked.is_usage_wanted,
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
            if reply.reasoning:
                yield chunk(index, {"reasoning_content": reply.reasoning})
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
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
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
    if reply.calls:
        return "tool_calls"
    return "length" if reply.is_cut else "stop"


def _usage(answer: ApiAnswer) -> Json:
    sampled = answer.num_sampled_tokens
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.num_prompt_tokens + sampled,
    }
