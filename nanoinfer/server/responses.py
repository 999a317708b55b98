"""Bodies of HTTP answers in the OpenAI format, from the engine's outputs and chunks.

A token whose bytes are no text by themselves is shown as the replacement character in a chat, where
`bytes` tell them, and by token_text.py's name in a completion, where names are keys.
Log-probs are the engine's `logps`: of the tempered distribution, before penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.call_ids import ids_of, next_ids
from nanoinfer.chat.reasoning import opened_reasoning
from nanoinfer.chat.reply import ReplyReader, ReplyStream, SplitReply, spoken_ids
from nanoinfer.options.streams import StreamChunk
from nanoinfer.options.text import TextStream
from nanoinfer.params import Output
from nanoinfer.server.prompt_scores import prompt_scores, with_top, without_answer
from nanoinfer.server.requests import ChatCompletion, Completion
from nanoinfer.server.token_text import TextOffsets, token_bytes, token_names
from nanoinfer.server.tool_calls import FunctionCall, function_call, parse_call

if TYPE_CHECKING:  # it imports the dialects, which write with this module
    from nanoinfer.chat.form import ChatForm

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
    raw = token_bytes(tokenizer, token)
    if raw is None:
        return {"token": tokenizer.decode([token]), "logprob": logp, "bytes": None}
    return {"token": raw.decode(errors="replace"), "logprob": logp, "bytes": list(raw)}


def text_logprobs(
    tokenizer: ChatTokenizer,
    ids: Sequence[int],
    logps: Sequence[float | None],
    top: Sequence[Sequence[tuple[int, float]] | None],
    offsets: TextOffsets,
    *,
    by_id: bool = False,
) -> Json:
    """`offsets` has seen the tokens before these of the answer's text. A token is named as among
    the likeliest beside it, so that the keys of a row are as many as its tokens; with `by_id` as in
    `token_choice`."""
    tokens, tops = [], []
    for token, row in zip(ids, top if top else [None] * len(ids), strict=True):
        shown = [*dict(row or ()), token]
        names = (
            {one: f"token_id:{one}" for one in shown} if by_id else token_names(tokenizer, shown)
        )
        tokens.append(names[token])
        tops.append(row and {names[likely]: logp for likely, logp in row})
    return {
        "tokens": tokens,
        "token_logprobs": list(logps),
        "top_logprobs": tops if top else None,
        "text_offset": [offsets.push(token) for token in ids],
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


def reasoning_json(text: str) -> Json:
    """The reasoning of a turn, under the name that clients know and the one that vLLM gave it
    since."""
    return {"reasoning_content": text, "reasoning": text}


def call_json(call: FunctionCall, name: str) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": name, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """The parts that a completion may hold: reasoning, text and calls, or nothing but one forced
    call."""

    reader: ReplyReader
    is_forced: bool
    history: Sequence[Message]
    """The conversation so far: ids of calls are new in it."""

    def read(self, text: str, *, is_cut: bool) -> tuple[SplitReply, list[Json]]:
        if self.is_forced:
            call = None if is_cut else parse_call(text)
            said = SplitReply(content=text if call is None else "")
            calls = [] if call is None else [call_json(call, *next_ids(self.history, 1))]
            return said, calls
        reply = self.reader.read(text, is_cut=is_cut)
        return reply, self.calls_of(reply)

    def calls_of(self, reply: SplitReply) -> list[Json]:
        ids = ids_of(reply.calls, self.history)
        pairs = zip(reply.calls, ids, strict=True)
        return [call_json(function_call(call), name) for call, name in pairs]


class ChatFormat:
    """Answers of /v1/chat/completions to a prompt that `form` made."""

    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        body: ChatCompletion,
        form: ChatForm,
        messages: Sequence[Message],
        prompt: Sequence[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.num_top, self.num_prompt_top = body.num_top, body.prompt_logprobs
        self.by_id = body.return_tokens_as_token_ids
        self.has_logprobs = body.num_top is not None
        self.has_ids = body.return_token_ids
        self.has_reasoning = body.shows_reasoning
        self.form = form
        self.stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        # A schema rules the turn from its first token on, whatever the prompt has opened.
        opened = "" if body.grammar() is not None else opened_reasoning(tokenizer, prompt)
        has_calls = bool(body.tool_specs()) and not body.is_tool_forced
        reader = form.reader(has_tools=has_calls, opened=opened)
        self.tools = ToolUse(reader, body.is_tool_forced, messages)

    def shown(self, output: Output) -> Output:
        """The output with as many top log-probs as were asked for."""
        return with_top(output, self.num_top or 0)

    def head(self, prompt: list[int], output: Output) -> Json:
        """The fields beside the choices: the scores of the prompt that they share."""
        if self.num_prompt_top is None:
            return {}
        scores = prompt_scores(self.tokenizer, prompt, output, self.num_prompt_top)
        return {"prompt_logprobs": scores}

    def choice(self, index: int, _: list[int], output: Output) -> Json:
        text = output.text or ""
        if self.form.marks:  # the engine leaves control tokens out
            text, _stop = self.form.spoken(self.tokenizer, output.ids, self.stop)
        reply, calls = self.tools.read(text, is_cut=output.finish_reason != "stop")
        message: Json = {"role": "assistant", "content": reply.content}
        if reply.reasoning and self.has_reasoning:
            message |= reasoning_json(reply.reasoning)
        if calls:
            message["content"] = reply.content or None
            message["tool_calls"] = calls
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
        self._reply = ReplyStream(form.tools.reader)
        self._forced = ""
        marks = form.form.marks
        self._spoken = TextStream(form.tokenizer, form.stop, skip_special=False) if marks else None
        self._num_spoken = 0
        delta = {"role": "assistant", "content": ""}
        self.first: Json | None = {"index": index, "delta": delta, "finish_reason": None}

    def push(self, chunk: StreamChunk) -> Json | None:
        """A choice to send; None if the chunk shows nothing new."""
        reply, calls = self._read(chunk)
        delta: Json = {"content": reply.content} if reply.content else {}
        if reply.reasoning and self._form.has_reasoning:
            delta |= reasoning_json(reply.reasoning)
        if calls:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        reason: str | None = None
        if chunk.output is not None:
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

    def _read(self, chunk: StreamChunk) -> tuple[SplitReply, list[Json]]:
        tools, piece = self._form.tools, self._piece(chunk)
        is_cut = chunk.output is not None and chunk.output.finish_reason != "stop"
        if tools.is_forced:
            self._forced += piece
            return tools.read(self._forced, is_cut=is_cut) if chunk.output else (SplitReply(), [])
        new = self._reply.push(piece)
        if chunk.output is None:
            return new, []
        rest = self._reply.finish(is_cut=is_cut)
        whole = SplitReply(
            reasoning=new.reasoning + rest.reasoning, content=new.content + rest.content
        )
        return whole, tools.calls_of(rest)

    def _piece(self, chunk: StreamChunk) -> str:
        """The text of a chunk, with the control tokens by which a turn is read."""
        if self._spoken is None:
            return chunk.text
        for token in spoken_ids(self._form.tokenizer, chunk.ids, self._form.form.marks):
            self._spoken.push(token)
        if chunk.output is not None:
            self._spoken.finish()
        text = self._spoken.settled() if chunk.output is None else self._spoken.text
        piece, self._num_spoken = text[self._num_spoken :], max(self._num_spoken, len(text))
        return piece


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
        """The output with the answer, if that was asked for, and as many top log-probs as were."""
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
            offsets = TextOffsets(self.tokenizer)
            logprobs = text_logprobs(self.tokenizer, ids, logps, top, offsets, by_id=self.by_id)
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
        self._offsets = TextOffsets(form.tokenizer)

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
                self._offsets,
                by_id=self._form.by_id,
            )
        ids = {"token_ids": chunk.ids} if self._form.has_ids else {}
        if not chunk.text and reason is None and logprobs is None and not ids:
            return None
        return {
            "index": self._index,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": reason,
        } | ids
