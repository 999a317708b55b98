"""A connection of a server: how many there may be, how much and how long one may ask.

uvicorn closes a connection that is idle after an answer, but not one that never sends a whole head,
nor one that never reads: whoever writes to that waits forever, an error after the time limit, too.
"""

from __future__ import annotations

import asyncio
import re

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoinfer.http.http_limits import HttpLimits

KEEP_ALIVE_S = 30
_HEAD_END = re.compile(rb"\n\r?\n")


def server_config(
    app: Starlette,
    limits: HttpLimits,
    *,
    is_program: bool = True,
    access_log: bool = False,
    log_level: str | None = None,
    close_s: int | None = None,
) -> uvicorn.Config:
    """Put uvicorn around `app`, and `limits` on each of its connections. Where the server is no
    program of its own, the process' logging is not set up. `access_log`: a line for each request.
    `close_s`: how long clients that still read have at the end; None: as long as they take."""
    return uvicorn.Config(
        app,
        port=0,  # of callers that give it no socket
        http=limited_connection(limits),
        ws="none",
        lifespan="off",
        log_config=uvicorn.config.LOGGING_CONFIG if is_program else None,
        log_level=log_level,
        access_log=access_log,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=close_s,
    )


class _ShortHeads(h11.Connection):
    """Refuses a head that is long or has many lines before it is parsed, whose time grows with
    their square. h11 itself measures only what has come in part."""

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(h11.SERVER, limits.max_head_bytes)
        self._limits = limits

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            data, _ = self.trailing_data
            end = _HEAD_END.search(data)
            size = len(data) if end is None else end.start()
            num_lines = data.count(b"\n", 0, size)
            if size > self._limits.max_head_bytes or num_lines > self._limits.max_headers:
                raise h11.RemoteProtocolError("the head is too large", 431)
        return super().next_event()


def limited_connection(limits: HttpLimits) -> type[H11Protocol]:
    """The protocol of a connection that is held to `limits`."""

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.conn = _ShortHeads(limits)  # nothing has come yet
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # else the last 64 KiB are not watched
            if len(self.connections) > limits.max_connections:
                transport.abort()
            else:
                self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            self._stop_unread_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader(None)

        def resume_writing(self) -> None:
            self._stop_unread_timer()
            super().resume_writing()

        def _watch_head(self) -> None:
            """The time runs while a head is awaited, and does not start again with each byte."""
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._timer is None:
                self._timer = self.loop.call_later(limits.head_timeout_s, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _watch_reader(self, num_unsent: int | None) -> None:
            """Watch until all is sent. The time starts again when the client has taken some."""
            left = self.transport.get_write_buffer_size()
            if left == num_unsent:
                self.transport.abort()
            else:
                wait_s = limits.send_timeout_s
                self._unread_timer = self.loop.call_later(wait_s, self._watch_reader, left)

        def _stop_unread_timer(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

    return Connection
