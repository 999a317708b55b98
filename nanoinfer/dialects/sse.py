"""Server-sent events of an answer: one that is known already, or one that is being sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from starlette.responses import Response, StreamingResponse

from nanoinfer.dialects.exchange import ServerEvent
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import Emit, EventStream


def event_stream(events: Iterable[ServerEvent]) -> Response:
    """A response of these events."""
    text = "".join(map(event_lines, events))  # one write: nothing fails between the first and last
    return StreamingResponse(
        iter([text]), media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


class NamedEventStream(EventStream):
    """Events of a dialect, written by `work` as it goes on; `fail` writes those of an error."""

    last_line = ""

    def __init__(
        self,
        work: Callable[[Emit], Coroutine[Any, Any, None]],
        limit_s: float,
        on_error: Callable[[BaseException], ApiError],
        fail: Callable[[ApiError], Iterator[ServerEvent]],
    ) -> None:
        super().__init__(work, limit_s, on_error)
        self._fail = fail

    def lines(self, value: ServerEvent) -> str:
        return event_lines(value)

    def error_lines(self, error: ApiError) -> str:
        return "".join(map(event_lines, self._fail(error)))


def event_lines(event: ServerEvent) -> str:
    """An event as it is sent."""
    name = f"event: {event.name}\n" if event.name else ""
    data = event.data if isinstance(event.data, str) else json.dumps(event.data)
    return f"{name}data: {data}\n\n"
