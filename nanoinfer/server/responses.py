"""Bodies of HTTP answers in the OpenAI format, from the engine's outputs and chunks.

A token whose bytes are no text by themselves is shown as the replacement character, with `bytes`
null. Log-probs are the engine's `logps`: of the tempered distribution, before penalties.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import Output
from nanoinfer.server.prompt_scores import prompt_scores, with_top, without_answer
from nanoinfer.server.requests import ChatCompletion, Completion
from nanoinfer.server.tool_calls import FunctionCall, parse_call, safe_length, split_calls
from nanoinfer.streams import StreamChunk

Json = dict[str, Any]
Top = Sequence[Sequence[tuple[int, float]]]


def usage(num_prompt: int, outputs: Sequence[Output], n: int) -> Json:
    """`num_prompt` counts each prompt once, however many completions (`n`) it has. What it found in
    the cache is what the first of them found: the others find what that one computed."""
    num_sampled = sum(len(output.ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs[::n])
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def chat_logprobs(
    tokenizer: ChatTokenizer,
    ids: Sequence[int],
    logps: Sequence[float],
    top: Top,
    *,
    by_id: bool = False,
) -> Json:
    """With `by_id` tokens are named as in `token_choice`."""
    entry = partial(_entry, tokenizer, by_id)
    tops = top if top else [()] * len(ids)
    return {
        "content": [
            entry(token, logp) | {"top_logprobs": [entry(*likely) for likely in row]}
            for token, logp, row in zip(ids, logps, tops, strict=True)
        ],
        "refusal": None,
    }


def _entry(tokenizer: ChatTokenizer, by_id: bool, token: int, logp: float) -> Json:
    if by_id:
        return _id_entry(token, logp)
    text = tokenizer.decode([token])
    is_text = "\ufffd" not in text
    return {"token": text, "logprob": logp, "bytes": list(text.encode()) if is_text else None}


def text_logprobs(
    tokenizer: ChatTokenizer,
    ids: Sequence[int],
    logps: Sequence[float | None],
    top: Sequence[Sequence[tuple[int, float]] | None],
    offset: int = 0,
    *,
    by_id: bool = False,
) -> Json:
    """`offset` is where the text of the first token begins in the answer's text. With `by_id`
    tokens are named as in `token_choice`."""

    def name(token: int) -> str:
        return f"token_id:{token}" if by_id else tokenizer.decode([token])

    tokens = [name(token) for token in ids]
    offsets = [offset]
    for text in tokens[:-1]:
        offsets.append(offsets[-1] + len(text))
    tops = [row and {name(token): logp for token, logp in row} for row in top]
    return {
        "tokens": tokens,
        "token_logprobs": list(logps),
        "top_logprobs": tops or None,
        "text_offset": offsets[: len(tokens)],
    }


def token_choice(index: int, output: Output, has_output: bool) -> Json:
    """A choice of /inference/v1/generate: as vLLM's, where a token's text is `token_id:N`. Beyond
    that `versions` has the policy version of each token."""
    tops = output.top_logps or [[] for _ in output.ids]
    content = [
        _id_entry(token, logp) | {"top_logprobs": [_id_entry(*likely) for likely in row]}
        for token, logp, row in zip(output.ids, output.logps, tops, strict=True)
    ]
    return {
        "index": index,
        "token_ids": output.ids,
        "logprobs": {"content": content},
        "finish_reason": output.finish_reason,
        "versions": output.versions,
    } | ({"output": asdict(output)} if has_output else {})


def _id_entry(token: int, logp: float) -> Json:
    return {"token": f"token_id:{token}", "logprob": logp, "bytes": None}


def prompt_logprobs(ids: Sequence[int], output: Output) -> list[Json | None] | None:
    """As vLLM's: nothing for the first token, then {token id: {"logprob": ..}} of each."""
    if not output.prompt_logps:
        return None
    pairs = zip(ids[1:], output.prompt_logps, strict=True)
    return [None, *({str(token): {"logprob": logp}} for token, logp in pairs)]


