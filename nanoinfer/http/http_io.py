"""One HTTP request: reading its body within limits, answering, and noticing that nobody listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nanoinfer.cancellation import to_the_end
from nanoinfer.http.api_error import ApiError, ClientDisconnectedError
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.http.strict_body import explained

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
Emit = Callable[[Any], Awaitable[None]]
LARGE_BYTES = 1 << 14
"""What is smaller is worked on in less time than a thread takes to begin under load."""
SHOWN_BYTES = 64
"""Of a token in an answer, about."""


async def read_body(request: Request, model: type[Body], limits: HttpLimits) -> Body:
    """The JSON body as `model`."""
    raw = await read_bytes(request, limits)
    return await in_proportion(len(raw), lambda: read_json_body(parse_object(raw), model))


async def read_object(request: Request, limits: HttpLimits) -> dict[str, Any]:
    """The JSON object of a body."""
    raw = await read_bytes(request, limits)
    return await in_proportion(len(raw), lambda: parse_object(raw))


async def read_bytes(request: Request, limits: HttpLimits) -> bytes:
    """A body as it came. ApiError 413 where it is too long, 408 where it took too long."""
    limit_s = limits.body_timeout_s
    try:
        raw = await asyncio.wait_for(_read_bytes(request, limits), limit_s)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limit_s:g} s") from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    return raw


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body's bytes."""
    value = _parse(raw)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(value).__name__}")
    return value


async def in_proportion(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, which takes time in proportion to `size` bytes: at once where that is
    little, else in a thread, so that the event loop goes on. A thread that has begun is waited for
    even by who is cancelled: whoever asks and hangs up again and again keeps one busy, not many."""
    if size < LARGE_BYTES:
        return work()
    return await to_the_end(asyncio.to_thread(work))


def read_json_body(value: dict[str, Any], model: type[Body], context: object = None) -> Body:
    """A JSON object as `model`, whose validators are given `context`. ApiError 400 names all that
    is wrong with it."""
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        message, name = explained(error, value)
        raise ApiError(400, message, name) from None


def _parse(raw: bytes) -> Any:
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
        if b"\\u" in raw:  # half a character, which no text and no answer could hold
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body holds a lone surrogate (half a character): send whole characters"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


async def _read_bytes(request: Request, limits: HttpLimits) -> bytes:
    max_bytes = limits.max_body_bytes
    too_long = ApiError(413, f"the body is longer than the limit of {limits.longest_body}")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_long
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Run `work`; cancel it on a hang-up (`ClientDisconnectedError`) or when time is over
    (`ApiError`)."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_hung_up(receive))
    try:
        both: set[asyncio.Task[Any]] = {task, watcher}
        done, _ = await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if watcher in done:
            raise ClientDisconnectedError
        raise ApiError(504, f"not finished within the limit of {limit_s:g} s")
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, written by `work` as it goes on; ends with [DONE].

    An error after the first byte cannot change the status any more: it is the last event.
    """

    last_line = "data: [DONE]\n\n"

    def __init__(
        self,
        work: Callable[[Emit], Coroutine[Any, Any, None]],
        limit_s: float,
        on_error: Callable[[BaseException], ApiError],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._work, self._limit_s, self._on_error = work, limit_s, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})

        async def emit(value: Any) -> None:
            await send(_body(self.lines(value)))

        try:
            await while_connected(receive, self._work(emit), self._limit_s)
        except ClientDisconnectedError as error:
            self._on_error(error)
            return
        except Exception as error:  # too late for a status: it goes into the stream
            await send(_body(self.error_lines(self._on_error(error))))
        await send(_body(self.last_line))
        await send({"type": "http.response.body", "body": b""})

    def lines(self, value: Any) -> str:
        """An event as it is sent."""
        return f"data: {json.dumps(value)}\n\n"

    def error_lines(self, error: ApiError) -> str:
        """The same of an error."""
        return self.lines(error.to_json())


def _body(text: str) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}
