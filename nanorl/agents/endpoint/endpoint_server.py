"""`RecordingServer`: an HTTP server whose every key is an episode.

    POST /v1/chat/completions  /v1/responses  /v1/messages     the dialects of APIs
    POST /v1/messages/count_tokens
    POST /inference/v1/generate                                token ids in, token ids out
    GET  /v1/models
    POST /episode                                              its answer; its reward, from a scorer

    server = RecordingServer(model="smollm2", max_model_len=512)
    async with server.episode(recording) as session:
        client = AsyncOpenAI(base_url=session.openai_url, api_key=session.key)

It runs as a task of the loop that plays the rollouts, and listens on the loopback unless told
otherwise. A key is good for as long as its episode, and leads nowhere else. The same routes stand
behind `/KEY`, for clients that cannot send one. An answer is recorded, and counts as a call, right
before the first byte of it is sent; one whose client hung up by then is aborted and forgotten.
Left out: streams that begin before the answer ends (each arrives as a stream, all at once).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from nanoinfer.dialects.exchange import ApiAnswer, ApiCall, CountingDialect, Dialect, Json
from nanoinfer.dialects.sse import event_stream
from nanoinfer.http.api_error import (
    ApiError,
    application,
    failure,
    known_error,
    user_errors,
)
from nanoinfer.http.api_key import given_keys
from nanoinfer.http.http_io import (
    SHOWN_BYTES,
    in_proportion,
    parse_object,
    read_bytes,
    while_connected,
)
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.http.listening import listen, url_of
from nanoinfer.http.serving import ServerInLoop
from nanoinfer.server.media import PictureTaker
from nanorl.agents.endpoint.recording import Recording, Sampled
from nanorl.agents.endpoint.report import EpisodeReport, ReportRules, read_report
from nanorl.agents.endpoint.token_calls import read_token_call, token_answer
from nanorl.types import InfrastructureError
from nanosched.node_address import LOOPBACK, node_address

if TYPE_CHECKING:
    from nanoengine.vision.picture_store import PictureStore
    from nanoinfer.vision.picture_reader import PictureReader

LOG = logging.getLogger("nanorl.agents.endpoint")
MAX_CALLS_AT_ONCE = 64
MAX_OPEN_BYTES = 256 << 20
"""The size of the bodies that one episode has under way: as many calls at once of texts alone, or
four of as many pictures as a body may have."""
Work = Callable[["ApiSession", Request, bytes], Coroutine[Any, Any, Response]]


@dataclass(eq=False)
class ApiSession:
    """The way into one episode."""

    recording: Recording
    url: str
    """Of the server, without a path: the base URL of Anthropic's clients."""
    key: str
    """Of this episode alone."""
    report: EpisodeReport = field(default_factory=EpisodeReport)
    """What was said of the episode by HTTP."""
    calls: set[asyncio.Task[Response]] = field(default_factory=set)
    """Those under way."""
    num_open: int = 0
    """Requests that have begun, those whose body still comes included."""
    open_bytes: int = 0
    """The size of their bodies."""
    is_over: bool = False

    @contextmanager
    def counted(self, most: int, num_bytes: int) -> Iterator[None]:
        """A request with a body of `num_bytes`, from its head to its answer. ApiError 429 where
        `most` are open, or the bodies of the open ones are too long together."""
        if self.num_open >= most:
            raise ApiError(
                429,
                f"an episode has at most {most} calls at once (agent.max_calls_at_once); try again",
            )
        if self.open_bytes and self.open_bytes + num_bytes > MAX_OPEN_BYTES:
            raise ApiError(
                429,
                f"an episode has at most {MAX_OPEN_BYTES >> 20} MiB of calls at once; try again",
            )
        self.num_open += 1
        self.open_bytes += num_bytes
        try:
            yield
        finally:
            self.num_open -= 1
            self.open_bytes -= num_bytes

    async def run(self, work: Coroutine[Any, Any, Response]) -> Response:
        """Do the work of a call; it ends with the episode, and then is an ApiError."""
        if self.is_over:  # while the body of the call came
            work.close()
            raise _no_episode()
        task = asyncio.create_task(work)
        self.calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_over:
                raise _no_episode() from None
            raise
        finally:
            self.calls.discard(task)

    async def end(self) -> None:
        """Abort the calls under way: when this returns, nothing is recorded any more."""
        self.is_over = True
        calls = list(self.calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def keyed_url(self) -> str:
        """A base URL that holds the key, for clients which send none."""
        return f"{self.url}/{self.key}"


class RecordingServer:
    """Listens from the first episode on, until `close`."""

    def __init__(
        self,
        dialects: Iterable[Dialect],
        *,
        model: str,
        max_model_len: int,
        host: str = LOOPBACK,
        limits: HttpLimits | None = None,
        max_calls_at_once: int = MAX_CALLS_AT_ONCE,
        scoring: ReportRules | None = None,
    ) -> None:
        """`model` is the name that clients see; whatever name they ask for, they get it."""
        self.sessions: dict[str, ApiSession] = {}
        self._dialects = list(dialects)
        self._model, self._max_model_len, self._host = model, max_model_len, host
        self._limits = limits or HttpLimits(request_timeout_s=3600.0)
        self._pictures: PictureReader | None = None
        self._max_calls_at_once = max_calls_at_once
        self._scoring = scoring or ReportRules()
        self._server: ServerInLoop | None = None
        self._bound_url = ""
        self._starting = asyncio.Lock()

    def let_see(self, store: PictureStore) -> None:
        """Take the pictures of clients into `store`, for a model that sees."""
        from nanoinfer.vision.picture_reader import PictureReader  # here: few models see

        self._pictures = PictureReader(store)
        self._limits = self._limits.with_pictures()

    @asynccontextmanager
    async def episode(self, recording: Recording) -> AsyncIterator[ApiSession]:
        """A session, whose key is good until the end of the block."""
        session = ApiSession(recording, await self._url(), f"nano-{secrets.token_urlsafe(24)}")
        self.sessions[session.key] = session
        try:
            yield session
        finally:
            del self.sessions[session.key]
            await session.end()

    async def close(self) -> None:
        """Stop listening; open connections are closed."""
        if self._server is not None:
            await self._server.end(at_once=True)
        self._server = None

    async def _url(self) -> str:
        """The server's URL; it is started if it does not listen in this event loop."""
        async with self._starting:
            if self._server is None or not self._server.is_serving:
                listener = listen(self._host, 0, flags="--agent.")
                self._server = ServerInLoop(self.starlette(), self._limits, listener)
                await self._server.begin()
                self._bound_url = url_of(listener, self._host, node_address())
        return self._bound_url

    # Routes

    def starlette(self) -> Starlette:
        """The application, for tests too."""
        routes = [
            Route(one.path, self._answering(one, self._call(one)), methods=["POST"])
            for one in self._dialects
        ]
        routes += [
            Route(one.count_path, self._answering(one, self._count(one)), methods=["POST"])
            for one in self._dialects
            if isinstance(one, CountingDialect)
        ]
        first = self._dialects[0]
        routes += [
            Route("/inference/v1/generate", self._answering(first, self._tokens), methods=["POST"]),
            Route("/episode", self._answering(first, self._report), methods=["POST"]),
            Route("/v1/models", self._answering(first, self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._answering(first, self._models), methods=["GET"]),
        ]
        return application([*routes, Mount("/{key}", routes=routes)])

    def _answering(self, dialect: Dialect, work: Work) -> Callable[[Request], Awaitable[Response]]:
        """A route whose errors are told in the dialect's own form."""

        async def endpoint(request: Request) -> Response:
            try:
                session = self._session(request)
                with self._counted(session, request):
                    raw = await self._body(session, request)
                    answering = work(session, request, raw)
                    return await while_connected(
                        request.receive, session.run(answering), self._limits.request_timeout_s
                    )
            except Exception as error:  # the border of the process: logged, and told
                status = 503 if isinstance(error, InfrastructureError) else 500
                told = known_error(error) or failure(error, LOG, "the engine", status)
                return JSONResponse(dialect.error(told), told.status, told.headers)

        return endpoint

    def _counted(self, session: ApiSession, request: Request) -> AbstractContextManager[None]:
        """An agent that keeps its episode busy keeps no scorer from reporting."""
        if self._scoring.is_scorer(request.headers):
            return nullcontext()
        longest, declared = self._limits.max_body_bytes, request.headers.get("content-length", "")
        size = min(int(declared), longest) if declared.isdigit() else longest
        return session.counted(self._max_calls_at_once, size if request.method == "POST" else 0)

    async def _body(self, session: ApiSession, request: Request) -> bytes:
        if request.method != "POST":
            return b""
        most, limits = session.recording.max_body_bytes, self._limits
        if self._pictures is not None:
            most = limits.max_body_bytes  # a picture's bytes say little of its tokens
        try:
            short = replace(limits, max_body_bytes=min(most, limits.max_body_bytes))
            return await read_bytes(request, short)
        except ApiError as error:
            is_too_long = error.status == 413 and most < limits.max_body_bytes
            raise session.recording.too_long() if is_too_long else error from None

    async def _read(
        self,
        session: ApiSession,
        raw: bytes,
        read: Callable[[Json, PictureTaker | None], ApiCall],
    ) -> ApiCall:
        if self._pictures is None:
            return await in_proportion(len(raw), lambda: read(parse_object(raw), None))
        return await self._pictures.read(
            lambda taker: read(parse_object(raw), taker), session.recording.check_pictures
        )

    def _session(self, request: Request) -> ApiSession:
        """The key may stand in the URL or in any API's header: some paths are of no one API."""
        for key in (request.path_params.get("key"), *given_keys(request.headers)):
            if key in self.sessions:
                return self.sessions[key]
        raise _no_episode()

    def _call(self, dialect: Dialect) -> Work:
        async def work(session: ApiSession, request: Request, raw: bytes) -> Response:
            call = await self._read(session, raw, dialect.read)
            name = uuid.uuid4().hex
            async with session.recording.answering(call, name) as sampled:
                answer = self._answer(sampled, name)

                def written() -> Response:
                    if call.is_streamed:
                        return event_stream(dialect.events(call, answer))
                    return JSONResponse(dialect.write(call, answer))

                num_shown = answer.num_sampled_tokens * (1 + (call.num_top or 0))
                return await in_proportion(num_shown * SHOWN_BYTES, written)

        return work

    def _count(self, dialect: CountingDialect) -> Work:
        async def work(session: ApiSession, request: Request, raw: bytes) -> Response:
            call = await self._read(session, raw, dialect.read_count)
            ids = await session.recording.prompt_ids(call)
            return JSONResponse(dialect.write_count(len(ids)))

        return work

    def _answer(self, sampled: Sampled, name: str) -> ApiAnswer:
        return ApiAnswer(
            id=name,
            model=self._model,
            created=int(time.time()),
            num_prompt_tokens=len(sampled.ids),
            replies=sampled.replies,
        )

    async def _tokens(self, session: ApiSession, request: Request, raw: bytes) -> Response:
        asked = await in_proportion(
            len(raw), lambda: read_token_call(parse_object(raw), session.recording)
        )
        if asked.params.images and self._pictures is not None:
            with user_errors():
                await self._pictures.check(asked.params.images)
        async with session.recording.completing(asked.token_ids, asked.params) as outputs:
            num_shown = sum(len(one.ids) for one in outputs) * (1 + asked.params.top_logps)
            return await in_proportion(
                num_shown * SHOWN_BYTES, lambda: JSONResponse(token_answer(asked, outputs))
            )

    async def _report(self, session: ApiSession, request: Request, raw: bytes) -> Response:
        said = read_report(parse_object(raw))
        try:
            self._scoring.check(said, request.headers, session.report.metrics)
        except ApiError as error:
            session.recording.metrics["refused_rewards"] += error.status == 403
            raise
        session.report.take(said)
        return JSONResponse({"num_calls": session.recording.num_answers})

    async def _models(self, session: ApiSession, request: Request, raw: bytes) -> Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "nanorl",
            "max_model_len": self._max_model_len,
        }
        if "name" in request.path_params:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})


def _no_episode() -> ApiError:
    return ApiError(
        401,
        "this API key is of no episode that is being played; use the one that the episode was "
        "given, and not after its end",
        code="invalid_api_key",
    )
