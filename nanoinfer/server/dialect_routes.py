"""The APIs of agents on the server, through their dialects (nanoinfer/dialects/).

    /v1/responses              OpenAI's Responses, which Codex speaks
    /v1/messages               Anthropic's Messages, which Claude Code speaks
    /v1/messages/count_tokens

An answer is streamed while it is sampled; errors have the dialect's own form. A model, an adapter,
a key and the limits are as for /v1/chat/completions, but for `max_tokens`: these clients ask for as
much as their own models may say, and get what the context holds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanoinfer.chat.form import ChatForms
from nanoinfer.chat.prompts import ChatPrompt, chat_prompt
from nanoinfer.dialects import agent_dialects
from nanoinfer.dialects.call_params import call_params
from nanoinfer.dialects.exchange import (
    ApiAnswer,
    ApiCall,
    ApiReply,
    CountingDialect,
    Json,
    ServerEvent,
    StreamingDialect,
)
from nanoinfer.dialects.spoken_reply import SpokenReply
from nanoinfer.dialects.sse import NamedEventStream
from nanoinfer.http.api_error import ApiError, user_errors
from nanoinfer.http.http_io import (
    SHOWN_BYTES,
    Emit,
    Handler,
    in_proportion,
    parse_object,
    read_bytes,
)
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.options.streams import StreamChunk
from nanoinfer.server.completions import CompletionJob, Completions
from nanoinfer.server.kept_answers import KeptAnswers
from nanoinfer.server.media import PictureTaker
from nanoinfer.server.served_model import ServedModel


class DialectRoutes:
    """The routes of each dialect, over one model."""

    def __init__(
        self,
        model: ServedModel,
        completions: Completions,
        limits: HttpLimits,
        on_error: Callable[[BaseException], ApiError],
    ) -> None:
        """`on_error` says what a client is told of an error in the midst of a stream."""
        self._model, self._completions, self._limits = model, completions, limits
        self._on_error = on_error
        self._forms = ChatForms(model.tokenizer)
        self._kept = KeptAnswers()

    def routes(self) -> Iterator[tuple[str, Handler, Callable[[ApiError], Json]]]:
        """Each path with what answers it, and the body of an error there."""
        for dialect in agent_dialects(self._model.tokenizer):
            yield dialect.path, self._answering(dialect), dialect.error
            if isinstance(dialect, CountingDialect):
                yield dialect.count_path, self._counting(dialect), dialect.error

    def _answering(self, dialect: StreamingDialect) -> Handler:
        async def answer(request: Request) -> Response:
            name, call = await self._read(request, dialect.read)
            call = self._kept.continued(call)
            adapter = self._model.adapter(name)
            prompt = await self.prompt(call)
            ids = prompt.ids
            room = self._model.client.engine.room(len(ids))
            if room < 1:
                raise self._model.bound.error()
            seed = uuid.uuid4().int % 2**63
            with user_errors():
                params = replace(call_params(call, room, seed, adapter), images=prompt.images)
                (job,) = await self._completions.admit([ids], 1, lambda _: params)
            begun = ApiAnswer(
                id=uuid.uuid4().hex,
                model=adapter or self._model.name,
                created=int(time.time()),
                num_prompt_tokens=len(ids),
                replies=[],
            )
            spoken = SpokenReply(self._forms.of(call.tools), self._model.tokenizer, call, ids)
            if call.is_streamed:
                return self._streamed(dialect, call, job, begun, spoken)
            return await self._whole(request, dialect, call, job, begun, spoken)

        return answer

    async def _whole(
        self,
        request: Request,
        dialect: StreamingDialect,
        call: ApiCall,
        job: CompletionJob,
        begun: ApiAnswer,
        spoken: SpokenReply,
    ) -> Response:
        (output,) = await self._completions.run(request, [job], 0, begun.id)

        def written() -> tuple[ApiReply, Response]:
            spoken.push(output.ids)
            reply = spoken.reply(output)
            return reply, JSONResponse(dialect.write(call, replace(begun, replies=[reply])))

        num_shown = len(output.ids) * (1 + (call.num_top or 0))
        reply, response = await in_proportion(num_shown * SHOWN_BYTES, written)
        self._kept.keep(begun.id, call, reply)
        return response

    def _streamed(
        self,
        dialect: StreamingDialect,
        call: ApiCall,
        job: CompletionJob,
        begun: ApiAnswer,
        spoken: SpokenReply,
    ) -> Response:
        stream = dialect.stream(call, begun)

        async def work(emit: Emit) -> None:
            async def send(events: Iterator[ServerEvent]) -> None:
                for event in events:
                    await emit(event)

            async def on_chunk(_: CompletionJob, chunk: StreamChunk) -> None:
                thought, said = spoken.push(chunk.ids)
                await send(stream.think(thought))
                await send(stream.say(said))

            await send(stream.begin())
            (output,) = await self._completions.sampled([job], 0, begun.id, on_chunk)
            reply = spoken.reply(output)
            self._kept.keep(begun.id, call, reply)
            await send(stream.end(replace(begun, replies=[reply])))

        limit_s = self._limits.request_timeout_s
        return NamedEventStream(work, limit_s, self._on_error, stream.fail)

    def _counting(self, dialect: CountingDialect) -> Handler:
        async def count(request: Request) -> Response:
            name, call = await self._read(request, dialect.read_count)
            self._model.adapter(name)
            prompt = await self.prompt(call)
            return JSONResponse(dialect.write_count(len(prompt.ids)))

        return count

    async def prompt(self, call: ApiCall) -> ChatPrompt:
        """The prompt of a call. ApiError where the template takes no such conversation."""
        messages = call.messages
        if not messages or messages[-1]["role"] == "assistant":
            raise ApiError(
                400, "messages: the last one must be a user's or a tool's; add one", "messages"
            )

        def encode() -> ChatPrompt:
            form = self._forms.of(call.tools)
            return chat_prompt(
                self._model.tokenizer,
                form.opening(messages),
                tools=form.schemas,
                variables=call.variables,
            )

        try:
            return await self._model.bound.encoded(
                [messages, call.tools, call.variables],
                encode,
                is_seeing=self._model.pictures is not None,
            )
        except (ValueError, RecursionError) as error:  # the template rejects it
            raise ApiError(400, f"messages: {error}", "messages") from None

    async def _read(
        self, request: Request, read: Callable[[Json, PictureTaker | None], ApiCall]
    ) -> tuple[str | None, ApiCall]:
        """The model that is asked for, and the call."""
        raw = await read_bytes(request, self._limits)

        def parsed(taker: PictureTaker | None) -> tuple[str | None, ApiCall]:
            body = parse_object(raw)
            return body.get("model"), read(body, taker)

        return await self._model.read(len(raw), parsed)
