"""A connection of the server: how many there may be, how long one may take to ask and to read.

uvicorn closes a connection that is idle after an answer, but not one that never sends a whole head,
nor one that never reads: whoever writes to that waits forever, an error after the time limit, too.
"""

from __future__ import annotations

import asyncio

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoinfer.server.config import HttpLimits

KEEP_ALIVE_S = 30


def server_config(
    app: Starlette, limits: HttpLimits, host: str, port: int, *, access_log: bool = True
) -> uvicorn.Config:
    """Put uvicorn around `app`, and `limits` on each of its connections. `access_log`: a line for
    each request."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=limited_connection(limits),
        ws="none",
        lifespan="off",
        access_log=access_log,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def limited_connection(limits: HttpLimits) -> type[H11Protocol]:
    """The protocol of a connection that is held to `limits`."""

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
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