def call_json(call: FunctionCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """Says if a completion may hold calls of functions, or is nothing but one."""

    is_offered: bool = False
    is_forced: bool = False

    def split(self, text: str) -> tuple[str, list[FunctionCall]]:
        if self.is_forced:
            call = parse_call(text)
            return ("", [call]) if call is not None else (text, [])
        return split_calls(text) if self.is_offered else (text, [])


class ChatFormat:
    """Answers of /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: ChatTokenizer, body: ChatCompletion) -> None:
        self.tokenizer = tokenizer
        self.num_top, self.num_prompt_top = body.num_top, body.prompt_logprobs
        self.by_id = body.return_tokens_as_token_ids
        self.has_logprobs = body.num_top is not None
        self.has_ids = body.return_token_ids
        self.tools = ToolUse(bool(body.tool_specs()), body.is_tool_forced)

    def shown(self, output: Output) -> Output:
        """What was asked for of an output."""
        return with_top(output, self.num_top or 0)

    def head(self, prompt: list[int], output: Output) -> Json:
        """What stands beside the choices: the scores of the prompt that they share."""
        if self.num_prompt_top is None:
            return {}
        scores = prompt_scores(self.tokenizer, prompt, output, self.num_prompt_top)
        return {"prompt_logprobs": scores}

    def choice(self, index: int, _: list[int], output: Output) -> Json:
        text, calls = self.tools.split(output.text or "")
        message: Json = {"role": "assistant", "content": text}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [call_json(call) for call in calls]
        logprobs = None
        if self.has_logprobs:
            logprobs = chat_logprobs(
                self.tokenizer, output.ids, output.logps, output.top_logps, by_id=self.by_id
            )
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if calls else output.finish_reason,
        } | ({"token_ids": output.ids} if self.has_ids else {})

    def start(self, index: int) -> ChatDeltas:
        return ChatDeltas(self, index)


class ChatDeltas:
    """Turns the chunks of one choice into streamed choices; calls come whole, at the end."""

    def __init__(self, form: ChatFormat, index: int) -> None:
        self._form, self._index = form, index
        self._text = ""
        self._num_shown = 0
        delta = {"role": "assistant", "content": ""}
        self.first: Json | None = {"index": index, "delta": delta, "finish_reason": None}

    def push(self, chunk: StreamChunk) -> Json | None:
        """A choice to send; None if the chunk shows nothing new."""
        self._text += chunk.text
        reason: str | None = None
        if chunk.output is None:
            delta = self._content(self._text, self._safe())
        else:
            text, calls = self._form.tools.split(chunk.output.text or "")
            delta = self._content(text, len(text))
            if calls:
                delta["tool_calls"] = [{"index": i} | call_json(c) for i, c in enumerate(calls)]
            reason = "tool_calls" if calls else chunk.output.finish_reason
        logprobs = None
        if self._form.has_logprobs:
            logprobs = chat_logprobs(
                self._form.tokenizer,
                chunk.ids,
                chunk.logps,
                chunk.top_logps,
                by_id=self._form.by_id,
            )
        ids = {"token_ids": chunk.ids} if self._form.has_ids else {}
        if not delta and reason is None and logprobs is None and not ids:
            return None
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        } | ids

    def _safe(self) -> int:
        if self._form.tools.is_forced:
            return 0
        return safe_length(self._text) if self._form.tools.is_offered else len(self._text)

    def _content(self, text: str, end: int) -> Json:
        new = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return {"content": new} if new else {}


class TextFormat:
    """Answers of /v1/completions."""

    chunk_object = "text_completion"

    def __init__(self, tokenizer: ChatTokenizer, body: Completion) -> None:
        self.tokenizer = tokenizer
        self.by_id = body.return_tokens_as_token_ids
        self.has_logprobs = body.logprobs is not None
        self.has_ids = body.return_token_ids
        self._echo = body.echo
        self._num_top, self._num_prompt_top = body.num_top, body.prompt_logprobs
        self._has_answer = body.max_tokens != 0

    def shown(self, output: Output) -> Output:
        """What was asked for of an output."""
        return with_top(output if self._has_answer else without_answer(output), self._num_top or 0)

    def head(self, prompt: list[int], output: Output) -> Json:
        """Each choice has the scores of its own prompt."""
        return {}

    def choice(self, index: int, prompt: list[int], output: Output) -> Json:
        text, ids = output.text or "", output.ids
        top: Sequence[Sequence[tuple[int, float]] | None] = output.top_logps
        logps: list[float | None] = [*output.logps]
        if self._echo:
            text = self.tokenizer.decode(prompt, skip_special=True) + text
            ids = prompt + ids
            logps = [None, *output.prompt_logps, *logps]
            likeliest = [row[: self._num_top] for row in output.prompt_top_logps]
            top = [None, *likeliest, *top] if self._num_top else []
        logprobs = None
        if self.has_logprobs:
            logprobs = text_logprobs(self.tokenizer, ids, logps, top, by_id=self.by_id)
        reason = output.finish_reason
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self.has_ids:
            choice |= {"token_ids": output.ids, "prompt_token_ids": prompt}
        if self._num_prompt_top is not None:
            scores = prompt_scores(self.tokenizer, prompt, output, self._num_prompt_top)
            choice["prompt_logprobs"] = scores
        return choice

    def start(self, index: int) -> TextDeltas:
        return TextDeltas(self, index)


class TextDeltas:
    """Turns the chunks of one choice into streamed choices."""

    first: Json | None = None

    def __init__(self, form: TextFormat, index: int) -> None:
        self._form, self._index = form, index
        self._offset = 0

    def push(self, chunk: StreamChunk) -> Json | None:
        """A choice to send; None if the chunk shows nothing new."""
        reason = chunk.output.finish_reason if chunk.output is not None else None
        logprobs = None
        if self._form.has_logprobs:
            logprobs = text_logprobs(
                self._form.tokenizer,
                chunk.ids,
                chunk.logps,
                chunk.top_logps,
                self._offset,
                by_id=self._form.by_id,
            )
            self._offset += sum(map(len, logprobs["tokens"]))
        ids = {"token_ids": chunk.ids} if self._form.has_ids else {}
        if not chunk.text and reason is None and logprobs is None and not ids:
            return None
        return {
            "index": self._index,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": reason,
        } | ids
